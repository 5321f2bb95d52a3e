"""What people ask for: plans approved, jobs held, resumed and ended, nodes given back; each once, each audited."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .action import JOB_VERBS, Command, Verb
from .decisions import Decisions
from .incident import allows
from .journal import Journal
from .plan import Exclusion, Plan
from .routing import Router
from .store import RecoveryStore


@dataclass(frozen=True, slots=True)
class Orders:
    """Obeys commands; every method runs inside a transaction of the caller. A redelivery never comes here."""

    store: RecoveryStore
    router: Router
    journal: Journal
    decisions: Decisions

    def obey(self, seq: int, command: Command, now: float) -> None:
        """Do what a person asks, or say why not; acknowledgements, mutes and feedback are the ledger's business."""
        if command.verb in ("approve", "reject"):
            self._judge_plan(seq, command, now)
        elif command.verb in JOB_VERBS:
            outcome = self._on_job(command, now)
            self.store.file_command(seq, outcome)
        else:
            self.store.file_command(seq, "noted")

    # A plan that waits for a person

    def _judge_plan(self, seq: int, command: Command, now: float) -> None:
        known = self.store.incident_of_verdict(command.incident_id) or command.incident_id
        incident = self.store.incident(known)
        if incident is None or not allows(incident.state, "approved"):
            state = "unknown here" if incident is None else incident.state
            self.store.file_command(seq, f"refused: incident {command.incident_id} is {state}")
            return
        wanted = incident.plan.plan_hash if incident.plan is not None else ""
        if command.verb == "reject":
            self.store.file_command(seq, "rejected")
            self.store.move(incident, "rejected", f"{command.author} rejected the plan: {command.note}", now)
        elif not wanted or command.plan_hash != wanted:
            asked, is_ = command.plan_hash[:12] or "none", wanted[:12] or "none"
            why = f"{command.author} approved plan {asked}, the plan is {is_}"
            self.store.file_command(seq, f"refused: {why}")
            self.store.move(incident, "refused", why, now, due_at=incident.due_at)
        elif self.router.acting_on(incident.job) is not None:
            why = f"{command.author} approved, but the job is being recovered for another incident"
            self.store.file_command(seq, f"refused: {why}")
            self.store.move(incident, "refused", why, now, due_at=incident.due_at)
        else:
            self.store.file_command(seq, "approved")
            approved = replace(incident, approved_hash=wanted)
            self.store.move(approved, "approved", f"approved by {command.author}", now)

    # A job as a whole

    def _on_job(self, command: Command, now: float) -> str:
        job = self.store.job(command.job)
        if job.outcome and command.verb != "unexclude":
            why = f"the job is over ({job.outcome})"
            rule = _by(command)
            verb: Verb = "stop" if command.verb == "abort" else "resume" if command.verb == "resume" else "hold"
            self.journal.of_person(command, verb, rule, "failed", f"nothing was done: {why}", now)
            return f"refused: {why}"
        match command.verb:
            case "hold":
                return self._hold(command, now)
            case "resume":
                return self._resume(command, now)
            case "unexclude":
                return self._unexclude(command, now)
            case _:
                return self._abort(command, now)

    def _hold(self, command: Command, now: float) -> str:
        """Nothing is decided or started for this job any more; what is being stopped is stopped to its end."""
        by = _by(command)
        self.store.save_job(replace(self.store.job(command.job), held=by))
        text = "recovery does nothing more for this job until `transom resume`; the job itself is left alone"
        self.journal.of_person(command, "hold", by, "done", text, now)
        return "held"

    def _resume(self, command: Command, now: float) -> str:
        """The hold ends, the breaker is closed again, and what was held is decided anew."""
        by, job = _by(command), self.store.job(command.job)
        self.store.save_job(replace(job, held="", breaker_reset_at=now))
        again = 0
        for incident in self.store.unfinished(command.job):
            if incident.state == "held" and self.router.acting_on(command.job) is None:
                self.store.move(replace(incident, approved_hash=""), "resumed", by, now)
                again += 1
        text = f"recovery acts again; incidents that are decided anew: {again}"
        self.journal.of_person(command, "resume", by, "done", text, now)
        return "resumed"

    def _unexclude(self, command: Command, now: float) -> str:
        node = command.node
        by = f"{_by(command)}; node {node}"
        text = f"node {node} may be used again from the next start on; its strikes stay"
        if not self.store.release(command.job, node, now):
            # A backend excludes nodes too, those that are down above all: it is told to try this one again.
            self.store.exclude(
                command.job, Exclusion(node, now, now, command.command_id, "given back", rest=True, told=True)
            )
            text = f"node {node} is not excluded by recovery; if it is by the backend, the next start may use it again"
        self.journal.of_person(command, "unexclude", by, "done", text, now)
        return "released"

    def _abort(self, command: Command, now: float) -> str:
        """The job is over from now on, whatever else is under way for it; its ranks are stopped by the backend."""
        attempt = max((one.attempt for one in self.store.attempts(command.job)), default=0)
        attempt = max(attempt, *(one.attempt for one in self.store.unfinished(command.job)), 0)
        incident_id = f"{command.job}/{attempt}/abort/{command.command_id}"
        incident = self.store.open_incident(incident_id, command.job, attempt, now)
        by = _by(command)
        plan = Plan("stop", "auto", "aborted", incident_id, 0, by, reason=by)
        if any(one.state == "finishing" for one in self.store.unfinished(command.job)):
            self.store.move(incident, "dropped", "the job is being stopped already", now)
            return "refused: the job is being stopped already"
        self.decisions.begin_stop(incident, plan, "stopped", now)
        return "aborted"


def _by(command: Command) -> str:
    """Who asked, and why."""
    note = f": {command.note}" if command.note else ""
    return f"{command.verb} by {command.author}{note}"
