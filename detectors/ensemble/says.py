"""What the ensemble says in words: whom it means, of which class, and which features made the rank odd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.clues import Condition, six_digits
from detectors.ensemble.committee import COMPUTE, DATA, Opinion
from detectors.ensemble.config import EnsembleConfig
from detectors.ranks.excess import DELAY, OPTIMIZER, OWN, STEP, WALL
from detectors.ranks.finding import Finding, Kind, Subject, describe
from detectors.ranks.findings import Support, condition_of
from detectors.roster import Roster
from detectors.steps import Floats, StepMatrix
from detectors.verdict import Culprit, Evidence

METRIC = "detect.ensemble"
FEATURES_TOLD = 3
COMPUTE_SECONDS_MIN, DATA_SECONDS_MIN = 0.002, 0.010
QUEUE_OF_EXCESS, QUEUE_OF_STEP = 0.5, 0.03  # so much waiting for a core explains what looks slow
CONFIDENCE = 0.8  # of what no rule has found

Ints = npt.NDArray[np.int64]
Who = tuple[int, str, int, Ints, Ints]  # rank, node; columns: its own, its peers', those of its node
Opinions = Sequence[tuple[Opinion, Floats]]


class Named(NamedTuple):
    """A finding that is the ensemble's own, and its support."""

    finding: Finding
    support: Support


def support_of(opinions: Opinions, who: Who, matrix: StepMatrix, steps: Sequence[int]) -> Support:
    """The ensemble's opinion of a rule's finding: how odd the newest of its steps is (running means take a while)."""
    decades = six_digits(opinions[-1][0].decades)
    return Support(decades, _evidence(opinions, who, matrix, steps, decades))


def cold_support(decades: float, finding: Finding, matrix: StepMatrix) -> Support:
    """Before anything is fitted."""
    assert finding.rank is not None
    text = f"a normal tail of half its largest deviation is 10^-{decades:.1f} (the ensemble is not fitted yet)"
    step = finding.steps[0]
    told = Evidence(
        kind="metric", at=matrix.report(step, finding.rank)[0], rank=finding.rank, node=finding.node, metric=METRIC,
        step=step, value=six_digits(decades), unit="decades", text=text,
    )  # fmt: skip
    return Support(six_digits(decades), (told,))


def attribute(
    opinions: Opinions, who: Who, matrix: StepMatrix, steps: tuple[Sequence[int], Sequence[int]], reached: float,
    config: EnsembleConfig, threshold: Callable[[str], float],
) -> Named | None:  # fmt: skip
    """The class by the features that count most: computation or data, and slower. Waits and queues are nobody's fault.

    `steps`: those looked at, and those of them that were odd. None where the excess is too small to care about.
    """
    rank, node, column, peers, _ = who
    names = config.features
    shares = _shares(opinions)
    slower = np.median([row for _, row in opinions], axis=0) > 0.0
    late = float(sum(shares[at] for at, name in enumerate(names) if name == DATA and slower[at]))
    mine = {name: float(shares[at]) for at, name in enumerate(names) if name in COMPUTE and slower[at]}
    kind: Kind = "data_stall" if late > sum(mine.values()) else "straggler"
    if (kind == "straggler" and not mine) or reached < threshold(kind):
        return None
    metric = DATA
    if kind == "straggler":
        own = matrix.values(steps[1][-1], OWN)
        usual = OWN if own is not None and np.isfinite(own).sum() * 2 >= len(own) else WALL
        metric = OPTIMIZER if max(mine, key=lambda name: mine[name]) == OPTIMIZER else usual
    subject = Subject(rank, node, np.array([column]), peers)
    mask = np.array([step in steps[1] for step in steps[0]])
    finding = describe(matrix, kind, metric, subject, steps[0], mask, waits=kind == "straggler")
    if not _matters(finding, matrix, steps[1][-1], config) or _queued(finding, who, matrix, steps[1]):
        return None
    decades = six_digits(reached)
    return Named(finding, Support(decades, _evidence(opinions, who, matrix, steps[1], decades)))


