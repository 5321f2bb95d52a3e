"""What is tried next for a cause that comes back: one rung further each time that a restart brought nothing.

    in place → on a spare → without the culprit → without its group → from an older checkpoint → a person

A rung that is not there for this job (no spare, no culprit, no group, no checkpoint) or that is not allowed
(`quarantine_mode` observe) is left out. Strikes work beside it: a node that is blamed twice in a day is put
into quarantine whatever rung the job is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from detectors.verdict import Verdict

from .action import Mode
from .backend import Observation
from .blame import cause_of, nodes_of
from .plan import Counters, JobSnapshot, Rung
from .policy_config import PolicyConfig

NODE_RUNGS: tuple[Rung, ...] = ("spare", "exclude", "exclude_group")
STRIKING = ("infra", "hang")  # budgets whose faults count against a node


@dataclass(frozen=True, slots=True)
class Measure:
    """What the ladder adds to a restart, with the reason in words; `mode`: of what it does to nodes."""

    rung: Rung = "in_place"
    mode: Mode = "auto"
    excluded_nodes: tuple[str, ...] = ()
    spared_nodes: tuple[str, ...] = ()
    struck_nodes: tuple[str, ...] = ()
    resume_below: int | None = None
    tries_max: int = 0  # restarts for this cause without progress; then it is a person's turn
    words: str = ""


def measure(
    lead: Verdict, job: JobSnapshot, counters: Counters, config: PolicyConfig, wasted: int, now: float
) -> Measure:
    """The rung for the next restart of this cause. `wasted`: restarts for it that brought the job no further."""
    row = config.row(lead.fault_class)
    if row.budget == "planned":
        return Measure(words="planned: no rung")
    rungs = rungs_for(lead, job, counters, config)
    stated = row.no_progress_max
    tries_max = stated if stated is not None else max(config.no_progress_max, config.rung_repeats_max * len(rungs))
    position = wasted // config.rung_repeats_max
    flaps = _flaps(lead, counters, config, now)
    words = []
    if flaps >= config.flap_restarts_max:
        nodes = sum(rung in NODE_RUNGS for rung in rungs)
        position = max(position, min(nodes, flaps // config.flap_restarts_max))
        words.append(f"it flaps: {flaps} restarts for this cause in {config.flap_seconds / 60:.0f} min")
    rung = rungs[min(position, len(rungs) - 1)]
    culprits = nodes_of(lead, job.observation)
    words.insert(0, f"rung {rung} of {', '.join(rungs)}")
    excluded: set[str] = set()
    by_row = row.verb == "exclude_and_restart"  # such a row excludes its culprits at the first blame, in its own mode
    if rung == "exclude_group" or (rung == "exclude" and not by_row):
        excluded |= set(culprits)
    if rung == "exclude_group":
        excluded |= _group_of(culprits, job.observation)
    struck = culprits if row.budget in STRIKING and row.verb in ("restart", "exclude_and_restart") else ()
    full = [node for node in struck if counters.strikes.get(node, 0) + 1 >= config.strikes_max]
    if full and not by_row:
        number, hours = config.strikes_max, config.strikes_window_seconds / 3600
        told = f"{' and '.join(full)} blamed {number} times in {hours:.0f} h"
        if config.quarantine_mode == "observe":
            words.append(f"{told}; only told, recover.quarantine_mode is observe")
        else:
            excluded |= set(full)
            words.append(f"{told}: quarantine")
    return Measure(
        rung=rung,
        mode=config.quarantine_mode if excluded else "auto",
        excluded_nodes=tuple(sorted(excluded)),
        spared_nodes=tuple(node for node in culprits if node not in excluded) if rung == "spare" else (),
        struck_nodes=tuple(struck),
        resume_below=job.resume_step if rung == "older_checkpoint" else None,
        tries_max=tries_max,
        words="; ".join(words),
    )


def rungs_for(lead: Verdict, job: JobSnapshot, counters: Counters, config: PolicyConfig) -> tuple[Rung, ...]:
    """The rungs that there are for this verdict and job, in order; the first is always there."""
    row = config.row(lead.fault_class)
    culprits = nodes_of(lead, job.observation)
    rungs: list[Rung] = ["exclude" if row.verb == "exclude_and_restart" and culprits else "in_place"]
    blamable = bool(culprits) and row.budget in STRIKING and not row.rollback
    allowed = config.quarantine_mode != "observe"
    if blamable and row.verb != "exclude_and_restart":
        if _spares(job.observation, counters) >= len(culprits):
            rungs.append("spare")
        if allowed:
            rungs.append("exclude")
    if blamable and allowed and _group_of(culprits, job.observation) - set(culprits):
        rungs.append("exclude_group")
    if job.resume_step is not None:
        rungs.append("older_checkpoint")
    return tuple(rungs)


def breaker_words(
    excluded: Sequence[str], job: JobSnapshot, counters: Counters, config: PolicyConfig, now: float
) -> str:
    """Why so many nodes are not excluded without a person; empty where they may be."""
    since = max(now - config.breaker_seconds, counters.breaker_reset_at)
    recent = {one.node for one in counters.exclusions if one.at > since and not one.rest}
    new = set(excluded) - {one.node for one in counters.exclusions if not one.rest}
    total = len(job.observation.nodes) if job.observation is not None else job.nodes
    nodes_max = max(config.breaker_nodes_max, int(config.breaker_share * total))
    if not new or len(recent | new) <= nodes_max:
        return ""
    minutes = config.breaker_seconds / 60
    return (
        f"the breaker is open: {len(recent | new)} of {total} nodes excluded in {minutes:.0f} min, "
        f"{nodes_max} at most; look at what they have in common, then `transom resume`"
    )


def _flaps(lead: Verdict, counters: Counters, config: PolicyConfig, now: float) -> int:
    cause = cause_of(lead, config)
    return sum(one.cause == cause and one.at > now - config.flap_seconds for one in counters.restarts)


def _spares(observation: Observation | None, counters: Counters) -> int:
    if observation is None:
        return 0
    excluded = {one.node for one in counters.exclusions}
    return sum(node.state == "spare" and node.name not in excluded for node in observation.nodes)


def _group_of(culprits: Sequence[str], observation: Observation | None) -> set[str]:
    """All nodes of the culprits' groups, where the backend tells groups."""
    nodes = observation.nodes if observation is not None else ()
    groups = {node.group for node in nodes if node.name in culprits and node.group}
    return {node.name for node in nodes if node.group in groups}
