"""Two replays of one run side by side: which incidents only one of them has, and which it tells otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from detectors.verdict import Culprit, Verdict
from pipelines.evaluate.matching import Label, match, stories_of, tally
from pipelines.replayed import Replayed, newest
from pipelines.report.report import Table
from pipelines.report.words import clock_text, culprits_text

MOVED_SECONDS_MAX = 120.0  # an incident of the same class and culprits that begins so much earlier or later


@dataclass(frozen=True, slots=True)
class VerdictDiff:
    """`moved`: the same class and culprits, told with another beginning or end, or another severity."""

    same: tuple[Verdict, ...]
    moved: tuple[tuple[Verdict, Verdict], ...]
    gone: tuple[Verdict, ...]
    new: tuple[Verdict, ...]

    def counts(self, fault_class: str) -> tuple[int, int, int, int]:
        """Same, moved, gone, new of one class."""
        return (
            sum(one.fault_class == fault_class for one in self.same),
            sum(one.fault_class == fault_class for _, one in self.moved),
            sum(one.fault_class == fault_class for one in self.gone),
            sum(one.fault_class == fault_class for one in self.new),
        )

    @property
    def classes(self) -> list[str]:
        moved = [one for _, one in self.moved]
        return sorted({one.fault_class for one in (*self.same, *moved, *self.gone, *self.new)})


def diff(first: Replayed, second: Replayed) -> VerdictDiff:
    """What the second says beside the first; by class and culprits, for ids may differ with the first evidence."""
    before, after = list(newest(first.verdicts).values()), list(newest(second.verdicts).values())
    same, moved, gone = [], [], []
    for one in before:
        near = [other for other in after if _is_one(one, other)]
        if not near:
            gone.append(one)
            continue
        other = min(near, key=lambda other: (abs(other.onset_at - one.onset_at), other.verdict_id))
        after.remove(other)
        if (other.onset_at, other.at, other.severity, other.status) == (one.onset_at, one.at, one.severity, one.status):
            same.append(other)
        else:
            moved.append((one, other))
    return VerdictDiff(tuple(same), tuple(moved), tuple(gone), tuple(after))


def _is_one(one: Verdict, other: Verdict) -> bool:
    near = abs(other.onset_at - one.onset_at) <= MOVED_SECONDS_MAX or other.verdict_id == one.verdict_id
    return near and one.fault_class == other.fault_class and _who(one.culprits) == _who(other.culprits)


def _who(culprits: Sequence[Culprit]) -> set[tuple[int | None, str | None]]:
    return {(culprit.rank, culprit.node) for culprit in culprits}


def diff_tables(found: VerdictDiff, names: tuple[str, str]) -> list[Table]:
    """Counts by class, and each incident that differs."""
    rows = tuple((name, *map(str, found.counts(name))) for name in found.classes)
    counts = Table(
        f"{names[0]} → {names[1]}", ("class", "same", "moved", "gone", "new"), rows,
        "" if rows else "Neither says that anything is wrong.",
    )  # fmt: skip
    told = [("gone", one, "") for one in found.gone] + [("new", one, "") for one in found.new]
    told += [("moved", one, _moved(before, one)) for before, one in found.moved]
    told.sort(key=lambda row: (row[1].onset_at, row[1].verdict_id, row[0]))
    if not told:
        return [counts]
    details = tuple(
        (what, one.fault_class, culprits_text(one), clock_text(one.onset_at), more or one.summary)
        for what, one, more in told
    )
    return [counts, Table("What differs", ("", "class", "culprit", "since", "how"), details)]


def _moved(before: Verdict, after: Verdict) -> str:
    parts = []
    for word, old, new in (("begins", before.onset_at, after.onset_at), ("last word", before.at, after.at)):
        if old != new:
            parts.append(f"{word} {abs(new - old):.1f} s {'later' if new > old else 'earlier'}")
    if before.severity != after.severity:
        parts.append(f"{before.severity} → {after.severity}")
    if before.status != after.status:
        parts.append(f"{before.status} → {after.status}")
    return ", ".join(parts)


def label_table(labels: Sequence[Label], replays: Sequence[tuple[str, Replayed]]) -> Table:
    """Each replay against what was really wrong."""
    rows = []
    for name, replayed in replays:
        matched = match(labels, stories_of(replayed.verdicts, replayed.said_at))
        counts = tally(matched)
        missed = [one.label.kind for one in matched.outcomes if not one.found and one.label.right.must_be_found]
        rows.append((
            name, f"{counts.found} of {counts.faults}", f"{counts.culprits} of {counts.blamed}", str(counts.false),
            f"{counts.delay(0.5):.1f} s" if counts.delays else "", ", ".join(missed),
        ))  # fmt: skip
    columns = ("", "found", "culprit right", "said for no reason", "median delay", "missed")
    return Table(f"Against {len(labels)} labels", columns, tuple(rows))
