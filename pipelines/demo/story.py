"""What happens to one job, read off the bus: the same messages that any other tool could read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from detectors.verdict import Verdict
from ingest.bus import Consumer
from ingest.clock import Clock
from ingest.codec import Codec, Undecodable
from ingest.events import AttemptStarted, CheckpointEvent, FaultInjected, Metrics, RankExited
from recovery.action import RECOVERY_TYPES, Action, Incident, Receipt

POLL_SECONDS = 0.1
RECORDS_MAX = 2_000
SLOTS = 2  # that the checkpoint engine keeps for each rank


@dataclass(slots=True)
class AttemptStory:
    """One attempt: where its ranks ran, how far it came, and which checkpoints it sealed."""

    started: AttemptStarted
    first_step_at: float | None = None  # when the first step of this attempt ended on every rank
    highest_step: dict[int, int] = field(default_factory=dict)
    step_ended_at: dict[int, float] = field(default_factory=dict)  # step: when the last rank ended it
    sealed: dict[int, list[int]] = field(default_factory=dict)  # rank: steps, oldest first
    exits: list[RankExited] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The newest step that every rank has ended; -1 before the first."""
        if len(self.highest_step) < self.started.world_size:
            return -1
        return min(self.highest_step.values())

    def newest_sealed(self, before_step: int | None = None) -> int | None:
        """The newest step below `before_step` that all ranks have in memory, where each rank keeps two."""
        if len(self.sealed) < self.started.world_size:
            return None
        kept = set.intersection(*(set(steps[-SLOTS:]) for steps in self.sealed.values()))
        return max((step for step in kept if before_step is None or step < before_step), default=None)


class Story:
    """Reads one job's messages and keeps what a spectator needs; `poll` returns what is new."""

    def __init__(self, consumer: Consumer, job: str, clock: Clock) -> None:
        self._consumer = consumer
        self._job = job
        self._clock = clock
        self._codec = Codec(RECOVERY_TYPES)
        self.attempts: dict[int, AttemptStory] = {}
        self.verdicts: dict[str, list[Verdict]] = {}  # revisions by id, in order
        self.seen_at: dict[str, float] = {}  # verdict or action id: when we first saw it
        self.actions: dict[str, Action] = {}
        self.receipts: dict[str, list[Receipt]] = {}
        self.incidents: dict[str, Incident] = {}
        self.complete_at: dict[tuple[int, int], float] = {}  # (attempt, step): when all its shards were on disk
        self.rejected_from: list[CheckpointEvent] = []
        self.faults: list[FaultInjected] = []
        self.loaded_tiers: dict[int, dict[int, str]] = {}  # attempt: rank: tier

    @property
    def attempt(self) -> int:
        return max(self.attempts, default=0)

    @property
    def current(self) -> AttemptStory | None:
        return self.attempts.get(self.attempt)

    def complete_on_disk(self, at: float) -> list[int]:
        """Steps whose shards were all on disk then, without those that were rejected: by their step and attempt."""
        return [
            step
            for (attempt, step), complete_at in self.complete_at.items()
            if complete_at <= at
            and not any(attempt <= event.attempt and step >= event.step for event in self.rejected_from)
        ]

    def poll(self) -> list[Any]:
        """Read what has come; returns the messages of this job that are new."""
        fresh: list[Any] = []
        for record in self._consumer.poll(RECORDS_MAX, POLL_SECONDS):
            try:
                message = self._codec.decode(record.headers, record.value)
            except Undecodable:
                continue  # detect and record send it to the dead letters; a spectator looks on
            if message.job == self._job:
                self._note(message)
                fresh.append(message)
        return fresh

    def wait_for(self, done: Callable[[], bool], seconds_max: float, each: Callable[[list[Any]], None]) -> bool:
        """Poll until `done()` or the time is over; `each` sees every batch. True if done."""
        deadline = self._clock.monotonic() + seconds_max
        while not done():
            if self._clock.monotonic() > deadline:
                return False
            each(self.poll())
        return True

    def _note(self, message: Any) -> None:
        if isinstance(message, Metrics):
            self._note_steps(message)
        elif isinstance(message, AttemptStarted):
            self.attempts[message.attempt] = AttemptStory(message)
        elif isinstance(message, FaultInjected):
            self.faults.append(message)
        elif isinstance(message, RankExited) and message.attempt in self.attempts:
            self.attempts[message.attempt].exits.append(message)
        elif isinstance(message, CheckpointEvent):
            self._note_checkpoint(message)
        elif isinstance(message, Verdict):
            self.seen_at.setdefault(message.verdict_id, self._clock.now())
            revisions = self.verdicts.setdefault(message.verdict_id, [])
            if all(known.revision != message.revision for known in revisions):
                revisions.append(message)
        elif isinstance(message, Action):
            self.seen_at.setdefault(message.action_id, self._clock.now())
            self.actions[message.action_id] = message
        elif isinstance(message, Receipt):
            self.receipts.setdefault(message.action_id, []).append(message)
        elif isinstance(message, Incident):
            known = self.incidents.get(message.incident_id)
            if known is None or message.sequence >= known.sequence:
                self.incidents[message.incident_id] = message

    def _note_steps(self, message: Metrics) -> None:
        attempt = self.attempts.get(message.attempt)
        if attempt is None or not message.steps:
            return
        for step, ended_at in zip(message.steps, message.ended_at, strict=True):
            attempt.step_ended_at[step] = max(ended_at, attempt.step_ended_at.get(step, 0.0))
        newest = max(message.steps)
        attempt.highest_step[message.rank] = max(newest, attempt.highest_step.get(message.rank, -1))
        if attempt.first_step_at is None and attempt.step >= 0:
            attempt.first_step_at = attempt.step_ended_at[min(attempt.step_ended_at)]

    def _note_checkpoint(self, event: CheckpointEvent) -> None:
        if event.state == "sealed" and event.attempt in self.attempts:
            self.attempts[event.attempt].sealed.setdefault(event.rank, []).append(event.step)
        elif event.state == "complete":
            self.complete_at[event.attempt, event.step] = event.at
        elif event.state == "rejected":
            self.rejected_from.append(event)
        elif event.state == "loaded":
            self.loaded_tiers.setdefault(event.attempt, {})[event.rank] = event.tier
