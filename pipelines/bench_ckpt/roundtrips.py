"""How many made-up training states come back bit for bit, with what shares memory sharing it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.client import Checkpointer
from pipelines.bench_ckpt.engine_process import JOB, NODE, EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt_states import StateMaker, difference

FROM_DISK_EVERY = 10
DURABLE_SECONDS_MAX = 60.0


def measure_roundtrips(task: Task, told: Callable[[str], object]) -> Outcome:
    """Most are loaded from memory, every tenth from disk. The first that differs is told by its seed."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={})
    whole = 0
    with EngineProcess(Path(task.folder) / "engine") as engine:
        for number in range(task.roundtrips):
            told(f"state {number} of {task.roundtrips}")
            seed = task.seed * 1_000_003 + number
            found = _round(engine, number + 1, seed)
            if found:
                outcome.notes.append(f"[roundtrips] seed {seed}: {found}"[:500])
            whole += not found
    outcome.values.append(Value("ckpt.roundtrips", whole, "states", task.roundtrips))
    if whole < task.roundtrips:
        outcome.notes.append(f"[roundtrips] {task.roundtrips - whole} of {task.roundtrips} states came back changed")
    return outcome


def _round(engine: EngineProcess, attempt: int, seed: int) -> str:
    """Save one state and load it in another process's stead; where it differs."""
    state = StateMaker(torch, random.Random(seed)).state()
    saver = Checkpointer(**engine.place, attempt=attempt)
    from_disk = attempt % FROM_DISK_EVERY == 0
    try:
        ticket = saver.save(state, attempt)
        if ticket.failed or (from_disk and not ticket.durable.wait(DURABLE_SECONDS_MAX)):
            return f"was not saved: {ticket.failed or ticket.durable.reason}"
    finally:
        saver.close()
    place: dict[str, Any] = {"job": JOB, "rank": 0, "world_size": 1, "node": NODE}
    loader = (
        Checkpointer(None, str(engine.directory), attempt=attempt, **place)
        if from_disk
        else Checkpointer(**engine.place, attempt=attempt)
    )
    into: dict[str, Any] = dict.fromkeys(state)
    try:
        report = loader.load(into, step=attempt)
    finally:
        loader.close()
    if report is None or report.tier != ("disk" if from_disk else "memory"):
        return f"came from elsewhere: {report}"
    return difference(torch, state, into)
