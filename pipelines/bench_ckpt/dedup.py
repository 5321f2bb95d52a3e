"""What data-parallel replicas cost on disk, and whether a step comes back bit for bit on other numbers of ranks.

Two nodes of two ranks each save the same state; the step's folder is measured against that of a single rank. Then 4
ranks save blocks of a state, 2 load them, save, and 3 load: from memory, from the memory of other nodes, from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.blocks import Shard
from ckpt_engine.client import Checkpointer
from ckpt_engine.manifest import read_manifest, step_folder
from ingest.clock import Clock, SystemClock
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.ring_process import HOLDER, HOME, JOB, NEW, RingProcess
from pipelines.bench_ckpt.states import make_training

REPLICAS = 4
CHAIN = (4, 2, 3)
ROWS, COLUMNS = 1201, 67  # whose blocks are not of one size
SECONDS_MAX = 120.0
LOOK_SECONDS = 0.02

Told = Callable[[str], object]
Nodes = Sequence[RingProcess | Path]  # where the ranks run, by turns; a folder: no engine at all


def measure_dedup(task: Task, told: Told) -> Outcome:
    """Raises RuntimeError where a load does not give what was saved, or not from the tier that it should."""
    folder, clock = Path(task.folder), SystemClock()
    state = make_training(task.case, max(1, task.mb // 6), task.seed).state
    outcome = Outcome(values=[], missing={}, notes=[], rounds={})
    told("one rank saves")
    one_bytes = stored_bytes(folder / "one", [state], (), clock)
    told(f"{REPLICAS} data-parallel ranks on two nodes save")
    all_bytes = stored_bytes(folder / "replicas", [state] * REPLICAS, (HOME, HOLDER), clock)
    for tier in ("memory", "peer", "disk"):
        told(f"{' to '.join(map(str, CHAIN))} ranks, from {tier}")
        reshard(folder / f"chain-{tier}", tier, clock)
    outcome.values.append(Value("ckpt.dedup_ratio", all_bytes / one_bytes, "ratio", REPLICAS))
    chain = " to ".join(map(str, CHAIN))
    outcome.notes.append(
        f"[dedup] {REPLICAS} replicas {all_bytes / 1e6:.2f} MB, one {one_bytes / 1e6:.2f} MB; {chain} ranks from "
        "memory, peer and disk bit for bit"
    )
    return outcome


def stored_bytes(folder: Path, states: Sequence[dict[str, Any]], nodes: Sequence[str], clock: Clock) -> int:
    """What a step of these ranks' states takes on disk, by an engine on each node: shards, records, manifest."""
    directory = folder / "steps"
    engines = [RingProcess(folder, node) for node in nodes]
    try:
        save_all(engines or [directory], states, step=1, attempt=1)
        _await_complete(directory, 1, clock)
        return sum(path.stat().st_size for path in step_folder(directory, 1).iterdir())
    finally:
        for engine in engines:
            engine.end()


def reshard(folder: Path, tier: str, clock: Clock) -> None:
    """The chain of numbers of ranks in one tier. Raises RuntimeError where it breaks."""
    names = {"memory": (HOME,), "peer": (HOME, HOLDER, NEW), "disk": ()}[tier]
    directory = folder / "steps"
    engines = [RingProcess(folder, node) for node in names]
    by_attempt: list[Nodes] = [engines or [directory]] * len(CHAIN)
    if tier == "peer":  # each time on a node whose own slots have none of it
        by_attempt = [engines[:2], engines[2:], engines[:1]]
    try:
        for number, world_size in enumerate(CHAIN):
            attempt, nodes = number + 1, by_attempt[number]
            states = [blocks(rank, world_size, zero=number > 0) for rank in range(world_size)]
            if number > 0:
                _load_all(nodes, states, step=number, attempt=attempt, tier=tier)
            if attempt < len(CHAIN):
                save_all(nodes, states, step=attempt, attempt=attempt)
                _await_complete(directory, attempt, clock)
    finally:
        for engine in engines:
            engine.end()


def blocks(rank: int, world_size: int, *, zero: bool) -> dict[str, Any]:
    """One rank's part of a state: a block of rows, one of columns, a flat one, and what is the same on all."""
    dice = torch.Generator().manual_seed(11)
    state: dict[str, Any] = {"same": torch.randn(COLUMNS, generator=dice), "words": "of all ranks"}
    for name, shape, dim in (("rows", (ROWS, COLUMNS), 0), ("columns", (ROWS, COLUMNS), 1), ("flat", (ROWS,), 0)):
        whole = torch.randn(shape, generator=dice)
        start, end = (part * shape[dim] // world_size for part in (rank, rank + 1))
        offset = tuple(start if at == dim else 0 for at in range(len(shape)))
        state[name] = Shard(whole.narrow(dim, start, end - start).clone(), shape, offset)
    if zero:
        for value in state.values():
            tensor = value.tensor if isinstance(value, Shard) else value
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
    return state


def save_all(nodes: Nodes, states: Sequence[dict[str, Any]], step: int, attempt: int) -> None:
    """Each rank saves its state; returns when the disk has it, and other nodes where there are several."""
    for rank, state in enumerate(states):
        checkpointer = _rank(nodes, rank, len(states), attempt)
        try:
            ticket = checkpointer.save(state, step)
            if ticket.failed or not ticket.durable.wait(SECONDS_MAX):
                raise RuntimeError(f"our save failed: {ticket.failed or ticket.durable.reason}")
        finally:
            checkpointer.close()


def _load_all(nodes: Nodes, states: Sequence[dict[str, Any]], step: int, attempt: int, tier: str) -> None:
    """All ranks load the newest step together, into states of zeros."""
    world_size = len(states)

    def load(rank: int) -> None:
        checkpointer = _rank(nodes, rank, world_size, attempt)
        try:
            report = checkpointer.load(states[rank])
        finally:
            checkpointer.close()
        if report is None or (report.step, report.tier, report.verified) != (step, tier, True):
            raise RuntimeError(f"rank {rank} of {world_size} loaded {report} where {tier} has step {step}")
        wanted = blocks(rank, world_size, zero=False)
        if not all(_same(states[rank][name], value) for name, value in wanted.items()):
            raise RuntimeError(f"rank {rank} of {world_size} did not get from {tier} what was saved")

    with ThreadPoolExecutor(world_size) as pool:
        for done in [pool.submit(load, rank) for rank in range(world_size)]:
            done.result()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Shard):
        return isinstance(other, Shard) and one.offset == other.offset and torch.equal(one.tensor, other.tensor)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _rank(nodes: Nodes, rank: int, world_size: int, attempt: int) -> Checkpointer:
    place = nodes[rank * len(nodes) // world_size]
    given: dict[str, Any] = {"job": JOB, "attempt": attempt, "rank": rank, "world_size": world_size}
    if isinstance(place, Path):
        return Checkpointer(None, str(place), node=HOME, **given)
    return Checkpointer(str(place.socket), None, node=place.node, **given)


def _await_complete(directory: Path, step: int, clock: Clock) -> None:
    deadline = clock.monotonic() + SECONDS_MAX
    while read_manifest(directory, step) is None:
        if clock.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not complete within {SECONDS_MAX:g} s")
        clock.sleep(LOOK_SECONDS)
