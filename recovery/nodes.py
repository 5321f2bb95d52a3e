"""Nodes that a job does without: put away with a reason and an end, given back by time or by a person."""

from __future__ import annotations

from collections.abc import Sequence

from .backend import Observation
from .plan import Exclusion, Plan
from .policy import quarantine_seconds
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import AttemptRow


def keep_away(store: RecoveryStore, config: PolicyConfig, job: str, plan: Plan, now: float) -> None:
    """What a plan does to nodes, written down; asked again for the same verdict it changes nothing."""
    quarantine(store, config, job, plan.excluded_nodes, plan.verdict_id, f"{plan.fault_class}, rung {plan.rung}", now)
    for node in plan.spared_nodes:
        until = now + config.spare_seconds
        reason = f"{plan.fault_class}: its ranks went to a spare"
        store.exclude(job, Exclusion(node, now, until, plan.verdict_id, reason, rest=True))
    store.strike(job, plan.struck_nodes, plan.verdict_id, now)


def quarantine(
    store: RecoveryStore,
    config: PolicyConfig,
    job: str,
    nodes: Sequence[str],
    verdict_id: str,
    reason: str,
    now: float,
) -> None:
    """Keep nodes away for a day, or twice as long as the last time."""
    for node in nodes:
        until = now + quarantine_seconds(store.quarantines(job, node), config)
        store.exclude(job, Exclusion(node, now, until, verdict_id, reason))


def adopt(store: RecoveryStore, observation: Observation, now: float) -> list[str]:
    """What people have done on the backend is taken over, not fought; each in a sentence.

    A node that we had excluded and that is usable there again was given back by somebody; its strikes stay. An
    attempt that is newer than any of ours was started by somebody, and is the job's attempt from now on.
    """
    job, told = observation.job, []
    usable = {node.name for node in observation.nodes if node.state in ("active", "spare")}
    for exclusion in store.exclusions(job, now):
        if exclusion.told and exclusion.node in usable and store.release(job, exclusion.node, now, known_there=True):
            told.append(f"an operator gave {exclusion.node} back on the backend; its strikes stay")
    newest = max((one.attempt for one in store.attempts(job)), default=0)
    if newest and observation.attempt > newest:
        nodes = len({rank.node for rank in observation.ranks})
        store.save_attempt(
            AttemptRow(job, observation.attempt, observation.token, now, now, budget="planned", nodes=nodes)
        )
        told.append(f"attempt {observation.attempt} was started by somebody else")
    return told


def usable_nodes(observation: Observation, excluded: Sequence[str]) -> int:
    """How many nodes a start could use now."""
    return sum(node.state in ("active", "spare") and node.name not in excluded for node in observation.nodes)


def release_words(store: RecoveryStore, job: str, now: float) -> str:
    """What a person could do about too few nodes: the oldest exclusion, and the command that ends it."""
    exclusions = store.exclusions(job, now)
    if not exclusions:
        return "no node is excluded; start another launcher, or wait"
    oldest = exclusions[0]
    hours = (oldest.until - now) / 3600
    return (
        f"the oldest exclusion is {oldest.node} ({oldest.reason}; {hours:.1f} h are left); "
        f"`transom unexclude {oldest.node} --job {job}` ends it"
    )
