"""`transom bench replay`: how much faster than it was a run of 1,024 ranks is replayed, on one core.

The run is made up, its form is a real job's: one step a second, twelve columns. As a table (Parquet, one row for each
rank and step) it is read in blocks; as a recording it is a message for each rank and step, as the bus held them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from detectors.config import DetectorConfig
from detectors.logs.rule_book import RuleBook
from pipelines.bench_detect import COLUMNS, RANKS_PER_NODE, STARTED_AT, STEP_SECONDS, encoded_records, made_up_steps
from pipelines.figures import Figure
from pipelines.historic.mapping import MappingFile
from pipelines.historic.open_run import open_run
from pipelines.historic.replay import replay_historic
from pipelines.ledger.engine import pa, pq
from pipelines.own_process import collect_garbage_seldom
from pipelines.recorded_messages import read_messages
from pipelines.recording import RecordingWriter
from pipelines.replay import replay_messages
from pipelines.settings import Settings

RANKS, STEPS = 1_024, 120
TABLE_STEPS = 1_800  # half an hour: models are fitted once in it, as in a run of any length
GROUP_STEPS = 60  # written at once
TABLE = "table.parquet"


def write_made_up_recording(folder: Path, ranks: int = RANKS, steps: int = STEPS) -> None:
    """The recording that is replayed."""
    with RecordingWriter(folder, "bench", now=STARTED_AT) as writer:
        for record in encoded_records(made_up_steps(ranks, steps)):
            writer.write(record)


def write_made_up_table(folder: Path, ranks: int = RANKS, steps: int = TABLE_STEPS, seed: int = 0) -> None:
    """The same run, for longer, as a table in the order of time."""
    dice = np.random.default_rng(seed)
    nodes = pa.array([f"node{rank // RANKS_PER_NODE}" for rank in range(ranks)]).dictionary_encode()
    writer: pq.ParquetWriter | None = None
    for begin in range(0, steps, GROUP_STEPS):
        numbers = np.arange(begin, min(begin + GROUP_STEPS, steps))
        told = {
            "rank": np.tile(np.arange(ranks), len(numbers)), "step": np.repeat(numbers, ranks),
            "ended_at": np.repeat(STARTED_AT + (numbers + 1) * STEP_SECONDS, ranks),
        }  # fmt: skip
        told |= {name: np.round(dice.normal(0.5, 0.01, ranks * len(numbers)), 6) for name in COLUMNS}
        table = pa.table({**told, "node": pa.concat_arrays([nodes] * len(numbers))})
        writer = writer or pq.ParquetWriter(folder / TABLE, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def measure_table(folder: Path, ranks: int = RANKS, steps: int = TABLE_STEPS) -> list[Figure]:
    """From the compressed table to verdicts, in this process's own time."""
    config, rules = DetectorConfig(), RuleBook.shipped()
    seconds = _seconds_of(lambda: replay_historic(open_run(folder / TABLE, MappingFile()), config, rules))
    return _figures("replay", seconds, ranks, steps)


def measure_recording(folder: Path, ranks: int = RANKS, steps: int = STEPS) -> list[Figure]:
    """The same of a recording, message by message."""
    settings = Settings()
    seconds = _seconds_of(lambda: replay_messages(read_messages(folder), settings))
    return _figures("replay.recording", seconds, ranks, steps)


def _seconds_of(work: Callable[[], object]) -> float:
    collect_garbage_seldom()
    began = time.process_time()
    work()
    return time.process_time() - began


def _figures(name: str, seconds: float, ranks: int, steps: int) -> list[Figure]:
    samples = ranks * steps * len(COLUMNS)
    speedup = steps * STEP_SECONDS / seconds
    return [
        Figure(f"{name}.samples_per_second", round(samples / seconds), "samples/s", n=samples),
        Figure(f"{name}.speedup_1k_ranks", round(speedup, 1), "times", n=steps),
    ]
