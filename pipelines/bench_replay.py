"""`transom bench replay`: how much faster than it was a recorded run of 1,024 ranks is replayed, on one core.

The recording is made up, its form is a real job's: a message for each rank and step, one step a second, twelve columns.
"""

from __future__ import annotations

import time
from pathlib import Path

from pipelines.bench_detect import COLUMNS, STARTED_AT, STEP_SECONDS, encoded_records, made_up_steps
from pipelines.figures import Figure
from pipelines.own_process import collect_garbage_seldom
from pipelines.recorded_messages import read_messages
from pipelines.recording import RecordingWriter
from pipelines.replay import replay_messages
from pipelines.settings import Settings

RANKS, STEPS = 1_024, 120


def write_made_up_recording(folder: Path, ranks: int = RANKS, steps: int = STEPS) -> None:
    """The recording that is replayed."""
    with RecordingWriter(folder, "bench", now=STARTED_AT) as writer:
        for record in encoded_records(made_up_steps(ranks, steps)):
            writer.write(record)


def measure_replay(folder: Path, ranks: int = RANKS, steps: int = STEPS) -> list[Figure]:
    """From the compressed file to verdicts, in this process's own time."""
    settings = Settings()
    collect_garbage_seldom()
    began = time.process_time()
    replayed = replay_messages(read_messages(folder), settings)
    seconds = time.process_time() - began
    assert not replayed.unreadable
    samples = ranks * steps * len(COLUMNS)
    speedup = steps * STEP_SECONDS / seconds
    return [
        Figure("replay.samples_per_second", round(samples / seconds), "samples/s", n=samples),
        Figure("replay.speedup_1k_ranks", round(speedup, 1), "times", n=steps),
    ]
