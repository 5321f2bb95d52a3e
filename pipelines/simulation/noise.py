"""Noise of a simulated job, resampled from a recorded clean run: what was measured comes again, in blocks.

Method: each timing's ratio to its own running median is its residual. The logarithms of the residuals are divided
into what all ranks of a step share, what the ranks of a node share beyond it, and what a rank has alone; sizes of the
three from the analysis of variance of a nested design (a mean of two ranks still holds half of their own noise).
Each part is drawn again at its own level, in blocks of consecutive steps with all timings together (moving block
bootstrap, Künsch 1989), so bursts last as long as they did and timings move together as they did.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingest.codec import Codec
from ingest.events import MESSAGE_TYPES, CheckpointEvent, FaultInjected, Metrics
from pipelines.recording import read_recording
from pipelines.simulation.scenario import BadScenario

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# What is drawn for each rank. The shares keep sums right: forward + backward = compute, processor time <= compute.
PARTS = ("own", "run_queue", "data", "optimizer", "forward_share", "cpu_share", "local_norm", "loss", "transfer")
OWN, RUN_QUEUE, DATA, OPTIMIZER, FORWARD_SHARE, CPU_SHARE, LOCAL_NORM, LOSS, TRANSFER = range(len(PARTS))
BLOCK_STEPS_MIN, BLOCK_STEPS_MAX = 8, 32
MEDIAN_STEPS = 51  # of the running median, centred: slower movements are drift, which scenarios have of their own
START_STEPS = 10  # of the recording, left out: it was warming up
ROWS_MIN = 100
SMALLEST = 1e-6
ALONE_SHARE = 0.8  # of the variance, from which a timing is taken to be the ranks' own


@dataclass(frozen=True)
class RecordedNoise:
    """The residuals of a clean run, as logarithms, divided by level; rows are steps, the last axis is PARTS."""

    residuals: Floats  # rows x ranks x parts: undivided, to compare with
    job: Floats  # rows x parts
    node: Floats  # nodes x rows x parts
    rank: Floats  # ranks x rows x parts
    forward_share: float  # of the compute, median
    cpu_share: float  # of own compute, median
    local_norm: float
    data_share: float  # of the step, median


@lru_cache(maxsize=4)
def recorded_noise(folder: Path) -> RecordedNoise:
    """The noise of the clean run recorded in `folder`. Raises NotARecording, BadScenario where it cannot serve."""
    table, nodes, left_out = _read(folder)
    compute = table["train.compute.duration"]
    own, queue = table["train.compute.own"], table["train.run_queue.delay"]
    transfer = np.broadcast_to(table["train.collective.wait"].min(axis=1, keepdims=True), own.shape)
    values = np.stack(
        [
            own, queue, table["train.data.duration"], table["train.optimizer.duration"],
            table["train.forward.duration"] / np.maximum(compute, SMALLEST),
            table["train.compute.cpu"] / np.maximum(own, SMALLEST),
            table["train.gradient.local_norm"], table["train.loss"], transfer,
        ],
        axis=-1,
    )  # fmt: skip
    logs = np.log(np.maximum(values, SMALLEST))
    residuals = (logs - _running_median(logs))[~left_out]
    medians = np.median(values, axis=(0, 1))
    job, node, rank = _divided(residuals, nodes)
    return RecordedNoise(
        residuals=residuals, job=job, node=node, rank=rank,
        forward_share=float(medians[FORWARD_SHARE]), cpu_share=float(min(1.0, medians[CPU_SHARE])),
        local_norm=float(medians[LOCAL_NORM]),
        data_share=float(medians[DATA] / np.median(table["train.step.duration"])),
    )  # fmt: skip


COLUMNS = (
    "train.step.duration", "train.data.duration", "train.forward.duration", "train.optimizer.duration",
    "train.collective.wait", "train.compute.duration", "train.compute.own", "train.compute.cpu",
    "train.run_queue.delay", "train.gradient.local_norm", "train.loss",
)  # fmt: skip


def _read(folder: Path) -> tuple[dict[str, Floats], list[list[int]], NDArray[np.bool_]]:
    """Columns (steps x ranks, complete steps only), ranks by node, and the steps that the job itself made long."""
    codec = Codec(MESSAGE_TYPES)
    found: dict[tuple[int, int], dict[int, tuple[float | None, ...]]] = defaultdict(dict)
    homes: dict[int, str] = {}
    saved: set[int] = set()
    attempts: set[int] = set()
    for record in read_recording(folder):
        if record.topic not in ("metrics", "events"):
            continue
        message = codec.decode(record.headers, record.value)
        if isinstance(message, FaultInjected):
            raise BadScenario(f"{folder} has an injected {message.fault}; noise must come from a clean run")
        if isinstance(message, CheckpointEvent) and message.state == "sealed":
            saved.add(message.step)
        if not isinstance(message, Metrics):
            continue
        attempts.add(message.attempt)
        if message.phase in ("checkpoint", "eval"):
            saved.add(message.step)
        if not message.steps:
            continue
        homes[message.rank] = message.node
        columns = [message.columns.get(name, (None,) * len(message.steps)) for name in COLUMNS]
        for step, row in zip(message.steps, zip(*columns, strict=True), strict=True):
            found[(message.attempt, step)][message.rank] = row
    return _table(folder, found, homes, saved, max(attempts, default=0))


def _table(
    folder: Path,
    found: dict[tuple[int, int], dict[int, tuple[float | None, ...]]],
    homes: dict[int, str],
    saved: set[int],
    attempt: int,
) -> tuple[dict[str, Floats], list[list[int]], NDArray[np.bool_]]:
    ranks = sorted(homes)
    whole = [
        step
        for (of, step), rows in sorted(found.items())
        if of == attempt and len(rows) == len(ranks) and all(None not in row for row in rows.values())
    ]
    whole = whole[START_STEPS:]
    if len(whole) < ROWS_MIN:
        raise BadScenario(
            f"{folder} has {len(whole)} complete steps, noise needs {ROWS_MIN}; give the recording of a longer run"
        )
    cube = np.array([[found[(attempt, step)][rank] for rank in ranks] for step in whole], dtype=float)
    table = {name: cube[:, :, index] for index, name in enumerate(COLUMNS)}
    names = sorted(set(homes.values()))
    nodes = [[index for index, rank in enumerate(ranks) if homes[rank] == name] for name in names]
    # The step after a checkpoint or an eval is long because the job did that, which is no noise.
    return table, nodes, np.array([step - 1 in saved for step in whole])


def _running_median(values: Floats) -> Floats:
    half = MEDIAN_STEPS // 2
    padded = np.pad(values, ((half, half), (0, 0), (0, 0)), mode="reflect")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_STEPS, axis=0), axis=-1))


def _divided(residuals: Floats, nodes: list[list[int]]) -> tuple[Floats, Floats, Floats]:
    """Job, node and rank parts, each scaled to its component of the variance."""
    of_node = np.stack([residuals[:, ranks].mean(axis=1) for ranks in nodes])
    job = of_node.mean(axis=0)
    rank = np.concatenate([residuals[:, ranks] - of_node[index][:, None] for index, ranks in enumerate(nodes)], axis=1)
    node = of_node - job
    per_node = float(np.mean([len(ranks) for ranks in nodes]))
    count = len(nodes)
    seen_rank, seen_node, seen_job = rank.var(axis=(0, 1)), node.var(axis=(0, 1)), job.var(axis=0)
    true_rank = seen_rank / (1.0 - 1.0 / per_node) if per_node > 1 else seen_rank
    mean_node = seen_node / (1.0 - 1.0 / count) if count > 1 else seen_node
    true_node = np.maximum(0.0, mean_node - true_rank / per_node)
    true_job = np.maximum(0.0, seen_job - mean_node / count)
    job = job * _scale(true_job, seen_job)
    node = node * _scale(true_node, seen_node)
    rank = rank * _scale(true_rank, seen_rank)
    # A mean of two would turn half of a lone rank's peak upside down: what is the ranks' own stays whole.
    alone = true_rank > ALONE_SHARE * (true_rank + true_node + true_job)
    rank[:, :, alone] = residuals[:, :, alone]
    job[:, alone] = node[:, :, alone] = 0.0
    return job, node, np.moveaxis(rank, 1, 0)


def _scale(true: Floats, seen: Floats) -> Floats:
    return np.asarray(np.sqrt(true / np.maximum(seen, 1e-18)))


class Blocks:
    """Walks `count` series through a bank (series x rows x parts) block by block; one call gives the next step."""

    def __init__(self, bank: Floats, count: int, dice: np.random.Generator) -> None:
        self._bank = bank
        self._dice = dice
        self._source: Ints = np.zeros(count, dtype=np.int64)
        self._row: Ints = np.zeros(count, dtype=np.int64)
        self._left: Ints = np.zeros(count, dtype=np.int64)

    def next(self) -> Floats:
        """Log residuals of one step: count x parts."""
        over = np.flatnonzero(self._left == 0)
        if len(over):
            lengths = self._dice.integers(BLOCK_STEPS_MIN, BLOCK_STEPS_MAX, len(over), endpoint=True)
            self._source[over] = self._dice.integers(0, self._bank.shape[0], len(over))
            self._row[over] = self._dice.integers(0, self._bank.shape[1] - lengths)
            self._left[over] = lengths
        drawn = self._bank[self._source, self._row]
        self._row += 1
        self._left -= 1
        return np.asarray(drawn)


class NoiseStream:
    """The noise of a simulated job, step after step."""

    def __init__(self, noise: RecordedNoise, node_of: Ints, strength: float, dice: np.random.Generator) -> None:
        job, node, rank = dice.spawn(3)
        self._node_of = node_of
        self._strength = strength
        self._job = Blocks(noise.job[None], 1, job)
        self._node = Blocks(noise.node, int(node_of.max()) + 1, node)
        self._rank = Blocks(noise.rank, len(node_of), rank)

    def next(self) -> Floats:
        """Factors of one step: ranks x PARTS."""
        logs = self._job.next() + self._node.next()[self._node_of] + self._rank.next()
        return np.exp(self._strength * logs)
