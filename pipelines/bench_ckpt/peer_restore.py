"""How long a rank waits whose node was lost: its shard comes from the memory of another engine, which
computes every checksum, over loopback into that of its new engine, which compares them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.client import Checkpointer
from ingest.clock import SystemClock
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.ring_process import HOLDER, HOME, JOB, NEW, RingProcess
from pipelines.bench_ckpt.rounds import BASE, Method, interval, measure_steady
from pipelines.bench_ckpt.states import PlainCopy, Training, make_training

IN_PLACE, VIEWS = "from a peer, in place", "from a peer, views"


class PeerLoads:
    """Loads of one rank on a node that is new each time."""

    def __init__(self, folder: Path, training: Training) -> None:
        self._folder = folder
        self._training = training
        self._engine: RingProcess | None = None
        self._started = 0

    def renew(self, number: int) -> None:
        """Another engine, with no shard in its memory, where the last one was; it has been there for a moment."""
        self.close()
        self._started += 1
        self._engine = RingProcess(self._folder, NEW, self._started)
        self._engine.await_ready(self._training.size_bytes, SystemClock())
        self._training.disturb()

    def in_place(self, number: int) -> Callable[[], object]:
        checkpointer = self._restarted()
        self._require(checkpointer.load(self._training.state))
        return checkpointer.close

    def views(self, number: int) -> Callable[[], object]:
        checkpointer = self._restarted()
        views = checkpointer.load_views(verify="first")
        self._require(views and views.report)
        return checkpointer.close

    def close(self) -> None:
        if self._engine is not None:
            self._engine.end()
            self._engine = None

    def _restarted(self) -> Checkpointer:
        assert self._engine is not None
        return _rank(self._engine, self._started + 1)

    def _require(self, report: Any) -> None:
        if not report or report.tier != "peer" or not report.verified:
            raise RuntimeError(f"the load was not from a peer's verified memory: {report}")


def measure_peer_restore(task: Task, told: Callable[[str], object]) -> Outcome:
    """The transformer with one number of threads."""
    if task.threads:
        torch.set_num_threads(task.threads)
    folder = Path(task.folder) / "ring"
    training = make_training(task.case, task.mb, task.seed)
    copy = PlainCopy(training.size_bytes)
    copy()
    holder, home = RingProcess(folder, HOLDER), RingProcess(folder, HOME)
    loads = PeerLoads(folder, training)
    try:
        told("a rank saves on a node, the next one keeps a copy, the node is lost")
        saver = _rank(home, 1)
        ticket = saver.save(training.state, training.steps)
        if ticket.failed or not ticket.durable.wait(120.0):
            raise RuntimeError(f"the save failed: {ticket.failed or ticket.durable.reason}")
        if not ticket.backed_up.wait(120.0):
            raise RuntimeError(f"no other node has a copy: {ticket.backed_up.reason}")
        saver.close()
        home.end()
        saved = [tensor.clone() for tensor in training.tensors]
        methods = [
            Method(BASE, lambda number: copy(number)),
            Method(VIEWS, loads.views, before=loads.renew),
            Method(IN_PLACE, loads.in_place, before=loads.renew),
        ]
        rounds = measure_steady(methods, task.rounds, SystemClock().monotonic, told=told)
        told("comparing what was loaded with what was saved")
        loads.renew(0)
        loads.in_place(0)()
        if not all(torch.equal(one, other) for one, other in zip(saved, training.tensors, strict=True)):
            raise RuntimeError("what came from the peer is not what was saved")
    finally:
        loads.close()
        home.end()
        holder.end()
    outcome = Outcome(values=[], missing={}, notes=[], rounds={f"peer, {task.label}": {**rounds.seconds}})
    value = rounds.ratio(VIEWS)
    outcome.values.append(Value("ckpt.peer_restore_ratio", value, "ratio", rounds.count, task.label))
    for name in rounds.seconds:
        low, high = interval(rounds.ratios(name))
        outcome.notes.append(f"[{task.label}] {name}: {rounds.ratio(name):.2f} memcpy (95 %: {low:.2f} to {high:.2f})")
    return outcome


def _rank(engine: RingProcess, attempt: int) -> Checkpointer:
    return Checkpointer(str(engine.socket), None, job=JOB, attempt=attempt, rank=0, world_size=1, node=engine.node)
