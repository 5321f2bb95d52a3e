"""What one group of measurements is told, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipelines.figures import Figure

Tell = Callable[[str], object]  # takes what is being done, in words, for a person who waits


@dataclass(frozen=True, slots=True)
class Task:
    """How much is measured, and where files may be written."""

    folder: Path
    seed: int = 0
    schedules: int = 10_000
    replays: int = 1_000
    trials: int = 5  # of each timing on this machine
    scheduler_trials: int = 20  # of each timing on a scheduler
    processes: int = 1  # for schedules
    kubeconfig: Path | None = None

    def below(self, group: str) -> Task:
        """The same task in a folder of its own."""
        return replace(self, folder=self.folder / group)


@dataclass(slots=True)
class Outcome:
    """What was found. `missing`: why a figure could not be measured; `rounds`: the times behind the figures."""

    figures: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rounds: dict[str, list[float]] = field(default_factory=dict)


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    """All of them as one."""
    whole = Outcome()
    for outcome in outcomes:
        whole.figures += outcome.figures
        whole.missing |= outcome.missing
        whole.notes += outcome.notes
        whole.rounds |= outcome.rounds
    return whole
