"""What had befallen a culprit shortly before the job broke: a warning that turns out to have been the cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from detectors.clues import Clue, Condition
from detectors.verdict import Advice, Culprit, Evidence, FaultClass, Verdict

BEFORE_SECONDS = 60.0  # a condition that ended longer ago explains nothing
KILLED = 9
CAUSES: frozenset[FaultClass] = frozenset(
    ("memory_growth", "throttled", "link_degraded", "data_stall", "gpu_ecc", "checkpoint_failed")
)
SUSPECTED = 0.7
SLOWED: frozenset[FaultClass] = frozenset(("straggler", "data_stall"))
SLOWS: frozenset[FaultClass] = frozenset(("throttled", "link_degraded", "memory_growth"))


class Foregoing(NamedTuple):
    """What a condition adds to a verdict. `fault_class` None: the class stays."""

    fault_class: FaultClass | None
    advice: Advice | None
    culprits: tuple[Culprit, ...]
    sentence: str
    evidence: tuple[Evidence, ...]


def explain(
    lead: Clue, culprits: tuple[Culprit, ...], before: Sequence[Verdict], *, confirmed: bool
) -> Foregoing | None:
    """The condition that best explains what befell the culprits; None where there is none.

    Memory that grew and then SIGKILL is the kernel's memory killer, probably; uncorrected memory errors of a GPU and
    then a death by signal are the GPU. Everything else is named beside the cause.
    """
    found = [verdict for verdict in before if verdict.fault_class in CAUSES and _concerns(verdict, lead, culprits)]
    if not found:
        return None
    found.sort(key=lambda verdict: (_rank_of(verdict.fault_class), verdict.onset_at, verdict.verdict_id))
    cause = found[0]
    evidence = tuple(cause.evidence[:2])
    if cause.fault_class == "memory_growth" and lead.signal == KILLED and not confirmed:
        suspected = tuple(Culprit(rank=who.rank, node=who.node, confidence=SUSPECTED) for who in culprits)
        sentence = f"Its memory had grown before, so the kernel's memory killer is suspected: {cause.summary}"
        return Foregoing("host_oom", "restart_in_place", suspected, sentence, evidence)
    if cause.fault_class == "gpu_ecc" and lead.kind == "exit" and lead.signal is not None and not confirmed:
        node = tuple(Culprit(node=who.node, confidence=0.9) for who in culprits[:1])
        return Foregoing("gpu_ecc", None, node, f"Before it: {cause.summary}", evidence)
    return Foregoing(None, None, culprits, f"Before it: {cause.summary}", evidence)


def slowed_by(condition: Condition, before: Sequence[Verdict]) -> Verdict | None:
    """The open condition that makes this one's rank slow: a straggler that is throttled is no riddle."""
    if condition.fault_class not in SLOWED:
        return None
    found = [
        verdict
        for verdict in before
        if verdict.status == "open" and verdict.fault_class in SLOWS and _shares(verdict.culprits, condition.culprits)
    ]
    return min(found, key=lambda verdict: (verdict.onset_at, verdict.verdict_id)) if found else None


def _concerns(verdict: Verdict, lead: Clue, culprits: tuple[Culprit, ...]) -> bool:
    """It began before, and is about a rank or a node that is blamed now."""
    return verdict.onset_at <= lead.at and _shares(verdict.culprits, culprits)


def _shares(first: tuple[Culprit, ...], second: tuple[Culprit, ...]) -> bool:
    """A rank, or a node where one of them means all of it, is in both."""
    for mine in first:
        for theirs in second:
            if mine.rank is not None and mine.rank == theirs.rank:
                return True
            if mine.node == theirs.node and (mine.rank is None or theirs.rank is None):
                return True
    return False


def _rank_of(fault_class: FaultClass) -> int:
    """The likelier to end a rank comes first."""
    order: tuple[FaultClass, ...] = ("gpu_ecc", "memory_growth", "link_degraded", "checkpoint_failed", "throttled")
    return order.index(fault_class) if fault_class in order else len(order)
