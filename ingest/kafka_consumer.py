"""A consumer over kafka-python: callbacks in the caller's thread, bounded waits, its own count of what was given.

The library calls its rebalance listener on its I/O thread while `poll` blocks. So the library's `poll` runs on a
thread of ours, the listener waits (without blocking the library's heartbeats) until the caller's own thread has
run the callback from within our `poll`, and a commit or seek made in it works.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .bus import BusError, BusMisconfigured, BusUnavailable, OnPartitions, Record, Start, TopicPartition
from .clock import Clock
from .events import Topic
from .partitioning import key_text

REQUEST_SECONDS = 5.0  # for one question to the broker: end offsets, committed offsets
GRACE_SECONDS = 0.05  # the library comes back a little after the time it was given
CALLBACK_LOOK_SECONDS = 0.005
CLOSE_SECONDS = 10.0


@dataclass(slots=True)
class _Callback:
    """The library asks for a callback; `done` lets it go on."""

    kind: Literal["assign", "revoke"]
    places: frozenset[TopicPartition]
    done: bool = False


@dataclass(slots=True)
class _Outcome:
    """What the library's call on our thread came to."""

    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Connection:
    """One consumer of the library and the thread that calls it, one call at a time."""

    kafka: Any
    errors: Any
    inbox: queue.SimpleQueue[_Callback | _Outcome] = field(default_factory=queue.SimpleQueue)
    calls: queue.SimpleQueue[Callable[[], Any] | None] = field(default_factory=queue.SimpleQueue)
    busy: bool = False
    abandoned: bool = False  # nobody answers callbacks any more

    def start(self) -> None:
        threading.Thread(target=self._work, name="kafka-bus-consumer", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> None:
        self.busy = True
        self.calls.put(function)

    def _work(self) -> None:
        while (function := self.calls.get()) is not None:
            try:
                self.inbox.put(_Outcome(function()))
            except Exception as error:  # noqa: BLE001  whatever it is belongs to the caller, on the caller's thread
                self.inbox.put(_Outcome(error=error))


class KafkaBusConsumer:
    """One member of a group. Used by one thread at a time."""

    def __init__(
        self,
        connect: Callable[[], Any],
        library: Any,
        clock: Clock,
        *,
        prefix: str,
        servers: str,
        topics: tuple[Topic, ...],
        start: Start,
        on_assign: OnPartitions | None,
        on_revoke: OnPartitions | None,
        commit_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._connect = connect
        self._library = library
        self._errors = library.errors
        self._clock = clock
        self._servers = servers
        self._names: dict[str, Topic] = {f"{prefix}.{topic}": topic for topic in topics}
        self._prefix = prefix
        self._start = start
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._commit_seconds = commit_seconds
        self._stall_seconds = stall_seconds
        self._positions: dict[TopicPartition, int] = {}  # of what we own: the next record to give
        self._uncommitted: dict[TopicPartition, int] = {}
        self._undecided: set[TopicPartition] = set()  # owned, but where to begin could not be asked yet
        self._seeks: dict[TopicPartition, int] = {}  # made while the library was polling; done before its next poll
        self._pending: deque[Record] = deque()  # fetched, not given yet
        self._idle_seconds = 0.0  # spent in polls that gave nothing, since the last one that did
        self._gave = False  # whether the last poll gave records
        self._in_callback = False
        self._closed = False
        self._connection: _Connection | None = self._open()

    # ---- the promises

    def poll(self, records_max: int, timeout_seconds: float) -> list[Record]:
        if self._closed:
            raise BusMisconfigured("this consumer is closed; make a new one")
        began = self._clock.monotonic()
        if not self._pending:
            self._poll_library(records_max, began + timeout_seconds)
        records = self._give(records_max)
        self._gave = bool(records)
        if records:
            self._idle_seconds = 0.0
        else:
            self._idle_seconds += self._clock.monotonic() - began
            if self._idle_seconds >= self._stall_seconds:
                self._idle_seconds = 0.0
                self._look_for_a_stall()
        return records

    def commit(self) -> None:
        if not self._uncommitted:
            return
        try:
            self._store(self._uncommitted)
        except self._errors.KafkaError as error:
            raise BusUnavailable(
                f"Kafka at {self._servers} did not store the offsets ({type(error).__name__}); "
                "poll again: what another member took over is delivered there"
            ) from error
        self._uncommitted.clear()

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        for place in offsets:
            if place not in self._positions:
                raise BusMisconfigured(
                    f"{place.topic}/{place.partition} is not assigned to this member; seek in on_assign"
                )
        self._pending = deque(record for record in self._pending if record.place not in offsets)
        for place, offset in offsets.items():
            self._positions[place] = offset
            self._uncommitted.pop(place, None)
            self._undecided.discard(place)
        if self._in_callback:
            self._seek_library(offsets)
        else:
            self._seeks.update(offsets)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._positions)

    def lag(self) -> dict[TopicPartition, int]:
        # What the last fetches told costs nothing (to ask waits for a fetch that is out), but may be of a broker gone.
        ends = (self._fetched_ends() if self._gave else None) or self._end_offsets()
        return {place: max(0, ends.get(place, at) - at) for place, at in self._positions.items()}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._connection is not None:
                self._close_connection(self._connection, answer=True)
        finally:
            self._connection = None
            self._forget(frozenset(self._positions))

    # ---- polling

    def _poll_library(self, records_max: int, deadline: float) -> None:
        connection = self._connection = self._connection or self._open()
        if not connection.busy:
            self._decide_start(connection)
            self._seek_library(self._seeks)
            self._seeks.clear()
            self._resume_join(connection)
            milliseconds = max(0, int((deadline - self._clock.monotonic()) * 1000))
            connection.call(lambda: connection.kafka.poll(timeout_ms=milliseconds, max_records=records_max))
        while True:
            rest = deadline + GRACE_SECONDS - self._clock.monotonic()
            try:
                item = connection.inbox.get(timeout=max(GRACE_SECONDS, rest))
            except queue.Empty:
                return  # the call goes on; the next poll takes what it brings
            if isinstance(item, _Outcome):
                break
            self._answer(connection, item)
        connection.busy = False
        if item.error is not None:
            raise self._explain(item.error) from item.error
        self._take(item.value)

    def _resume_join(self, connection: _Connection) -> None:
        """Finish a join that an earlier poll began and ran out of time in.

        kafka-python 3.0.12 forgets it where new metadata was the cause: it takes itself for a member, never takes
        up its partitions and never beats again (its heartbeat stays off), for ever.
        """
        coordinator = getattr(connection.kafka, "_coordinator", None)
        if coordinator is not None and getattr(coordinator, "rejoining", False):
            coordinator.request_rejoin()

    def _take(self, batches: Mapping[Any, Iterable[Any]]) -> None:
        for partition, found in batches.items():
            place = TopicPartition(self._names[partition.topic], partition.partition)
            # Fetched before a seek, or before this member knew where to begin.
            if place in self._seeks or place in self._undecided or place not in self._positions:
                continue
            for record in found:
                self._pending.append(
                    Record(
                        place.topic,
                        place.partition,
                        record.offset,
                        key_text(record.key),
                        tuple((name, raw or b"") for name, raw in record.headers),
                        record.value or b"",
                        record.timestamp / 1000.0,
                    )
                )

    def _give(self, records_max: int) -> list[Record]:
        records = [self._pending.popleft() for _ in range(min(records_max, len(self._pending)))]
        for record in records:
            self._positions[record.place] = self._uncommitted[record.place] = record.offset + 1
        return records

    # ---- membership, on the caller's thread

    def _answer(self, connection: _Connection, callback: _Callback) -> None:
        self._in_callback = True
        try:
            if callback.kind == "revoke":
                self._revoked(callback.places)
            else:
                self._positions.update((place, 0) for place in callback.places)
                self._undecided.update(callback.places)
                self._decide_start(connection)
                if callback.places and self._on_assign is not None:
                    self._on_assign(callback.places)
        finally:
            self._in_callback = False
            callback.done = True

    def _revoked(self, places: frozenset[TopicPartition]) -> None:
        # What was fetched but not given is fetched again by whoever owns the partition next.
        self._pending = deque(record for record in self._pending if record.place not in places)
        try:
            if places and self._on_revoke is not None:
                self._on_revoke(places)
        finally:
            self._forget(places)

    def _decide_start(self, connection: _Connection) -> None:
        """Begin where the group stopped; where it never was, store the decided start before anything is read.

        A group without stored offsets would begin at the end again after every rebalance, and lose what was
        published meanwhile.
        """
        if not self._undecided:
            return
        kafka, milliseconds = connection.kafka, REQUEST_SECONDS * 1000
        try:
            begin: dict[TopicPartition, int] = {}
            for place in self._undecided:
                offset = kafka.committed(self._library_place(place), timeout_ms=milliseconds)
                if offset is not None:
                    begin[place] = offset
            new = [place for place in self._undecided if place not in begin]
            if new:
                ask = kafka.beginning_offsets if self._start == "earliest" else kafka.end_offsets
                found = ask([self._library_place(place) for place in new], timeout_ms=milliseconds)
                decided = {place: found[self._library_place(place)] for place in new}
                self._store(decided, connection)
                begin.update(decided)
        except self._errors.KafkaError as error:
            raise self._explain(error) from error
        self._positions.update(begin)
        self._undecided.clear()
        self._seek_library(begin, connection)

    def _forget(self, places: frozenset[TopicPartition]) -> None:
        for place in places:
            self._positions.pop(place, None)
            self._uncommitted.pop(place, None)
            self._seeks.pop(place, None)
            self._undecided.discard(place)

    # ---- the library

    def _open(self) -> _Connection:
        connection = _Connection(self._connect(), self._errors)
        connection.kafka.subscribe(topics=list(self._names), listener=self._listener(connection))
        connection.start()
        return connection

    def _listener(self, connection: _Connection) -> Any:
        names = self._names

        async def ask(kind: Literal["assign", "revoke"], places: Iterable[Any]) -> None:
            callback = _Callback(kind, frozenset(TopicPartition(names[p.topic], p.partition) for p in places))
            connection.inbox.put(callback)
            while not callback.done and not connection.abandoned:
                await connection.kafka._net.sleep(CALLBACK_LOOK_SECONDS)  # the library's loop, not asyncio's

        class Listener(self._library.AsyncConsumerRebalanceListener):  # type: ignore[name-defined,misc]
            async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
                await ask("revoke", revoked)

            async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
                await ask("assign", assigned)

        return Listener()

    def _close_connection(self, connection: _Connection, *, answer: bool) -> None:
        """Leave the group; callbacks that come meanwhile are answered, or let go where that cannot be hoped for."""
        connection.abandoned = not answer
        deadline = self._clock.monotonic() + CLOSE_SECONDS
        calls_left = 2 if connection.busy else 1
        connection.calls.put(lambda: connection.kafka.close(autocommit=False, timeout_ms=CLOSE_SECONDS * 300))
        connection.calls.put(None)
        try:
            while calls_left:
                item = connection.inbox.get(timeout=max(0.0, deadline - self._clock.monotonic()))
                if isinstance(item, _Outcome):
                    calls_left -= 1
                elif answer and item.kind == "revoke":
                    self._answer(connection, item)
                else:
                    item.done = True
        except queue.Empty:
            pass  # its thread is a daemon and ends with the library's call
        finally:
            connection.abandoned = True

    def _look_for_a_stall(self) -> None:
        """Nothing came for long: is there nothing, is the broker gone, or is the library stuck (it has been)?"""
        ends = self._end_offsets()
        if not any(ends.get(place, at) > at for place, at in self._positions.items()):
            return
        connection, self._connection = self._connection, None
        self._revoked(frozenset(self._positions))
        if connection is not None:
            self._close_connection(connection, answer=False)
        self._connection = self._open()

    def _fetched_ends(self) -> dict[TopicPartition, int] | None:
        """Ends as the newest fetches told them; None while a partition has not been fetched."""
        if self._connection is None or self._connection.busy:
            return None
        ends = {place: self._connection.kafka.highwater(self._library_place(place)) for place in self._positions}
        return None if any(end is None for end in ends.values()) else {place: end or 0 for place, end in ends.items()}

    def _end_offsets(self) -> dict[TopicPartition, int]:
        if self._connection is None or not self._positions:
            return {}
        places = {self._library_place(place): place for place in self._positions}
        try:
            found = self._connection.kafka.end_offsets(list(places), timeout_ms=REQUEST_SECONDS * 1000)
        except self._errors.KafkaError as error:
            raise self._explain(error) from error
        return {places[partition]: offset for partition, offset in found.items()}

    def _store(self, offsets: Mapping[TopicPartition, int], connection: _Connection | None = None) -> None:
        connection = connection or self._connection
        if connection is None:
            raise self._errors.CommitFailedError("not connected")
        metadata = self._library.OffsetAndMetadata
        connection.kafka.commit(
            {self._library_place(place): metadata(offset, "", -1) for place, offset in offsets.items()},
            timeout_ms=self._commit_seconds * 1000,
        )

    def _seek_library(self, offsets: Mapping[TopicPartition, int], connection: _Connection | None = None) -> None:
        connection = connection or self._connection
        for place, offset in offsets.items():
            if connection is not None:
                connection.kafka.seek(self._library_place(place), offset)

    def _library_place(self, place: TopicPartition) -> Any:
        return self._library.TopicPartition(f"{self._prefix}.{place.topic}", place.partition)

    def _explain(self, error: Exception) -> BusError:
        if isinstance(error, BusError):
            return error
        if isinstance(error, self._errors.AuthorizationError):
            return BusMisconfigured(f"Kafka at {self._servers} does not let this client read: {error}")
        return BusUnavailable(
            f"Kafka at {self._servers} does not answer as it should ({type(error).__name__}: {error})"
        )
