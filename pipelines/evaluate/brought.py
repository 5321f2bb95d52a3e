"""What the ensemble brought beside the rules: incidents that it opened by itself, and how many of them were false."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipelines.evaluate.matching import Matched, Story

ENSEMBLE = "ensemble"


class Run(Protocol):
    """A run that was held against its labels."""

    @property
    def stories(self) -> Sequence[Story]: ...
    @property
    def matched(self) -> Matched: ...


def told_brought(runs: Sequence[Run]) -> str:
    """One sentence for a person."""
    opened = sum(story.detector == ENSEMBLE for run in runs for story in run.stories)
    false = sum(story.detector == ENSEMBLE for run in runs for story in run.matched.false)
    if not opened:
        return "The ensemble supported the rules and opened no incident by itself."
    return (
        f"The ensemble opened {opened} incident(s) that no rule had found then: {opened - false} right, {false} false."
    )
