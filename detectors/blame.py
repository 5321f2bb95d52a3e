"""Who did it: the earliest root by producer time, what explains it better, and whether it is a rank or a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from detectors.clues import Clue
from detectors.roster import Roster
from detectors.verdict import Advice, Culprit, Evidence, FaultClass, Severity

EXPLAIN_BEFORE_SECONDS = 120.0
EXPLAIN_AFTER_SECONDS = 120.0
TOGETHER_SECONDS = 1.0  # roots of several ranks this close together are one blow

CLASS_TABLE: Mapping[FaultClass, tuple[Severity, Advice]] = {
    "straggler": ("warning", "notify"),
    "data_stall": ("warning", "notify"),
    "job_slow": ("warning", "notify"),
    "contended_node": ("info", "none"),
    "loss_spike": ("warning", "notify"),
    "divergence": ("error", "notify"),
    "regime_change": ("info", "none"),
    "memory_growth": ("warning", "notify"),
    "throttled": ("warning", "notify"),
    "link_degraded": ("warning", "notify"),
    "checkpoint_failed": ("error", "notify"),
    "telemetry_gap": ("info", "none"),
    "warning": ("info", "none"),
    "rank_lost": ("critical", "restart_in_place"),
    "node_lost": ("critical", "restart_exclude_node"),
    "hang": ("critical", "restart_in_place"),
    "collective_timeout": ("critical", "restart_in_place"),
    "nan": ("critical", "rollback_restart"),
    "numeric": ("critical", "rollback_restart"),
    "gpu_lost": ("critical", "restart_exclude_node"),
    "gpu_ecc": ("critical", "restart_exclude_node"),
    "nvlink_error": ("critical", "restart_exclude_node"),
    "network_error": ("error", "restart_in_place"),
    "cuda_error": ("error", "restart_in_place"),
    "illegal_memory_access": ("error", "restart_in_place"),
    "oom": ("error", "stop"),
    "host_oom": ("error", "stop"),
    "storage_error": ("error", "restart_in_place"),
    "disk_full": ("error", "stop"),
    "start_failure": ("error", "restart_in_place"),
    "preempted": ("info", "restart_in_place"),
    "user_error": ("error", "stop"),
    "unknown": ("critical", "restart_in_place"),
}

DEVICE: frozenset[FaultClass] = frozenset(("gpu_lost", "gpu_ecc", "nvlink_error"))  # the node is to blame
EXPLAINS_SIGNAL: frozenset[FaultClass] = DEVICE | {
    "host_oom", "cuda_error", "illegal_memory_access", "node_lost", "preempted", "storage_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blame:
    """The judge's opinion of a set of clues."""

    lead: Clue
    fault_class: FaultClass
    severity: Severity
    advice: Advice
    culprits: tuple[Culprit, ...]
    victims: int
    summary: str
    evidence: tuple[Evidence, ...]
    detector: str
    confirmed: bool


def choose(clues: Sequence[Clue], roster: Roster) -> Blame:
    """Weigh `clues` (at least one). Roots beat the weak, the weak beat those who only suffer; then the earliest."""
    roots = sorted((clue for clue in clues if clue.role == "root"), key=_order)
    dead = {clue.rank: clue for clue in clues if clue.kind == "exit"}
    roots = [clue for clue in roots if not _explains_nothing(clue, dead)]
    if not roots:
        return _without_root(clues, roster)
    first = roots[0]
    better = _explanation(first, clues)
    lead = better or first
    culprits, together = _culprits(lead, roots, roster)
    table_severity, table_advice = CLASS_TABLE[lead.fault_class]
    summary = _summary(lead, first, culprits, together, roster, dead.get(lead.rank))
    others = [clue for clue in [lead, first, *together] if clue is not lead]
    suffering = sorted((clue for clue in clues if clue.role in ("cascade", "weak")), key=_order)
    evidence = _evidence([lead, *others, *suffering[:2]])
    victims = max(0, roster.size - len(_ranks(culprits, roster)))
    if not culprits and lead.fault_class == "user_error":
        victims = 0  # all of them did it
    return Blame(
        lead=lead, fault_class=lead.fault_class, severity=lead.severity or table_severity,
        advice=lead.advice or table_advice, culprits=culprits, victims=victims, summary=summary, evidence=evidence,
        detector=f"rules/{lead.rule}" if lead.rule else "job_channel" if lead.kind == "nan" else "liveness",
        confirmed=better is not None,
    )  # fmt: skip


def _order(clue: Clue) -> tuple[float, int, str]:
    return (clue.at, -1 if clue.rank is None else clue.rank, clue.source.node)


def _explains_nothing(clue: Clue, dead: Mapping[int | None, Clue]) -> bool:
    """A line of a rank that then died of a signal for which such a line is no reason; a line of a rank that lives."""
    if clue.kind != "log" or clue.alone:
        return False
    end = dead.get(clue.rank)
    if clue.rank is not None and end is None:
        return True
    return end is not None and end.signal is not None and end.role == "root" and clue.fault_class not in EXPLAINS_SIGNAL


