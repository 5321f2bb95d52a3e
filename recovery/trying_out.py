"""What comes of pre-flight checks: strikes, quarantine where a mode allows it, and the words for people."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .backend import Backend, ProbingBackend
from .calls import Call, Checked, preflight
from .checking import blamed, kept, words_of
from .ladder import breaker_words
from .nodes import keep_away
from .plan import JobSnapshot, Plan
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import IncidentRow, IntentRow


@dataclass(frozen=True, slots=True)
class TryingOut:
    """The state `checking`; `tried` runs inside a transaction of the caller."""

    store: RecoveryStore
    backend: Backend
    config: PolicyConfig

    def is_wanted(self, plan: Plan) -> bool:
        """Not where a plain restart cures: only before classes that say so, and for a cause that has come back."""
        if not self.config.preflight or plan.budget == "planned" or not isinstance(self.backend, ProbingBackend):
            return False
        return self.config.row(plan.fault_class).checks or plan.repeats > 0

    def call(self, incident: IncidentRow, intent: IntentRow) -> Call:
        backend, config = self.backend, self.config
        return lambda: preflight(backend, incident.job, incident.attempt, intent.excluded, config)

    def tried(self, incident: IncidentRow, plan: Plan, intent: IntentRow, found: Checked, now: float) -> IncidentRow:
        """Write down what was found and what is done about it; the incident with the plan as it is from now on."""
        if found.why_none:
            return incident
        nodes = blamed(found.results)
        plan, words = self._without(plan, incident, nodes, found, now) if nodes else (plan, "")
        told = words_of(found.results, nodes, complete=found.complete) + words
        keep_away(self.store, self.config, incident.job, plan, now)
        excluded = self.store.excluded(incident.job, now)
        note = intent.note
        if nodes or not found.complete:
            note = f"{note}; {told}" if note else told
        self.store.save_intent(replace(intent, checks=kept(found.results), note=note, excluded=excluded))
        return replace(incident, plan=replace(plan, rule=f"{plan.rule}; {told}"))

    def _without(
        self, plan: Plan, incident: IncidentRow, nodes: set[str], found: Checked, now: float
    ) -> tuple[Plan, str]:
        """The plan with strikes for these nodes, and without them where the class's mode is auto."""
        config, names = self.config, ", ".join(sorted(nodes))
        plan = replace(plan, struck_nodes=tuple(sorted({*plan.struck_nodes, *nodes})))
        mode = config.mode_of_nodes(plan.fault_class)
        if mode != "auto":
            return plan, f"; {names} is only told of, for what is done to nodes is in mode {mode}"
        counters = self.store.counters(incident.job, now, config.restarts_window_seconds, config.strikes_window_seconds)
        job = JobSnapshot(incident.job, incident.attempt, nodes=len({one.node for one in found.results}))
        breaker = breaker_words(sorted(nodes), job, counters, config, now)
        if breaker:
            return plan, f"; {names} stays in use: {breaker}"
        excluded = tuple(sorted({*plan.excluded_nodes, *nodes}))
        spared = tuple(node for node in plan.spared_nodes if node not in excluded)
        plan = replace(plan, verb="exclude_and_restart", excluded_nodes=excluded, spared_nodes=spared)
        return plan, f"; without {names}"
