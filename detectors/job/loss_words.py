"""What the loss channel found, in words: a condition with loss and gradient norm before and now."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from detectors.clues import Condition, Source
from detectors.job.wild_gradient import WildGradient
from detectors.roster import Roster
from detectors.steps import StepMatrix
from detectors.verdict import Culprit, Evidence

LOSS, NORM, LOCAL_NORM = "train.loss", "train.gradient.norm", "train.gradient.local_norm"
SPIKE: Literal["loss_spike"] = "loss_spike"
CLIMB_STEPS = 20  # a loss that takes longer to rise does not jump
DIVERGENCE: Literal["divergence"] = "divergence"


class LossStory(NamedTuple):
    """A spike or a divergence; numbers as they are, not their logarithms."""

    kind: Literal["loss_spike", "divergence"]
    onset_step: int
    step: int  # in which it is said
    usual: float
    now: float
    norm_usual: float
    norm_now: float | None
    wild: WildGradient | None = None


def condition_of(story: LossStory, matrix: StepMatrix, roster: Roster) -> Condition:
    """The condition for the judge. It names nobody, because what one rank computes reaches all in the same step: but
    for a gradient that was wild on one rank before they were reduced."""
    told, wild = matrix.values(story.step, LOSS), story.wild
    assert told is not None
    rank = matrix.ranks[int(np.flatnonzero(np.isfinite(told))[0])]
    if wild is not None and matrix.values(story.onset_step, LOCAL_NORM) is not None:
        rank = wild.rank
    seen_at, sequence, partition, offset = matrix.report(story.step, rank)
    node = roster.node_of(rank)

    def evidence(metric: str, text: str, value: float) -> Evidence:
        return Evidence(
            kind="metric", text=text, at=seen_at, rank=rank, node=node, metric=metric, step=story.step, value=value,
            topic="metrics", partition=partition, offset=offset,
        )  # fmt: skip

    text = f"the loss is {story.now:.4g} at step {story.step}, before it was about {story.usual:.4g}"
    seen = [evidence(LOSS, text, story.now)]
    if story.norm_now is not None:
        text = f"the gradient's norm is {story.norm_now:.4g}, before it was about {story.norm_usual:.4g}"
        seen.append(evidence(NORM, text, story.norm_now))
    if wild is not None:
        text = f"the own gradient of rank {wild.rank} has norm {wild.norm:.4g}, the largest other {wild.others:.4g}"
        seen.insert(0, evidence(LOCAL_NORM, text, wild.norm))
    onset_at = seen_at
    if matrix.values(story.onset_step, LOSS) is not None:
        first_at, *_ = matrix.report(story.onset_step, rank)
        onset_at = first_at if math.isfinite(first_at) else seen_at
    return Condition(
        key=story.kind,
        fault_class=story.kind,
        culprits=() if wild is None else (Culprit(rank=wild.rank, node=roster.node_of(wild.rank)),),
        victims=roster.size - (wild is not None),
        onset_at=onset_at,
        onset_step=story.onset_step,
        first_bad_step=story.onset_step if story.kind == DIVERGENCE else None,
        summary=_summary(story, roster),
        evidence=tuple(seen),
        detector="job_channel/loss",
        source=Source(
            rank=rank, node=node or "", topic="metrics", sequence=sequence, partition=partition, offset=offset
        ),
    )


def _summary(story: LossStory, roster: Roster) -> str:
    onset, wild = story.onset_step, story.wild
    if wild is not None and story.kind == SPIKE:
        return (
            f"The gradient of rank {wild.rank} on {roster.node_of(wild.rank)} was {wild.norm / wild.others:,.0f} times"
            f" any other's at step {onset}, and the reduction gave it to all: the loss may jump. If the same rank does"
            " it again, its GPU computes wrongly."
        )
    if story.kind == DIVERGENCE:
        return (
            f"The training diverges since step {onset}: the loss is {story.now:.4g}, it was {story.usual:.4g} and has"
            f" not come back. Go back to a checkpoint before step {onset}."
        )
    if story.step - onset > CLIMB_STEPS:
        return f"The loss climbs since step {onset}: it is {story.now:.4g} and was {story.usual:.4g}{_norms(story)}."
    if story.now <= story.usual * 1.05:
        return (
            f"The gradient's norm runs away since step {onset}; the loss, {story.now:.4g}, may follow. Such spikes"
            " mostly pass by themselves: wait before you roll back."
        )
    return (
        f"The loss jumped to {story.now:.4g} from {story.usual:.4g}, beginning at step {onset}. Such spikes mostly"
        " pass by themselves: wait before you roll back."
    )


def _norms(story: LossStory) -> str:
    if story.norm_now is None:
        return ""
    return f"; the gradient's norm is {story.norm_now:.3g}, it was {story.norm_usual:.3g}"
