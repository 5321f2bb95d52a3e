"""Verdicts against labels: which fault was found, when, who was blamed, and what was said for no reason.

A fault is found when an incident that opened within its time (and `TOLERANCE_SECONDS` after it) ends up in a right
class. A verdict that no label explains is false: one in a clean run, one before its fault, one of a class that is not
right, and a second one that names somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from detectors.verdict import Culprit, FaultClass, Verdict

from .scoring import shared_delay

TOLERANCE_SECONDS = 5.0
EARLY_SECONDS = 0.05  # a label is stamped just before the fault, by another process

CulpritKind = Literal["rank", "node", "nobody", "any"]


@dataclass(frozen=True, slots=True)
class Right:
    """What a right answer to a fault looks like.

    `culprit`: the rank; its node, where blaming a rank is wrong; nobody; or whoever, where the fault is nobody's.
    `must_be_found`: silence is wrong. `tolerated`: true words about the same fault that are not the answer.
    """

    classes: frozenset[FaultClass]
    culprit: CulpritKind = "rank"
    must_be_found: bool = True
    tolerated: frozenset[FaultClass] = frozenset()


@dataclass(frozen=True, slots=True)
class Label:
    """One fault that was really there. `ended_at` None: it lasts until the run's end. Times in UTC seconds."""

    kind: str
    right: Right
    onset_at: float
    ended_at: float | None = None
    ranks: tuple[int, ...] = ()
    node: str | None = None
    severity: float = 0.0

    def covers(self, at: float, tolerance_seconds: float) -> bool:
        """Whether a verdict that opens now may be about this fault."""
        until = float("inf") if self.ended_at is None else self.ended_at + tolerance_seconds
        return self.onset_at - EARLY_SECONDS <= at <= until


@dataclass(frozen=True, slots=True)
class Story:
    """One incident, all its revisions. A baseline has no classes: its `fault_class` None fits every fault.

    `class_at`: when each class was first said. `opened_at` and these are when it was *said*, not when it began.
    """

    opened_at: float
    fault_class: FaultClass | None
    culprits: tuple[Culprit, ...]
    class_at: tuple[tuple[str, float], ...] = ()
    summary: str = ""
    detector: str = ""  # that opened it

    def said_at(self, classes: Iterable[str]) -> float:
        """When one of these classes was first said."""
        wanted = set(classes)
        return min((at for name, at in self.class_at if name in wanted), default=self.opened_at)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one fault was met. `said`: the class of the story that answers it, of the first one about it, or nothing."""

    label: Label
    found: bool
    said: str = "nothing"
    delay_seconds: float | None = None
    culprit_right: bool | None = None  # None: not found, or nobody is to blame


@dataclass(frozen=True, slots=True)
class Matched:
    """All labels of a run against all it said."""

    outcomes: tuple[Outcome, ...]
    false: tuple[Story, ...]


def stories_of(verdicts: Sequence[Verdict], said_at: Sequence[float]) -> list[Story]:
    """Revisions (with the time each was said) put together by incident: the last one's class and culprits count."""
    by_id: dict[str, list[tuple[Verdict, float]]] = {}
    for verdict, at in zip(verdicts, said_at, strict=True):
        by_id.setdefault(verdict.verdict_id, []).append((verdict, at))
    stories = []
    for revisions in by_id.values():
        newest = max((verdict for verdict, _ in revisions), key=lambda verdict: verdict.revision)
        first: dict[str, float] = {}
        for verdict, at in revisions:
            first.setdefault(verdict.fault_class, at)
        opened, opened_at = revisions[0]
        told = tuple(first.items())
        stories.append(Story(opened_at, newest.fault_class, newest.culprits, told, newest.summary, opened.detector))
    return sorted(stories, key=lambda story: story.opened_at)


