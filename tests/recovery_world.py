"""A small world for recovery: a job on the memory backend, verdicts on a log, power cuts, and a publisher."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectors.verdict import Culprit, Verdict
from ingest.clock import ManualClock
from pipelines.bench_recovery.schedule_world import Cuts, CuttableStore, PowerCut
from recovery.action import Command, CommandVerb
from recovery.backend import BackendError, CheckpointChoice, Observation, StartRequest
from recovery.backends.memory import MemoryBackend
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.workers import InlineWorkers

JOB = "job"
QUICK = PolicyConfig(
    probation_steps=3, probation_seconds=1.0, retry_seconds=0.2, retry_seconds_max=1.0, backoff_seconds=1.0
)


def verdict(fault_class: str, verdict_id: str = "v", attempt: int = 1, **fields: Any) -> Verdict:
    """A settled verdict about rank 1 on node n0, unless told otherwise."""
    values: dict[str, Any] = {
        "verdict_id": verdict_id,
        "revision": 1,
        "job": JOB,
        "attempt": attempt,
        "fault_class": fault_class,
        "severity": "critical",
        "settled": True,
        "culprits": (Culprit(rank=1, node="n0"),),
        "onset_at": 1000.0,
        "at": 1000.0,
        "advice": "restart_in_place",
        "summary": f"{fault_class} of rank 1",
    }
    return Verdict(**{**values, **fields})


class CuttableBackend(MemoryBackend):
    """Power may be cut right before and right after every effect; faults come from `fault`."""

    def __init__(self, clock: ManualClock, cuts: Cuts) -> None:
        super().__init__(clock)
        self._cuts = cuts
        self.fault: Callable[[str], tuple[BackendError, bool] | None] = lambda method: None
        self.calls: list[str] = []

    def _around(self, method: str, effect: Callable[[], Any]) -> Any:
        self.calls.append(method)
        error = self.fault(method)
        self._cuts.point()
        if error is not None and not error[1]:
            raise error[0]
        result = effect()
        self._cuts.point()
        if error is not None:
            raise error[0]
        return result

    def observe(self, job: str) -> Observation:
        return self._around("observe", lambda: MemoryBackend.observe(self, job))

    def start(self, request: StartRequest) -> Observation:
        return self._around("start", lambda: MemoryBackend.start(self, request))

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        return self._around(
            "stop",
            lambda: MemoryBackend.stop(
                self, job, attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds
            ),
        )

    def finish(self, job: str, outcome: Any, reason: str) -> None:
        self._around("finish", lambda: MemoryBackend.finish(self, job, outcome, reason))

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        return self._around(
            "collect_evidence",
            lambda: MemoryBackend.collect_evidence(self, job, attempt, deadline_seconds=deadline_seconds),
        )


@dataclass
class Catalog:
    """Checkpoints that every rank can load from memory."""

    steps: set[int] = field(default_factory=lambda: {5, 10})
    rejected: list[tuple[int, int, str]] = field(default_factory=list)
    asked: list[tuple[int | None, list[tuple[int, str]]]] = field(default_factory=list)

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        self.asked.append((before_step, list(places)))
        fit = [step for step in self.steps if before_step is None or step < before_step]
        return CheckpointChoice(max(fit), "memory") if fit else None

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        self.rejected.append((step, up_to_attempt, reason))
        self.steps = {one for one in self.steps if one < step}


class World:
    """One job (2 nodes x 2 ranks, one spare), the verdict topic with its committed offset, and what was published."""

    def __init__(
        self,
        folder: Path,
        config: PolicyConfig = QUICK,
        *,
        seed: int = 0,
        cuts: Cuts | None = None,
        watched: bool = False,
    ) -> None:
        """`watched`: recovery looks at the job without a verdict too."""
        self.watched = watched
        self.path = folder / "recovery.sqlite"
        self.config = config
        self.clock = ManualClock(1000.0)
        self.cuts = cuts or Cuts()
        self.backend = CuttableBackend(self.clock, Cuts())
        self.backend.add_job(JOB, {"n0": 2, "n1": 2, "spare": 2}, nodes_wanted=2, nproc_per_node=2)
        self.backend.start(StartRequest(JOB, 1, "first"))
        self.backend.set_step(JOB, 12)
        self.backend._cuts = self.cuts
        self.backend.calls.clear()
        self.catalog = Catalog()
        self.seed = seed
        self.topic: list[Verdict] = []
        self.offset = 0
        self.published: list[Any] = []
        self._orders = 0
        self.commands: list[Command] = []
        self.commands_offset = 0
        self.begin_life()

    def begin_life(self) -> None:
        self.store = CuttableStore(self.path, self.cuts)
        workers: InlineWorkers[Any] = InlineWorkers()
        dice = random.Random(self.seed * 1000 + self.store.epoch)
        jobs = (JOB,) if self.watched else ()
        self.controller = Controller(
            self.store, self.backend, self.catalog, self.config, dice, workers, jobs=lambda: jobs
        )

    def round(self, seconds: float = 0.3) -> None:
        """Poll, tick, publish, and let time pass: a power cut anywhere in it begins the next life."""
        try:
            while self.offset < len(self.topic):
                self.controller.accept(self.topic[self.offset], self.clock.now())
                self.offset += 1
            while self.commands_offset < len(self.commands):
                self.controller.accept_command(self.commands[self.commands_offset], self.clock.now())
                self.commands_offset += 1
            self.controller.tick(self.clock.now())
            waiting = self.controller.pending_messages()
            self.published += [one.message for one in waiting]
            self.controller.mark_published([one.seq for one in waiting])
        except PowerCut:
            self.store.close()
            self.begin_life()
        self.clock.advance(seconds)

    def run(self, rounds: int = 40, then: Callable[[], bool] | None = None, *, steps: bool = True) -> None:
        """Rounds until nothing is left to do (and `then` holds), at most so many; running jobs make steps."""
        for _ in range(rounds):
            self.round()
            if steps:
                self.make_steps()
            store = self.store
            left = store.new_verdicts(1) or store.new_commands(1) or store.open_rejections() or store.waiting(1)
            read = self.offset == len(self.topic) and self.commands_offset == len(self.commands)
            idle = self.controller.idle() and read and not left
            if idle and (then is None or then()):
                return

    def make_steps(self) -> None:
        """If all ranks run, all make a step; a fresh attempt begins where it resumed."""
        view = MemoryBackend.observe(self.backend, JOB)
        if view.ranks and all(rank.state == "running" for rank in view.ranks):
            resumed = self.backend.starts[-1].resume_step or 0
            self.backend.set_step(JOB, max(view.step, resumed) + 1)

    def send(self, *verdicts: Verdict) -> None:
        self.topic += verdicts

    def order(self, verb: CommandVerb, incident_id: str = "", **fields: Any) -> None:
        """A person's command, on its topic; the next round takes it in."""
        self._orders += 1
        command = Command(
            command_id=fields.pop("command_id", f"c{self._orders}"), job=JOB, at=self.clock.now(), verb=verb,
            incident_id=incident_id, author="ada", **fields,
        )  # fmt: skip
        self.commands.append(command)

    def let_pass(self, seconds: float, step: float = 1.0) -> None:
        """Rounds for so long, whatever there is to do."""
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.round(step)

    def attempts(self) -> list[int]:
        """Attempts that effectively started ranks, in order."""
        return [request.attempt for request in self.backend.starts]

    def states(self) -> dict[str, str]:
        """Where each incident stands, by what was published."""
        return {one.incident_id: one.state for one in self.published if hasattr(one, "sequence")}

    def actions(self) -> dict[str, Any]:
        return {one.action_id: one for one in self.published if hasattr(one, "verb")}

    def receipts(self) -> dict[str, Any]:
        """The newest receipt of each action."""
        return {one.action_id: one for one in self.published if hasattr(one, "outcome")}
