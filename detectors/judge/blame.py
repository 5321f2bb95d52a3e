"""Who did it: the earliest root by producer time, what explains it better, and whether it is a rank or a node.

Times of several nodes are compared by one clock (`clock_skew.py`); where two roots lie closer than the clocks agree,
the heavier evidence leads (`WEIGHTS`), and where that is equal too nobody is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from detectors.clues import Clue
from detectors.culprits import names_of, whom
from detectors.judge.foregoing import Foregoing, explain
from detectors.roster import Roster
from detectors.verdict import Advice, Culprit, Evidence, FaultClass, Severity, Verdict

EXPLAIN_BEFORE_SECONDS = 120.0
EXPLAIN_AFTER_SECONDS = 120.0
TOGETHER_SECONDS = 1.0  # roots of several ranks this close together are one blow
SURVIVED_STEPS = 2  # of all ranks of a node, after what its kernel said
NODE_CONFIDENCE = 0.9  # of a node that several of its ranks stand for

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
    "planned": ("info", "restart_in_place"),
    "user_error": ("error", "stop"),
    "unknown": ("critical", "restart_in_place"),
}

# How much one kind of evidence weighs against another; 1.0 is a device's own word.
WEIGHTS: Mapping[str, float] = {
    "device": 1.0, "ended by a signal": 0.9, "lost node": 0.9, "nan": 0.9, "stopped or silent": 0.9,
    "sequence": 0.8, "stack": 0.7, "log": 0.7, "exception": 0.7, "metric": 0.6, "weak": 0.3,
}  # fmt: skip

DEVICE: frozenset[FaultClass] = frozenset(("gpu_lost", "gpu_ecc", "nvlink_error"))  # the node is to blame
LINES = ("log", "device")  # what explains an end by having been said before it
POINTING = ("stack", "sequence")  # says who is waited for; breaks nothing by itself
SURELY = 0.9  # a hang that silence or the process itself tells of needs no stacks to name its rank
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
    pointed: bool = False  # stacks or sequence numbers are part of it


def choose(clues: Sequence[Clue], roster: Roster, before: Sequence[Verdict] = ()) -> Blame:
    """Weigh `clues` (at least one). Roots beat the weak, the weak beat those who only suffer; then the earliest.

    `before`: conditions that were open shortly before; those of the culprit are named with it.
    """
    pointing = sorted((clue for clue in clues if clue.kind in POINTING), key=lambda clue: (-_sure(clue), clue.kind))
    clues = [clue for clue in clues if clue.kind not in POINTING]
    assert clues, "stacks alone break nothing"
    roots = sorted((clue for clue in clues if clue.role == "root"), key=lambda clue: _order(clue, roster))
    dead = {clue.rank: clue for clue in clues if clue.kind == "exit"}
    roots = [clue for clue in roots if not _explains_nothing(clue, dead) and not _survived(clue, roster)]
    if not roots:
        return _without_root(clues, roster, pointing)
    first, rivals = _first(roots, roster)
    better = _explanation(first, clues, roster)
    lead = better or first
    if lead.kind == "hang" and pointing:
        return _pointed(lead, pointing, roster, before)
    culprits, together = _culprits(lead, roots, roster)
    table_severity, table_advice = CLASS_TABLE[lead.fault_class]
    summary = _summary(lead, first, culprits, together, roster, dead.get(lead.rank))
    if rivals and better is None:
        culprits, summary = (), f"{summary} {_rivals_words(lead, rivals)}"
    others = [clue for clue in [lead, first, *together] if clue is not lead]
    suffering = sorted(
        (clue for clue in clues if clue.role in ("cascade", "weak")), key=lambda clue: _order(clue, roster)
    )
    evidence = _evidence([lead, *others, *suffering[:2]])
    victims = max(0, roster.size - len(ranks_of(culprits, roster)))
    if not culprits and together and not rivals:
        victims = 0  # all of them did it
    blame = Blame(
        lead=lead, fault_class=lead.fault_class, severity=lead.severity or table_severity,
        advice=lead.advice or table_advice, culprits=culprits, victims=victims, summary=summary, evidence=evidence,
        detector=f"rules/{lead.rule}" if lead.rule else "job_channel" if lead.kind == "nan" else "liveness",
        confirmed=better is not None,
    )  # fmt: skip
    return _after(blame, before, roster)


def _after(blame: Blame, before: Sequence[Verdict], roster: Roster) -> Blame:
    """The same, with what had befallen the culprit shortly before."""
    foregoing: Foregoing | None = explain(blame.lead, blame.culprits, before, confirmed=blame.confirmed)
    if foregoing is None:
        return blame
    severity, advice = blame.severity, blame.advice
    if foregoing.fault_class is not None:
        severity, advice = CLASS_TABLE[foregoing.fault_class]
    return replace(
        blame, fault_class=foregoing.fault_class or blame.fault_class, severity=severity,
        advice=foregoing.advice or advice, culprits=foregoing.culprits,
        summary=f"{blame.summary} {foregoing.sentence}", evidence=(*blame.evidence[:1], *foregoing.evidence,
        *blame.evidence[1:]), victims=max(0, roster.size - len(ranks_of(foregoing.culprits, roster))),
    )  # fmt: skip


def _pointed(lead: Clue, pointing: Sequence[Clue], roster: Roster, before: Sequence[Verdict]) -> Blame:
    """A hang with stacks or sequence numbers beside it: they name whom silence does not name surely."""
    best = pointing[0]
    assert lead.culprits is not None
    surely = max((culprit.confidence for culprit in lead.culprits), default=0.0)
    theirs = bool(best.culprits) and surely < SURELY and surely <= _sure(best)
    culprits = best.culprits if theirs and best.culprits is not None else lead.culprits
    severity, advice = CLASS_TABLE[lead.fault_class]
    summary = lead.summary
    if theirs:
        step = f" in step {lead.step}" if lead.step is not None else ""
        summary = f"The job hangs{step} because of {names_of(culprits)}: {best.summary}."
    elif not culprits:
        summary = f"{lead.summary.rstrip('.')}: {best.summary}."
    blame = Blame(
        lead=lead, fault_class=lead.fault_class, severity=lead.severity or severity, advice=lead.advice or advice,
        culprits=culprits, victims=max(0, roster.size - len(ranks_of(culprits, roster))), summary=summary,
        evidence=_evidence([_shortened(lead), *pointing]), detector="liveness", confirmed=False, pointed=True,
    )  # fmt: skip
    return _after(blame, before, roster)


def _shortened(clue: Clue) -> Clue:
    """With two pieces of its evidence, so that what points at somebody has room."""
    return msgspec.structs.replace(clue, evidence=clue.evidence[:2])


def _sure(clue: Clue) -> float:
    return max((culprit.confidence for culprit in clue.culprits or ()), default=0.0)


def weight(clue: Clue) -> float:
    """What this clue weighs beside another of the same moment."""
    if clue.fault_class in DEVICE:
        return WEIGHTS["device"]
    if clue.role in ("weak", "cascade"):
        return WEIGHTS["weak"]
    if clue.kind == "exit":
        return WEIGHTS["ended by a signal" if clue.signal is not None else "exception"]
    return WEIGHTS[{"node": "lost node", "hang": "stopped or silent"}.get(clue.kind, clue.kind)]


def _first(roots: Sequence[Clue], roster: Roster) -> tuple[Clue, list[Clue]]:
    """The root that leads, and those that might as well: on another node, as heavy, and no clock tells them apart."""
    earliest = roots[0]
    tied = [earliest] + [clue for clue in roots[1:] if _tied(earliest, clue, roster)]
    first = max(tied, key=weight)  # the earliest of the heaviest
    rivals = [
        clue
        for clue in tied
        if clue is not first
        and weight(clue) == weight(first)
        and clue.node != first.node
        and not _same_blow(first, clue)
    ]
    return first, rivals if first.kind != "nan" else []


def _tied(first: Clue, second: Clue, roster: Roster) -> bool:
    apart = _when(second, roster) - _when(first, roster)
    return apart < roster.clocks.uncertainty(first.source.node, second.source.node)


def _same_blow(first: Clue, second: Clue) -> bool:
    """Ends of one class are named together; of exceptions that is only done where all ranks have them."""
    both_ends = first.kind == second.kind == "exit" and first.fault_class == second.fault_class
    both_taken = first.fault_class == second.fault_class == "preempted"  # an allocation's nodes go together
    return both_taken or (both_ends and first.fault_class != "user_error")


def _rivals_words(lead: Clue, rivals: Sequence[Clue]) -> str:
    other = rivals[0]
    who = f"rank {other.rank} on {other.node}" if other.rank is not None else f"node {other.node}"
    seconds = abs(other.at - lead.at)
    return (
        f"At the same time, as far as clocks tell ({seconds:.2f} s apart), {who} failed too: who was first is unknown."
    )


def _when(clue: Clue, roster: Roster) -> float:
    """When it happened, by the clock of the median node."""
    return clue.at + roster.clocks.offset(clue.source.node)


def _order(clue: Clue, roster: Roster) -> tuple[float, int, str]:
    return (_when(clue, roster), -1 if clue.rank is None else clue.rank, clue.source.node)


def _explains_nothing(clue: Clue, dead: Mapping[int | None, Clue]) -> bool:
    """A line of a rank that then died of a signal for which such a line is no reason; a line of a rank that lives."""
    if clue.kind not in LINES or clue.alone:
        return False
    end = dead.get(clue.rank)
    if clue.rank is not None and end is None:
        return True
    return end is not None and end.signal is not None and end.role == "root" and clue.fault_class not in EXPLAINS_SIGNAL


def _survived(clue: Clue, roster: Roster) -> bool:
    """A kernel's line after which all ranks of its node went on: no cause, though it may explain an end on its node."""
    if clue.kind not in LINES or clue.alone or clue.rank is not None or clue.step is None:
        return False
    ranks = roster.ranks_of(clue.node or "")
    return bool(ranks) and min(rank.step for rank in ranks) >= clue.step + SURVIVED_STEPS