def match(labels: Sequence[Label], stories: Sequence[Story], tolerance_seconds: float = TOLERANCE_SECONDS) -> Matched:
    """Give each label the story that answers it best, and call false what nothing explains."""
    left = list(stories)
    outcomes = []
    for label in sorted(labels, key=lambda label: label.onset_at):
        about = [story for story in left if label.covers(story.opened_at, tolerance_seconds)]
        answers = [story for story in about if _fits(story, label.right.classes)]
        if not answers:
            said = next((str(story.fault_class) for story in about), "nothing")
            outcomes.append(Outcome(label, found=False, said=said))
            continue
        best = min(answers, key=lambda story: (not culprit_right(story, label), story.opened_at))
        left.remove(best)
        blame = label.right.culprit
        outcomes.append(
            Outcome(
                label, found=True, said=str(best.fault_class),
                delay_seconds=max(0.0, best.said_at(label.right.classes) - label.onset_at),
                culprit_right=None if blame == "any" else culprit_right(best, label),
            )
        )  # fmt: skip
    false = [story for story in left if not any(_explains(label, story, tolerance_seconds) for label in labels)]
    return Matched(tuple(outcomes), tuple(false))


def culprit_right(story: Story, label: Label) -> bool:
    """Whether the story names the culprit, first and alone."""
    named = [(culprit.rank, culprit.node) for culprit in story.culprits]
    match label.right.culprit:
        case "any":
            return True
        case "nobody":
            return not named
        case "node":
            if story.fault_class is None:  # a baseline knows only ranks: one of the node is as near as it can come
                return bool(named) and named[0][1] == label.node
            return [rank for rank, _ in named] == [None] and named[0][1] == label.node
        case _:
            return bool(named) and {rank for rank, _ in named} == set(label.ranks)


def _fits(story: Story, classes: frozenset[FaultClass]) -> bool:
    return story.fault_class in classes if story.fault_class is not None else bool(classes)


def _explains(label: Label, story: Story, tolerance_seconds: float) -> bool:
    """True words about the fault: tolerated ones that blame nobody else, or the right class and culprit once more."""
    if not label.covers(story.opened_at, tolerance_seconds):
        return False
    if story.fault_class is not None and story.fault_class in label.right.tolerated:
        if label.right.culprit == "any":
            return True
        return all(culprit.node == label.node and culprit.rank in (None, *label.ranks) for culprit in story.culprits)
    return _fits(story, label.right.classes) and culprit_right(story, label)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over runs; addition joins them."""

    faults: int = 0  # that must be found
    found: int = 0
    blamed: int = 0  # found, and somebody is to blame
    culprits: int = 0
    false: int = 0
    clean_steps: int = 0
    delays: tuple[float, ...] = ()

    @property
    def recall(self) -> float:
        return self.found / self.faults if self.faults else float("nan")

    @property
    def culprit(self) -> float:
        return self.culprits / self.blamed if self.blamed else float("nan")

    @property
    def f1(self) -> float:
        """Of finding: precision counts what was said for no reason."""
        said = self.found + self.false
        if not self.faults or not said or not self.found:
            return 0.0
        precision = self.found / said
        return 2.0 * precision * self.recall / (precision + self.recall)

    @property
    def false_per_1k(self) -> float:
        return 1_000.0 * self.false / self.clean_steps if self.clean_steps else float("nan")

    def delay(self, quantile: float) -> float:
        """Seconds from the onset to the first word of a right class; NaN where nothing was found."""
        return float(np.quantile(self.delays, quantile)) if self.delays else float("nan")

    def found_within(self, share: float) -> float:
        """Seconds within which this share of *all* faults is told; infinite where it never is.

        Unlike `delay` it does not become better by missing the faults that are hard to see.
        """
        return shared_delay(self.delays, self.faults, share)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.faults + other.faults, self.found + other.found, self.blamed + other.blamed,
            self.culprits + other.culprits, self.false + other.false, self.clean_steps + other.clean_steps,
            self.delays + other.delays,
        )  # fmt: skip


def tally(matched: Matched, clean_steps: int = 0) -> Tally:
    """The counts of one run. Faults about which silence is right count only by what is said wrongly."""
    must = [outcome for outcome in matched.outcomes if outcome.label.right.must_be_found]
    blamed = [outcome for outcome in must if outcome.culprit_right is not None]
    return Tally(
        faults=len(must), found=sum(outcome.found for outcome in must), blamed=len(blamed),
        culprits=sum(bool(outcome.culprit_right) for outcome in blamed), false=len(matched.false),
        clean_steps=clean_steps,
        delays=tuple(outcome.delay_seconds for outcome in must if outcome.delay_seconds is not None),
    )  # fmt: skip
