"""What the channels hand to the judge: where a thing was said, conditions that last, and clues to a crash."""

from __future__ import annotations

from typing import Literal

import msgspec

from detectors.verdict import Advice, Culprit, Evidence, FaultClass, Severity
from ingest.events import MESSAGE_TYPES, Message, Topic

Role = Literal["root", "weak", "confirm", "cascade"]
ClueKind = Literal["log", "exit", "hang", "node", "nan", "device", "stack", "sequence"]

TOPIC_OF: dict[type[Message], Topic] = {type_: topic for topic, type_ in MESSAGE_TYPES.values()}


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a message lies on the bus, and when the bus took it (its own clock)."""

    topic: Topic
    partition: int
    offset: int
    appended_at: float | None = None


class Source(msgspec.Struct, frozen=True, gc=False):
    """The producer's identity of one message, and its place on the bus: the seed of a verdict's id."""

    rank: int
    node: str
    topic: Topic
    sequence: int
    partition: int | None = None
    offset: int | None = None
    silence: bool = False  # the message is the last one before a silence

    def identity(self, job: str, attempt: int) -> str:
        """`job/attempt/rank/topic/sequence`; a node's launcher has rank -1 everywhere, so there the node stands."""
        producer = str(self.rank) if self.rank >= 0 else self.node
        return f"{job}/{attempt}/{producer}/{self.topic}/{self.sequence}{'/silence' if self.silence else ''}"


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Something that begins and may end while the job trains: a straggler, a data stall, a warning."""

    key: str  # what it is about: one condition of a key is open at a time
    fault_class: FaultClass
    culprits: tuple[Culprit, ...]
    victims: int
    onset_at: float
    onset_step: int | None
    summary: str
    evidence: tuple[Evidence, ...]
    source: Source
    detector: str
    severity: Severity | None = None
    advice: Advice | None = None
    first_bad_step: int | None = None
    quiet_seconds: float | None = None  # over when it was not said again for so long; None: somebody ends it


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One hint at why an attempt breaks. `rank` and `node` say whom it is about, `source` who said it.

    `alone`: opens an incident without an exit or a silence beside it. `settled`: nothing more is awaited.
    Of kind `stack` and `sequence` it says who is waited for, and breaks nothing by itself; of kind `device` it is
    a counter of a device, which explains an exit as a line of the kernel does.
    """

    kind: ClueKind
    role: Role
    fault_class: FaultClass
    at: float
    rank: int | None
    node: str | None
    source: Source
    evidence: tuple[Evidence, ...]
    summary: str
    rule: str = ""
    severity: Severity | None = None
    advice: Advice | None = None
    alone: bool = False
    settled: bool = False
    signal: int | None = None
    step: int | None = None  # the step its rank was in
    first_bad_step: int | None = None
    culprits: tuple[Culprit, ...] | None = None  # where the channel knows better than (rank, node)
    key: str = ""  # a later clue of the same key replaces this one


def source_of(message: Message, place: Place | None, *, silence: bool = False) -> Source:
    """The identity of `message`, with its place on the bus where that is known."""
    topic = TOPIC_OF[type(message)]
    partition, offset = (None, None) if place is None else (place.partition, place.offset)
    return Source(message.rank, message.node, topic, message.sequence, partition, offset, silence)


def six_digits(value: float) -> float:
    """`value` rounded to six significant digits, so that live and replay agree on any processor."""
    return float(f"{value:.6g}")
