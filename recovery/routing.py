"""Which incident a new verdict belongs to: the first look at everything that detection says.

One incident per cause and at most one in hand per job: what comes about an attempt that is already being
dealt with joins that incident, what comes about an attempt that is over can no longer restart anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from detectors.verdict import Verdict

from .action import Action
from .incident import ACTING, IN_HAND, TERMINAL, State, allows
from .nodes import quarantine
from .policy import stale_effects
from .policy_config import PolicyConfig, effective_verb
from .store import Entry, RecoveryStore
from .store_schema import IncidentRow, Rejection

EXITED: tuple[State, ...] = ("exited",)
BATCH_MAX = 200  # inbox entries in one transaction


@dataclass(frozen=True, slots=True)
class Router:
    """Files inbox entries; every method runs inside a transaction of the caller."""

    store: RecoveryStore
    config: PolicyConfig

    def file(self, entry: Entry, now: float) -> None:
        """Give a verdict to its incident, or open one, or say why neither."""
        verdict = entry.verdict
        known = self.store.incident_of_verdict(verdict.verdict_id)
        incident = self.store.incident(known) if known is not None else None
        if incident is not None and incident.state not in TERMINAL:
            self._join(entry, incident, now, "revision of")
            return
        if incident is not None:
            self._file_late(entry, incident, now)
            return
        obstacle = self._obstacle(verdict)
        if obstacle:
            self._ignore(entry, obstacle, now)
            return
        host = self._in_hand(verdict)
        if host is not None:
            self._join(entry, host, now, "merged into")
            return
        self._open(entry, now)

    def _open(self, entry: Entry, now: float) -> None:
        verdict = entry.verdict
        incident = self.store.open_incident(verdict.verdict_id, verdict.job, verdict.attempt, now)
        self.store.file_verdict(entry, "opened", incident.incident_id)
        waits_for = self.acting_on(verdict.job) if self._acts(verdict) else None
        if self._acts(verdict):
            self._explain(verdict, now)
        if waits_for is not None:
            cause = f"{verdict.fault_class}; waits until {waits_for.incident_id} is done"
            self.store.move(incident, "unsettled", cause, now)
        elif verdict.settled:
            self.store.move(incident, "settled", f"{verdict.fault_class}: {verdict.summary}", now)
        else:
            cause = f"{verdict.fault_class}, not settled: {verdict.summary}"
            self.store.move(incident, "unsettled", cause, now, due_at=now + self.config.coalesce_seconds_max)

    def _explain(self, verdict: Verdict, now: float) -> None:
        """Detection knows more of this end than its exits tell: recovery's own incident about it is over."""
        for other in self.store.unfinished(verdict.job, EXITED):
            if other.attempt == verdict.attempt:
                self.store.move(other, "explained", f"{verdict.fault_class}: {verdict.summary}", now)

    def _join(self, entry: Entry, incident: IncidentRow, now: float, how: str) -> None:
        """Add the verdict to an incident that is not over; wake it if that changes what to do."""
        verdict, waits = entry.verdict, incident.state in ("awaiting_approval", "notified")
        before = self.store.verdicts_of(incident.incident_id) if waits else []
        self.store.file_verdict(entry, f"{how} {incident.incident_id}", incident.incident_id)
        closes = verdict.status == "closed" and allows(incident.state, "closed")
        # A storm of verdicts about one attempt must not cost the square of their number: most need only be filed.
        verdicts = self.store.verdicts_of(incident.incident_id) if waits or closes else []
        if closes and all(one.status == "closed" for one in verdicts):
            self.store.move(incident, "closed", "detection says it is over", now)
            return
        if incident.state == "coalescing":
            if verdict.settled:
                self.store.save_incident(replace(incident, due_at=now))
            return
        if incident.state in ("starting", "probation") and verdict.status == "open":
            self.apply_stale(verdict, now)  # too late for this start, in time for the next
            return
        changed = {self._meaning(one) for one in verdicts} != {self._meaning(one) for one in before}
        if changed and incident.state == "awaiting_approval":
            self.store.move(incident, "revised", f"new evidence: {verdict.summary}", now)
        elif changed and incident.state == "notified" and self._acts(verdict) and not self.must_wait(incident):
            self.store.move(incident, "revised", f"now {verdict.fault_class}: {verdict.summary}", now)

    def _file_late(self, entry: Entry, incident: IncidentRow, now: float) -> None:
        """A revision of an incident that is over may still name a node or a bad checkpoint, no more."""
        outcome = f"late: {incident.incident_id} is {incident.state}"
        self.store.file_verdict(entry, outcome, incident.incident_id)
        if entry.verdict.status == "open" and not self.store.job(entry.verdict.job).outcome:
            self.apply_stale(entry.verdict, now)

    def _ignore(self, entry: Entry, why: str, now: float) -> None:
        verdict = entry.verdict
        incident = self.store.open_incident(verdict.verdict_id, verdict.job, verdict.attempt, now)
        self.store.file_verdict(entry, f"ignored: {why}", incident.incident_id)
        effects = self.apply_stale(verdict, now) if why.startswith("stale") else ""
        self.store.append(ignored(verdict, why + effects, now))
        self.store.move(incident, "dropped", why + effects, now)

    def apply_stale(self, verdict: Verdict, now: float) -> str:
        """Keep what an outdated verdict is still good for; in words, empty where that is nothing."""
        nodes, step = stale_effects(verdict, self.config)
        why = f"{verdict.fault_class} of attempt {verdict.attempt}"
        quarantine(self.store, self.config, verdict.job, nodes, verdict.verdict_id, why, now)
        if step is not None:
            why = f"{verdict.fault_class}, verdict {verdict.verdict_id}"
            self.store.reject(Rejection(verdict.job, step, verdict.attempt, why, verdict.verdict_id))
        told = [f"node {node} excluded from the next start" for node in nodes]
        told += [f"checkpoints from step {step} rejected"] if step is not None else []
        return "".join(f"; {one}" for one in told)

    def _obstacle(self, verdict: Verdict) -> str:
        """Why this verdict opens no incident; empty where it does."""
        job = self.store.job(verdict.job)
        if job.outcome:
            return f"terminal: the job is over ({job.outcome})"
        if verdict.status == "closed":
            return "closed before it was acted on"
        started = [one.attempt for one in self.store.attempts(verdict.job) if one.started_at is not None]
        if started and verdict.attempt < started[-1]:
            return f"stale attempt: the verdict is about attempt {verdict.attempt}, the job is at {started[-1]}"
        return ""

    def _in_hand(self, verdict: Verdict) -> IncidentRow | None:
        """The incident that deals with this attempt already; what is only told to people stays by itself."""
        if not self._acts(verdict):
            return None
        for incident in self.store.unfinished(verdict.job, IN_HAND):
            same = incident.attempt == verdict.attempt
            if same and any(self._acts(one) for one in self.store.told_in(incident.incident_id)):
                return incident
        return None

    def acting_on(self, job: str) -> IncidentRow | None:
        return next(iter(self.store.unfinished(job, ACTING)), None)

    def must_wait(self, incident: IncidentRow) -> bool:
        """Is another incident doing something to the job, and would this one do something too?"""
        acts = any(self._acts(verdict) for verdict in self.store.told_in(incident.incident_id))
        return acts and self.acting_on(incident.job) is not None

    def _acts(self, verdict: Verdict) -> bool:
        return effective_verb(verdict, self.config) != "notify"

    def _meaning(self, verdict: Verdict) -> tuple[object, ...]:
        return (
            verdict.verdict_id,
            verdict.fault_class,
            verdict.advice,
            verdict.culprits,
            verdict.first_bad_step,
        )


def ignored(verdict: Verdict, why: str, now: float) -> Action:
    """The audit row of a verdict about which nothing is done."""
    return Action(
        action_id=f"{verdict.job}/{verdict.attempt}/ignore/{verdict.verdict_id}",
        job=verdict.job,
        attempt=verdict.attempt,
        at=now,
        verb="ignore",
        mode="auto",
        verdict_id=verdict.verdict_id,
        verdict_revision=verdict.revision,
        fault_class=verdict.fault_class,
        rule=why,
    )
