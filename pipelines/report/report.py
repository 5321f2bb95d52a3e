"""What a report of a replay says, whatever it is written in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from detectors.verdict import Verdict
from pipelines.historic.run import Told
from pipelines.replayed import Replayed, newest

from .series import Curves, curves_for, fill

PICTURES_MAX = 24
EVIDENCE_MAX = 8


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a heading of its own; every cell is text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: str = ""


@dataclass(slots=True)
class RunReport:
    """One run under one configuration."""

    job: str
    kind: str
    source: str
    notes: tuple[str, ...]
    incidents: tuple[Verdict, ...]
    begins_at: float
    ends_at: float
    messages: int
    ranks: int
    curves: dict[str, Curves] = field(default_factory=dict)  # by verdict
    tables: list[Table] = field(default_factory=list)


@dataclass(slots=True)
class Surveyor:
    """Counts what a run told while it is replayed."""

    begins_at: float = float("inf")
    ends_at: float = 0.0
    messages: int = 0
    ranks: set[int] = field(default_factory=set)

    def see(self, at: float, rank: int) -> None:
        self.begins_at, self.ends_at = min(self.begins_at, at), max(self.ends_at, at)
        self.messages += 1
        if rank >= 0:
            self.ranks.add(rank)


def incidents_of(replayed: Replayed) -> tuple[Verdict, ...]:
    """The newest revision of each, in the order of their onsets."""
    return tuple(sorted(newest(replayed.verdicts).values(), key=lambda verdict: (verdict.onset_at, verdict.verdict_id)))


def wanted_curves(incidents: Sequence[Verdict], begins_at: float, ends_at: float) -> dict[str, Curves]:
    """Curves to be filled by a second reading of the run."""
    return {verdict.verdict_id: curves_for(verdict, begins_at, ends_at) for verdict in incidents[:PICTURES_MAX]}


def take(curves: dict[str, Curves], told: Told) -> None:
    """Give one message or block to the curves."""
    fill(curves.values(), told)
