"""The bus of one process: replay, simulation and tests. The same promises, held in memory and bounded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .bus import (
    BUFFERED_MAX,
    BusFull,
    BusMisconfigured,
    BusUnavailable,
    OnPartitions,
    Record,
    Start,
    TopicPartition,
    refuse_oversized,
)
from .clock import Clock
from .events import TOPICS, Topic
from .partitioning import assign_ranges, partition_of, plan_topics

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.001, 0.02


@dataclass(slots=True)
class _Log:
    first_offset: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.records)


@dataclass(slots=True)
class _Group:
    """Members in order of joining, with their topics and when they last polled; owners and stored offsets."""

    generation: int = 0
    members: dict[int, tuple[tuple[Topic, ...], float]] = field(default_factory=dict)
    owners: dict[TopicPartition, int] = field(default_factory=dict)
    offsets: dict[TopicPartition, int] = field(default_factory=dict)

    def expel(self, member: int) -> None:
        self.members.pop(member, None)
        self.owners = {place: owner for place, owner in self.owners.items() if owner != member}
        self.generation += 1


@dataclass(slots=True)
class _State:
    """Everything that producers and consumers share, guarded by `lock`."""

    clock: Clock
    records_max: int
    session_timeout_seconds: float
    lock: threading.RLock = field(default_factory=threading.RLock)
    logs: dict[TopicPartition, _Log] = field(default_factory=dict)
    counts: dict[Topic, int] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)


class MemoryBus:
    """Keeps at most `records_max` records in each partition; the oldest go first, as by a short retention."""

    def __init__(
        self,
        *,
        clock: Clock,
        buffered_max: int = BUFFERED_MAX,
        records_max: int = 1_000_000,
        session_timeout_seconds: float = 30.0,
    ) -> None:
        self._state = _State(clock, records_max, session_timeout_seconds)
        self._buffered_max = buffered_max

    def producer(self) -> MemoryProducer:
        return MemoryProducer(self._state, self._buffered_max)

    def consumer(
        self,
        group: str,
        topics: Sequence[Topic],
        *,
        start: Start = "earliest",
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> MemoryConsumer:
        return MemoryConsumer(self._state, group, tuple(topics), start, on_assign, on_revoke)

    def create_topics(self, partitions: int) -> None:
        state = self._state
        with state.lock:
            for topic, count in plan_topics(state.counts, partitions).items():
                state.counts[topic] = count
                state.logs.update((TopicPartition(topic, number), _Log()) for number in range(count))
            for group in state.groups.values():
                group.generation += 1

    def close(self) -> None:
        """Nothing is held open."""


class MemoryProducer:
    """Buffers; `flush` appends. May be used by several threads."""

    def __init__(self, state: _State, buffered_max: int) -> None:
        self._state = state
        self._buffered_max = buffered_max
        self._waiting: list[tuple[Topic, str, tuple[tuple[str, bytes], ...], bytes]] = []
        self._closed = False

    def send(self, topic: Topic, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        if topic not in TOPICS:
            raise BusMisconfigured(f"there is no topic {topic!r}; topics are {', '.join(TOPICS)}")
        refuse_oversized(topic, headers, value)
        with self._state.lock:
            if self._closed:
                raise BusMisconfigured("this producer is closed; make a new one")
            if len(self._waiting) >= self._buffered_max:
                raise BusFull(f"{self._buffered_max} messages wait in memory; call flush, or drop this one")
            self._waiting.append((topic, key, tuple(headers), value))

    def flush(self, timeout_seconds: float) -> None:
        state = self._state
        with state.lock:
            for topic in {message[0] for message in self._waiting}:
                if topic not in state.counts:
                    raise BusMisconfigured(f"there is no topic {topic}; call create_topics first")
            now = state.clock.now()
            for topic, key, headers, value in self._waiting:
                place = TopicPartition(topic, partition_of(key, state.counts[topic]))
                log = state.logs[place]
                log.records.append(
                    Record(topic, place.partition, log.next_offset, key, headers, value, appended_at=now)
                )
                if len(log.records) > state.records_max:
                    # A tenth at once, so that a full log does not move all its records for each new one.
                    surplus = max(1, state.records_max // 10)
                    del log.records[:surplus]
                    log.first_offset += surplus
            self._waiting.clear()

    def close(self) -> None:
        with self._state.lock:
            if not self._closed:
                self._closed = True
                self.flush(0.0)


class MemoryConsumer:
    """One member of a group. Used by one thread at a time; several members may live in several threads."""

    def __init__(
        self,
        state: _State,
        group: str,
        topics: tuple[Topic, ...],
        start: Start,
        on_assign: OnPartitions | None,
        on_revoke: OnPartitions | None,
    ) -> None:
        self._state = state
        self._topics = topics
        self._start = start
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        with state.lock:
            self._group = state.groups.setdefault(group, _Group())
        self._member: int | None = None
        self._generation = -1
        self._claims_left = False
        self._positions: dict[TopicPartition, int] = {}  # of what we own
        self._uncommitted: dict[TopicPartition, int] = {}
        self._turn = 0
        self._closed = False

    def poll(self, records_max: int, timeout_seconds: float) -> list[Record]:
        if self._closed:
            raise BusMisconfigured("this consumer is closed; make a new one")
        clock = self._state.clock
        deadline = clock.monotonic() + timeout_seconds
        wait_seconds = WAIT_SECONDS_MIN
        while True:
            self._keep_membership()
            with self._state.lock:
                records = self._read(records_max)
            rest = deadline - clock.monotonic()
            if records or rest <= 0:
                return records
            clock.sleep(min(rest, wait_seconds))
            wait_seconds = min(WAIT_SECONDS_MAX, wait_seconds * 2)

    def _read(self, records_max: int) -> list[Record]:
        places = sorted(self._positions)
        records: list[Record] = []
        for index in range(len(places)):
            place = places[(self._turn + index) % len(places)]
            log = self._state.logs[place]
            first = max(0, self._positions[place] - log.first_offset)
            found = log.records[first : first + records_max - len(records)]
            if found:
                records.extend(found)
                self._positions[place] = self._uncommitted[place] = found[-1].offset + 1
        self._turn += 1
        return records

    def commit(self) -> None:
        with self._state.lock:
            for place in self._uncommitted:
                if self._member is None or self._group.owners.get(place) != self._member:
                    raise BusUnavailable(
                        f"{place.topic}/{place.partition} was taken from this member, which was silent for too "
                        "long; what it polled is delivered to the new owner"
                    )
            self._group.offsets.update(self._uncommitted)
            self._uncommitted.clear()

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        for place in offsets:
            if place not in self._positions:
                raise BusMisconfigured(
                    f"{place.topic}/{place.partition} is not assigned to this member; seek in on_assign"
                )
        self._positions.update(offsets)
        for place in offsets:
            self._uncommitted.pop(place, None)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._positions)

    def lag(self) -> dict[TopicPartition, int]:
        with self._state.lock:
            logs = self._state.logs
            return {
                place: max(0, logs[place].next_offset - max(position, logs[place].first_offset))
                for place, position in self._positions.items()
            }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._positions and self._on_revoke is not None:
                self._on_revoke(frozenset(self._positions))
        finally:
            with self._state.lock:
                if self._member is not None:
                    self._group.expel(self._member)
            self._forget(frozenset(self._positions))

    # ---- membership: the same two steps as in the embedded bus, see sqlite_consumer

    def _keep_membership(self) -> None:
        state, group = self._state, self._group
        with state.lock:
            now = state.clock.monotonic()
            expelled = self._member is not None and self._member not in group.members
            for member, (_, seen_at) in list(group.members.items()):
                if member != self._member and now - seen_at > state.session_timeout_seconds:
                    group.expel(member)
        if expelled:
            lost = frozenset(self._positions)
            self._member = None
            self._uncommitted.clear()
            try:
                if lost and self._on_revoke is not None:
                    self._on_revoke(lost)
            finally:
                self._forget(lost)
        with state.lock:
            if self._member is None:
                group.generation += 1
                self._member, self._generation = group.generation, -1
            group.members[self._member] = (self._topics, now)
        if group.generation != self._generation or self._claims_left:
            self._rebalance(self._member)

    def _rebalance(self, ours: int) -> None:
        state, group = self._state, self._group
        with state.lock:
            generation = group.generation
            counts = {topic: state.counts.get(topic, 0) for topic in self._topics}
            members = [(str(member), topics) for member, (topics, _) in sorted(group.members.items())]
        wanted = assign_ranges(members, counts).get(str(ours), frozenset())
        revoked = frozenset(self._positions) - wanted
        if revoked:
            if self._on_revoke is not None:
                self._on_revoke(revoked)
            with state.lock:
                for place in revoked:
                    if group.owners.get(place) == ours:
                        del group.owners[place]
            self._forget(revoked)
        gained: dict[TopicPartition, int] = {}
        with state.lock:
            for place in wanted - frozenset(self._positions):
                if ours in group.members and group.owners.setdefault(place, ours) == ours:
                    log = state.logs[place]
                    start = log.first_offset if self._start == "earliest" else log.next_offset
                    gained[place] = group.offsets.setdefault(place, start)
        self._generation = generation
        self._positions.update(gained)
        self._claims_left = wanted != frozenset(self._positions)
        if gained and self._on_assign is not None:
            self._on_assign(frozenset(gained))

    def _forget(self, places: frozenset[TopicPartition]) -> None:
        for place in places:
            self._positions.pop(place, None)
            self._uncommitted.pop(place, None)
