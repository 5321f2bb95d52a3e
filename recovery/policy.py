"""What to do about verdicts: a pure function of the verdicts, the job, its counters and the configuration.

Reading order of a decision: which verdict leads; is there still anything to do; its row; what is done to
nodes and checkpoints; budgets; mode. Nothing is touched: the same arguments give the same plan and hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from detectors.verdict import Verdict

from .action import Mode, Verb
from .backend import Observation
from .policy_config import PolicyConfig, effective_verb

REASON_CHARACTERS_MAX = 2000
_STRENGTH: Mapping[Verb, int] = {
    "exclude_and_restart": 0, "restart": 1, "stop": 2, "hold": 3, "notify": 4, "ignore": 5
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counters:
    """What the job has used up. `no_progress`: restarts by cause since the job last got further."""

    restarts_in_window: int = 0
    no_progress: Mapping[str, int] = field(default_factory=dict)
    startup_failures: int = 0
    furthest_step: int = -1


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The job at the moment of the decision. `attempt`: the newest that was started, 0 where none is."""

    job: str
    attempt: int
    observation: Observation | None = None
    outcome: str = ""  # not empty: the job is over, and how
    restarted: bool = False  # we have restarted it before
    started_at: float | None = None  # of this attempt, where we started it
    resume_step: int | None = None  # of this attempt, where we started it


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision and what explains it. `plan_hash` names what would be done, whatever mode and budget say."""

    verb: Verb
    mode: Mode
    fault_class: str
    verdict_id: str
    verdict_revision: int
    rule: str
    cause: str = ""  # what the budgets count by
    excluded_nodes: tuple[str, ...] = ()
    before_step: int | None = None  # resume below this step, reject checkpoints from it on
    collect_evidence: bool = False
    reason: str = ""  # for stop: what the job is told
    budget_spent: bool = False
    no_progress: dict[str, int] = field(default_factory=dict)  # the counters after this restart
    repeats: int = 0  # restarts for this cause already made that brought the job no further
    startup_failures: int = 0
    reached_step: int = -1
    plan_hash: str = ""


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
        return _plain(lead, "ignore", "auto", gone)
    if verb == "notify":
        return _plain(lead, "notify", "auto", f"row {lead.fault_class}: notify; advice {lead.advice}")
    candidate = _candidate(lead, verb, verdicts, job, counters, config, now)
    if verb == "hold" and approved_hash != candidate.plan_hash:
        return replace(candidate, verb="hold", rule=f"{candidate.rule}; a restart alone does not help")
    if verb == "stop":
        return _with_mode(candidate, approved_hash, "user errors are not restarted")
    outdated = job.observation is not None and _is_outdated(lead, job.observation, config, now)
    if outdated and approved_hash != candidate.plan_hash:
        rule = f"{candidate.rule}; the verdict is {now - lead.at:.0f} s old and the job runs"
        return replace(candidate, verb="hold", rule=rule)
    return _within_budget(candidate, lead, job, counters, config, now, approved_hash)


def leading(verdicts: Sequence[Verdict], config: PolicyConfig) -> Verdict:
    """The verdict that decides: the earliest by producer time; a user error next to a root is its echo."""
    acting = [one for one in verdicts if effective_verb(one, config) != "notify"] or list(verdicts)
    roots = [one for one in acting if config.row(one.fault_class).root]

    def is_echo(one: Verdict) -> bool:
        return one.fault_class == "user_error" and any(
            abs(root.onset_at - one.onset_at) <= config.echo_seconds for root in roots
        )

    return min(
        (one for one in acting if not is_echo(one)),
        key=lambda one: (one.onset_at, _STRENGTH[effective_verb(one, config)], one.verdict_id),
    )


def strengthen(
    plan: Plan, verdicts: Sequence[Verdict], config: PolicyConfig, observation: Observation | None = None
) -> Plan:
    """The plan of a restart that is under way, with the nodes and steps that later evidence adds to it."""
    excluded = tuple(sorted({*plan.excluded_nodes, *_nodes_to_exclude(verdicts, config, ("auto",), observation)}))
    steps = [plan.before_step, *(_first_bad(one, config) for one in verdicts)]
    before = min((step for step in steps if step is not None), default=None)
    if excluded == plan.excluded_nodes and before == plan.before_step:
        return plan
    return replace(
        plan,
        verb="exclude_and_restart" if excluded else plan.verb,
        excluded_nodes=excluded,
        before_step=before,
        rule=f"{plan.rule}; widened by later evidence",
    )


def stale_effects(verdict: Verdict, config: PolicyConfig) -> tuple[tuple[str, ...], int | None]:
    """What a verdict about an older attempt may still do: exclude nodes, reject checkpoints."""
    row = config.row(verdict.fault_class)
    if row.mode != "auto" or effective_verb(verdict, config) not in ("restart", "exclude_and_restart"):
        return (), None
    return _nodes_to_exclude((verdict,), config, ("auto",), None), _first_bad(verdict, config)


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


def cause_of(verdict: Verdict, config: PolicyConfig) -> str:
    """What the no-progress budget counts by: the class, and the culprit where the class blames somebody."""
    if config.row(verdict.fault_class).verb == "exclude_and_restart":
        names = sorted({culprit.node for culprit in verdict.culprits if culprit.node})
    elif verdict.fault_class in ("rank_lost", "hang"):
        names = [f"rank {rank}" for rank in sorted({c.rank for c in verdict.culprits if c.rank is not None})]
    else:
        names = []
    return " ".join([verdict.fault_class, *names])


def _nothing_to_do(lead: Verdict, job: JobSnapshot) -> str:
    """Why nothing may be done at all; empty where something may."""
    if job.outcome:
        return f"terminal: the job is over ({job.outcome})"
    if lead.attempt < job.attempt:
        return f"stale attempt: the verdict is about attempt {lead.attempt}, the job is at {job.attempt}"
    if job.observation is None:
        return ""
    if job.observation.phase == "finished":
        return "terminal: the job is over (finished)"
    if lead.attempt > job.attempt:
        return f"unknown attempt: the verdict is about attempt {lead.attempt}, the job is at {job.attempt}"
    return ""


def _candidate(
    lead: Verdict,
    verb: Verb,
    verdicts: Sequence[Verdict],
    job: JobSnapshot,
    counters: Counters,
    config: PolicyConfig,
    now: float,
) -> Plan:
    """What would be done if budgets and mode allow it, with its hash."""
    row = config.row(lead.fault_class)
    nodes: tuple[str, ...] = ()
    before: int | None = None
    cause = cause_of(lead, config)
    if verb != "stop":
        # What another row would only propose is not slipped in with this one.
        nodes = _nodes_to_exclude(verdicts, config, ("auto", row.mode), job.observation)
        steps = [_first_bad(one, config) for one in verdicts]
        before = min((step for step in steps if step is not None), default=None)
        verb = "exclude_and_restart" if nodes else "restart"
    wasted = _wasted(lead, job, counters, config, now)
    if before is not None and wasted.get(cause, 0) > 0:
        # The checkpoint we resumed from led to the same place: it is bad too.
        before = before if job.resume_step is None else min(before, job.resume_step)
    culprits = ", ".join(_culprit_words(lead)) or "unknown"
    plan = Plan(
        verb=verb,
        mode=row.mode,
        fault_class=lead.fault_class,
        verdict_id=lead.verdict_id,
        verdict_revision=lead.revision,
        rule=f"row {lead.fault_class}: {row.verb}, {row.mode}; culprit {culprits}",
        cause=cause,
        excluded_nodes=nodes,
        before_step=before,
        collect_evidence=row.collect_evidence,
        reason=_reason(lead),
    )
    return replace(plan, plan_hash=_hash(plan, lead))


def _within_budget(
    plan: Plan,
    lead: Verdict,
    job: JobSnapshot,
    counters: Counters,
    config: PolicyConfig,
    now: float,
    approved_hash: str,
) -> Plan:
    """The plan with its budgets checked and charged; a person's approval overrides them."""
    reached = _reached(lead, job)
    wasted = _wasted(lead, job, counters, config, now)
    mine, everything = wasted.get(plan.cause, 0), sum(wasted.values())
    startup = counters.startup_failures + 1 if _is_startup_failure(lead, job, config, now) else 0
    no_progress_max = config.row(lead.fault_class).no_progress_max or config.no_progress_max
    hours = config.restarts_window_seconds / 3600
    numbers = (
        f"restarts in the last {hours:.0f} h: {counters.restarts_in_window} of "
        f"{config.restarts_max}; without progress: {mine} of {no_progress_max} for {plan.cause}, "
        f"{everything} of {config.no_progress_any_cause_max} for all causes; "
        f"failures at start-up: {startup} of {config.startup_failures_max}; "
        f"reached step {reached}, furthest before {counters.furthest_step}"
    )
    plan = replace(
        plan,
        rule=f"{plan.rule}; {numbers}",
        no_progress={**wasted, plan.cause: mine + 1},
        repeats=mine,
        startup_failures=startup,
        reached_step=reached,
    )
    if approved_hash == plan.plan_hash:
        return replace(plan, mode="auto", rule=f"{plan.rule}; approved by a person")
    if startup >= config.startup_failures_max:
        return _spent(plan, "stop", f"it failed {startup} times while starting: {plan.reason}")
    if counters.restarts_in_window >= config.restarts_max:
        return _spent(plan, config.spent_budget, "the budget of restarts is spent")
    if mine >= no_progress_max or everything >= config.no_progress_any_cause_max:
        why = f"restarts for {plan.cause} bring the job no further: {plan.reason}"
        return _spent(plan, config.spent_budget, why)
    return plan


