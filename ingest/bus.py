"""The bus as the rooms see it: what a producer and a consumer promise, whatever carries the bytes.

Promises, held by one contract suite (tests/contract/test_bus.py) for every implementation:

* order: records of one key arrive in the order one producer sent them;
* at least once: a record polled but not committed is delivered again to the group;
* groups: each partition belongs to one live member of a group; offsets are stored per group;
* bounds: `poll` returns at most `records_max`; a producer buffers at most its configured count, then raises
  BusFull;
  a message over MESSAGE_BYTES_MAX (headers: HEADER_BYTES_MAX) is refused with BusMisconfigured;
* `commit` covers exactly what `poll` has returned, and is called after the product of it has been flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from .codec import MESSAGE_BYTES_MAX
from .events import Topic

HEADER_BYTES_MAX = 32_000  # with the value still below Kafka's default message.max.bytes
BUFFERED_MAX = 10_000  # messages that a producer keeps by default while the bus does not take them


class TopicPartition(NamedTuple):
    """One ordered log."""

    topic: Topic
    partition: int


@dataclass(frozen=True, slots=True)
class Record:
    """One message as it lies on the bus; `offset` counts within (topic, partition)."""

    topic: Topic
    partition: int
    offset: int
    key: str
    headers: tuple[tuple[str, bytes], ...]
    value: bytes
    appended_at: float

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class BusError(Exception):
    """Base of what a bus can raise; the text is one sentence that says what to do."""


class BusUnavailable(BusError):
    """The bus cannot be reached now; trying again later may help. Nothing was lost."""


class BusFull(BusError):
    """The producer's buffer is full, the bus does not take what is sent; the message was not accepted."""


class BusMisconfigured(BusError):
    """Trying again will not help: wrong topic, wrong path, a file system that cannot hold the bus."""


def missing_extra(extra: str, purpose: str) -> BusMisconfigured:
    """What a door raises whose library is not installed."""
    return BusMisconfigured(f"{purpose} needs an extra that is not installed; run: pip install 'transom[{extra}]'")


def refuse_oversized(topic: Topic, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
    """Raise BusMisconfigured for a message that no bus would ever take; every `send` begins with this."""
    if len(value) > MESSAGE_BYTES_MAX:
        raise BusMisconfigured(
            f"a message of {len(value)} bytes for {topic} is over the limit of {MESSAGE_BYTES_MAX}; "
            "send smaller batches"
        )
    header_bytes = 0
    for name, raw in headers:
        header_bytes += len(raw) + (len(name) if name.isascii() else len(name.encode("utf-8", "surrogateescape")))
    if header_bytes > HEADER_BYTES_MAX:
        raise BusMisconfigured(
            f"headers of {header_bytes} bytes for {topic} are over the limit of {HEADER_BYTES_MAX}; "
            "put them in the value"
        )


class Producer(Protocol):
    """Sends messages. `send` never waits for the bus; `flush` does."""

    def send(self, topic: Topic, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        """Buffer one message. Raises BusFull."""
        ...

    def flush(self, timeout_seconds: float) -> None:
        """Return when all that was sent is durable on the bus. Raises BusUnavailable (what is buffered stays)."""
        ...

    def close(self) -> None:
        """Flush for a short while, then let go of everything. May be called twice."""
        ...


class Consumer(Protocol):
    """One member of a consumer group."""

    def poll(self, records_max: int, timeout_seconds: float) -> list[Record]:
        """Up to `records_max` next records, waiting `timeout_seconds` for the first. Raises BusUnavailable."""
        ...

    def commit(self) -> None:
        """Store, for the group, the position after what `poll` has returned. Raises BusUnavailable.

        A partition that was sought and not polled since keeps the offset it had.
        """
        ...

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Deliver from these offsets next. Raises BusMisconfigured for a partition that is not assigned."""
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this member owns now."""
        ...

    def lag(self) -> dict[TopicPartition, int]:
        """Records on the bus that this member has not been given yet, for each partition it owns.

        After a poll that gave nothing this is the bus's own answer. Raises BusUnavailable where it gives none.
        """
        ...

    def close(self) -> None:
        """Leave the group. Does not commit. May be called twice."""
        ...


Start = Literal["earliest", "latest"]
OnPartitions = Callable[[frozenset[TopicPartition]], None]


class Bus(Protocol):
    """A way to make producers, consumers and topics."""

    def producer(self) -> Producer: ...

    def consumer(
        self,
        group: str,
        topics: Sequence[Topic],
        *,
        start: Start = "earliest",
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> Consumer:
        """Join `group`. `start` says where a group without stored offsets begins; that is stored at once.

        `on_assign` and `on_revoke` are called from within `poll` or `close`, never from another thread.
        """
        ...

    def create_topics(self, partitions: int) -> None:
        """Create what does not exist yet; metrics, logs and events get equal partition counts. Idempotent.

        Raises BusMisconfigured where existing metrics, logs and events differ in their partition counts.
        """
        ...

    def close(self) -> None: ...