def _explanation(first: Clue, clues: Sequence[Clue], roster: Roster) -> Clue | None:
    """The earliest line that says why `first` happened: of the same rank, or of its node's kernel."""
    if first.kind not in ("exit", "node"):
        return None
    found = [
        clue
        for clue in clues
        if clue.kind in LINES
        and clue.role in ("root", "confirm")
        and clue.fault_class != "warning"
        and -EXPLAIN_BEFORE_SECONDS <= clue.at - first.at <= EXPLAIN_AFTER_SECONDS
        and (clue.rank == first.rank if clue.rank is not None else clue.node == first.node)
        and (first.signal is None or clue.fault_class in EXPLAINS_SIGNAL)
        and (first.kind != "node" or clue.fault_class in EXPLAINS_SIGNAL)
        and not (first.kind == "exit" and first.signal is None and _survived(clue, roster))
    ]
    return min(found, key=lambda clue: (_survived(clue, roster), _order(clue, roster))) if found else None


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
        and clue.fault_class == lead.fault_class and _when(clue, roster) <= _when(lead, roster) + TOGETHER_SECONDS
    ]  # fmt: skip
    ranks = sorted({lead.rank, *(clue.rank for clue in together if clue.rank is not None)})
    several = len({rank.node for rank in roster.ranks.values()}) > 1
    if len(ranks) > 1 and len(ranks) >= roster.size and (several or lead.fault_class == "user_error"):
        return (), together
    named = tuple(
        msgspec.structs.replace(culprit, confidence=NODE_CONFIDENCE) if culprit.rank is None else culprit
        for culprit in whom(ranks, roster, 1.0)
    )
    if lead.fault_class == "user_error" and len(named) > 1:
        return (Culprit(rank=lead.rank, node=lead.node),), together
    return named, together


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
    if together and len(culprits) > 1:
        return f"{lead.summary} Within a second failed: {names_of(culprits)}."
    if lead.kind == "log" and end is not None and end.role == "root" and end.fault_class == lead.fault_class:
        return end.summary
    if lead is not first and first.kind == "exit":
        return f"{lead.summary} Then rank {first.rank} on {first.node} ended."
    return lead.summary


