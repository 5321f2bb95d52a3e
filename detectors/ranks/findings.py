"""Findings of the rank channel in words: the condition that the judge opens, with its evidence."""

from __future__ import annotations

from typing import NamedTuple

from detectors.clues import Condition, Source, six_digits
from detectors.ranks.finding import Finding, Kind
from detectors.roster import Roster
from detectors.steps import StepMatrix
from detectors.verdict import Culprit, Evidence

NAMES: dict[Kind, str] = {
    "straggler": "compute time", "data_stall": "time waiting for data", "contended_node": "run-queue delay",
    "link_degraded": "collective wait",
}  # fmt: skip
OPTIMIZER = "train.optimizer.duration"


class Support(NamedTuple):
    """What the ensemble says of a finding: clean steps so odd are one in 10^decades; and its evidence."""

    decades: float
    evidence: tuple[Evidence, ...]


def condition_of(finding: Finding, matrix: StepMatrix, roster: Roster, support: Support | None) -> Condition:
    """The condition for an opened finding, with the ensemble's opinion where it has one."""
    whole_node = finding.rank is None
    onset = finding.steps[0]
    rank = _speaker(finding, matrix, roster, onset)
    node = roster.node_of(rank)
    seen_at, sequence, partition, offset = matrix.report(onset, rank)
    value, peers = six_digits(finding.value), six_digits(finding.peers_median)
    told_by = None if whole_node and finding.kind != "contended_node" else rank
    evidence = [
        Evidence(
            kind="metric", text=_text(finding, rank, value, peers), at=seen_at, rank=told_by, node=node,
            metric=finding.metric, step=onset, value=value, peers_median=peers, unit="s", topic="metrics",
            partition=partition, offset=offset,
        )
    ]  # fmt: skip
    if finding.wait is not None and finding.wait_peers is not None:
        evidence.append(_wait_evidence(finding, told_by, node, seen_at, onset))
    evidence += support.evidence if support is not None else ()
    sure = _confidence(finding, None if support is None else support.decades)
    members = roster.ranks_of(finding.node) if whole_node else []
    suffering = len(members) if finding.kind == "contended_node" else roster.size - max(1, len(members))
    return Condition(
        key=f"{finding.kind}/{finding.subject}",
        fault_class=finding.kind,
        culprits=(Culprit(rank=None if whole_node else rank, node=node, confidence=sure),),
        victims=max(0, suffering),
        onset_at=seen_at,
        onset_step=onset,
        summary=_summary(finding, rank, node, value, peers, onset, len(members)),
        evidence=tuple(evidence),
        source=Source(
            rank=rank, node=node or "", topic="metrics", sequence=sequence, partition=partition, offset=offset
        ),
        detector="rank_channel",
    )


def _speaker(finding: Finding, matrix: StepMatrix, roster: Roster, onset: int) -> int:
    """The rank whose message is the finding's first evidence: for a node the lowest of its ranks that told."""
    if finding.rank is not None:
        return finding.rank
    mine = [state.rank for state in roster.ranks_of(finding.node) if state.rank in matrix.ranks]
    told = [rank for rank in mine if matrix.report(onset, rank)[1] >= 0]
    return (told or mine)[0]


def _wait_evidence(finding: Finding, rank: int | None, node: str | None, at: float, onset: int) -> Evidence:
    assert finding.wait is not None
    assert finding.wait_peers is not None
    value, peers = six_digits(finding.wait), six_digits(finding.wait_peers)
    whose = f"rank {rank}" if rank is not None else f"the ranks of {node}"
    text = (
        f"the others wait for it: collective wait of {whose} is {value:.4g} s, its peers' median {peers:.4g} s"
        if _awaited(finding)
        else f"collective wait of {whose} is {value:.4g} s, its peers' median {peers:.4g} s: nobody waits for it"
    )
    return Evidence(
        kind="metric", text=text, at=at, rank=rank, node=node, metric="train.collective.wait", step=onset,
        value=value, peers_median=peers, unit="s",
    )  # fmt: skip


def _awaited(finding: Finding) -> bool:
    """Its collective wait is shorter than its peers' by a good part of what it computes longer."""
    assert finding.wait is not None
    assert finding.wait_peers is not None
    return finding.wait_peers - finding.wait >= 0.3 * (finding.value - finding.peers_median)


def _confidence(finding: Finding, decades: float | None) -> float:
    """Who computes long while the others wait is sure; the ensemble's support adds a little."""
    if finding.kind == "contended_node":
        return 0.6
    if finding.kind == "link_degraded":
        return 0.7
    if finding.wait is not None and not _awaited(finding):
        return 0.75
    return 0.95 if finding.wait is not None or (decades is not None and decades >= 4) else 0.9


def _text(finding: Finding, rank: int, value: float, peers: float) -> str:
    name = "optimizer time" if finding.metric == OPTIMIZER else NAMES[finding.kind]
    whose = f"rank {rank} is" if finding.rank is not None or finding.kind == "contended_node" else (
        f"the ranks of {finding.node} is"
    )  # fmt: skip
    return (
        f"{name} of {whose} {value:.4g} s, its peers' median {peers:.4g} s, in"
        f" {len(finding.steps)} of the last steps ({finding.steps[0]} to {finding.steps[-1]})"
    )


def _summary(finding: Finding, rank: int, node: str | None, value: float, peers: float, onset: int, ranks: int) -> str:
    percent = f"{100.0 * (value / peers - 1.0):+.0f} %" if peers > 0.0 else "from nothing"
    beside = f"{value:.3g} s a step, its peers {peers:.3g} s"
    since = f"since its first step, {onset:,}" if finding.from_start else f"since step {onset:,}"
    if finding.kind == "contended_node":
        return f"The processors of {node} are contended {since}: its ranks wait {value:.3g} s a step for a core."
    whole = finding.rank is None
    who = f"Node {node}, all {ranks} ranks of it," if whole else f"Rank {rank} on {node}"
    if finding.kind == "straggler":
        what = "is slow in the optimizer" if finding.metric == OPTIMIZER else "computes slowly"
        return f"{who} {what} {since}: {beside} ({percent})."
    if finding.kind == "data_stall":
        return f"{who} waits for its data {since}: {beside}."
    return f"{who} ends its collectives later than its peers {since}: {beside} waiting ({percent})."
