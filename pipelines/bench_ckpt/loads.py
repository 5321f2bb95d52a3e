"""How long a restarted rank waits for its state: after kill -9 of the rank before, from the engine's memory, beside
torch.load of a file that is cached and of one that is not."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from ckpt_engine.client import Checkpointer
from ingest.clock import SystemClock
from pipelines.bench_ckpt.engine_process import EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.rounds import BASE, Method, Rounds, interval, measure_steady
from pipelines.bench_ckpt.saves import DURABLE_SECONDS_MAX
from pipelines.bench_ckpt.states import PlainCopy, Training, make_training

IN_PLACE, VIEWS, VIEWS_VERIFIED = "in place", "views, verified later", "views, verified first"
TORCH_HOT, TORCH_COLD, TORCH_MMAP = "torch.load, cached", "torch.load, not cached", "torch.load(mmap=True), cached"
RATIOS = {
    "ckpt.load_views_ratio": (VIEWS, BASE),
    "ckpt.load_views_verified_ratio": (VIEWS_VERIFIED, BASE),
    "ckpt.load_inplace_ratio": (IN_PLACE, BASE),
    "ckpt.vs_torch_load_hot": (TORCH_HOT, IN_PLACE),
    "ckpt.vs_torch_load_cold": (TORCH_COLD, IN_PLACE),
}

Told = Callable[[str], object]


class OurLoads:
    """Loads of one rank that is started again and again; every one is a new attempt with a new connection."""

    def __init__(self, engine: EngineProcess, training: Training) -> None:
        self._engine = engine
        self._training = training
        self._attempt = 1

    def in_place(self, number: int) -> Callable[[], object]:
        checkpointer = self._restarted()
        report = checkpointer.load(self._training.state)
        self._require(report is not None and report.tier == "memory" and report.verified, report)
        return checkpointer.close

    def views(self, number: int) -> Callable[[], object]:
        return self._views("deferred")

    def views_verified(self, number: int) -> Callable[[], object]:
        return self._views("first")

    def _views(self, verify: Any) -> Callable[[], object]:
        checkpointer = self._restarted()
        views = checkpointer.load_views(verify=verify)
        self._require(views is not None and views.report.tier == "memory", views and views.report)
        return checkpointer.close

    def _restarted(self) -> Checkpointer:
        self._attempt += 1
        return Checkpointer(**self._engine.place, attempt=self._attempt)

    def _require(self, condition: bool, report: object) -> None:
        if not condition:
            raise RuntimeError(f"the load was not from verified memory: {report}")


def measure_loads(task: Task, told: Told) -> Outcome:
    """The transformer with one number of threads."""
    if task.threads:
        torch.set_num_threads(task.threads)
    folder = Path(task.folder)
    file = folder / "state.pt"
    training = make_training(task.case, task.mb, task.seed)
    copy = PlainCopy(training.size_bytes)
    copy()
    with EngineProcess(folder / "engine") as engine:
        told("a rank saves, and is killed")
        with _rank(engine, training, file):
            pass
        ours = OurLoads(engine, training)
        methods = [
            Method(BASE, lambda number: copy(number)),
            Method(VIEWS, ours.views),
            Method(VIEWS_VERIFIED, ours.views_verified),
            Method(IN_PLACE, ours.in_place, before=lambda number: training.disturb()),
            Method(TORCH_HOT, lambda number: _torch_load(training, file), before=lambda number: file.read_bytes()),
            Method(TORCH_MMAP, lambda number: _torch_load(training, file, mmap=True)),
            Method(TORCH_COLD, lambda number: _torch_load(training, file), before=lambda number: drop_cache(file)),
        ]
        rounds = measure_steady(methods, task.rounds, SystemClock().monotonic, told=told)
        told("comparing what was loaded with what was saved")
        training.disturb()
        ours.in_place(0)()
        _check(training, file)
    return load_figures(task, rounds)


def load_figures(task: Task, rounds: Rounds) -> Outcome:
    """The figures in the times of one case."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={f"load, {task.label}": {**rounds.seconds}})
    for name, (over, under) in RATIOS.items():
        outcome.values.append(Value(name, rounds.ratio(over, under), "ratio", rounds.count, task.label))
    for name in rounds.seconds:
        low, high = interval(rounds.ratios(name))
        outcome.notes.append(f"[{task.label}] {name}: {rounds.ratio(name):.2f} memcpy (95 %: {low:.2f} to {high:.2f})")
    return outcome


def drop_cache(file: Path) -> None:
    """The next reader has to go to the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _torch_load(training: Training, file: Path, mmap: bool = False) -> None:
    state = torch.load(file, weights_only=True, mmap=mmap)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.steps = state["step"]


@contextmanager
def _rank(engine: EngineProcess, training: Training, file: Path) -> Iterator[int]:
    """A rank of its own, forked with the state as it is here, that changes it and saves; killed at the end."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child uses none of them
        pid = os.fork()
    if pid == 0:
        _save_and_stay(engine, training, file, writing)
    os.close(writing)
    try:
        with os.fdopen(reading) as said:
            line = said.readline()
        if line != "saved\n":
            raise RuntimeError(f"the rank did not save: {line}")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _save_and_stay(engine: EngineProcess, training: Training, file: Path, writing: int) -> NoReturn:
    try:
        torch.set_num_threads(1)  # torch's others were not forked
        training.disturb()
        ticket = Checkpointer(**engine.place, attempt=1).save(training.state, training.steps)
        if ticket.failed or not ticket.durable.wait(DURABLE_SECONDS_MAX):
            raise RuntimeError(ticket.failed or ticket.durable.reason)
        with file.open("wb") as output:
            torch.save(training.state_dicts, output)
            output.flush()
            os.fsync(output.fileno())
        os.write(writing, b"saved\n")
        while True:
            SystemClock().sleep(60.0)
    except BaseException as error:  # noqa: BLE001 - the parent says it, and nothing of the parent may run on here
        os.write(writing, f"{error}\n".encode())
    finally:
        os._exit(1)


def _check(training: Training, file: Path) -> None:
    """A load that brings back something else would not count. Raises RuntimeError."""
    saved = torch.load(file, weights_only=True)
    moments = [value for entry in saved["optimizer"]["state"].values() for value in entry.values()]
    pairs = zip([*saved["model"].values(), *moments], training.tensors, strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise RuntimeError("what was loaded is not what the killed rank had saved")
