"""How long each part of a recovery took, and what a job has lost to its faults; docs/recovery-measures.md defines it.

An incident's stages are the states that recovery tells of, each with the time spent in it; before them is detection,
after them the first step of the next attempt, and the time until it is where the job was. Nothing here reads a clock:
all times are those of the messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .shapes import IncidentMeasures, JobMeasures

Stage = Literal["detect", "decide", "stop", "check", "wait", "select", "start", "first_step", "catch_up"]
STAGE_OF_STATE: Mapping[str, Stage] = {
    "open": "decide",
    "coalescing": "decide",
    "exited": "decide",
    "deciding": "decide",
    "awaiting_approval": "decide",
    "held": "decide",
    "stopping": "stop",
    "fence_failed": "stop",
    "checking": "check",
    "backing_off": "wait",
    "waiting_capacity": "wait",
    "selecting": "select",
    "starting": "start",
}
ATTEMPTS_KEPT_MAX = 256  # of one job, newest
EARLY_STEPS_MAX = 1_024  # of one attempt: what was lost is trained again at its beginning


@dataclass(slots=True)
class StageTimes:
    """Where recovery's time went, from the transitions of one incident in their order."""

    seconds: dict[Stage, float] = field(default_factory=dict)
    started_at: float | None = None  # when the next attempt was started
    state: str = ""
    since: float = 0.0
    sequence: int = -1

    def move(self, state: str, at: float, sequence: int) -> None:
        """One transition; one that was told before is no news."""
        if sequence <= self.sequence:
            return
        stage = STAGE_OF_STATE.get(self.state)
        if stage is not None:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + max(0.0, at - self.since)
        if state == "probation" and self.state != "probation":
            self.started_at = at
        self.state, self.since, self.sequence = state, at, sequence


@dataclass(slots=True)
class AttemptSteps:
    """How far one attempt came, and when it ended its first steps."""

    highest: int = -1
    first_at: float | None = None  # the earliest end of a step
    ended_at: dict[int, float] = field(default_factory=dict)  # of the first steps, by step

    def ended(self, step: int, at: float) -> None:
        """A rank has ended `step`; of several ranks the first counts, in a collective they end together."""
        self.highest = max(self.highest, step)
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        if step in self.ended_at or len(self.ended_at) < EARLY_STEPS_MAX:
            self.ended_at[step] = min(at, self.ended_at.get(step, at))

    def reached_at(self, step: int) -> float | None:
        """When it first ended `step` or a later one; None where it has not, or nobody remembers."""
        if step > self.highest:
            return None
        exactly = self.ended_at.get(step)
        if exactly is not None:
            return exactly
        return min((at for ended, at in self.ended_at.items() if ended >= step), default=None)


class AttemptBook:
    """The attempts of one job that are remembered, by number."""

    def __init__(self) -> None:
        self._attempts: dict[int, AttemptSteps] = {}

    def of(self, attempt: int) -> AttemptSteps:
        known = self._attempts.get(attempt)
        if known is None:
            known = self._attempts[attempt] = AttemptSteps()
            while len(self._attempts) > ATTEMPTS_KEPT_MAX:
                del self._attempts[min(self._attempts)]
        return known

    def get(self, attempt: int) -> AttemptSteps | None:
        return self._attempts.get(attempt)


def incident_measures(
    times: StageTimes,
    *,
    onset_at: float | None,
    told_at: float | None,
    before: AttemptSteps | None,
    after: AttemptSteps | None,
    resume_step: int | None,
    restarted: bool,
) -> IncidentMeasures:
    """What is known of one incident so far. `told_at`: its first settled verdict; `before`, `after`: the attempts."""
    seconds = dict(times.seconds)
    if onset_at is not None and told_at is not None:
        seconds["detect"] = max(0.0, told_at - onset_at)
    lost = None
    if restarted and before is not None and before.highest >= 0:
        lost = max(0, before.highest - (resume_step or 0))
    first_at = after.first_at if after is not None else None
    caught_at = None
    if first_at is not None and times.started_at is not None:
        seconds["first_step"] = max(0.0, first_at - times.started_at)
    if first_at is not None and after is not None and before is not None and lost is not None:
        caught_at = after.reached_at(before.highest)
        if caught_at is not None:
            seconds["catch_up"] = max(0.0, caught_at - first_at)
    recover = None if first_at is None or onset_at is None else max(0.0, first_at - onset_at)
    return IncidentMeasures(
        detect_seconds=seconds.get("detect"),
        decide_seconds=seconds.get("decide"),
        stop_seconds=seconds.get("stop"),
        check_seconds=seconds.get("check"),
        wait_seconds=seconds.get("wait"),
        select_seconds=seconds.get("select"),
        start_seconds=seconds.get("start"),
        first_step_seconds=seconds.get("first_step"),
        catch_up_seconds=seconds.get("catch_up"),
        recover_seconds=recover,
        lost_steps=lost,
    )


def stage_seconds(measures: IncidentMeasures) -> Iterable[tuple[Stage, float]]:
    """The stages that an incident has been through, in their order."""
    names: tuple[Stage, ...] = (
        "detect", "decide", "stop", "check", "wait", "select", "start", "first_step", "catch_up",
    )  # fmt: skip
    for name in names:
        seconds: float | None = getattr(measures, f"{name}_seconds")
        if seconds is not None:
            yield name, seconds


def measures_in_words(measures: IncidentMeasures) -> str:
    """One line for a person; empty where nothing is known beyond the time to the verdict."""
    stages = [f"{stage.replace('_', ' ')} {seconds:.1f}" for stage, seconds in stage_seconds(measures)]
    if len(stages) < 2:
        return ""
    back = "" if measures.recover_seconds is None else f"training again after {measures.recover_seconds:.1f} s"
    lost = "" if measures.lost_steps is None else f"{measures.lost_steps} steps lost"
    return "; ".join(part for part in (back, f"{', '.join(stages)} s", lost) if part)


def job_measures(incidents: Iterable[tuple[IncidentMeasures, bool]], wall_seconds: float | None) -> JobMeasures:
    """Of one job, from its failures: (measures, whether it was restarted for it). `wall_seconds`: since it began.

    MTTF is the time in which nothing was being repaired ÷ failures, MTTR the mean from onset to the first new step.
    """
    failures = list(incidents)
    repairs = [one.recover_seconds for one, _ in failures if one.recover_seconds is not None]
    mttf = None
    if failures and wall_seconds is not None:
        mttf = max(0.0, wall_seconds - sum(repairs)) / len(failures)
    return JobMeasures(
        failures=len(failures),
        restarts=sum(restarted for _, restarted in failures),
        mttf_seconds=mttf,
        mttr_seconds=statistics.fmean(repairs) if repairs else None,
        lost_steps=sum(one.lost_steps or 0 for one, _ in failures),
    )
