"""How fast memory comes to disk beside a plain write and fsync, and what training feels of it on two busy cores."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.ticket import Ticket
from ingest.clock import SystemClock
from pipelines.bench_ckpt.engine_process import EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.rounds import interval, spread
from pipelines.bench_ckpt.saves import DURABLE_SECONDS_MAX
from pipelines.bench_ckpt.states import Training, make_training

CORES = 2
PIECE_BYTES = 8 << 20
SMALL_MB = 20  # of the model whose steps are timed: several of them fit into one write
STEPS_BEFORE = 4
STEPS_MAX = 100

Told = Callable[[str], object]


def measure_persisting(task: Task, told: Told) -> Outcome:
    """Both figures; engine and training share two cores, whatever else the machine has."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)
    clock = SystemClock().monotonic
    folder = Path(task.folder)
    large, small = make_training(task.case, task.mb, task.seed), make_training("transformer", SMALL_MB, task.seed)
    plain = memoryview(bytearray(os.urandom(1 << 20) * (large.size_bytes >> 20)))
    rates: list[float] = []
    inflations: list[float] = []
    plain_seconds: list[float] = []
    with EngineProcess(folder / "engine") as engine:
        checkpointer = Checkpointer(**engine.place, attempt=1)
        try:
            for number in range(task.rounds + 1):
                told(f"round {number} of {task.rounds}" if number else "warm-up")
                large.disturb()
                taken = plain_write(folder / "plain", plain, clock)
                _durable(checkpointer.save(large.state, large.steps))
                event = engine.events("durable", "disk")[-1]
                rate = (taken / len(plain)) / (event.seconds / event.size_bytes)
                large.disturb()
                before, during = _steps(small, lambda: checkpointer.save(large.state, large.steps), clock)
                if number:
                    plain_seconds.append(taken)
                    rates.append(rate)
                    inflations += [statistics.median(during) / statistics.median(before) - 1.0] if during else []
        finally:
            checkpointer.close()
    return persist_figures(task, rates, inflations, plain_seconds)


def persist_figures(task: Task, rates: list[float], inflations: list[float], plain_seconds: list[float]) -> Outcome:
    """The figures of all rounds."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={"persist": {"plain write and fsync": plain_seconds}})
    outcome.values.append(Value("ckpt.persist_ratio", statistics.median(rates), "ratio", len(rates)))
    low, high = interval(rates)
    outcome.notes.append(
        f"[persist] rate ÷ plain write and fsync: 95 % {low:.2f} to {high:.2f}; the plain write took "
        f"{statistics.median(plain_seconds):.3f} s and wandered by {spread(plain_seconds):.0%}"
    )
    if not inflations:
        outcome.missing["ckpt.persist_step_inflation"] = "no training step fell wholly into a write; take more --mb"
        return outcome
    outcome.values.append(Value("ckpt.persist_step_inflation", statistics.median(inflations), "ratio", len(inflations)))
    low, high = interval(inflations)
    outcome.notes.append(f"[persist] steps on {CORES} busy cores are longer by 95 % {low:.1%} to {high:.1%}")
    return outcome


def plain_write(path: Path, content: memoryview, clock: Callable[[], float]) -> float:
    """Seconds to write and fsync a new file, piece by piece."""
    path.unlink(missing_ok=True)
    began = clock()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for start in range(0, len(content), PIECE_BYTES):
            piece, done = content[start : start + PIECE_BYTES], 0
            while done < len(piece):
                done += os.pwrite(descriptor, piece[done:], start + done)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    taken = clock() - began
    path.unlink()
    return taken


def _steps(
    training: Training, save: Callable[[], Ticket], clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of steps before a save, and of those that lie wholly in the writing of it."""

    def step() -> float:
        began = clock()
        training.step()
        return clock() - began

    step()
    before = [step() for _ in range(STEPS_BEFORE)]
    ticket = save()
    during: list[float] = []
    for _ in range(STEPS_MAX):
        taken = step()
        if ticket.durable.wait(0.0) or ticket.durable.settled:
            break
        during.append(taken)
    _durable(ticket)
    return before, during


def _durable(ticket: Ticket) -> None:
    if ticket.failed or not ticket.durable.wait(DURABLE_SECONDS_MAX):
        raise RuntimeError(f"our save did not come to disk: {ticket.failed or ticket.durable.reason}")
