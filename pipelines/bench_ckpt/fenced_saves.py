"""How little a fenced save holds up training: the save, the wait in the fence, and a whole step with both."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt_engine.client import Checkpointer
from ingest.clock import SystemClock
from pipelines.bench_ckpt.engine_process import EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.rounds import BASE, Method, Rounds, interval, measure_steady
from pipelines.bench_ckpt.saves import DURABLE_SECONDS_MAX
from pipelines.bench_ckpt.states import PlainCopy, Training, make_training

WITH, WITHOUT = "step with a fenced save", "step without a save"
COMPUTE_MEMCPYS_MIN = 3.0
BATCH_MAX = 64

Told = Callable[[str], object]


@dataclass(slots=True)
class FencedSteps:
    """Training steps with a fenced save at their start. Of each it keeps how long save, compute and fence took."""

    checkpointer: Checkpointer
    training: Training
    clock: Callable[[], float]
    saves: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)

    def call(self, number: int) -> Callable[[], object]:
        began = self.clock()
        ticket = self.checkpointer.save(self.training.state, self.training.steps)
        self.saves.append(self.clock() - began)
        began = self.clock()
        self.training.compute()
        self.computes.append(self.clock() - began)
        self.waits.append(self.checkpointer.fence())
        self.training.update()

        def settle() -> None:
            if not ticket.sealed.wait(DURABLE_SECONDS_MAX) or not ticket.durable.wait(DURABLE_SECONDS_MAX):
                raise RuntimeError(f"our fenced save failed: {ticket.failed or ticket.durable.reason}")

        return settle


def measure_fenced(task: Task, told: Told) -> Outcome:
    """One case with one number of threads."""
    if task.threads:
        torch.set_num_threads(task.threads)
    clock = SystemClock().monotonic
    training = make_training(task.case, task.mb, task.seed)
    copy = PlainCopy(training.size_bytes)
    copy()
    with EngineProcess(Path(task.folder) / "engine") as engine:
        checkpointer = Checkpointer(**engine.place, attempt=1, mode="fenced")
        try:
            checkpointer.adopt(training.state)
            lengthen(training, copy, clock)
            steps = FencedSteps(checkpointer, training, clock)
            methods = [
                Method(BASE, lambda number: copy(number)),
                Method(WITHOUT, lambda number: training.step()),
                Method(WITH, steps.call),
            ]
            rounds = measure_steady(methods, task.rounds, clock, told=told)
            told("comparing what memory holds with what was saved")
            _check(checkpointer, training, task)
        finally:
            checkpointer.close()
    return fenced_figures(task, rounds, steps.saves, steps.waits, steps.computes)


def fenced_figures(
    task: Task, rounds: Rounds, saves: list[float], waits: list[float], computes: list[float]
) -> Outcome:
    """The figures in the times of one case; of `saves`, `waits` and `computes` the last belong to the rounds."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={f"fenced, {task.label}": {**rounds.seconds}})
    count = rounds.count
    base = rounds.seconds[BASE]

    def ratios(seconds: list[float]) -> list[float]:
        return [taken / plain for taken, plain in zip(seconds[-count:], base, strict=True)]

    computed = statistics.median(ratios(computes))
    found = {
        "ckpt.fenced_ratio": ratios(saves),
        "ckpt.fence_wait_ratio": ratios(waits),
        "ckpt.fenced_step_ratio": rounds.ratios(WITH, WITHOUT),
    }
    for name, values in found.items():
        if name == "ckpt.fence_wait_ratio" and computed < COMPUTE_MEMCPYS_MIN:
            outcome.missing[name] = f"compute took only {computed:.1f} memcpy"
            continue
        low, high = interval(values)
        outcome.values.append(Value(name, statistics.median(values), "ratio", count, task.label))
        outcome.notes.append(
            f"[{task.label}] {name}: 95 % {low:.4f} to {high:.4f}; compute takes {computed:.1f} memcpy"
        )
    return outcome


def lengthen(training: Training, copy: PlainCopy, clock: Callable[[], float]) -> None:
    """Make the batch large enough that forward and backward take as long as the figure of the fence asks."""
    training.step()
    while True:
        began = clock()
        copy()
        plain, began = clock() - began, clock()
        training.compute()
        computed = clock() - began
        training.update()
        if computed >= 2 * COMPUTE_MEMCPYS_MIN * plain or training.batch_size >= BATCH_MAX:
            return
        training.batch_size *= 2


def _check(checkpointer: Checkpointer, training: Training, task: Task) -> None:
    """Save once more, train on, and look whether memory has what was saved. Raises RuntimeError."""
    before = make_training(task.case, task.mb, task.seed + 1)
    kept = [tensor.clone() for tensor in training.tensors]
    ticket = checkpointer.save(training.state, training.steps)
    training.compute()
    training.update()
    report = checkpointer.load(before.state)
    same = all(torch.equal(one, other) for one, other in zip(kept, before.tensors, strict=True))
    if not ticket.sealed.wait(DURABLE_SECONDS_MAX) or report is None or not same:
        raise RuntimeError(f"what came back is not what was saved: {ticket!r}, {report}")
