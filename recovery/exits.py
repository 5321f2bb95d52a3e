"""Ends that no verdict explains: error files, scheduler and exit codes are read, and the verdict is recovery's own."""

from __future__ import annotations

from dataclasses import dataclass

from .backend import Observation
from .calls import Refused, Result, Seen
from .classify import synthesized
from .journal import Journal
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import IncidentRow

ENDED = ("failed", "stopped")


@dataclass(frozen=True, slots=True)
class Exits:
    """Every method runs inside a transaction of the caller."""

    store: RecoveryStore
    journal: Journal
    config: PolicyConfig

    def unexplained(self, observation: Observation) -> bool:
        """Is this attempt down, and nobody deals with it or has told people of it?"""
        job, attempt = observation.job, observation.attempt
        down = attempt > 0 and observation.phase in ENDED and not observation.ended and not observation.held
        known = self.store.job(job).outcome or self.store.incident(_exit_id(job, attempt)) is not None
        return down and not known and not self._in_hand(job, attempt)

    def open(self, observation: Observation, waited: float, now: float) -> None:
        """No verdict came in the grace: an incident of our own, which looks once more before it judges."""
        job, attempt = observation.job, observation.attempt
        incident = self.store.open_incident(_exit_id(job, attempt), job, attempt, now)
        cause = f"attempt {attempt} is {observation.phase}, and no verdict said why in {waited:.0f} s"
        self.store.move(incident, "exited", cause, now)

    def looked(self, incident: IncidentRow, result: Result, now: float) -> None:
        """What the backend says now decides, by our own verdict."""
        if isinstance(result, Refused):
            self.store.move(incident, "runs_again", f"the job is gone: {result.text}", now)
            return
        assert isinstance(result, Seen)
        observation = result.observation
        if observation.phase == "finished" or observation.ended:
            self.journal.job_over(incident.job, observation.phase, "", now)
        elif observation.attempt != incident.attempt or observation.phase not in ENDED:
            self.store.move(incident, "runs_again", f"attempt {observation.attempt} is {observation.phase}", now)
        else:
            verdict = synthesized(observation, self.config.exits, incident.incident_id, now)
            self.store.insert_filed(verdict, incident.incident_id, "made by recovery", now)
            self.store.append(verdict)
            self.store.move(incident, "unexplained", f"no verdict came; {verdict.fault_class}: {verdict.summary}", now)

    def _in_hand(self, job: str, attempt: int) -> bool:
        """Somebody deals with this attempt; what is only told to people, or watched, does not."""
        for other in self.store.unfinished(job):
            only_told = other.state == "notified" and other.plan is not None and other.plan.verb == "notify"
            if other.state in ("probation", "blind") or (only_told and other.attempt <= attempt):
                continue
            return True
        return False


def _exit_id(job: str, attempt: int) -> str:
    return f"{job}/{attempt}/recovery/exit"
