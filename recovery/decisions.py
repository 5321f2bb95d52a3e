"""From an observation to a plan, and from a plan to what is written down before anything is done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .backend import Observation
from .calls import Refused, Result, Seen
from .incident import Event
from .journal import Journal, action_of
from .nodes import adopt, keep_away
from .plan import JobSnapshot, Plan
from .policy import decide
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import IncidentRow, IntentRow


@dataclass(frozen=True, slots=True)
class Decisions:
    """The state `deciding`; all but `plan` run inside a transaction of the caller."""

    store: RecoveryStore
    journal: Journal
    config: PolicyConfig

    def decide_now(self, incident: IncidentRow, now: float) -> bool:
        """Decide without the backend where only people are to be told; False where it must be asked."""
        plan = self.plan(incident, None, now)
        if plan is not None and plan.verb not in ("notify", "ignore"):
            return False
        self._act_on(incident, plan, now)
        return True

    def plan(self, incident: IncidentRow, observation: Observation | None, now: float) -> Plan | None:
        """What the policy says about this incident; None where detection has closed all of it."""
        store, job, config = self.store, self.store.job(incident.job), self.config
        verdicts = [one for one in store.verdicts_of(incident.incident_id) if one.status == "open"]
        if not verdicts:
            return None
        started = [one for one in store.attempts(incident.job) if one.started_at is not None]
        newest = started[-1] if started else None
        attempt = max(observation.attempt if observation else 0, newest.attempt if newest else 0)
        mine = newest if newest is not None and newest.attempt == attempt else None
        snapshot = JobSnapshot(
            job=incident.job,
            attempt=attempt,
            observation=observation,
            outcome=job.outcome,
            restarted=bool(started),
            started_at=mine.started_at if mine else None,
            resume_step=mine.resume_step if mine else None,
            nodes=mine.nodes if mine else 0,
            held=job.held,
        )
        counters = store.counters(incident.job, now, config.restarts_window_seconds, config.strikes_window_seconds)
        return decide(verdicts, snapshot, counters, config, now, incident.approved_hash)

    def decided(self, incident: IncidentRow, result: Result, now: float) -> None:
        if isinstance(result, Refused):
            why = f"unknown job: {result.text}"
            self.journal.ignore(incident, why, now)
            return
        assert isinstance(result, Seen)
        observation = result.observation
        if observation.phase == "finished":
            self.journal.job_over(incident.job, "finished", "", now, but=incident.incident_id)
        adopt(self.store, observation, now)
        self.journal.attempt_runs(incident.job, observation.attempt, now, but=incident.incident_id)
        self._act_on(incident, self.plan(incident, observation, now), now)

    def _act_on(self, incident: IncidentRow, plan: Plan | None, now: float) -> None:
        store = self.store
        if plan is None:
            store.move(incident, "closed", "detection says it is over", now)
        elif plan.verb == "ignore":
            self.journal.ignore(incident, plan.rule, now)
        elif plan.verb == "notify":
            self.journal.tell(replace(incident, plan=plan), plan, "auto", "done", "people are told", now)
            store.move(replace(incident, plan=plan), "notify", plan.rule, now)
        else:
            self.journal.failed_again(incident, plan, now)
            self._act_on_job(replace(incident, plan=plan), plan, now)

    def _act_on_job(self, incident: IncidentRow, plan: Plan, now: float) -> None:
        """A plan that would do something to the job: now, after an approval, or never."""
        store = self.store
        told_before = store.incident(incident.incident_id)
        known = told_before.plan if told_before is not None else None
        again = known is not None and (known.verb, known.plan_hash) == (plan.verb, plan.plan_hash)
        if plan.verb == "hold":
            if not again:
                text = f"nothing is done; approve plan {plan.plan_hash} to do it anyway"
                self.journal.tell(incident, plan, "approve", "awaiting_approval", text, now)
            store.move(incident, "hold", plan.rule, now)
        elif plan.mode == "observe":
            if not again:
                text = f"nothing is done in mode observe; approve plan {plan.plan_hash} to do it"
                self.journal.tell(incident, plan, "observe", "observed", text, now)
            store.move(incident, "notify", plan.rule, now)
        elif plan.mode == "approve":
            if not again:
                text = f"waits for an approval of plan {plan.plan_hash}"
                self.journal.tell(incident, plan, "approve", "awaiting_approval", text, now)
            due_at = now + self.config.approval_seconds_max
            store.move(incident, "propose", plan.rule, now, due_at=due_at)
        elif plan.verb == "stop":
            self.begin_stop(incident, plan, "failed", now)
        else:
            self._begin_restart(incident, plan, now)

    def _begin_restart(self, incident: IncidentRow, plan: Plan, now: float) -> None:
        store, job = self.store, self.store.job(incident.job)
        action_id = self.journal.new_action_id(incident, plan.verb)
        store.save_intent(IntentRow(action_id, incident.incident_id, incident.job, incident.attempt, "stopping", now))
        keep_away(store, self.config, incident.job, plan, now)
        furthest = max(job.furthest_step, plan.reached_step)
        counted = replace(
            job,
            no_progress=plan.no_progress,
            startup_failures=plan.startup_failures,
            furthest_step=furthest,
        )
        store.save_job(counted)
        store.move(replace(incident, action_id=action_id), "restart", plan.rule, now)

    def begin_stop(self, incident: IncidentRow, plan: Plan, outcome: str, now: float) -> None:
        """Terminal before the backend is told, so that nothing can start the job in between.

        `outcome`: failed by the policy, or stopped by a person (from `open`).
        """
        action_id = self.journal.new_action_id(incident, plan.verb)
        self.store.save_intent(
            IntentRow(action_id, incident.incident_id, incident.job, incident.attempt, "finishing", now)
        )
        self.journal.job_over(incident.job, outcome, plan.reason, now, but=incident.incident_id)
        self.store.append(action_of(action_id, incident, plan, plan.mode, now))
        event: Event = "abort" if incident.state == "open" else "stop"
        self.store.move(replace(incident, action_id=action_id, plan=plan), event, plan.rule, now)
