"""How long a save holds up training: ours, first and steady, beside torch's and other libraries', in one process."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt_engine.client import Checkpointer
from ingest.clock import SystemClock
from pipelines.bench_ckpt.engine_process import EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.peers import DCP_DEFAULT, SAVE_FSYNC, Peer, open_peers
from pipelines.bench_ckpt.rounds import BASE, Method, Rounds, interval, measure_steady
from pipelines.bench_ckpt.states import PlainCopy, Training, make_training

OURS = "transom"
FIRST_SAVES = 3
DURABLE_SECONDS_MAX = 120.0

Told = Callable[[str], object]


@dataclass(slots=True)
class OurSaves:
    """Saves of one real `Checkpointer` to one real engine, each waited for until it is on disk."""

    checkpointer: Checkpointer
    training: Training
    saved: list[int] = field(default_factory=list)

    def call(self, number: int) -> Callable[[], object]:
        ticket = self.checkpointer.save(self.training.state, self.training.steps)
        if ticket.failed:
            raise RuntimeError(f"our save failed: {ticket.failed}")
        self.saved.append(self.training.steps)
        return lambda: ticket.durable.wait(DURABLE_SECONDS_MAX)


def measure_saves(task: Task, told: Told) -> Outcome:
    """One case with one number of threads."""
    if task.threads:
        torch.set_num_threads(task.threads)
    folder = Path(task.folder)
    training = make_training(task.case, task.mb, task.seed)
    copy = PlainCopy(training.size_bytes)
    copy()
    told("first saves")
    first_ratios: list[float] = []
    for number in range(FIRST_SAVES - 1):
        with EngineProcess(folder / f"first{number}") as engine:
            first_ratios.append(_first_save(engine, training, copy)[0])
    with EngineProcess(folder / "engine") as engine, contextlib.ExitStack() as stack:
        ratio, checkpointer = _first_save(engine, training, copy)
        stack.callback(checkpointer.close)
        first_ratios.append(ratio)
        ours = OurSaves(checkpointer, training)
        peers = open_peers(folder / "peers", training, stack)
        methods = [
            Method(BASE, lambda number: copy(number)),
            Method(OURS, ours.call, before=lambda number: training.disturb()),
            *(Method(peer.name, peer.call) for peer in peers.there),
        ]
        rounds = measure_steady(methods, task.rounds, SystemClock().monotonic, told=told)
        told("comparing what memory holds with what was saved")
        _check(checkpointer, training, task)
    return save_figures(task, rounds, first_ratios, peers.there, peers.missing)


def save_figures(
    task: Task, rounds: Rounds, first_ratios: list[float], peers: list[Peer], missing: dict[str, str]
) -> Outcome:
    """The figures in the times of one case."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={task.label: {**rounds.seconds}})
    steady = rounds.ratio(OURS)

    def add(name: str, value: float, unit: str = "ratio", n: int = rounds.count) -> None:
        outcome.values.append(Value(name, value, unit, n, task.label))

    add("ckpt.save_ratio", steady)
    add("ckpt.first_save_ratio", statistics.median(first_ratios) / steady, n=len(first_ratios))
    slower = [peer.name for peer in peers if not rounds.not_slower(OURS, peer.name)]
    add("ckpt.slower_than_peers", len(slower), "peers", len(peers))
    for name, peer in (("ckpt.vs_torch_save_fsync", SAVE_FSYNC), ("ckpt.vs_dcp_async", DCP_DEFAULT)):
        if peer in rounds.seconds:
            add(name, rounds.ratio(peer, OURS))
        else:
            outcome.missing[name] = missing.get(peer, f"{peer} was not measured")
    firsts = {peer.name: peer.first_seconds for peer in peers}
    for name in rounds.seconds:
        low, high = interval(rounds.ratios(name))
        milliseconds = 1e3 * statistics.median(rounds.seconds[name])
        first = f", first call {1e3 * firsts[name]:.1f} ms" if name in firsts else ""
        line = f"{name}: {milliseconds:.1f} ms, {rounds.ratio(name):.2f} memcpy (95 %: {low:.2f} to {high:.2f}){first}"
        if name not in (OURS, BASE):
            low, high = interval(rounds.ratios(OURS, name))
            line += f"; ours ÷ it {rounds.ratio(OURS, name):.2f} ({low:.2f} to {high:.2f})"
        outcome.notes.append(f"[{task.label}] {line}")
    outcome.notes += [f"[{task.label}] {name}: {reason}" for name, reason in missing.items()]
    return outcome


def _first_save(engine: EngineProcess, training: Training, copy: PlainCopy) -> tuple[float, Checkpointer]:
    """First save ÷ memcpy of a rank that has begun as training scripts do: tried to load, then trained a step."""
    clock = SystemClock().monotonic
    checkpointer = Checkpointer(**engine.place, attempt=1)
    if checkpointer.load(training.state) is not None:
        raise RuntimeError("a new engine has a checkpoint already")
    training.step()
    began = clock()
    copy()
    plain, began = clock() - began, clock()
    ticket = checkpointer.save(training.state, training.steps)
    taken = clock() - began
    if ticket.failed or not ticket.durable.wait(DURABLE_SECONDS_MAX):
        raise RuntimeError(f"our first save failed: {ticket.failed or ticket.durable.reason}")
    return taken / plain, checkpointer


def _check(checkpointer: Checkpointer, training: Training, task: Task) -> None:
    """A figure of a save that does not hold what was saved would mean nothing. Raises RuntimeError."""
    other = make_training(task.case, task.mb, task.seed + 1)
    state = other.state
    report = checkpointer.load(state)
    if report is None or state["step"] != training.steps or not other.same_as(training):
        raise RuntimeError(f"what came back is not what was saved: {report}")
