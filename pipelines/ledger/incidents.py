"""Incidents as they are now: verdicts, recovery's transitions, actions, receipts and commands, merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from detectors.verdict import Verdict
from recovery.action import Action, Command, Incident, Receipt
from recovery.incident import TERMINAL

from .measures import StageTimes, incident_measures
from .shapes import ActionView, IncidentMeasures, IncidentPage, IncidentView

INCIDENTS_MAX = 10_000  # open and recent ones; older ones are in the tables
WAITING_RECEIPTS_MAX = 1_000  # receipts whose action has not come yet


@dataclass(slots=True)
class IncidentState:
    """One incident. Topics reach the ledger in any order, so each part may be the first."""

    incident_id: str
    job: str
    attempt: int
    opened_at: float
    updated_at: float
    seq: int = 0
    verdict: Verdict | None = None
    transition: Incident | None = None
    action: Action | None = None
    receipt: Receipt | None = None
    acknowledged_by: str = ""
    acknowledged_at: float | None = None
    feedback: str = ""
    muted_until: float | None = None
    told_at: float | None = None  # of the first settled verdict
    times: StageTimes = field(default_factory=StageTimes)

    @property
    def is_open(self) -> bool:
        """Until its verdict is closed, or recovery is done with it: a job that was stopped never closes its verdict."""
        if self.recovery_state() in TERMINAL:
            return self._came_back()
        return self.verdict is None or self.verdict.status == "open"

    def _came_back(self) -> bool:
        """Recovery is done with it because it was over, and detection says under the same id that it is not."""
        verdict, transition = self.verdict, self.transition
        assert transition is not None
        told_later = verdict is not None and verdict.status == "open" and verdict.at > transition.at
        return (
            told_later and transition.state == "resolved" and self.action is not None and self.action.verb == "notify"
        )

    def fault_class(self) -> str:
        if self.verdict is not None:
            return self.verdict.fault_class
        return self.action.fault_class if self.action is not None else "unknown"

    def severity(self) -> str:
        return self.verdict.severity if self.verdict is not None else "warning"

    def status(self) -> str:
        return "open" if self.is_open else "closed"

    def recovery_state(self) -> str:
        return self.transition.state if self.transition is not None else ""

    def stopped_the_job(self) -> bool:
        """Whether the job was stopped for it, to be restarted or to end."""
        verbs = ("restart", "exclude_and_restart", "stop")
        return self.action is not None and self.action.verb in verbs and self.action.mode == "auto"

    def view(self, measures: IncidentMeasures) -> IncidentView:
        """As the API shows it."""
        verdict = self.verdict
        outcome = self.receipt
        return IncidentView(
            seq=self.seq,
            incident_id=self.incident_id,
            job=self.job,
            attempt=self.attempt,
            fault_class=self.fault_class(),
            severity=self.severity(),
            status=self.status(),
            state=self.recovery_state(),
            culprits=verdict.culprits if verdict else (),
            victims=verdict.victims if verdict else 0,
            onset_at=verdict.onset_at if verdict else None,
            onset_step=verdict.onset_step if verdict else None,
            first_bad_step=verdict.first_bad_step if verdict else None,
            opened_at=self.opened_at,
            updated_at=self.updated_at,
            closed_at=verdict.at if verdict and verdict.status == "closed" else None,
            summary=verdict.summary if verdict else "the verdict itself has not arrived yet",
            advice=verdict.advice if verdict else "none",
            settled=verdict.settled if verdict else False,
            action=_action_view(self.action),
            outcome=outcome.outcome if outcome else "",
            outcome_text=outcome.text if outcome else "",
            acknowledged_by=self.acknowledged_by,
            acknowledged_at=self.acknowledged_at,
            feedback=self.feedback,
            muted_until=self.muted_until,
            measures=measures,
        )


def _action_view(action: Action | None) -> ActionView | None:
    if action is None:
        return None
    return ActionView(
        action_id=action.action_id,
        verb=action.verb,
        mode=action.mode,
        rule=action.rule,
        excluded_nodes=action.excluded_nodes,
        next_attempt=action.next_attempt,
        resume_step=action.resume_step,
        resume_tier=action.resume_tier,
        plan_hash=action.plan_hash,
    )


def measured_alone(state: IncidentState) -> IncidentMeasures:
    """What an incident took as far as its own messages tell, without its job's steps."""
    onset_at = state.verdict.onset_at if state.verdict is not None else None
    return incident_measures(
        state.times,
        onset_at=onset_at,
        told_at=state.told_at,
        before=None,
        after=None,
        resume_step=None,
        restarted=False,
    )