def _without_root(clues: Sequence[Clue], roster: Roster, pointing: Sequence[Clue]) -> Blame:
    """Only sufferers so far. A rank that ended without a word is suspected, one that lost its peers is not, nor one
    that reported a time-out before it ended: it had waited for somebody."""
    ordered = sorted(clues, key=lambda clue: _order(clue, roster))
    ends = [clue for clue in ordered if clue.kind == "exit"]
    timed_out = {clue.rank for clue in clues if clue.kind == "log" and clue.fault_class == "collective_timeout"}
    if timed_out:
        return _timed_out(ordered, timed_out, roster, pointing)
    weak = [clue for clue in ends if clue.role == "weak"]
    pool = weak or ends or ordered
    lead = pool[0]
    fault_class: FaultClass = "rank_lost" if weak and lead.signal is not None else "unknown"
    severity, advice = CLASS_TABLE[fault_class]
    rivals = [clue for clue in weak[1:] if clue.node != lead.node and _tied(lead, clue, roster)]
    known = weak and lead.rank is not None and not rivals
    culprits = (Culprit(rank=lead.rank, node=lead.node, confidence=0.5),) if known else ()
    ranks = sorted({clue.rank for clue in ends if clue.rank is not None})
    summary = f"{len(ranks)} of {roster.size} ranks lost their peers and nobody has said why: the cause is unknown."
    if weak:
        summary = f"{lead.summary} {_rivals_words(lead, rivals)}" if rivals else lead.summary
    return Blame(
        lead=lead, fault_class=fault_class, severity=severity, advice=advice, culprits=culprits,
        victims=max(0, roster.size - len(culprits)), summary=summary, evidence=_evidence(pool[:4]),
        detector="liveness", confirmed=False,
    )  # fmt: skip


