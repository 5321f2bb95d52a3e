"""What a replay said, and how two sets of verdicts differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from detectors.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """Two sets of verdicts, compared by id: the newest revision of each counts."""

    same: tuple[Verdict, ...] = ()
    changed: tuple[tuple[Verdict, Verdict], ...] = ()
    gone: tuple[Verdict, ...] = ()
    new: tuple[Verdict, ...] = ()


@dataclass(slots=True)
class Replayed:
    """What came out, and what the live run had said."""

    verdicts: list[Verdict] = field(default_factory=list)
    said_at: list[float] = field(default_factory=list)  # when each verdict came out, by the recording's clock
    live: list[Verdict] = field(default_factory=list)
    unreadable: int = 0

    def say(self, verdicts: list[Verdict], at: float) -> None:
        self.verdicts += verdicts
        self.said_at += [at] * len(verdicts)

    def lines(self) -> bytes:
        """One JSON a line, in order: the same recording gives the same bytes."""
        encoder = msgspec.json.Encoder()
        return b"".join(encoder.encode(verdict) + b"\n" for verdict in self.verdicts)


def compare(live: Iterable[Verdict], replayed: Iterable[Verdict]) -> Difference:
    """What differs between two sets of verdicts, apart from offsets on the bus."""
    before, after = newest(live), newest(replayed)
    both = [name for name in before if name in after]
    equal = [name for name in both if _told(before[name]) == _told(after[name])]
    return Difference(
        same=tuple(after[name] for name in equal),
        changed=tuple((before[name], after[name]) for name in both if name not in equal),
        gone=tuple(verdict for name, verdict in before.items() if name not in after),
        new=tuple(verdict for name, verdict in after.items() if name not in before),
    )


def newest(verdicts: Iterable[Verdict]) -> dict[str, Verdict]:
    """The newest revision of each verdict by its id, in the order in which they opened."""
    known: dict[str, Verdict] = {}
    for verdict in verdicts:
        before = known.get(verdict.verdict_id)
        if before is None or verdict.revision >= before.revision:
            known[verdict.verdict_id] = verdict
    return known


def _told(verdict: Verdict) -> Verdict:
    evidence = tuple(
        msgspec.structs.replace(item, topic=None, partition=None, offset=None) for item in verdict.evidence
    )
    return msgspec.structs.replace(verdict, evidence=evidence)