def _spent(plan: Plan, verb: Literal["hold", "stop"], why: str) -> Plan:
    reason = why[:REASON_CHARACTERS_MAX]
    return replace(plan, verb=verb, mode="auto", budget_spent=True, reason=reason, rule=f"{plan.rule}; {reason}")


def _with_mode(plan: Plan, approved_hash: str, why: str) -> Plan:
    if approved_hash == plan.plan_hash:
        return replace(plan, mode="auto", rule=f"{plan.rule}; {why}; approved by a person")
    return replace(plan, rule=f"{plan.rule}; {why}")


def _plain(lead: Verdict, verb: Verb, mode: Mode, rule: str) -> Plan:
    return Plan(verb, mode, lead.fault_class, lead.verdict_id, lead.revision, rule)


def _nodes_to_exclude(
    verdicts: Sequence[Verdict], config: PolicyConfig, modes: Sequence[Mode], observation: Observation | None
) -> tuple[str, ...]:
    """The nodes that these verdicts blame; where one names only a rank, the node that rank runs on."""
    places = {rank.rank: rank.node for rank in observation.ranks} if observation else {}
    nodes: set[str] = set()
    for verdict in verdicts:
        row = config.row(verdict.fault_class)
        if effective_verb(verdict, config) != "exclude_and_restart" or row.mode not in modes:
            continue
        for culprit in verdict.culprits:
            node = culprit.node or (places.get(culprit.rank) if culprit.rank is not None else None)
            if node:
                nodes.add(node)
    return tuple(sorted(nodes))


