"""One step of an incident: which call it waits for, and what the answer makes of it.

Every answer is one transaction: the transition, the intent, the counters and the messages. What the next call
does is therefore always on disk before it is made. What comes of a start stands in `launching.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from .backend import Backend, CheckpointCatalog, PersistingCatalog, StartRequest
from .calls import (
    Call,
    Checked,
    Chosen,
    Done,
    Refused,
    Result,
    Stopped,
    choose_checkpoint,
    finish_job,
    look,
    look_for_nodes,
    start_attempt,
    stop_attempt,
)
from .decisions import Decisions
from .exits import Exits
from .journal import Journal, action_of_start
from .launching import Launching
from .nodes import keep_away
from .plan import Plan
from .policy import backoff_seconds, strengthen
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import AttemptRow, IncidentRow, IntentRow
from .trying_out import TryingOut


class Steps:
    """Calls and answers of every driven state; `answer` runs inside a transaction of the caller."""

    def __init__(
        self,
        store: RecoveryStore,
        backend: Backend,
        catalog: CheckpointCatalog,
        config: PolicyConfig,
        random: Random,
        journal: Journal,
    ) -> None:
        self._store = store
        self._backend = backend
        self._catalog = catalog
        self._config = config
        self._random = random
        self._journal = journal
        self._launching = Launching(store, journal, config)
        self._trying_out = TryingOut(store, backend, config)
        self.decisions = Decisions(store, journal, config)
        self.exits = Exits(store, journal, config)

    # the call of a state

    def call(self, incident: IncidentRow) -> Call:
        """What an incident in this state waits for, ready to run in another thread: it touches no store."""
        backend, job = self._backend, incident.job
        if incident.state in ("deciding", "exited", "probation"):
            return lambda: look(backend, job)
        if incident.state == "finishing":
            outcome, reason = self._store.job(job).outcome, self._store.job(job).reason
            return lambda: finish_job(backend, job, "stopped" if outcome == "stopped" else "failed", reason)
        if incident.state == "waiting_capacity":
            return lambda: look_for_nodes(backend, job, incident.attempt)
        plan, intent = self._journal.under_way(incident)
        if incident.state in ("stopping", "fence_failed"):
            return self._stop_call(incident, plan, intent)
        if incident.state == "checking":
            return self._trying_out.call(incident, intent)
        if incident.state == "selecting":
            return self._choice_call(incident, plan, intent)
        assert incident.state == "starting"
        assert intent.next_attempt is not None
        request = StartRequest(
            job, intent.next_attempt, intent.token, intent.excluded, intent.resume_step, intent.nodes, intent.released
        )
        return lambda: start_attempt(backend, request, incident.attempt)

    def _stop_call(self, incident: IncidentRow, plan: Plan, intent: IntentRow) -> Call:
        backend, config, first = self._backend, self._config, not intent.note
        persists = first and plan.budget == "planned" and isinstance(self._catalog, PersistingCatalog)
        catalog = self._catalog if persists and isinstance(self._catalog, PersistingCatalog) else None
        return lambda: stop_attempt(
            backend,
            incident.job,
            incident.attempt,
            evidence=plan.collect_evidence and first,
            config=config,
            persist=catalog,
        )

    def _choice_call(self, incident: IncidentRow, plan: Plan, intent: IntentRow) -> Call:
        decided, plan = plan, self._strengthened(incident, plan)
        places = [
            (place.rank, place.node)
            for attempt in self._store.attempts(incident.job)
            if attempt.attempt == incident.attempt
            for place in attempt.places
        ]
        backend, catalog = self._backend, self._catalog
        excluded = sorted(_without(intent, decided, plan))
        return lambda: choose_checkpoint(
            backend,
            catalog,
            job=incident.job,
            attempt=incident.attempt,
            plan=plan,
            excluded=excluded,
            last_places=places,
            nodes=intent.nodes,
        )

    def _strengthened(self, incident: IncidentRow, plan: Plan) -> Plan:
        """The plan with what verdicts that came since the decision add to it."""
        verdicts = [one for one in self._store.verdicts_of(incident.incident_id) if one.status == "open"]
        return strengthen(plan, verdicts, self._config)

    # the answer

    def answer(self, incident: IncidentRow, result: Result, now: float) -> None:
        """Apply what a call returned; Unanswered never comes here, it changes nothing."""
        by_state: dict[str, Callable[[IncidentRow, Result, float], None]] = {
            "deciding": self.decisions.decided,
            "exited": self.exits.looked,
            "stopping": self._stopped,
            "fence_failed": self._stopped,
            "checking": self._checked,
            "selecting": self._selected,
            "waiting_capacity": self._launching.waited,
            "starting": self._launching.started,
            "probation": self._launching.watched,
            "finishing": self._finished,
        }
        by_state[incident.state](incident, result, now)

    def unanswered(self, incident: IncidentRow, text: str, now: float) -> None:
        """People are told that a backend does not answer; nothing is concluded from it."""
        cause = f"no clear answer from the backend, which proves nothing; asking on: {text}"
        if incident.state in ("stopping", "fence_failed", "starting", "finishing"):
            self._journal.receipt(incident, "ambiguous", cause, now)
        if incident.state != "exited":
            self._store.move(incident, "unreachable", cause, now, due_at=incident.due_at)

    def _stopped(self, incident: IncidentRow, result: Result, now: float) -> None:
        plan, intent = self._journal.under_way(incident)
        if isinstance(result, Refused):
            self._not_gone(incident, f"the old attempt cannot be stopped: {result.text}", now, patience=0.0)
            return
        assert isinstance(result, Stopped)
        self._store.save_stacks(incident.job, incident.attempt, result.stacks, now)
        note = intent.note or result.note
        if plan.collect_evidence and not intent.note and not note:
            answered = ", ".join(str(rank) for rank in sorted(result.stacks)) or "none"
            note = f"stacks of ranks: {answered}"
        if not result.gone:
            self._store.save_intent(replace(intent, note=note))
            waited = now - incident.entered_at
            why = f"ranks of attempt {incident.attempt} may still live {waited:.0f} s after the stop"
            self._not_gone(incident, why, now, patience=self._config.stop_seconds_max)
            return
        # What is away when the old attempt is gone is away for the next one, and named so in the choice and the start.
        excluded = self._store.excluded(incident.job, now)
        self._store.save_intent(replace(intent, phase="stopped", note=note, excluded=excluded))
        if self._trying_out.is_wanted(plan):
            cause = f"attempt {incident.attempt} is gone; its nodes are tried out"
            self._store.move(incident, "gone_to_check", cause, now, due_at=now + self._config.preflight_seconds_max)
            return
        delay = backoff_seconds(plan, self._config, self._random.random())
        if delay > 0.0 and incident.state == "stopping":
            cause = f"attempt {incident.attempt} is gone; the next start waits {delay:.1f} s"
            self._store.move(incident, "gone_but_early", cause, now, due_at=now + delay)
        else:
            self._store.move(incident, "gone", f"attempt {incident.attempt} is gone", now)

    def _checked(self, incident: IncidentRow, result: Result, now: float) -> None:
        if self._journal.overtaken(incident, result, now):
            return
        plan, intent = self._journal.under_way(incident)
        why_none = result.text if isinstance(result, Refused) else ""
        assert why_none or isinstance(result, Checked)
        found = result if isinstance(result, Checked) else Checked(why_none=why_none)
        after = self._trying_out.tried(incident, plan, intent, found, now)
        assert after.plan is not None
        told = f"no checks: {found.why_none}" if found.why_none else after.plan.rule.removeprefix(f"{plan.rule}; ")
        delay = backoff_seconds(plan, self._config, self._random.random())
        if delay > 0.0:
            cause = f"{told}; the next start waits {delay:.1f} s"
            self._store.move(after, "checked_early", cause, now, due_at=now + delay)
        else:
            self._store.move(after, "checked", told, now)

    def unchecked(self, incident: IncidentRow, now: float) -> IncidentRow:
        """The checks have not been answered in time: the job goes on without them, and that is written down."""
        _, intent = self._journal.under_way(incident)
        told = f"no checks: they were not done in {self._config.preflight_seconds_max:.0f} s"
        note = f"{intent.note}; {told}" if intent.note else told
        self._store.save_intent(replace(intent, note=note))
        return self._store.move(incident, "checked", told, now)

    def _not_gone(self, incident: IncidentRow, why: str, now: float, *, patience: float) -> None:
        """First people are told and the stop is asked for on and on; then it is their turn."""
        waited = now - incident.entered_at
        if incident.state == "fence_failed":
            if patience == 0.0 or waited > self._config.fence_seconds_max:
                self._journal.hold(incident, "not_gone", f"{why}; nothing is started beside them", now)
        elif patience == 0.0 or waited > patience:
            self._journal.receipt(incident, "failed", f"{why}; asking on", now)
            self._store.move(incident, "not_gone", why, now)

    def _selected(self, incident: IncidentRow, result: Result, now: float) -> None:
        if self._journal.overtaken(incident, result, now):
            return
        store, (decided, intent) = self._store, self._journal.under_way(incident)
        if isinstance(result, Refused):
            self._journal.hold(incident, "no_checkpoint", f"the job cannot be restarted: {result.text}", now)
            return
        assert isinstance(result, Chosen)
        if result.choice is None and self._config.without_checkpoint == "hold":
            why = "no checkpoint can be loaded by all ranks, and starting from scratch is not allowed"
            self._journal.hold(incident, "no_checkpoint", why, now)
            return
        plan, attempts = result.plan, store.attempts(incident.job)
        keep_away(store, self._config, incident.job, plan, now)
        excluded = store.excluded(incident.job, now)
        asked_without = _without(intent, decided, plan)
        if plan != self._strengthened(incident, decided) or set(excluded) != asked_without:
            # A verdict came, or a quarantine ended, while the catalog was asked: ask again, with it.
            store.save_intent(replace(intent, excluded=excluded))
            return
        next_attempt = 1 + max([result.observation.attempt, incident.attempt, *(a.attempt for a in attempts)])
        token = f"{self._random.getrandbits(64):016x}"
        step = result.choice.step if result.choice else None
        tier = result.choice.tier if result.choice else ""
        chosen = replace(
            intent,
            phase="starting",
            token=token,
            next_attempt=next_attempt,
            resume_step=step,
            resume_tier=tier,
            excluded=excluded,
            released=store.released(incident.job, now),
        )
        store.save_intent(chosen)
        store.save_attempt(
            AttemptRow(
                incident.job, next_attempt, token, now, None, step,
                budget=plan.budget, cause=plan.cause, nodes=intent.nodes or 0,
            )
        )  # fmt: skip
        incident = replace(incident, plan=plan)
        store.append(action_of_start(chosen, incident, plan, now))
        where = f"step {step} from {tier}" if step is not None else "the beginning"
        fewer = f" on {intent.nodes} nodes" if intent.nodes else ""
        store.move(incident, "selected", f"attempt {next_attempt} resumes from {where}{fewer}", now)

    def _finished(self, incident: IncidentRow, result: Result, now: float) -> None:
        """Refused: the backend knows no such job any more, which is what we wanted."""
        plan, _ = self._journal.under_way(incident)
        assert isinstance(result, Done | Refused)
        note = "" if isinstance(result, Done) else f" ({result.text})"
        self._journal.receipt(incident, "done", f"the job was stopped{note}: {plan.reason}", now)
        self._journal.close(incident, "budget_spent_and_ended" if plan.budget_spent else "ended", plan.reason, now)


def _without(intent: IntentRow, decided: Plan, plan: Plan) -> set[str]:
    """The nodes that a choice does without: those in force, and those that evidence has added since the decision."""
    return {*intent.excluded, *plan.avoided_nodes} - (set(decided.avoided_nodes) - set(intent.excluded))
