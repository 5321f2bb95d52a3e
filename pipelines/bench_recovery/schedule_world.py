"""A small world for recovery's schedules: a job on the memory backend, lies, power cuts, overlapping controllers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from detectors.verdict import Verdict
from ingest.clock import ManualClock
from recovery.backend import (
    Ambiguous,
    BackendError,
    CheckpointChoice,
    Conflict,
    Observation,
    StartRequest,
    Unavailable,
)
from recovery.backends.memory import MemoryBackend
from recovery.calls import Result
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import Fenced, RecoveryStore
from recovery.store_schema import OutboxMessage
from recovery.workers import Done

JOB = "job"
RANKS = 4
FIRST_STEP = 12
_T = TypeVar("_T")
LIES: tuple[tuple[BackendError, bool], ...] = (  # an error, and whether the call has its effect all the same
    (Unavailable("connection refused"), False),
    (Ambiguous("timed out"), False),
    (Ambiguous("timed out"), True),
    (Conflict("somebody was here"), False),
    (BackendError("?"), True),
)


class PowerCut(BaseException):
    """The machine loses power here. Not an Exception, so that nothing can mistake it for another error."""


@dataclass(slots=True)
class Cuts:
    """Counts the places where power can be cut, and cuts it at the chosen ones."""

    at: frozenset[int] = frozenset()
    seen: int = 0

    def point(self) -> None:
        self.seen += 1
        if self.seen in self.at:
            raise PowerCut


class CuttableStore(RecoveryStore):
    """Power may be cut right before and right after every commit."""

    def __init__(self, path: Path, cuts: Cuts) -> None:
        super().__init__(path, durable=False)
        self._cuts = cuts

    def _commit(self) -> None:
        self._cuts.point()
        super()._commit()
        self._cuts.point()


class LyingBackend(MemoryBackend):
    """Power may be cut right before and right after every effect; errors come before the effect or after it."""

    def __init__(self, clock: ManualClock, dice: random.Random) -> None:
        super().__init__(clock)
        self._dice = dice
        self.cuts = Cuts()
        self.lies = 0.0  # the share of calls that end in an error

    def _around(self, effect: Callable[[], _T]) -> _T:
        lie = self._dice.choice(LIES) if self.lies and self._dice.random() < self.lies else None
        self.cuts.point()
        if lie is not None and not lie[1]:
            raise lie[0]
        result = effect()
        self.cuts.point()
        if lie is not None:
            raise lie[0]
        return result

    def observe(self, job: str) -> Observation:
        return self._around(lambda: super(LyingBackend, self).observe(job))

    def start(self, request: StartRequest) -> Observation:
        return self._around(lambda: super(LyingBackend, self).start(request))

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        return self._around(
            lambda: super(LyingBackend, self).stop(
                job, attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds
            )
        )

    def finish(self, job: str, outcome: Any, reason: str) -> None:
        self._around(lambda: super(LyingBackend, self).finish(job, outcome, reason))

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        return self._around(
            lambda: super(LyingBackend, self).collect_evidence(job, attempt, deadline_seconds=deadline_seconds)
        )


class LateWorkers:
    """Calls are made at once or some turns later, in any order between jobs: what threads do to a controller.

    A controller that was replaced leaves its calls behind, and they are made all the same.
    """

    def __init__(self, dice: random.Random, lateness: float) -> None:
        self._dice = dice
        self._lateness = lateness
        self._out: dict[str, Callable[[], Result]] = {}
        self._done: list[Done[Result]] = []

    def submit(self, key: str, call: Callable[[], Result]) -> bool:
        assert not self.busy(key)
        self._out[key] = call
        self.run_some()
        return True

    def run_some(self) -> None:
        """Make those of the calls whose time has come."""
        for key in [key for key in self._out if self._dice.random() >= self._lateness]:
            self._done.append(Done(key, self._out.pop(key)()))

    def left_behind(self) -> list[Callable[[], Result]]:
        """Calls of a controller that is gone: nobody hears their answers."""
        return list(self._out.values())

    def busy(self, key: str) -> bool:
        return key in self._out or any(done.key == key for done in self._done)

    def take(self) -> list[Done[Result]]:
        self.run_some()
        done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> bool:
        return bool(self._done)


@dataclass
class Checkpoints:
    """Checkpoints that every rank can load from memory: every fifth step."""

    newest: int = 10
    rejected_from: int | None = None

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        bounds = [bound for bound in (before_step, self.rejected_from) if bound is not None]
        step = min([self.newest, *((bound - 1) // 5 * 5 for bound in bounds)])
        return CheckpointChoice(step, "memory") if step > 0 else None

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        self.rejected_from = step if self.rejected_from is None else min(step, self.rejected_from)


@dataclass
class ScheduleWorld:
    """One job (2 nodes x 2 ranks, spares), the verdict topic with its committed offset, and what was published."""

    folder: Path
    config: PolicyConfig
    dice: random.Random
    lateness: float
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    topic: list[Verdict] = field(default_factory=list)
    offset: int = 0
    published: list[OutboxMessage] = field(default_factory=list)
    lives: int = 0

    def __post_init__(self) -> None:
        self.cuts = Cuts()
        self.backend = LyingBackend(self.clock, self.dice)
        nodes = {"n0": 2, "n1": 2, "spare0": 2, "spare1": 2, "spare2": 2}
        self.backend.add_job(JOB, nodes, nodes_wanted=2, nproc_per_node=2)
        self.backend.start(StartRequest(JOB, 1, "first"))
        self.backend.set_step(JOB, FIRST_STEP)
        self.checkpoints = Checkpoints()
        self._replaced: list[tuple[Controller, CuttableStore]] = []
        self._forgotten: list[Callable[[], Result]] = []  # calls that lives before this one have left in flight
        self.begin_life()

    def arm(self, cuts: Cuts, lies: float) -> None:
        """From now on power may be cut and the backend may lie."""
        self.cuts = self.backend.cuts = self.store._cuts = cuts
        self.backend.lies = lies

    def begin_life(self) -> None:
        self.store = CuttableStore(self.folder / "recovery.sqlite", self.cuts)
        self.workers = LateWorkers(self.dice, self.lateness)
        self.lives += 1
        self.controller = Controller(
            self.store, self.backend, self.checkpoints, self.config, random.Random(self.dice.random()), self.workers
        )

    def take_over(self) -> None:
        """A second controller begins while the first believes that it still has the lease."""
        self.store.path.with_name(self.store.path.name + ".lock").unlink()
        self._replaced.append((self.controller, self.store))
        self._forgotten += self.workers.left_behind()
        self.begin_life()

    def round(self, seconds: float) -> None:
        """Poll, tick, publish, and let time pass: a power cut anywhere in it begins the next life."""
        self._disturb()
        try:
            while self.offset < len(self.topic):
                self.controller.accept(self.topic[self.offset], self.clock.now())
                self.offset += 1
            self.controller.tick(self.clock.now())
            waiting = self.controller.pending_messages()
            self.published += [one.message for one in waiting]
            self.controller.mark_published([one.seq for one in waiting])
        except PowerCut:
            self._forgotten += self.workers.left_behind()
            self.store.close()
            self._begin_after_cut()
        self.clock.advance(seconds)

    def _begin_after_cut(self) -> None:
        while True:
            try:
                return self.begin_life()
            except PowerCut:
                continue

    def _disturb(self) -> None:
        """What earlier lives still do: calls in flight have their effect, a controller without a lease goes on."""
        while self._forgotten and self.dice.random() < 0.5:
            call = self._forgotten.pop(self.dice.randrange(len(self._forgotten)))
            self._uncut(call)
        for controller, store in list(self._replaced):
            try:
                self._uncut(lambda controller=controller: controller.tick(self.clock.now()))  # type: ignore[misc]
            except Fenced:
                self._replaced.remove((controller, store))
                store.close()

    def _uncut(self, act: Callable[[], object]) -> None:
        """Power cuts are for the life that counts."""
        cuts, self.backend.cuts = self.backend.cuts, Cuts()
        try:
            act()
        finally:
            self.backend.cuts = cuts

    def close(self) -> None:
        self.store.close()
        for _, store in self._replaced:
            store.close()

    # What the job does

    def make_steps(self) -> None:
        """If all ranks run, all make a step; a fresh attempt begins where it resumed."""
        view = MemoryBackend.observe(self.backend, JOB)
        if view.phase == "running" and view.ranks and all(rank.state == "running" for rank in view.ranks):
            resumed = self.backend.starts[-1].resume_step or 0
            step = max(view.step, resumed) + 1
            self.backend.set_step(JOB, step)
            if self.checkpoints.rejected_from is not None and step >= self.checkpoints.rejected_from:
                self.checkpoints.rejected_from = None  # trained anew, and good
            self.checkpoints.newest = max(self.checkpoints.newest, step // 5 * 5)

    def view(self) -> Observation:
        """The job as it really is."""
        return MemoryBackend.observe(self.backend, JOB)

    def quiet(self) -> bool:
        """Nothing is left to do."""
        store = self.store
        left = store.new_verdicts(1) or store.new_commands(1) or store.open_rejections() or store.waiting(1)
        return self.controller.idle() and self.offset == len(self.topic) and not left and not self._forgotten
