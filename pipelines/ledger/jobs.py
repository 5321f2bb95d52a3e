"""The current state of every job, built from its messages; what `jobs()` shows."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ingest.events import (
    LAUNCHER_RANK,
    AttemptEnded,
    AttemptStarted,
    CheckpointEvent,
    DeviceMetrics,
    Message,
    Metrics,
)

from .measures import AttemptBook
from .shapes import CheckpointView, JobMeasures, JobView

STEP_METRIC = "train.step.duration"
JOBS_MAX = 1_000
CHECKPOINTS_MAX = 64  # complete steps remembered for each job
DURATIONS_MAX = 1_024  # newest step durations of a job, for its median
METRIC_NAMES_MAX = 2_000  # of one job


@dataclass(slots=True)
class JobState:
    """One job: what its newest attempt does, and how far it ever came."""

    job: str
    attempt: int = 0
    state: Literal["running", "failed", "finished", "stopped"] = "running"
    world_size: int = 0
    nodes: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    first_started_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    last_step: int = -1
    highest_step: int = -1
    last_seen_at: float | None = None
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS_MAX))
    checkpoints: dict[int, CheckpointView] = field(default_factory=dict)
    metric_names: set[str] = field(default_factory=set)
    attempts: AttemptBook = field(default_factory=AttemptBook)

    def begin(self, attempt: int) -> None:
        """A newer attempt speaks: everything of the old one is over."""
        self.attempt = attempt
        self.state = "running"
        self.nodes = set()
        self.ended = {}
        self.started_at = None
        self.ended_at = None
        self.outcome = ""
        self.last_step = -1

    def reached(self, attempt: int, step: int) -> None:
        """`step` was trained in `attempt`."""
        self.highest_step = max(self.highest_step, step)
        if attempt == self.attempt:
            self.last_step = max(self.last_step, step)

    def goodput(self, now: float) -> float | None:
        """Highest step reached × median step seconds over the wall time so far; None before a step."""
        if self.first_started_at is None or not self.durations or self.highest_step < 0:
            return None
        end = now if self.ended_at is None else self.ended_at
        wall = end - self.first_started_at
        if wall <= 0.0:
            return None
        return min(1.0, self.highest_step * statistics.median(self.durations) / wall)

    def wall_seconds(self, now: float) -> float | None:
        """Since the first attempt was started, until now or its end."""
        if self.first_started_at is None:
            return None
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.first_started_at)

    def checkpoint(self) -> CheckpointView | None:
        """The newest complete one."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    def view(self, now: float, lost_after_seconds: float, open_incidents: int, measures: JobMeasures) -> JobView:
        """As the API shows it."""
        state: Any = self.state
        silent = self.last_seen_at is not None and now - self.last_seen_at > lost_after_seconds
        if state == "running" and silent:
            state = "lost"
        return JobView(
            job=self.job,
            attempt=self.attempt,
            state=state,
            world_size=self.world_size,
            started_at=self.started_at,
            last_step=self.last_step if self.last_step >= 0 else None,
            last_seen_at=self.last_seen_at,
            goodput=self.goodput(now),
            open_incidents=open_incidents,
            checkpoint=self.checkpoint(),
            outcome=self.outcome,
            measures=measures,
        )


class JobBook:
    """All jobs, least recently heard of first. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobState] = {}

    def __iter__(self) -> Iterator[JobState]:
        return iter(self._jobs.values())

    def get(self, job: str) -> JobState | None:
        return self._jobs.get(job)

    def newest_first(self) -> list[JobState]:
        """Jobs by their last sign of life."""
        return sorted(self._jobs.values(), key=lambda state: state.last_seen_at or 0.0, reverse=True)

    def apply(self, message: Message) -> None:
        """One message of a job, in the order of the bus (topics among each other in any order)."""
        state = self._of(message.job)
        if message.attempt > state.attempt:
            state.begin(message.attempt)
        state.last_seen_at = max(state.last_seen_at or 0.0, message.at)
        match message:
            case Metrics():
                self._metrics(state, message)
            case DeviceMetrics() if len(state.metric_names) < METRIC_NAMES_MAX:
                state.metric_names.update(message.columns)
            case AttemptStarted():
                self._started(state, message)
            case AttemptEnded() if message.attempt == state.attempt:
                self._ended(state, message)
            case CheckpointEvent():
                self._checkpoint(state, message)

    def restore_step(self, job: str, attempt: int, step: int, at: float) -> None:
        """What the parts say about a job, at start."""
        state = self._of(job)
        if attempt > state.attempt:
            state.begin(attempt)
        state.reached(attempt, step)
        state.last_seen_at = max(state.last_seen_at or 0.0, at)

    def restore_first_steps(self, job: str, attempt: int, steps: Iterable[tuple[int, float]]) -> None:
        """The first steps of an attempt and when they ended, at start."""
        known = self._of(job).attempts.of(attempt)
        for step, at in steps:
            known.ended(step, at)

    def restore_samples(self, job: str, durations: Iterable[float], names: Iterable[str]) -> None:
        """Step durations (oldest first) and metric names of a job, at start."""
        state = self._of(job)
        state.durations.extend(durations)
        state.metric_names.update(names)

    def _of(self, job: str) -> JobState:
        state = self._jobs.get(job)
        if state is None:
            state = self._jobs[job] = JobState(job)
            if len(self._jobs) > JOBS_MAX:
                oldest = min(self._jobs.values(), key=lambda other: (other.job == job, other.last_seen_at or 0.0))
                del self._jobs[oldest.job]
        return state

    def _metrics(self, state: JobState, message: Metrics) -> None:
        if message.steps:
            state.reached(message.attempt, max(message.steps))
            steps = state.attempts.of(message.attempt)
            for step, at in zip(message.steps, message.ended_at, strict=True):
                steps.ended(step, at)
        elif message.step > 0:
            state.reached(message.attempt, message.step - 1)  # the rank is in that step now
        if STEP_METRIC in message.columns:
            state.durations.extend(value for value in message.columns[STEP_METRIC] if value is not None)
        if len(state.metric_names) < METRIC_NAMES_MAX:
            state.metric_names.update(message.columns)

    def _started(self, state: JobState, message: AttemptStarted) -> None:
        first = message.at if state.first_started_at is None else state.first_started_at
        state.first_started_at = min(first, message.at)  # metrics may have told of a later attempt before
        if message.attempt != state.attempt:
            return
        state.nodes.update(place.node for place in message.places)
        state.world_size = message.world_size
        if state.started_at is None:
            state.started_at = message.at
        if message.resume_step is not None:
            state.last_step = max(state.last_step, message.resume_step)

    def _ended(self, state: JobState, message: AttemptEnded) -> None:
        state.ended[message.node] = message.outcome
        outcomes = set(state.ended.values())
        everybody = state.nodes <= set(state.ended)
        if "failed" in outcomes:
            state.state = "failed"
        elif not everybody:
            return
        else:
            state.state = "stopped" if "stopped" in outcomes else "finished"
        state.outcome = state.state
        state.ended_at = message.at

    def _checkpoint(self, state: JobState, event: CheckpointEvent) -> None:
        whole = event.state == "complete" or (event.state == "durable" and event.rank == LAUNCHER_RANK)
        if whole:
            state.checkpoints[event.step] = CheckpointView(step=event.step, tier=event.tier, event_at=event.at)
            while len(state.checkpoints) > CHECKPOINTS_MAX:
                del state.checkpoints[min(state.checkpoints)]
        elif event.state == "rejected":
            state.checkpoints.pop(event.step, None)