def _timed_out(clues: Sequence[Clue], timed_out: set[int | None], roster: Roster, pointing: Sequence[Clue]) -> Blame:
    """A collective that timed out, told by those who waited: who did not come is to blame, if anybody is known."""
    lead = next(clue for clue in clues if clue.kind == "log" and clue.fault_class == "collective_timeout")
    severity, advice = CLASS_TABLE["collective_timeout"]
    ended = {clue.rank for clue in clues if clue.kind == "exit"}
    missing = [rank for rank in roster.ranks.values() if rank.rank not in timed_out | ended and not rank.finished]
    if 2 * len(missing) >= roster.size or 2 * len(timed_out) < roster.size:
        missing = []  # those who waited have not all said so yet
    best = pointing[0] if pointing else None
    alone = missing[0].rank if len(missing) == 1 else None  # outranks the numbers of those who spoke
    named = best.culprits if best is not None else None
    if best is not None and best.kind == "sequence" and alone is not None:
        named = named if named and alone in ranks_of(named, roster) else None
    told = f"{len(timed_out)} of {roster.size} ranks waited for a collective until it timed out"
    culprits: tuple[Culprit, ...] = ()
    if best is not None and named:
        culprits, summary = named, f"{told}: {best.summary}."
    elif missing:
        share = min(0.5, round(1.0 / len(missing), 3))
        culprits = whom((rank.rank for rank in missing), roster, share)
        summary = f"{told}; {names_of(culprits)} said nothing, so the others may have waited for it."
    else:
        summary = f"{told}; who did not come is unknown."
    return Blame(
        lead=lead, fault_class="collective_timeout", severity=severity, advice=advice, culprits=culprits,
        victims=max(0, roster.size - len(ranks_of(culprits, roster))), summary=summary,
        evidence=_evidence([*pointing, *clues[:4]]), detector=f"rules/{lead.rule}" if lead.rule else "liveness",
        confirmed=False, pointed=bool(pointing),
    )  # fmt: skip


def _evidence(clues: Sequence[Clue]) -> tuple[Evidence, ...]:
    seen: list[Evidence] = []
    for clue in clues:
        seen += [entry for entry in clue.evidence if entry not in seen]
    return tuple(seen)


def ranks_of(culprits: Sequence[Culprit], roster: Roster) -> set[int]:
    """Everybody who is blamed, a node being all its ranks."""
    blamed: set[int] = set()
    for culprit in culprits:
        if culprit.rank is not None:
            blamed.add(culprit.rank)
        elif culprit.node is not None:
            blamed |= {rank.rank for rank in roster.ranks_of(culprit.node)}
    return blamed
