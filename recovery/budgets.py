"""What a restart is paid from, and what is said when nothing is left: windowed, by class, and by progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from detectors.verdict import Verdict

from .blame import REASON_CHARACTERS_MAX
from .ladder import Measure, breaker_words
from .plan import Counters, JobSnapshot, Plan
from .policy_config import PolicyConfig
from .policy_rows import Budget


@dataclass(frozen=True, slots=True)
class Account:
    """The numbers behind a decision about one plan, and whether it may be done."""

    plan: Plan  # charged
    words: str
    spent: Literal["", "hold", "stop"] = ""
    why: str = ""


def within_budget(
    plan: Plan,
    lead: Verdict,
    job: JobSnapshot,
    counters: Counters,
    config: PolicyConfig,
    rung: Measure,
    now: float,
    approved_hash: str,
) -> Plan:
    """The plan with its budgets checked and charged; a person's approval overrides them."""
    if plan.budget == "planned":
        rule = f"{plan.rule}; planned, so no budget pays for it"
        plan = replace(plan, rule=rule, no_progress=dict(counters.no_progress), reached_step=reached(lead, job))
        return _approved(plan) if approved_hash == plan.plan_hash else plan
    account = _account(plan, lead, job, counters, config, rung, now)
    plan = replace(account.plan, rule=f"{plan.rule}; {account.words}")
    if approved_hash == plan.plan_hash:
        return _approved(plan)
    return _spent(plan, account.spent, account.why) if account.spent else plan


def _approved(plan: Plan) -> Plan:
    return replace(plan, mode="auto", rule=f"{plan.rule}; approved by a person")


def _account(
    plan: Plan, lead: Verdict, job: JobSnapshot, counters: Counters, config: PolicyConfig, rung: Measure, now: float
) -> Account:
    far = reached(lead, job)
    lost = wasted(lead, job, counters, config, now)
    mine, everything = lost.get(plan.cause, 0), sum(lost.values())
    startup = counters.startup_failures + 1 if _is_startup_failure(lead, job, config, now) else 0
    nodes = job.node_count
    total, total_max = restarts_used(counters, config, nodes, None)
    used, used_max = restarts_used(counters, config, nodes, plan.budget)
    hours = config.restarts_window_seconds / 3600
    words = (
        f"restarts in the last {hours:.0f} h: {total} of {total_max}, {used} of {used_max} for {plan.budget}; "
        f"without progress: {mine} of {rung.tries_max} for {plan.cause}, "
        f"{everything} of {config.no_progress_any_cause_max} for all causes; "
        f"failures at start-up: {startup} of {config.startup_failures_max}; "
        f"reached step {far}, furthest before {counters.furthest_step}"
    )
    charged = replace(
        plan,
        no_progress={**lost, plan.cause: mine + 1},
        repeats=mine,
        startup_failures=startup,
        reached_step=far,
    )
    if startup >= config.startup_failures_max:
        return Account(charged, words, "stop", f"it failed {startup} times while starting: {plan.reason}")
    if total >= total_max:
        return Account(charged, words, config.spent_budget, "the budget of restarts is spent")
    if used >= used_max:
        return Account(charged, words, config.spent_budget, f"the budget of restarts for {plan.budget} is spent")
    if mine >= rung.tries_max or everything >= config.no_progress_any_cause_max:
        why = f"restarts for {plan.cause} bring the job no further: {plan.reason}"
        return Account(charged, words, config.spent_budget, why)
    breaker = breaker_words(plan.excluded_nodes, job, counters, config, now)
    return Account(charged, words, "hold", breaker) if breaker else Account(charged, words)


def restarts_used(counters: Counters, config: PolicyConfig, nodes: int, budget: Budget | None) -> tuple[int, int]:
    """(used, allowed) in the window, of one budget or (None) of all together. More nodes may fail more often."""
    paid = [one for one in counters.restarts if one.budget != "planned" and budget in (None, one.budget)]
    more = nodes // config.nodes_per_restart if config.nodes_per_restart and budget != "user" else 0
    allowed = config.restarts_max if budget is None else config.class_restarts_max.get(budget, config.restarts_max)
    return len(paid), allowed + more


def reached(lead: Verdict, job: JobSnapshot) -> int:
    """The furthest step the attempt is known to have reached; -1 where nobody knows."""
    steps = [rank.step for rank in job.observation.ranks] if job.observation else []
    return max([-1, lead.onset_step if lead.onset_step is not None else -1, *steps])


def wasted(lead: Verdict, job: JobSnapshot, counters: Counters, config: PolicyConfig, now: float) -> dict[str, int]:
    """Restarts by cause that brought nothing; none where the job has got further than ever before."""
    if not counters.no_progress:
        return {}
    far = reached(lead, job)
    if far < 0 and job.started_at is not None and now - job.started_at >= config.progress_seconds:
        return {}
    return dict(counters.no_progress) if job.restarted and far <= counters.furthest_step else {}


def _is_startup_failure(lead: Verdict, job: JobSnapshot, config: PolicyConfig, now: float) -> bool:
    if lead.fault_class == "start_failure":
        return True
    young = job.started_at is not None and now - job.started_at < config.startup_seconds
    blames_a_node = config.row(lead.fault_class).verb == "exclude_and_restart"
    return young and not blames_a_node and reached(lead, job) < 0


def _spent(plan: Plan, verb: Literal["hold", "stop"], why: str) -> Plan:
    reason = why[:REASON_CHARACTERS_MAX]
    return replace(plan, verb=verb, mode="auto", budget_spent=True, reason=reason, rule=f"{plan.rule}; {reason}")
