"""What to do about verdicts: a pure function of the verdicts, the job, its counters and the configuration.

Reading order of a decision: which verdict leads; is there still anything to do; its row; what is done to
nodes and checkpoints (`ladder.py`); what people have said; budgets (`budgets.py`); mode. Nothing is touched: the
same arguments give the same plan and hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from detectors.verdict import Verdict

from .action import Mode, Verb
from .backend import Observation
from .blame import cause_of, culprit_words, first_bad, leading, nodes_to_exclude, reason_of
from .budgets import wasted, within_budget
from .ladder import Measure, measure
from .plan import Counters, JobSnapshot, Plan, hash_of
from .policy_config import PolicyConfig, effective_verb
from .policy_rows import MODES


def decide(
    verdicts: Sequence[Verdict],
    job: JobSnapshot,
    counters: Counters,
    config: PolicyConfig,
    now: float,
    approved_hash: str = "",
) -> Plan:
    """The plan for one incident. `verdicts`: the newest revision of each that belongs to it, at least one."""
    assert verdicts
    lead = leading(verdicts, config)
    verb = effective_verb(lead, config)
    gone = _nothing_to_do(lead, job)
    if gone:
        return _plain(lead, "ignore", gone)
    if verb == "notify":
        return _plain(lead, "notify", f"row {lead.fault_class}: notify; advice {lead.advice}")
    if lead.restarts_by:
        rule = f"row {lead.fault_class}: {verb}, but {lead.restarts_by} restarts this job: recovery only observes it"
        return _plain(lead, "notify", rule)
    doubt = _doubt(lead, verb, job, config)
    if doubt:
        return _plain(lead, "notify", f"row {lead.fault_class}: {verb}, but {doubt}")
    in_vain = wasted(lead, job, counters, config, now).get(cause_of(lead, config), 0)
    rung = measure(lead, job, counters, config, in_vain, now)
    candidate = _candidate(lead, verb, verdicts, rung, job, counters, config, now)
    approved = approved_hash == candidate.plan_hash
    held = _held_by_people(job)
    if held and not approved:
        return replace(candidate, verb="hold", rule=f"{candidate.rule}; {held}")
    if verb == "hold" and not approved:
        return replace(candidate, verb="hold", rule=f"{candidate.rule}; a restart alone does not help")
    if verb == "stop":
        return _with_mode(candidate, "user errors are not restarted", approved=approved)
    outdated = job.observation is not None and _is_outdated(lead, job.observation, config, now)
    if outdated and not approved:
        rule = f"{candidate.rule}; the verdict is {now - lead.at:.0f} s old and the job runs"
        return replace(candidate, verb="hold", rule=rule)
    return within_budget(candidate, lead, job, counters, config, rung, now, approved_hash)


def strengthen(
    plan: Plan, verdicts: Sequence[Verdict], config: PolicyConfig, observation: Observation | None = None
) -> Plan:
    """The plan of a restart that is under way, with the nodes and steps that later evidence adds to it."""
    excluded = tuple(sorted({*plan.excluded_nodes, *nodes_to_exclude(verdicts, config, ("auto",), observation)}))
    steps = [plan.before_step, *(first_bad(one, config) for one in verdicts)]
    before = min((step for step in steps if step is not None), default=None)
    if excluded == plan.excluded_nodes and before == plan.before_step:
        return plan
    return replace(
        plan,
        verb="exclude_and_restart" if excluded else plan.verb,
        excluded_nodes=excluded,
        spared_nodes=tuple(node for node in plan.spared_nodes if node not in excluded),
        before_step=before,
        rule=f"{plan.rule}; widened by later evidence",
    )


def stale_effects(verdict: Verdict, config: PolicyConfig) -> tuple[tuple[str, ...], int | None]:
    """What a verdict about an older attempt may still do: exclude nodes, reject checkpoints."""
    row = config.row(verdict.fault_class)
    if (
        verdict.restarts_by
        or row.mode != "auto"
        or effective_verb(verdict, config) not in ("restart", "exclude_and_restart")
    ):
        return (), None
    return nodes_to_exclude((verdict,), config, ("auto",), None), first_bad(verdict, config)


def backoff_seconds(plan: Plan, config: PolicyConfig, dice: float) -> float:
    """How long to wait before the start; `dice` in [0, 1). The first restart of a cause does not wait."""
    if plan.repeats == 0:
        return 0.0
    full: float = min(config.backoff_seconds_max, config.backoff_seconds * 2.0 ** min(plan.repeats - 1, 30))
    return full * (0.5 + 0.5 * dice)


def retry_seconds(tries: int, config: PolicyConfig, dice: float) -> float:
    """How long to wait before a backend that failed `tries` times is asked again."""
    full: float = min(config.retry_seconds_max, config.retry_seconds * 2.0 ** min(max(tries - 1, 0), 30))
    return full * (0.5 + 0.5 * dice)


def quarantine_seconds(times: int, config: PolicyConfig) -> float:
    """How long a node is kept away that was put into quarantine `times` times before: twice as long each time."""
    return float(min(config.quarantine_seconds_max, config.quarantine_seconds * 2.0 ** min(times, 30)))


def _nothing_to_do(lead: Verdict, job: JobSnapshot) -> str:
    """Why nothing may be done at all; empty where something may."""
    if job.outcome:
        return f"terminal: the job is over ({job.outcome})"
    if lead.attempt < job.attempt:
        return f"stale attempt: the verdict is about attempt {lead.attempt}, the job is at {job.attempt}"
    if job.observation is None:
        return ""
    if job.observation.phase == "finished" or job.observation.ended:
        return f"terminal: the job is over ({job.observation.phase})"
    if lead.attempt > job.attempt:
        return f"unknown attempt: the verdict is about attempt {lead.attempt}, the job is at {job.attempt}"
    return ""


def _doubt(lead: Verdict, verb: Verb, job: JobSnapshot, config: PolicyConfig) -> str:
    """Why an unsure verdict is only told: it is not sure of its culprits, and the job does not look broken."""
    sure = max((culprit.confidence for culprit in lead.culprits), default=1.0)
    if verb == "stop" or sure >= config.confidence_min or job.observation is None or _looks_broken(job.observation):
        return ""
    return f"its confidence is {sure:.2f} (at least {config.confidence_min:.2f} to act) and all ranks run"


def _held_by_people(job: JobSnapshot) -> str:
    if job.held:
        return f"{job.held}; `transom resume` lets recovery act again"
    if job.observation is not None and job.observation.held:
        return f"it is on hold on its backend ({job.observation.held}), and nothing is done against that"
    return ""


def _candidate(
    lead: Verdict,
    verb: Verb,
    verdicts: Sequence[Verdict],
    rung: Measure,
    job: JobSnapshot,
    counters: Counters,
    config: PolicyConfig,
    now: float,
) -> Plan:
    """What would be done if people, budgets and mode allow it, with its hash."""
    row = config.row(lead.fault_class)
    plan = Plan(
        verb=verb,
        mode=row.mode,
        fault_class=lead.fault_class,
        verdict_id=lead.verdict_id,
        verdict_revision=lead.revision,
        rule=f"row {lead.fault_class}: {row.verb}, {row.mode}; culprit {culprit_words(lead)}",
        cause=cause_of(lead, config),
        collect_evidence=row.collect_evidence,
        reason=reason_of(lead),
        budget=row.budget,
    )
    if verb != "stop":
        plan = _placed(plan, lead, verdicts, rung, job, counters, config, now)
    return replace(plan, plan_hash=hash_of(plan, lead))


def _placed(
    plan: Plan,
    lead: Verdict,
    verdicts: Sequence[Verdict],
    rung: Measure,
    job: JobSnapshot,
    counters: Counters,
    config: PolicyConfig,
    now: float,
) -> Plan:
    """The restart with the nodes it does without and the steps it stays below."""
    # What another row would only propose is not slipped in with this one.
    by_rows = nodes_to_exclude(verdicts, config, ("auto", plan.mode), job.observation)
    nodes = tuple(sorted({*by_rows, *rung.excluded_nodes}))
    steps = [first_bad(one, config) for one in verdicts]
    before = min((step for step in steps if step is not None), default=None)
    if before is not None and wasted(lead, job, counters, config, now).get(plan.cause, 0) > 0:
        # The checkpoint we resumed from led to the same place: it is bad too.
        before = before if job.resume_step is None else min(before, job.resume_step)
    return replace(
        plan,
        verb="exclude_and_restart" if nodes else "restart",
        mode=_stricter(plan.mode, rung.mode),
        rule=f"{plan.rule}; {rung.words}",
        excluded_nodes=nodes,
        spared_nodes=tuple(node for node in rung.spared_nodes if node not in nodes),
        struck_nodes=rung.struck_nodes,
        before_step=before,
        resume_below=None if before is not None else rung.resume_below,
        rung=rung.rung,
    )


def _stricter(one: Mode, other: Mode) -> Mode:
    return min(one, other, key=MODES.index)  # observe, approve, auto


def _with_mode(plan: Plan, why: str, *, approved: bool) -> Plan:
    if approved:
        return replace(plan, mode="auto", rule=f"{plan.rule}; {why}; approved by a person")
    return replace(plan, rule=f"{plan.rule}; {why}")


def _plain(lead: Verdict, verb: Verb, rule: str) -> Plan:
    return Plan(verb, "auto", lead.fault_class, lead.verdict_id, lead.revision, rule)


def _looks_broken(observation: Observation) -> bool:
    return observation.phase in ("failed", "stopped") or any(rank.state != "running" for rank in observation.ranks)


def _is_outdated(lead: Verdict, observation: Observation, config: PolicyConfig, now: float) -> bool:
    """Old, and the job does not look broken: what was true then need not be true now."""
    return now - lead.at > config.verdict_seconds_max and not _looks_broken(observation)
