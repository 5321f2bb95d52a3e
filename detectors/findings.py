"""Findings of the rank channel in words: the condition that the judge opens, with its evidence."""

from __future__ import annotations

from detectors.clues import Condition, Source, six_digits
from detectors.rank_channel import Finding
from detectors.roster import Roster
from detectors.steps import StepMatrix
from detectors.verdict import Culprit, Evidence


def condition_of(finding: Finding, matrix: StepMatrix, roster: Roster, decades: int | None) -> Condition:
    """The condition for an opened finding. `decades`: the ensemble holds it for a matter of 10^-decades."""
    node_wide = finding.kind == "contended_node"
    rank = matrix.ranks[0] if node_wide else int(finding.subject)
    if node_wide:
        rank = next(state.rank for state in roster.ranks_of(finding.subject) if state.rank in matrix.ranks)
    node = roster.node_of(rank)
    onset = finding.steps[0]
    seen_at, sequence, partition, offset = matrix.report(onset, rank)
    value, peers = six_digits(finding.value), six_digits(finding.peers_median)
    evidence = [
        Evidence(
            kind="metric", text=_text(finding, rank, value, peers), at=seen_at, rank=rank, node=node,
            metric=finding.metric, step=onset, value=value, peers_median=peers, unit="s", topic="metrics",
            partition=partition, offset=offset,
        )
    ]  # fmt: skip
    if decades is not None:
        evidence.append(
            Evidence(
                kind="metric", at=seen_at, rank=rank, node=node, metric="detect.ensemble.pca", step=onset,
                value=10.0**-decades, unit="probability",
                text=f"PCA over the rank's timings: in clean steps such rows have a probability of about 1e-{decades}",
            )
        )  # fmt: skip
    return Condition(
        key=f"{finding.kind}/{finding.subject}",
        fault_class=finding.kind,
        culprits=(Culprit(rank=None if node_wide else rank, node=node, confidence=_confidence(finding, decades)),),
        victims=len(roster.ranks_of(finding.subject)) if node_wide else max(0, roster.size - 1),
        onset_at=seen_at,
        onset_step=onset,
        summary=_summary(finding, rank, node, value, peers, onset),
        evidence=tuple(evidence),
        source=Source(
            rank=rank, node=node or "", topic="metrics", sequence=sequence, partition=partition, offset=offset
        ),
        detector="rank_channel",
    )


def _confidence(finding: Finding, decades: int | None) -> float:
    """Half again the threshold is sure; the ensemble's support adds a little."""
    if finding.kind == "contended_node":
        return 0.6
    return 0.95 if decades is not None and decades >= 4 else 0.9


def _text(finding: Finding, rank: int, value: float, peers: float) -> str:
    name = {"straggler": "compute time", "data_stall": "time waiting for data", "contended_node": "run-queue delay"}
    return (
        f"{name[finding.kind]} of rank {rank} is {value:.4g} s, its peers' median {peers:.4g} s, in"
        f" {len(finding.steps)} of the last steps ({finding.steps[0]} to {finding.steps[-1]})"
    )


def _summary(finding: Finding, rank: int, node: str | None, value: float, peers: float, onset: int) -> str:
    percent = f"+{100.0 * (value / peers - 1.0):.0f} %" if peers > 0.0 else "from nothing"
    beside = f"{value:.3g} s a step, its peers {peers:.3g} s"
    if finding.kind == "straggler":
        return f"Rank {rank} on {node} computes slowly since step {onset}: {beside} ({percent})."
    if finding.kind == "data_stall":
        return f"Rank {rank} on {node} waits for its data since step {onset}: {beside}."
    return f"The processors of {node} are contended since step {onset}: its ranks wait {value:.3g} s a step for a core."