class IncidentBook:
    """Open and recent incidents, least recently changed first; `measure` says what each took. Its owner locks."""

    def __init__(
        self,
        incidents_max: int = INCIDENTS_MAX,
        measure: Callable[[IncidentState], IncidentMeasures] | None = None,
    ) -> None:
        self._measure = measure or measured_alone
        self._incidents: dict[str, IncidentState] = {}
        self._incident_of_action: dict[str, str] = {}
        self._waiting: dict[str, tuple[int, Receipt]] = {}
        self._incidents_max = incidents_max
        self.newest_change = 0

    def __iter__(self) -> Iterator[IncidentState]:
        return iter(self._incidents.values())

    def get(self, incident_id: str) -> IncidentState | None:
        return self._incidents.get(incident_id)

    def open_by_job(self) -> dict[str, int]:
        """How many incidents are open, by job."""
        counts: dict[str, int] = {}
        for state in self._incidents.values():
            if state.is_open:
                counts[state.job] = counts.get(state.job, 0) + 1
        return counts

    def apply(self, change: int, message: Any) -> None:
        """One message, with the number of its change; other messages than those of incidents are ignored."""
        self.newest_change = max(self.newest_change, change)
        if isinstance(message, Command | Action) and not _incident_of(message):
            return  # about a job as a whole: its rows are in the tables
        match message:
            case Verdict():
                self._verdict(change, message)
            case Incident():
                state = self._touch(change, message.incident_id, message)
                if state.transition is None or message.sequence >= state.transition.sequence:
                    state.transition = message
                state.times.move(message.state, message.at, message.sequence)
            case Action():
                self._action(change, message)
            case Receipt():
                self._receipt(change, message)
            case Command():
                self._command(change, message)

    def page(
        self,
        *,
        job: str | None,
        state: str | None,
        fault_class: str | None,
        severity: str | None,
        after: int | None,
        limit: int,
    ) -> IncidentPage:
        """Without `after` the newest `limit`; with it the next `limit` that changed since."""
        newest_first = reversed(self._incidents.values())
        wanted: list[IncidentState] = []
        for incident in newest_first:
            if after is not None and incident.seq <= after:
                break
            if (
                (job is None or incident.job == job)
                and (state is None or state in (incident.recovery_state(), incident.status()))
                and (fault_class is None or incident.fault_class() == fault_class)
                and (severity is None or incident.severity() == severity)
            ):
                wanted.append(incident)
                if after is None and len(wanted) == limit:
                    break
        if after is not None and len(wanted) > limit:
            wanted = wanted[-limit:]  # the oldest changes first, or a reader would miss the rest
            following = wanted[0].seq
        else:
            following = max(self.newest_change, after or 0)
        views = tuple(incident.view(self._measure(incident)) for incident in wanted)
        return IncidentPage(incidents=views, next=following)

    def _touch(self, change: int, incident_id: str, message: Any) -> IncidentState:
        state = self._incidents.pop(incident_id, None)
        if state is None:
            state = IncidentState(
                incident_id,
                message.job,
                getattr(message, "attempt", 0),
                opened_at=message.at,
                updated_at=message.at,
            )
        self._incidents[incident_id] = state  # newest last
        state.seq = change
        state.updated_at = max(state.updated_at, message.at)
        if len(self._incidents) > self._incidents_max:
            self._evict(incident_id)
        return state

    def _evict(self, but: str) -> None:
        for incident_id, state in self._incidents.items():
            if not state.is_open and incident_id != but:
                break
        else:
            incident_id, state = next(iter(self._incidents.items()))
        del self._incidents[incident_id]
        for action_id in [key for key, value in self._incident_of_action.items() if value == incident_id]:
            del self._incident_of_action[action_id]

    def _verdict(self, change: int, verdict: Verdict) -> None:
        state = self._touch(change, verdict.verdict_id, verdict)
        if state.verdict is None:
            state.opened_at = verdict.at
            state.job, state.attempt = verdict.job, verdict.attempt
        if verdict.settled and (state.told_at is None or verdict.at < state.told_at):
            state.told_at = verdict.at
        if state.verdict is None or verdict.revision >= state.verdict.revision:
            state.verdict = verdict

    def _action(self, change: int, action: Action) -> None:
        state = self._touch(change, action.verdict_id, action)
        self._incident_of_action[action.action_id] = action.verdict_id
        if state.action is None or action.at >= state.action.at:
            if state.action is not None and state.action.action_id != action.action_id:
                state.receipt = None
            state.action = action
        waiting = self._waiting.pop(action.action_id, None)
        if waiting is not None:
            self._receipt(change, waiting[1])

    def _receipt(self, change: int, receipt: Receipt) -> None:
        incident_id = self._incident_of_action.get(receipt.action_id)
        if incident_id is None:
            self._waiting[receipt.action_id] = (change, receipt)
            if len(self._waiting) > WAITING_RECEIPTS_MAX:
                del self._waiting[next(iter(self._waiting))]
            return
        state = self._touch(change, incident_id, receipt)
        shown = state.action is not None and state.action.action_id == receipt.action_id
        if shown and (state.receipt is None or receipt.at >= state.receipt.at):
            state.receipt = receipt

    def _command(self, change: int, command: Command) -> None:
        state = self._touch(change, command.incident_id, command)
        match command.verb:
            case "acknowledge":
                state.acknowledged_by, state.acknowledged_at = command.author, command.at
            case "feedback":
                state.feedback = command.feedback
            case "mute":
                state.muted_until = command.until
            case _:
                pass  # recovery answers with a transition or a receipt


def _incident_of(message: Command | Action) -> str:
    return message.incident_id if isinstance(message, Command) else message.verdict_id
