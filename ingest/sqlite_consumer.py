"""A consumer of the embedded bus: membership of a group, ownership of partitions, offsets, all in the bus file.

Ownership moves in two steps, so that no partition ever has two owners: whoever should give a partition up is told
(`on_revoke`, in which it may still commit) and then releases it; only then the other member claims it. Every commit
checks the ownership in its own transaction: what a member that was expelled meanwhile tries to store is refused.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from . import sqlite_file
from .bus import BusMisconfigured, BusUnavailable, OnPartitions, Record, Start, TopicPartition
from .clock import Clock
from .events import Topic
from .partitioning import assign_ranges, key_text

HEARTBEATS_OF_A_SESSION = 10
QUIET_SECONDS, QUIET_FACTOR = 2.0, 2.0  # where nothing comes, look half as often: an idle service costs next to nothing
_headers = msgspec.msgpack.Decoder(tuple[tuple[str, bytes], ...])
_topics = msgspec.json.Decoder(tuple[str, ...])


class GroupSettings(NamedTuple):
    """How long a silent member keeps its partitions, how often an idle one looks, how long it waits for the lock."""

    session_timeout_seconds: float
    poll_interval_seconds: float
    busy_seconds: float


class SqliteConsumer:
    """One member of a group. Used by one thread at a time."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        prefix: str,
        group: str,
        topics: tuple[Topic, ...],
        start: Start,
        on_assign: OnPartitions | None,
        on_revoke: OnPartitions | None,
        settings: GroupSettings,
    ) -> None:
        self._path = path
        self._clock = clock
        self._prefix = prefix
        self._group = f"{prefix}/{group}"
        self._topics = topics
        self._start = start
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._settings = settings
        self._process = process_identity()
        self._member: int | None = None  # the group's generation when we joined: unique, and in order of joining
        self._generation = -1  # the generation we have acted upon
        self._claims_left = False  # partitions that are ours by assignment, but not yet released by their owner
        self._seen_at = 0.0
        self._read_at = 0.0
        self._logs: dict[TopicPartition, int] = {}  # what we own, and its number in the file
        self._positions: dict[TopicPartition, int] = {}
        self._uncommitted: dict[TopicPartition, int] = {}
        self._turn = 0  # which partition is read first, so that a busy one does not starve the others
        self._group_version = -1
        self._quiet_version = -1  # the file's version at which there was nothing left to read
        self._closed = False
        self._connection = sqlite_file.connect(path)

    # ---- reading

    def poll(self, records_max: int, timeout_seconds: float) -> list[Record]:
        if self._closed:
            raise BusMisconfigured("this consumer is closed; make a new one")
        deadline = self._clock.monotonic() + timeout_seconds
        while True:
            try:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                self._keep_membership(version)
                records = [] if version == self._quiet_version else self._read(records_max)
            except sqlite3.Error as error:
                raise sqlite_file.explain(error, self._path) from error
            now = self._clock.monotonic()
            if records:
                self._read_at = now
                return records
            self._quiet_version = version
            if now >= deadline:
                return []
            quiet = now - self._read_at > QUIET_SECONDS
            interval = self._settings.poll_interval_seconds * (QUIET_FACTOR if quiet else 1.0)
            self._clock.sleep(min(deadline - now, interval))

    def _read(self, records_max: int) -> list[Record]:
        places = sorted(self._logs)
        records: list[Record] = []
        for index in range(len(places)):
            if len(records) >= records_max:
                break
            place = places[(self._turn + index) % len(places)]
            low = self._logs[place] << sqlite_file.OFFSET_BITS
            rows = self._connection.execute(
                "SELECT id, key, headers, value, appended_at FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (
                    low + self._positions[place],
                    low + (1 << sqlite_file.OFFSET_BITS),
                    records_max - len(records),
                ),
            ).fetchall()
            records.extend(
                Record(
                    place.topic,
                    place.partition,
                    row - low,
                    key_text(key),
                    _headers.decode(headers),
                    value,
                    at,
                )
                for row, key, headers, value, at in rows
            )
            if rows:
                self._positions[place] = self._uncommitted[place] = rows[-1][0] - low + 1
        self._turn += 1
        return records

    def commit(self) -> None:
        if not self._uncommitted:
            return
        with self._transaction():
            for place, offset in self._uncommitted.items():
                self._require_ownership(place)
                self._store_offset(self._logs[place], offset)
        self._uncommitted.clear()

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        for place in offsets:
            if place not in self._logs:
                raise BusMisconfigured(
                    f"{place.topic}/{place.partition} is not assigned to this member; seek in on_assign"
                )
        self._positions.update(offsets)
        for place in offsets:
            self._uncommitted.pop(place, None)
        self._quiet_version = -1

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._logs)

    def lag(self) -> dict[TopicPartition, int]:
        result: dict[TopicPartition, int] = {}
        try:
            for place, log in self._logs.items():
                first, end = self._connection.execute(
                    "SELECT first_offset, next_offset FROM logs WHERE log = ?", (log,)
                ).fetchone()
                result[place] = max(0, end - max(first, self._positions[place]))
        except sqlite3.Error as error:
            raise sqlite_file.explain(error, self._path) from error
        return result

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._logs and self._on_revoke is not None:
                self._on_revoke(frozenset(self._logs))
            # A group that cannot be left now forgets this member when its session ends.
            with suppress(BusUnavailable), self._transaction():
                self._expel([self._member])
        finally:
            self._forget(frozenset(self._logs))
            self._connection.close()

    # ---- membership

    def _keep_membership(self, version: int) -> None:
        now = self._clock.monotonic()
        heartbeat_seconds = self._settings.session_timeout_seconds / HEARTBEATS_OF_A_SESSION
        if self._member is None or now - self._seen_at >= heartbeat_seconds:
            self._beat(now)
        if version == self._group_version:
            return
        (generation,) = self._connection.execute(
            "SELECT generation FROM groups WHERE name = ?", (self._group,)
        ).fetchone()
        if generation != self._generation or self._claims_left:
            self._rebalance()
        self._group_version = version

    def _beat(self, now: float) -> None:
        """Say that we live, expel who does not, join where we are no member (any more)."""
        expelled = False
        with self._transaction():
            if self._member is not None:
                expelled = not self._connection.execute(
                    "UPDATE members SET seen_at = ? WHERE name = ? AND member = ?",
                    (now, self._group, self._member),
                ).rowcount
            others = self._connection.execute(
                "SELECT member, seen_at, process FROM members WHERE name = ? AND member IS NOT ?",
                (self._group, self._member),
            ).fetchall()
            # A time later than now was written before this machine booted.
            self._expel(
                member
                for member, seen_at, process in others
                if not 0.0 <= now - seen_at <= self._settings.session_timeout_seconds or is_dead(process, self._process)
            )
        self._seen_at = now
        if expelled:
            self._lose_all()
        if self._member is None:
            self._join(now)

    def _join(self, now: float) -> None:
        with self._transaction():
            self._connection.execute("INSERT OR IGNORE INTO groups VALUES (?, 0)", (self._group,))
            member = self._next_generation()
            self._connection.execute(
                "INSERT INTO members VALUES (?, ?, ?, ?, ?)",
                (self._group, member, msgspec.json.encode(self._topics).decode(), now, self._process),
            )
        self._member = member
        self._group_version = -1

    def _lose_all(self) -> None:
        """We were expelled: what we owned may have new owners already, so nothing of it can be stored."""
        lost = frozenset(self._logs)
        self._member, self._generation = None, -1
        self._uncommitted.clear()
        try:
            if lost and self._on_revoke is not None:
                self._on_revoke(lost)
        finally:
            self._forget(lost)

    def _rebalance(self) -> None:
        with self._transaction():
            (generation,) = self._connection.execute(
                "SELECT generation FROM groups WHERE name = ?", (self._group,)
            ).fetchone()
            ours, logs = self._wanted()
        revoked = frozenset(self._logs) - ours
        if revoked:
            if self._on_revoke is not None:
                self._on_revoke(revoked)
            with self._transaction():
                for place in revoked:
                    self._connection.execute(
                        "DELETE FROM owners WHERE name = ? AND log = ? AND member = ?",
                        (self._group, self._logs[place], self._member),
                    )
            self._forget(revoked)
        gained: dict[TopicPartition, int] = {}
        with self._transaction():
            member = self._connection.execute(
                "SELECT 1 FROM members WHERE name = ? AND member = ?", (self._group, self._member)
            ).fetchone()
            for place in sorted(ours - frozenset(self._logs)) if member else ():
                claimed = self._connection.execute(
                    "INSERT OR IGNORE INTO owners VALUES (?, ?, ?)", (self._group, logs[place], self._member)
                ).rowcount
                if claimed:
                    gained[place] = self._stored_offset(logs[place])
        self._generation = generation
        self._logs.update((place, logs[place]) for place in gained)
        self._positions.update(gained)
        self._claims_left = ours != frozenset(self._logs)
        if gained:
            self._quiet_version = -1
            if self._on_assign is not None:
                self._on_assign(frozenset(gained))

    def _wanted(self) -> tuple[frozenset[TopicPartition], dict[TopicPartition, int]]:
        """What should be ours, and the number of every log of our topics."""
        members = [
            (str(member), _topics.decode(topics))
            for member, topics in self._connection.execute(
                "SELECT member, topics FROM members WHERE name = ? ORDER BY member", (self._group,)
            )
        ]
        logs: dict[TopicPartition, int] = {}
        counts: dict[Topic, int] = {}
        for topic in self._topics:
            rows = self._connection.execute(
                "SELECT partition, log FROM logs WHERE topic = ?", (f"{self._prefix}.{topic}",)
            ).fetchall()
            counts[topic] = len(rows)
            logs.update((TopicPartition(topic, partition), log) for partition, log in rows)
        return assign_ranges(members, counts).get(str(self._member), frozenset()), logs

    def _stored_offset(self, log: int) -> int:
        """The group's offset of a log; where there is none, the start is decided and stored with the claim."""
        row = self._connection.execute(
            "SELECT next_offset FROM offsets WHERE name = ? AND log = ?", (self._group, log)
        ).fetchone()
        if row is not None:
            return int(row[0])
        first, end = self._connection.execute(
            "SELECT first_offset, next_offset FROM logs WHERE log = ?", (log,)
        ).fetchone()
        offset = int(first if self._start == "earliest" else end)
        self._store_offset(log, offset)
        return offset

    def _store_offset(self, log: int, offset: int) -> None:
        self._connection.execute(
            "INSERT INTO offsets VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET next_offset = excluded.next_offset",
            (self._group, log, offset),
        )

    def _require_ownership(self, place: TopicPartition) -> None:
        row = self._connection.execute(
            "SELECT member FROM owners WHERE name = ? AND log = ?", (self._group, self._logs[place])
        ).fetchone()
        if row is None or row[0] != self._member:
            raise BusUnavailable(
                f"{place.topic}/{place.partition} was taken from this member of {self._group}, which was silent "
                "for too long; what it polled is delivered to the new owner"
            )

    def _expel(self, members: Iterable[int | None]) -> None:
        gone = [member for member in members if member is not None]
        for member in gone:
            for table in ("members", "owners"):
                self._connection.execute(f"DELETE FROM {table} WHERE name = ? AND member = ?", (self._group, member))
        if gone:
            self._next_generation()
            self._group_version = -1  # data_version does not tell us of our own commits

    def _next_generation(self) -> int:
        (generation,) = self._connection.execute(
            "UPDATE groups SET generation = generation + 1 WHERE name = ? RETURNING generation",
            (self._group,),
        ).fetchone()
        return int(generation)

    def _forget(self, places: frozenset[TopicPartition]) -> None:
        for place in places:
            self._logs.pop(place, None)
            self._positions.pop(place, None)
            self._uncommitted.pop(place, None)

    def _transaction(self) -> AbstractContextManager[None]:
        return sqlite_file.transaction(self._connection, self._path, self._settings.busy_seconds)


def process_identity() -> str:
    """This process, so that others on this machine can tell that it is gone: pid namespace, pid, start."""
    return f"{_namespace()} {os.getpid()} {_started(os.getpid())}"


def is_dead(process: str, ours: str) -> bool:
    """True only if that process is certainly gone; where we cannot see it, the session time-out decides."""
    namespace, pid, started = process.split(" ")
    if namespace == "-" or namespace != ours.split(" ")[0]:
        return False
    return _started(int(pid)) != started


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "-"


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "-" where there is none or it is only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "-"
    return "-" if fields[0] in "ZX" else fields[19]
