"""The embedded bus: one WAL file on a local disk, shared by all services and launchers of one machine."""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from . import sqlite_file
from .bus import (
    BUFFERED_MAX,
    BusFull,
    BusMisconfigured,
    OnPartitions,
    Start,
    refuse_oversized,
)
from .clock import Clock
from .events import TOPICS, Topic
from .partitioning import key_bytes, partition_of, plan_topics
from .sqlite_consumer import GroupSettings, SqliteConsumer

MOUNTINFO = Path("/proc/self/mountinfo")
PRUNE_RECORDS_MAX = 2_000  # of one transaction, so that producers wait milliseconds for the lock
CLOSE_FLUSH_SECONDS = 2.0


class SqliteBus:
    """Opens the bus file, creating it where needed. Several processes may do so at once.

    `mountinfo` is the text of /proc/self/mountinfo; None reads it. Raises BusMisconfigured for a path that cannot
    hold the bus and for a file that is not one.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock,
        prefix: str = "transom",
        buffered_max: int = BUFFERED_MAX,
        session_timeout_seconds: float = 30.0,
        poll_interval_seconds: float = 0.02,
        busy_seconds: float = 5.0,
        mountinfo: str | None = None,
    ) -> None:
        self._path = Path(path).absolute()
        self._clock = clock
        self._prefix = prefix
        self._buffered_max = buffered_max
        self._busy_seconds = busy_seconds
        self._settings = GroupSettings(session_timeout_seconds, poll_interval_seconds, busy_seconds)
        if mountinfo is None:
            mountinfo = MOUNTINFO.read_text(errors="replace") if MOUNTINFO.exists() else ""
        sqlite_file.refuse_network_path(self._path.parent.resolve() / self._path.name, mountinfo)
        sqlite_file.prepare(self._path)

    def producer(self) -> SqliteProducer:
        return SqliteProducer(self._path, self._clock, self._prefix, self._buffered_max)

    def consumer(
        self,
        group: str,
        topics: Sequence[Topic],
        *,
        start: Start = "earliest",
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> SqliteConsumer:
        return SqliteConsumer(
            self._path,
            self._clock,
            self._prefix,
            group,
            tuple(topics),
            start,
            on_assign,
            on_revoke,
            self._settings,
        )

    def create_topics(self, partitions: int) -> None:
        connection = sqlite_file.connect(self._path)
        try:
            with sqlite_file.transaction(connection, self._path, self._busy_seconds):
                for topic, count in plan_topics(partition_counts(connection, self._prefix), partitions).items():
                    connection.executemany(
                        "INSERT INTO logs(topic, partition) VALUES (?, ?)",
                        [(f"{self._prefix}.{topic}", number) for number in range(count)],
                    )
                # Members that wait for these topics look again when their group's generation moves.
                connection.execute(
                    "UPDATE groups SET generation = generation + 1 WHERE substr(name, 1, ?) = ?",
                    (len(self._prefix) + 1, f"{self._prefix}/"),
                )
        finally:
            connection.close()

    def prune(self, topic: Topic, older_than: float) -> int:
        """Delete the records of `topic` that were appended before `older_than` (UTC seconds), oldest first.

        Returns how many. The file keeps its size; the space is used again. Consumers that had not read them go on
        with the oldest record that is left.
        """
        connection = sqlite_file.connect(self._path)
        pruned = 0
        try:
            logs = connection.execute("SELECT log FROM logs WHERE topic = ?", (f"{self._prefix}.{topic}",)).fetchall()
            for (log,) in logs:
                while (batch := self._prune_some(connection, log, older_than)) > 0:
                    pruned += batch
        except sqlite3.Error as error:
            raise sqlite_file.explain(error, self._path) from error
        finally:
            connection.close()
        return pruned

    def _prune_some(self, connection: sqlite3.Connection, log: int, older_than: float) -> int:
        low, high = log << sqlite_file.OFFSET_BITS, (log + 1) << sqlite_file.OFFSET_BITS
        with sqlite_file.transaction(connection, self._path, self._busy_seconds):
            rows = connection.execute(
                "SELECT id, appended_at FROM records WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (low, high, PRUNE_RECORDS_MAX),
            ).fetchall()
            # Only the front may go: a log has no holes, whatever the clock did meanwhile.
            count = next((index for index, row in enumerate(rows) if row[1] >= older_than), len(rows))
            if count:
                last = rows[count - 1][0]
                connection.execute("DELETE FROM records WHERE id >= ? AND id <= ?", (low, last))
                connection.execute("UPDATE logs SET first_offset = ? WHERE log = ?", (last - low + 1, log))
        return count

    def close(self) -> None:
        """Nothing is held here: producers and consumers have their own connections."""


class _Waiting(NamedTuple):
    topic: Topic
    key: str
    headers: bytes
    value: bytes


class SqliteProducer:
    """Buffers in memory; each `flush` appends everything in one transaction. May be used by several threads."""

    def __init__(self, path: Path, clock: Clock, prefix: str, buffered_max: int) -> None:
        self._path = path
        self._clock = clock
        self._prefix = prefix
        self._buffered_max = buffered_max
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()  # guards the buffer
        self._flushing = threading.Lock()  # guards the connection
        self._connection = sqlite_file.connect(path)
        self._closed = False

    def send(self, topic: Topic, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        if topic not in TOPICS:
            raise BusMisconfigured(f"there is no topic {topic!r}; topics are {', '.join(TOPICS)}")
        refuse_oversized(topic, headers, value)
        message = _Waiting(topic, key, msgspec.msgpack.encode(headers), value)
        with self._lock:
            if self._closed:
                raise BusMisconfigured("this producer is closed; make a new one")
            if len(self._waiting) >= self._buffered_max:
                raise BusFull(f"{self._buffered_max} messages wait for {self._path}; call flush, or drop this one")
            self._waiting.append(message)

    def flush(self, timeout_seconds: float) -> None:
        with self._flushing:
            with self._lock:
                batch = list(self._waiting)
            if not batch:
                return
            with sqlite_file.transaction(self._connection, self._path, timeout_seconds):
                self._append(batch)
            with self._lock:
                for _ in batch:
                    self._waiting.popleft()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.flush(CLOSE_FLUSH_SECONDS)
        finally:
            self._connection.close()

    def _append(self, batch: Sequence[_Waiting]) -> None:
        now = self._clock.now()
        logs: dict[Topic, dict[int, int]] = {}
        ends: dict[int, int] = {}
        for topic in {message.topic for message in batch}:
            rows = self._connection.execute(
                "SELECT partition, log, next_offset FROM logs WHERE topic = ?", (f"{self._prefix}.{topic}",)
            ).fetchall()
            if not rows:
                raise BusMisconfigured(f"there is no topic {self._prefix}.{topic}; run: transom topics create")
            logs[topic] = {partition: log for partition, log, _ in rows}
            ends.update((log, end) for _, log, end in rows)
        records: list[tuple[int, bytes, bytes, bytes, float]] = []
        for message in batch:
            log = logs[message.topic][partition_of(message.key, len(logs[message.topic]))]
            records.append(
                (
                    (log << sqlite_file.OFFSET_BITS) | ends[log],
                    key_bytes(message.key),
                    message.headers,
                    message.value,
                    now,
                )
            )
            ends[log] += 1
        self._connection.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", records)
        self._connection.executemany(
            "UPDATE logs SET next_offset = ? WHERE log = ?", [(end, log) for log, end in ends.items()]
        )


def partition_counts(connection: sqlite3.Connection, prefix: str) -> dict[Topic, int]:
    """The topics that exist under `prefix`, with their partition counts."""
    counts: dict[Topic, int] = {}
    for topic in TOPICS:
        (count,) = connection.execute("SELECT count(*) FROM logs WHERE topic = ?", (f"{prefix}.{topic}",)).fetchone()
        if count:
            counts[topic] = count
    return counts