def _explanation(first: Clue, clues: Sequence[Clue]) -> Clue | None:
    """The earliest line that says why `first` happened: of the same rank, or of its node's kernel."""
    if first.kind not in ("exit", "node"):
        return None
    found = [
        clue
        for clue in clues
        if clue.kind == "log"
        and clue.role in ("root", "confirm")
        and clue.fault_class != "warning"
        and first.at - EXPLAIN_BEFORE_SECONDS <= clue.at <= first.at + EXPLAIN_AFTER_SECONDS
        and (clue.rank == first.rank if clue.rank is not None else clue.node == first.node)
        and (first.signal is None or clue.fault_class in EXPLAINS_SIGNAL)
        and (first.kind != "node" or clue.fault_class in EXPLAINS_SIGNAL)
    ]
    return min(found, key=_order) if found else None


def _culprits(lead: Clue, roots: Sequence[Clue], roster: Roster) -> tuple[tuple[Culprit, ...], list[Clue]]:
    """Whom to name, and the clues of the others who fell in the same blow."""
    if lead.culprits is not None:
        return lead.culprits, []
    if lead.fault_class in DEVICE or lead.fault_class == "node_lost" or lead.rank is None:
        return ((Culprit(node=lead.node),) if lead.node else ()), []
    together = [
        clue
        for clue in roots
        if clue is not lead and clue.kind == "exit" and clue.rank != lead.rank
        and clue.fault_class == lead.fault_class and clue.at <= lead.at + TOGETHER_SECONDS
    ]  # fmt: skip
    ranks = sorted({lead.rank, *(clue.rank for clue in together if clue.rank is not None)})
    if lead.fault_class == "user_error" and len(ranks) > 1 and len(ranks) >= roster.size:
        return (), together
    nodes = {roster.node_of(rank) for rank in ranks}
    if len(ranks) > 1 and len(nodes) == 1 and len({rank.node for rank in roster.ranks.values()}) > 1:
        return (Culprit(node=lead.node, confidence=0.9),), together
    if lead.fault_class == "user_error":
        return (Culprit(rank=lead.rank, node=lead.node),), together
    return tuple(Culprit(rank=rank, node=roster.node_of(rank)) for rank in ranks), together


def _summary(
    lead: Clue, first: Clue, culprits: tuple[Culprit, ...], together: list[Clue], roster: Roster, end: Clue | None
) -> str:
    if together and not culprits:
        return f"All {roster.size} ranks ended with the same kind of error: {lead.summary}"
    if together and len(culprits) == 1 and culprits[0].rank is None:
        ranks = ", ".join(
            str(rank) for rank in sorted({clue.rank for clue in (lead, *together) if clue.rank is not None})
        )
        return f"Ranks {ranks}, all on {culprits[0].node}, were lost together: {lead.summary}"
    if lead.kind == "log" and end is not None and end.role == "root" and end.fault_class == lead.fault_class:
        return end.summary
    if lead is not first and first.kind == "exit":
        return f"{lead.summary} Then rank {first.rank} on {first.node} ended."
    return lead.summary


def _without_root(clues: Sequence[Clue], roster: Roster) -> Blame:
    """Only sufferers so far. A rank that ended without a word is suspected, one that lost its peers is not."""
    ends = sorted((clue for clue in clues if clue.kind == "exit"), key=_order)
    weak = [clue for clue in ends if clue.role == "weak"]
    pool = weak or ends or sorted(clues, key=_order)
    lead = pool[0]
    fault_class: FaultClass = "rank_lost" if weak and lead.signal is not None else "unknown"
    severity, advice = CLASS_TABLE[fault_class]
    culprits = (Culprit(rank=lead.rank, node=lead.node, confidence=0.5),) if weak and lead.rank is not None else ()
    ranks = sorted({clue.rank for clue in ends if clue.rank is not None})
    summary = (
        lead.summary
        if weak
        else f"{len(ranks)} of {roster.size} ranks lost their peers and nobody has said why: the cause is unknown."
    )
    return Blame(
        lead=lead, fault_class=fault_class, severity=severity, advice=advice, culprits=culprits,
        victims=max(0, roster.size - len(culprits)), summary=summary, evidence=_evidence(pool[:4]),
        detector="liveness", confirmed=False,
    )  # fmt: skip


def _evidence(clues: Sequence[Clue]) -> tuple[Evidence, ...]:
    seen: list[Evidence] = []
    for clue in clues:
        seen += [entry for entry in clue.evidence if entry not in seen]
    return tuple(seen)


def _ranks(culprits: tuple[Culprit, ...], roster: Roster) -> set[int]:
    blamed: set[int] = set()
    for culprit in culprits:
        if culprit.rank is not None:
            blamed.add(culprit.rank)
        elif culprit.node is not None:
            blamed |= {rank.rank for rank in roster.ranks_of(culprit.node)}
    return blamed
