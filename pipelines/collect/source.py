"""What a collector reads from: a small Protocol that every source keeps, and what a source may find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.events import LogLine

SEEN_MAX = 5_000  # things that one read may bring


class SourceFailed(Exception):
    """A source cannot be read now; the text is one sentence that says what to do. It is tried again."""


@dataclass(frozen=True, slots=True)
class Whose:
    """What a source knows of whom it speaks; what is empty is found by who runs on the node.

    `torchrun_attempt` counts restarts from 0 as torchrun does; `key` tells one file's attempt from the next one's.
    """

    node: str = ""
    job: str = ""
    attempt: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    pci_address: str = ""
    torchrun_attempt: int | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class SeenLine:
    """One log record. A kernel's line goes to every job of its node."""

    line: LogLine
    whose: Whose = Whose()


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples of one device at one time, in our names and units."""

    device: str
    at: float
    columns: Mapping[str, float]
    whose: Whose = Whose()


Seen = SeenLine | Measured


class Source(Protocol):
    """One thing to read. Each is read by a thread of its own: one that hangs holds up no other."""

    name: str
    every_seconds: float

    def read(self, now: float) -> Sequence[Seen]:
        """What is new, at most SEEN_MAX, oldest first. Raises SourceFailed."""
        ...

    def stored(self) -> None:
        """What `read` gave last is on the bus: positions may be written down."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What was lost or could not be read so far, by a word that a person understands."""
        ...

    def close(self) -> None:
        """Let go of everything. May be called twice."""
        ...