def condition_alone(named: Named, matrix: StepMatrix, roster: Roster) -> Condition:
    """The condition of a finding that no rule has made."""
    told = condition_of(named.finding, matrix, roster, named.support)
    culprits = tuple(
        Culprit(rank=one.rank, node=one.node, confidence=min(one.confidence, CONFIDENCE)) for one in told.culprits
    )
    return msgspec.structs.replace(told, detector="ensemble", culprits=culprits)


def _matters(finding: Finding, matrix: StepMatrix, step: int, config: EnsembleConfig) -> bool:
    apart = finding.value - finding.peers_median
    if finding.kind == "straggler":
        return apart >= COMPUTE_SECONDS_MIN and finding.excess >= config.excess_min
    durations = matrix.values(step, "train.step.duration")
    told = durations[np.isfinite(durations)] if durations is not None else np.empty(0)
    length = float(np.median(told)) if len(told) else 0.0
    return apart >= max(DATA_SECONDS_MIN, config.excess_min * length)


def _queued(finding: Finding, who: Who, matrix: StepMatrix, steps: Sequence[int]) -> bool:
    """The rank or its node waits for a core by a good part of the excess: processors are crowded, nobody is slow."""
    _, _, column, peers, mates = who
    waits, lengths = [], []
    for step in steps:
        delay, length = matrix.values(step, DELAY), matrix.values(step, STEP)
        if delay is None or length is None or not np.isfinite(delay[column]) or not np.isfinite(delay[peers]).any():
            continue
        usual = float(np.nanmedian(delay[peers]))
        waits.append(max(float(delay[column]), float(np.nanmedian(delay[mates]))) - usual)
        lengths.append(float(np.nanmedian(length)))
    if not waits:
        return False
    apart = finding.value - finding.peers_median
    return float(np.median(waits)) >= min(QUEUE_OF_EXCESS * apart, QUEUE_OF_STEP * float(np.median(lengths)))


def _shares(opinions: Opinions) -> Floats:
    """Of each feature in what made the steps odd; they add up to one."""
    total = np.zeros(len(opinions[0][1]))
    for opinion, _ in opinions:
        whole = float(opinion.contributions.sum())
        total += opinion.contributions / whole if whole > 0.0 else 0.0
    whole = float(total.sum())
    return total / whole if whole > 0.0 else total


def _evidence(
    opinions: Opinions, who: Who, matrix: StepMatrix, steps: Sequence[int], decades: float
) -> tuple[Evidence, ...]:
    """The score, and the three features behind it, each with its value and its peers'."""
    rank, node, column, peers, _ = who
    last = opinions[-1][0]
    at = matrix.report(steps[0], rank)[0]
    members = ", ".join(f"{name} {value:.1f}" for name, value in last.members.items())
    agree = sum(value >= 2.0 for value in last.votes.values())
    votes = f"; {agree} of {len(last.votes)} votes agree" if last.votes else ""
    score = Evidence(
        kind="metric", at=at, rank=rank, node=node, metric=METRIC, step=steps[0], value=decades, unit="decades",
        text=f"one clean step in 10^{decades:.1f} is so unlike its peers' (decades: {members}{votes})",
    )  # fmt: skip
    shares = _shares(opinions)
    told = [score]
    subject = Subject(rank, node, np.array([column]), peers)
    for index in np.argsort(-shares, kind="stable")[:FEATURES_TOLD]:
        name = last.features[index]
        if shares[index] <= 0.01:
            break
        beside = describe(matrix, "straggler", name, subject, steps, np.ones(len(steps), dtype=np.bool_), waits=False)
        value, usual = six_digits(beside.value), six_digits(beside.peers_median)
        told.append(
            Evidence(
                kind="metric", at=at, rank=rank, node=node, metric=name, step=steps[0], value=value, peers_median=usual,
                unit="s",
                text=f"{name} {value:.4g} s, its peers' median {usual:.4g} s:"
                f" {shares[index]:.0%} of what {last.leader} sees",
            )
        )  # fmt: skip
    return tuple(told)
