"""What the pace channel found, in words: a condition with the step's seconds before and after, and what grew."""

from __future__ import annotations

import math

from detectors.clues import Condition, Source, six_digits
from detectors.job.pace_story import PaceStory
from detectors.job.step_summary import COLUMNS
from detectors.roster import Roster
from detectors.steps import StepMatrix
from detectors.verdict import Culprit, Evidence, FaultClass

CLASSES: dict[str, FaultClass] = {
    "job_slow": "job_slow", "data_stall": "data_stall", "regime_change": "regime_change",
}  # fmt: skip  # by what a condition's key begins with
PARTS = {
    "data": ("train.data.duration", "waiting for data"),
    "compute": ("train.compute.duration", "computing"),
    "delay": ("train.run_queue.delay", "waiting for a processor"),
    "wait": ("train.collective.wait", "the collective, even for the rank that arrives last"),
    "optimizer": ("train.optimizer.duration", "the optimizer"),
    "several": ("train.compute.own", "computing"),
}
SIGNAL_WORDS = {"samples": "samples a step", "tokens": "tokens a step", "learning_rate": "the learning rate"}
NAMED_MAX = 4  # ranks that a sentence names


def condition_of(key: str, story: PaceStory, matrix: StepMatrix, roster: Roster) -> Condition:
    """The condition for the judge."""
    told = dict(zip(COLUMNS, story.onset.tolist(), strict=True))
    onset, rank, offset = int(told["step"]), int(told["rank"]), int(told["offset"])
    node = roster.node_of(rank)
    partition = matrix.report(onset, rank)[2] if offset >= 0 else None

    def seen(text: str, metric: str, value: float, unit: str = "s") -> Evidence:
        return Evidence(
            kind="metric", text=text, at=told["seen_at"], rank=rank, node=node, metric=metric, step=onset,
            value=value, unit=unit, topic="metrics", partition=partition, offset=offset if offset >= 0 else None,
        )  # fmt: skip

    before, after = six_digits(story.before), six_digits(story.after)
    text = f"a step took {before:.4g} s, now {after:.4g} s (median of {story.steps} steps)"
    evidence = [seen(text, "train.step.duration", after)]
    if story.part in PARTS and math.isfinite(story.part_after):
        metric, words = PARTS[story.part]
        was, now = six_digits(story.part_before), six_digits(story.part_after)
        where = f"on {_named(story.ranks, roster)}" if story.ranks else "on all ranks"
        evidence.append(seen(f"{words}: {was:.4g} s a step before, {now:.4g} s now, {where}", metric, now))
    for name, (was, now) in story.signals.items():
        if name != "learning_rate":
            text = (
                f"{was:.4g} {name} a step before, {now:.4g} now;"
                f" {was / story.before:.4g} and {now / story.after:.4g} a second"
            )
            evidence.append(seen(text, f"train.{name}", six_digits(now), "1"))
    fault_class = CLASSES[key.partition("/")[0]]
    named = story.ranks if len(story.ranks) <= NAMED_MAX else ()
    culprits = tuple(
        Culprit(rank=rank, node=roster.node_of(rank), confidence=0.5)
        for rank in (named if story.rank is None else (story.rank,))
    )
    return Condition(
        key=key, fault_class=fault_class, culprits=culprits, victims=max(0, roster.size - len(culprits)),
        onset_at=told["seen_at"], onset_step=onset, summary=_summary(fault_class, story, onset, roster),
        evidence=tuple(evidence), detector="job_channel/pace",
        source=Source(
            rank=rank, node=node or "", topic="metrics", sequence=int(told["sequence"]), partition=partition,
            offset=offset if offset >= 0 else None,
        ),
    )  # fmt: skip


def _summary(fault_class: FaultClass, story: PaceStory, onset: int, roster: Roster) -> str:
    percent = 100.0 * (story.after / story.before - 1.0)
    pace = f"{story.after:.4g} s a step instead of {story.before:.4g} s ({percent:+.1f} %)"
    if fault_class == "data_stall":
        return (
            f"All {roster.size} ranks wait for their data since step {onset}: {story.part_after:.3g} s a step,"
            f" before {story.part_before:.3g} s."
        )
    if fault_class == "regime_change" and story.part == "accepted":
        return f"The job has kept its pace since step {onset}: {pace}. It is taken as normal from here on."
    if fault_class == "regime_change":
        moved = [
            f"{SIGNAL_WORDS[name]} went from {was:.4g} to {now:.4g}"
            for name, (was, now) in story.signals.items()
            if was > 0.0 and abs(now / was - 1.0) > 0.01
        ]
        return (
            f"Another regime since step {onset}: {pace}, because {' and '.join(moved) or 'the learning rate jumped'}."
        )
    if story.part in ("checkpoint", "eval"):
        what = "Checkpoints" if story.part == "checkpoint" else "Evaluations"
        return f"{what} take longer, {story.steps} times in a row: {story.after:.3g} s, usually {story.before:.3g} s."
    if story.part == "several":
        grew = f"({story.part_before:.3g} s before, {story.part_after:.3g} s now)"
        return (
            f"The job is slower since step {onset}: {pace}; {_named(story.ranks, roster)} compute longer {grew}, and"
            " the others wait for them."
        )
    if story.rank is not None:
        return (
            f"The job is slower since step {onset}: {pace}; all others wait for rank {story.rank} on"
            f" {roster.node_of(story.rank)}, which computes a little longer than they do."
        )
    return f"The job is slower since step {onset}: {pace}, {_because(story)}."


def _because(story: PaceStory) -> str:
    grew = f"({story.part_before:.3g} s before, {story.part_after:.3g} s now)"
    if story.part == "compute":
        return f"everybody computes longer {grew}; no rank stands out"
    if story.part == "data":
        return f"all ranks wait longer for their data {grew}"
    if story.part == "wait":
        return f"the collective takes longer for everybody {grew}: look at the network"
    if story.part == "optimizer":
        return f"the optimizer takes longer on all ranks {grew}"
    if not story.measured:
        return "and its ranks do not tell the parts of their steps, so it may be one of them or all"
    return "outside of what the ranks measure in a step; no rank stands out"


def _named(ranks: tuple[int, ...], roster: Roster) -> str:
    if len(ranks) > NAMED_MAX:
        return f"{len(ranks)} of {roster.size} ranks, rank {ranks[0]} on {roster.node_of(ranks[0])} first,"
    return " and ".join(f"rank {rank} on {roster.node_of(rank)}" for rank in ranks)
