"""One step of an incident: which call it waits for, and what the answer makes of it.

Every answer is one transaction: the transition, the intent, the counters and the messages. What the next call
does is therefore always on disk before it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from .backend import Backend, CheckpointCatalog, StartRequest
from .calls import (
    Call,
    Chosen,
    Done,
    JobOver,
    OlderAlive,
    Overtaken,
    Refused,
    Result,
    Seen,
    Started,
    Stopped,
    choose_checkpoint,
    finish_job,
    look,
    start_attempt,
    stop_attempt,
)
from .decisions import Decisions
from .journal import Journal, action_of_start
from .policy import Plan, backoff_seconds, strengthen
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import AttemptRow, IncidentRow, Place


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
        self.decisions = Decisions(store, journal, config)

    # the call of a state

    def call(self, incident: IncidentRow) -> Call:
        """What an incident in this state waits for, ready to run in another thread: it touches no store."""
        backend, config, job = self._backend, self._config, incident.job
        if incident.state in ("deciding", "probation"):
            return lambda: look(backend, job)
        if incident.state == "finishing":
            outcome, reason = self._store.job(job).outcome, self._store.job(job).reason
            return lambda: finish_job(backend, job, "stopped" if outcome == "stopped" else "failed", reason)
        plan, intent = self._journal.under_way(incident)
        if incident.state == "stopping":
            evidence = plan.collect_evidence and not intent.note
            return lambda: stop_attempt(backend, job, incident.attempt, evidence=evidence, config=config)
        if incident.state == "selecting":
            return self._choice_call(incident, plan)
        assert incident.state == "starting"
        assert intent.next_attempt is not None
        request = StartRequest(job, intent.next_attempt, intent.token, intent.excluded, intent.resume_step)
        return lambda: start_attempt(backend, request, incident.attempt)

    def _choice_call(self, incident: IncidentRow, plan: Plan) -> Call:
        plan = self._strengthened(incident, plan)
        excluded = sorted({*self._store.excluded(incident.job), *plan.excluded_nodes})
        places = [
            (place.rank, place.node)
            for attempt in self._store.attempts(incident.job)
            if attempt.attempt == incident.attempt
            for place in attempt.places
        ]
        backend, catalog = self._backend, self._catalog
        return lambda: choose_checkpoint(
            backend,
            catalog,
            job=incident.job,
            attempt=incident.attempt,
            plan=plan,
            excluded=excluded,
            last_places=places,
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
            "stopping": self._stopped,
            "selecting": self._selected,
            "starting": self._started,
            "probation": self._watched,
            "finishing": self._finished,
        }
        by_state[incident.state](incident, result, now)

    def unanswered(self, incident: IncidentRow, text: str, now: float) -> None:
        """People are told that a backend does not answer; nothing is concluded from it."""
        cause = f"no clear answer from the backend, which proves nothing; asking on: {text}"
        if incident.state in ("stopping", "starting", "finishing"):
            self._journal.receipt(incident, "ambiguous", cause, now)
        self._store.move(incident, "unreachable", cause, now, due_at=incident.due_at)

    def _stopped(self, incident: IncidentRow, result: Result, now: float) -> None:
        plan, intent = self._journal.under_way(incident)
        if isinstance(result, Refused):
            self._journal.hold(incident, "not_gone", f"the old attempt cannot be stopped: {result.text}", now)
            return
        assert isinstance(result, Stopped)
        self._store.save_stacks(incident.job, incident.attempt, result.stacks, now)
        note = intent.note or result.note
        if plan.collect_evidence and not intent.note and not note:
            answered = ", ".join(str(rank) for rank in sorted(result.stacks)) or "none"
            note = f"stacks of ranks: {answered}"
        if not result.gone:
            waited = now - incident.entered_at
            self._store.save_intent(replace(intent, note=note))
            if waited > self._config.stop_seconds_max:
                why = f"ranks of attempt {incident.attempt} may still live {waited:.0f} s after the stop"
                self._journal.hold(incident, "not_gone", why, now)
            return
        self._store.save_intent(replace(intent, phase="stopped", note=note))
        delay = backoff_seconds(plan, self._config, self._random.random())
        if delay > 0.0:
            cause = f"attempt {incident.attempt} is gone; the next start waits {delay:.1f} s"
            self._store.move(incident, "gone_but_early", cause, now, due_at=now + delay)
        else:
            self._store.move(incident, "gone", f"attempt {incident.attempt} is gone", now)

    def _selected(self, incident: IncidentRow, result: Result, now: float) -> None:
        if self._overtaken(incident, result, now):
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
        if plan != self._strengthened(incident, decided):
            return  # a verdict came while the catalog was asked: ask again, with it
        next_attempt = 1 + max([result.observation.attempt, incident.attempt, *(a.attempt for a in attempts)])
        token = f"{self._random.getrandbits(64):016x}"
        step = result.choice.step if result.choice else None
        tier = result.choice.tier if result.choice else ""
        store.exclude(incident.job, plan.excluded_nodes, plan.verdict_id, now)
        chosen = replace(
            intent,
            phase="starting",
            token=token,
            next_attempt=next_attempt,
            resume_step=step,
            resume_tier=tier,
            excluded=store.excluded(incident.job),
        )
        store.save_intent(chosen)
        store.save_attempt(AttemptRow(incident.job, next_attempt, token, now, None, step))
        incident = replace(incident, plan=plan)
        store.append(action_of_start(chosen, incident, plan, now))
        where = f"step {step} from {tier}" if step is not None else "the beginning"
        store.move(incident, "selected", f"attempt {next_attempt} resumes from {where}", now)

    def _started(self, incident: IncidentRow, result: Result, now: float) -> None:
        if self._overtaken(incident, result, now):
            return
        store, (_, intent) = self._store, self._journal.under_way(incident)
        assert intent.next_attempt is not None
        if isinstance(result, Refused):
            self._journal.hold(incident, "start_rejected", f"the start was refused: {result.text}", now)
            return
        assert isinstance(result, Started)
        places = tuple(Place(rank.rank, rank.node) for rank in result.observation.ranks)
        row = next(one for one in store.attempts(incident.job) if one.attempt == intent.next_attempt)
        store.save_attempt(replace(row, started_at=now, places=places))
        store.save_intent(replace(intent, phase="started"))
        text = f"attempt {intent.next_attempt} was started" + (f"; {intent.note}" if intent.note else "")
        self._journal.receipt(incident, "done", text, now, intent.next_attempt)
        store.move(incident, "started", text, now)
        self._journal.attempt_runs(incident.job, intent.next_attempt, now, but=incident.incident_id)

    def _watched(self, incident: IncidentRow, result: Result, now: float) -> None:
        """Probation: steady after enough steps and enough time; a failure is told by a verdict, not by us."""
        _, intent = self._journal.under_way(incident)
        assert intent.next_attempt is not None
        if isinstance(result, Refused):
            self._journal.close(incident, "attempt_over", f"the job is gone: {result.text}", now)
            return
        assert isinstance(result, Seen)
        observation, waited = result.observation, now - incident.entered_at
        if observation.phase == "finished":
            self._journal.job_over(incident.job, "finished", "", now)
            return
        if observation.attempt > intent.next_attempt:
            self._journal.close(incident, "attempt_over", f"attempt {observation.attempt} was started", now)
            return
        job, resumed = self._store.job(incident.job), intent.resume_step or 0
        if observation.step >= resumed + self._config.probation_steps:
            if waited >= self._config.probation_seconds:
                furthest = max(job.furthest_step, observation.step)
                cause = f"step {observation.step}, resumed from {resumed}; furthest so far {furthest}"
                self._journal.close(incident, "steady", cause, now)
        elif waited > self._config.probation_seconds_max and observation.step < 0:
            self._journal.close(incident, "steady", f"runs for {waited:.0f} s; it reports no steps", now)
        elif waited > self._config.probation_seconds_max:
            cause = f"step {observation.step} after {waited:.0f} s, resumed from {resumed}"
            self._journal.close(incident, "stuck", cause, now)

    def _finished(self, incident: IncidentRow, result: Result, now: float) -> None:
        """Refused: the backend knows no such job any more, which is what we wanted."""
        plan, _ = self._journal.under_way(incident)
        assert isinstance(result, Done | Refused)
        note = "" if isinstance(result, Done) else f" ({result.text})"
        self._journal.receipt(incident, "done", f"the job was stopped{note}: {plan.reason}", now)
        self._journal.close(incident, "budget_spent_and_ended" if plan.budget_spent else "ended", plan.reason, now)

    def _overtaken(self, incident: IncidentRow, result: Result, now: float) -> bool:
        """The three answers that say: not now, or no more."""
        if isinstance(result, JobOver):
            self._journal.receipt(incident, "done", "the job had finished by itself; nothing was started", now)
            self._journal.job_over(incident.job, "finished", "", now)
        elif isinstance(result, Overtaken):
            text = f"attempt {result.attempt} was started by somebody else; nothing was done"
            self._journal.receipt(incident, "failed", text, now)
            self._journal.close(incident, "attempt_over", text, now)
        elif isinstance(result, OlderAlive):
            self._store.move(incident, "older_alive", "ranks of the old attempt live after all", now)
        else:
            return False
        return True
