"""What is written down when an incident moves: actions, receipts, intents, and what it means for others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .action import Action, Command, Mode, Outcome, Receipt, Verb
from .calls import JobOver, OlderAlive, Overtaken, Result
from .incident import Event, State, allows
from .plan import Plan
from .routing import Router, ignored
from .store import RecoveryStore
from .store_schema import IncidentRow, IntentRow

WAITING: tuple[State, ...] = ("notified", "awaiting_approval", "held", "exited")  # for people, or for detection
ON_PROBATION: tuple[State, ...] = ("probation",)


@dataclass(frozen=True, slots=True)
class Journal:
    """Every method runs inside a transaction of the caller."""

    store: RecoveryStore
    router: Router

    def under_way(self, incident: IncidentRow) -> tuple[Plan, IntentRow]:
        """Plan and intent of an incident that is doing something."""
        intent = self.store.intent(incident.action_id)
        assert incident.plan is not None
        assert intent is not None
        return incident.plan, intent

    def new_action_id(self, incident: IncidentRow, verb: Verb) -> str:
        """job/attempt/verb; a second try after a person's approval gets a number."""
        base = f"{incident.job}/{incident.attempt}/{verb}"
        tries = 1
        while self.store.intent(base if tries == 1 else f"{base}/{tries}") is not None:
            tries += 1
        return base if tries == 1 else f"{base}/{tries}"

    def tell(self, incident: IncidentRow, plan: Plan, mode: Mode, outcome: Outcome, text: str, now: float) -> None:
        """An action that does nothing to the job, and its receipt; the id says which of several."""
        action_id = f"{incident.job}/{incident.attempt}/{plan.verb}/{plan.verdict_id}"
        action_id += f"/{plan.plan_hash[:12]}" if plan.plan_hash else ""
        self.store.append(action_of(action_id, incident, plan, mode, now))
        self.receipt(replace(incident, action_id=action_id), outcome, text, now)

    def receipt(
        self, incident: IncidentRow, outcome: Outcome, text: str, now: float, next_attempt: int | None = None
    ) -> None:
        """What came of the incident's action."""
        self.store.append(
            Receipt(
                action_id=incident.action_id,
                job=incident.job,
                attempt=incident.attempt,
                at=now,
                outcome=outcome,
                text=text,
                next_attempt=next_attempt,
            )
        )

    def ignore(self, incident: IncidentRow, why: str, now: float) -> None:
        """Nothing is done about it, but what a stale verdict is still good for."""
        effects = ""
        for verdict in self.store.verdicts_of(incident.incident_id):
            effects += self.router.apply_stale(verdict, now) if why.startswith("stale") else ""
            self.store.append(ignored(verdict, why + effects, now))
        self.store.move(incident, "dropped", why + effects, now)

    def close(self, incident: IncidentRow, event: Event, why: str, now: float) -> None:
        """Leave the intent behind and move on."""
        intent = self.store.intent(incident.action_id)
        if intent is not None:
            self.store.save_intent(replace(intent, phase="closed"))
        self.store.move(incident, event, why, now)

    def hold(self, incident: IncidentRow, event: Event, why: str, now: float) -> None:
        """Something is wrong that no rule of ours can mend: a person's turn."""
        self.receipt(incident, "failed", why, now)
        self.close(incident, event, why, now)

    def overtaken(self, incident: IncidentRow, result: Result, now: float) -> bool:
        """The three answers that say: not now, or no more."""
        if isinstance(result, JobOver):
            self.receipt(incident, "done", "the job had finished by itself; nothing was started", now)
            self.job_over(incident.job, "finished", "", now)
        elif isinstance(result, Overtaken):
            text = f"attempt {result.attempt} was started by somebody else; nothing was done"
            self.receipt(incident, "failed", text, now)
            self.close(incident, "attempt_over", text, now)
        elif isinstance(result, OlderAlive):
            self.store.move(incident, "older_alive", "ranks of the old attempt live after all", now)
        else:
            return False
        return True

    def job_over(self, job: str, outcome: str, why: str, now: float, but: str = "") -> None:
        """Terminal stays terminal: mark the job, and close every other incident that this ends."""
        known = self.store.job(job)
        if not known.outcome:
            self.store.save_job(replace(known, outcome=outcome, reason=why))
        for other in self.store.unfinished(job):
            if other.incident_id != but and allows(other.state, "job_over"):
                self.close(other, "job_over", f"the job is over ({outcome})", now)

    def attempt_runs(self, job: str, attempt: int, now: float, but: str = "") -> None:
        """`attempt` runs: incidents of older ones that wait for people or for detection are over."""
        for other in self.store.unfinished(job, WAITING):
            if other.incident_id != but and other.attempt < attempt:
                self.close(other, "attempt_over", f"attempt {attempt} runs", now)

    def failed_again(self, incident: IncidentRow, plan: Plan, now: float) -> None:
        """The job failed while an earlier restart was on probation."""
        for other in self.store.unfinished(incident.job, ON_PROBATION):
            if other.attempt < incident.attempt:
                cause = f"attempt {incident.attempt} failed in its probation: {plan.fault_class}"
                self.close(other, "failed_again", cause, now)

    def of_person(self, command: Command, verb: Verb, rule: str, outcome: Outcome, text: str, now: float) -> None:
        """The audit row of what a person asked of a whole job, and what came of it."""
        attempt = max((one.attempt for one in self.store.attempts(command.job)), default=0)
        action_id = f"{command.job}/{attempt}/{verb}/{command.command_id}"
        row = IncidentRow("", command.job, attempt, "open", 0, now, now, now, action_id)
        plan = Plan(verb, "auto", "", "", 0, rule)
        self.store.append(action_of(action_id, row, plan, "auto", now))
        self.receipt(row, outcome, text, now)


def action_of(action_id: str, incident: IncidentRow, plan: Plan, mode: Mode, now: float) -> Action:
    """The audit row of a plan, without what only the choice of a checkpoint adds."""
    return Action(
        action_id=action_id,
        job=incident.job,
        attempt=incident.attempt,
        at=now,
        verb=plan.verb,
        mode=mode,
        verdict_id=plan.verdict_id,
        verdict_revision=plan.verdict_revision,
        fault_class=plan.fault_class,
        rule=plan.rule,
        rung=plan.rung,
        excluded_nodes=plan.excluded_nodes,
        spared_nodes=plan.spared_nodes,
        reject_from_step=plan.before_step,
        plan_hash=plan.plan_hash,
    )


def action_of_start(intent: IntentRow, incident: IncidentRow, plan: Plan, now: float) -> Action:
    """The audit row of a restart, complete: written with the choice, before the start."""
    return Action(
        action_id=intent.action_id,
        job=incident.job,
        attempt=incident.attempt,
        at=now,
        verb=plan.verb,
        mode="auto",
        verdict_id=plan.verdict_id,
        verdict_revision=plan.verdict_revision,
        fault_class=plan.fault_class,
        rule=plan.rule,
        rung=plan.rung,
        excluded_nodes=plan.excluded_nodes,
        spared_nodes=plan.spared_nodes,
        next_attempt=intent.next_attempt,
        resume_step=intent.resume_step,
        resume_tier=intent.resume_tier,
        reject_from_step=plan.before_step,
        plan_hash=plan.plan_hash,
        checks=intent.checks,
    )