def _first_bad(verdict: Verdict, config: PolicyConfig) -> int | None:
    if not config.row(verdict.fault_class).rollback:
        return None
    return verdict.first_bad_step if verdict.first_bad_step is not None else verdict.onset_step


def _reached(lead: Verdict, job: JobSnapshot) -> int:
    """The furthest step the attempt is known to have reached; -1 where nobody knows."""
    steps = [rank.step for rank in job.observation.ranks] if job.observation else []
    return max([-1, lead.onset_step if lead.onset_step is not None else -1, *steps])


def _wasted(lead: Verdict, job: JobSnapshot, counters: Counters, config: PolicyConfig, now: float) -> dict[str, int]:
    """Restarts by cause that brought nothing; none where the job has got further than ever before."""
    reached = _reached(lead, job)
    if reached < 0 and job.started_at is not None and now - job.started_at >= config.progress_seconds:
        return {}
    return dict(counters.no_progress) if job.restarted and reached <= counters.furthest_step else {}


def _is_startup_failure(lead: Verdict, job: JobSnapshot, config: PolicyConfig, now: float) -> bool:
    if lead.fault_class == "start_failure":
        return True
    young = job.started_at is not None and now - job.started_at < config.startup_seconds
    blames_a_node = config.row(lead.fault_class).verb == "exclude_and_restart"
    return young and not blames_a_node and _reached(lead, job) < 0


def _is_outdated(lead: Verdict, observation: Observation, config: PolicyConfig, now: float) -> bool:
    """Old, and the job does not look broken: what was true then need not be true now."""
    looks_broken = observation.phase in ("failed", "stopped") or any(
        rank.state != "running" for rank in observation.ranks
    )
    return now - lead.at > config.verdict_seconds_max and not looks_broken


def _culprit_words(verdict: Verdict) -> list[str]:
    return [
        " on ".join(part for part in (f"rank {one.rank}" if one.rank is not None else "", one.node or "") if part)
        for one in verdict.culprits
    ]


def _reason(verdict: Verdict) -> str:
    """The summary and the error text a person needs, bounded; not what its victims say of their lost peers."""
    named = {culprit.rank for culprit in verdict.culprits}
    said = [
        item
        for item in verdict.evidence
        if item.kind in ("log", "event") and (not named or item.rank is None or item.rank in named)
    ]
    texts = [verdict.summary, *(item.text for item in said)]
    return "\n".join(dict.fromkeys(text for text in texts if text))[:REASON_CHARACTERS_MAX]


def _hash(plan: Plan, lead: Verdict) -> str:
    """SHA-256 over what would be done; the same decision about the same attempt hashes the same."""
    canonical = msgspec.json.encode(
        {
            "job": lead.job,
            "attempt": lead.attempt,
            "verb": plan.verb,
            "cause": plan.cause,
            "excluded_nodes": list(plan.excluded_nodes),
            "before_step": plan.before_step,
        },
        order="deterministic",
    )
    return hashlib.sha256(canonical).hexdigest()
