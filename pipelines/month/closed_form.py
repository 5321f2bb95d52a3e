"""Other ways to run a job for a month, by arithmetic: nobody, torchrun, a requeue; and ours, as a check.

Only the policies' own rules and numbers differ, so that the table compares policies and not guesses. The dice are drawn
in a fixed order for each incident: time to the failure, work since the checkpoint, kind, then what the policy draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from pipelines.month.assumptions import BAD_NODES, HANGS, OURS, OURS_IN_MEMORY, Assumptions, Costs, FailureKind, Fleet
from pipelines.month.result import Month, reaction_seconds

TRIES_MAX = 3
BETWEEN_TRIES_SECONDS = 120.0
FOUND_BY_HAND_SECONDS = (3_600.0, 7_200.0)  # until a person sees a hang that nothing looks for
NODE_MISSED = 0.5  # a person does not see which node it was


@dataclass(slots=True)
class Repair:
    """One incident under one policy."""

    down_seconds: float = 0.0
    pages: int = 0
    restarts: int = 0
    more_lost_seconds: float = 0.0


Rule = Callable[[FailureKind, float, Costs, Assumptions, Random], Repair]


@dataclass(frozen=True, slots=True)
class Policy:
    """A name, what things cost under it, and what it does about a failure."""

    name: str
    costs: Costs
    rule: Rule


def nobody(kind: FailureKind, at: float, costs: Costs, given: Assumptions, dice: Random) -> Repair:
    """A person sees it, finds the cause and starts the job again."""
    repair = Repair(pages=1, restarts=1)
    if kind in HANGS:
        repair.down_seconds += dice.uniform(*FOUND_BY_HAND_SECONDS)
    repair.down_seconds += reaction_seconds(given.human, at, dice) + costs.restart_seconds
    if kind in BAD_NODES and dice.random() < NODE_MISSED:
        repair.restarts += 1
        repair.down_seconds += costs.restart_seconds
        repair.down_seconds += reaction_seconds(given.human, at + repair.down_seconds, dice)
    elif kind in ("user_bug", "poison_ckpt"):
        repair.restarts += 1
        repair.down_seconds += reaction_seconds(given.human, at + repair.down_seconds, dice) + costs.restart_seconds
    return repair


def restarter(good_node: float) -> Rule:
    """Three tries, then a person. `good_node`: how likely a try goes without the bad node."""

    def rule(kind: FailureKind, at: float, costs: Costs, given: Assumptions, dice: Random) -> Repair:
        repair = Repair()
        if kind in HANGS:
            repair.down_seconds += costs.hang_seconds
        if kind in BAD_NODES:
            for _ in range(TRIES_MAX):
                repair.restarts += 1
                repair.down_seconds += costs.restart_seconds
                if dice.random() < good_node:
                    return repair
                repair.down_seconds += BETWEEN_TRIES_SECONDS + (costs.hang_seconds if kind in HANGS else 0.0)
            repair.down_seconds += reaction_seconds(given.human, at + repair.down_seconds, dice)
        elif kind in ("user_bug", "poison_ckpt"):
            repair.restarts += TRIES_MAX
            repair.down_seconds += TRIES_MAX * (costs.restart_seconds + BETWEEN_TRIES_SECONDS)
            repair.down_seconds += reaction_seconds(given.human, at, dice)
        else:
            repair.restarts += 1
            repair.down_seconds += costs.restart_seconds
            return repair
        repair.pages += 1
        repair.restarts += 1
        repair.down_seconds += costs.restart_seconds
        return repair

    return rule


def ours(kind: FailureKind, at: float, costs: Costs, given: Assumptions, dice: Random) -> Repair:
    """What the product should come to; the simulation with its own code is held against this."""
    crash = kind in ("bad_node_crash", "transient_crash", "user_bug")
    repair = Repair(restarts=1)
    repair.down_seconds += (costs.crash_seconds if crash else costs.hang_seconds) + costs.decide_seconds
    repair.down_seconds += 0.0 if kind == "transient_crash" else costs.preflight_seconds
    if dice.random() < given.wrong_culprit:
        repair.restarts += 1
        repair.down_seconds += costs.restart_seconds
    repair.down_seconds += costs.restart_seconds
    if kind == "user_bug":
        repair.down_seconds += 2 * (costs.restart_seconds + 60.0)
        repair.down_seconds += reaction_seconds(given.human, at + repair.down_seconds, dice) + costs.restart_seconds
        repair.pages, repair.restarts = 1, repair.restarts + 3
    elif kind == "poison_ckpt":
        repair.more_lost_seconds = given.poison_seconds
        repair.down_seconds += 0.5 * costs.restart_seconds
    return repair


POLICIES: Mapping[str, Policy] = {
    "nobody": Policy("nobody, 3 h checkpoints", Costs(10_800.0, 180.0, 720.0), nobody),
    "torchrun": Policy("torchrun in place, 3 h checkpoints", Costs(10_800.0, 180.0, 360.0, 600.0), restarter(0.0)),
    "requeue": Policy("scheduler requeue, 30 min checkpoints", Costs(1_800.0, 20.0, 600.0, 600.0), restarter(0.4)),
    "ours": Policy("ours by arithmetic, 5 min checkpoints", OURS, ours),
    "ours_in_memory": Policy("ours by arithmetic, 1 min in memory", OURS_IN_MEMORY, ours),
}


def month_of(policy: Policy, fleet: Fleet, given: Assumptions, seed: int) -> Month:
    """One month. The last stretch is cut at its end and loses nothing; a repair may run past it."""
    dice = Random(seed)
    month = Month(policy.name, fleet.name, given.month_seconds)
    share = policy.costs.checkpoint_seconds / (policy.costs.checkpoint_seconds + policy.costs.save_seconds)
    kinds, weights = list(given.shares), list(given.shares.values())
    at = 0.0
    while at < given.month_seconds:
        up = dice.expovariate(1.0 / fleet.mttf_seconds)
        if at + up >= given.month_seconds:
            month.useful_seconds += (given.month_seconds - at) * share
            break
        gained = up * share
        since_checkpoint = dice.uniform(0.0, policy.costs.checkpoint_seconds)
        (kind,) = dice.choices(kinds, weights)
        at += up
        repair = policy.rule(kind, at, policy.costs, given, dice)
        lost = min(gained, min(gained, since_checkpoint) + repair.more_lost_seconds)
        month.useful_seconds += gained - lost
        month.lost_seconds += lost
        month.failures += 1
        month.restarts += repair.restarts
        month.pages += repair.pages
        month.down.append((at, at + repair.down_seconds))
        at += repair.down_seconds
    return month
