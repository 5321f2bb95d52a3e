"""Ten million samples in a ledger: how large they are, and how long a chart of all ranks takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ingest.bus import Record
from ingest.clock import SystemClock
from ingest.codec import Codec
from ingest.events import Metrics
from pipelines.figures import Figure
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.shapes import CommandRequest, Health

JOB = "bench"
RANKS, SAMPLES = 256, 10_000_000
COLUMNS = ("train.step.duration", "train.forward.duration", "train.backward.duration", "train.loss", "train.data.wait")
STEPS_OF_A_MESSAGE = 60
STARTED_AT = 1_000_000.0
CHARTS = 7
BATCH = 500


def batched_records(
    ranks: int, steps: int, *, columns: tuple[str, ...] = COLUMNS, of_a_message: int = STEPS_OF_A_MESSAGE
) -> Iterator[Record]:
    """One step a second of each rank, several steps a message, values with six digits, as they lie on a bus."""
    codec, dice, offset = Codec(), np.random.default_rng(1), 0
    for first in range(0, steps, of_a_message):
        numbers = tuple(range(first, min(first + of_a_message, steps)))
        times = tuple(STARTED_AT + step for step in numbers)
        values = np.round(dice.normal(0.5, 0.01, (ranks, len(columns), len(numbers))), 6).tolist()
        for rank in range(ranks):
            message = Metrics(
                job=JOB, attempt=1, rank=rank, node=f"node{rank // 8}", sequence=first, at=times[-1], phase="train",
                step=numbers[-1] + 1, steps=numbers, ended_at=times,
                columns=dict(zip(columns, map(tuple, values[rank]), strict=True)),
            )  # fmt: skip
            encoded = codec.encode(message)
            yield Record("metrics", 0, offset, JOB, encoded.headers, encoded.value, times[-1])
            offset += 1


def measure_sizes(folder: Path, tell: Callable[[str], None], samples: int = SAMPLES) -> list[Figure]:
    """Write them as `record` does, weigh the folder, ask for charts."""
    steps = -(-samples // (RANKS * len(COLUMNS)))
    written = steps * RANKS * len(COLUMNS)
    clock = SystemClock()
    with Ledger(folder / "ledger", clock) as ledger:
        batch: list[Record] = []
        for count, record in enumerate(batched_records(RANKS, steps), start=1):
            batch.append(record)
            if len(batch) == BATCH:
                ledger.append(batch)
                ledger.commit()
                batch = []
                tell(f"{count * STEPS_OF_A_MESSAGE * len(COLUMNS):,} samples written")
        ledger.append(batch)
        ledger.commit(force=True)
        tell("charts")
        reader = LocalReader(ledger.cursor, ledger.state, ledger.parts, now=clock.now, health=_well, post=_refuse)
        taken = []
        for _ in range(CHARTS):
            began = time.perf_counter()
            reader.series_table(JOB, COLUMNS[0])
            taken.append(1e3 * (time.perf_counter() - began))
    used = sum(path.stat().st_size for path in (folder / "ledger").rglob("*") if path.is_file())
    return [
        Figure("ledger.bytes_10m", round(used * SAMPLES / written), "bytes", n=written),
        Figure("ledger.chart_ms", round(statistics.median(taken), 1), "ms", n=CHARTS),
    ]


def _well() -> Health:
    return Health(status="ok", reason="", lag={}, data_at=0.0)


def _refuse(_: CommandRequest) -> str:
    raise AssertionError("nobody gives commands here")
