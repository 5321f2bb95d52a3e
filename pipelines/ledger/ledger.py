"""The ledger's one writer: records of the bus become rows, parts and offsets, each exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ingest.bus import Record, TopicPartition
from ingest.clock import Clock
from ingest.codec import Codec, Undecodable
from ingest.events import DeviceMetrics, Logs, Metrics, NodeHeartbeat
from recovery.action import RECOVERY_TYPES

from .engine import duckdb
from .opening import FILE_NAME, METRICS_FOLDER, check_version, open_database, refuse_network_folder
from .parts import TEMPORARY_SUFFIX, PartStore, removal_row
from .shapes import LedgerBusy, LedgerWriteFailed
from .state import LedgerState
from .stored import newest_seq, oldest_log_line, stored_offsets, stored_parts
from .tables import SCHEMA_VERSION, TABLES, Entry, check_storable, create_statements, entry_of, log_rows

READERS_DRAIN_SECONDS = 15.0
DOOMED_KEEP_SECONDS = 30.0  # a query that started before a merge may still read the old parts
TIDY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Bounds and periods of the ledger."""

    flush_seconds: float = 5.0  # a metrics part at least so often
    part_samples_max: int = 200_000  # or when so many wait
    bulk_seconds: float = 1.0  # log lines are committed so often; verdicts and the like at once
    log_rows_max: int = 2_000_000
    logs_keep_seconds: float = 30 * 86_400.0
    metrics_keep_seconds: float = 30 * 86_400.0
    lock_wait_seconds: float = 5.0
    threads: int = 2
    memory_bytes_max: int = 2**30
    lost_after_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that cannot be stored, and why, for the dead letters."""

    record: Record
    reason: str


@dataclass(slots=True)
class _Waiting:
    """What was appended and is not committed yet."""

    entries: list[Entry] = field(default_factory=list)
    logs: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.entries and not self.logs


class Ledger:
    """Owns ledger.duckdb and metrics/. `append` and `commit` belong to one thread, `cursor` to any.

    Raises LedgerLocked or LedgerUnreadable when it cannot be opened, LedgerWriteFailed when the disk does not
    take a commit; after it only `reopen` helps, which forgets what was not committed: read `offsets()` again.
    """

    def __init__(self, folder: Path, clock: Clock, config: LedgerConfig | None = None) -> None:
        self.folder = Path(folder)
        self._clock = clock
        self._config = config or LedgerConfig()
        self._codec = Codec(RECOVERY_TYPES)
        self.state = LedgerState(lost_after_seconds=self._config.lost_after_seconds)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)  # DuckDB makes its files readable to all, so the folder keeps them
            (self.folder / METRICS_FOLDER).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise LedgerWriteFailed(
                f"the ledger's folder {self.folder} cannot be made ({error.strerror}); give one that can be written"
            ) from error
        refuse_network_folder(self.folder)
        self.parts = PartStore(self.folder / METRICS_FOLDER)
        self._readers = threading.Condition()
        self._reader_count = 0
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._reader_root: duckdb.DuckDBPyConnection | None = None
        self.commits = 0
        self.commit_seconds = 0.0
        self._open()

    # ---- opening and closing

    def _open(self) -> None:
        path = self.folder / FILE_NAME
        connection = open_database(
            path,
            self._clock,
            lock_wait_seconds=self._config.lock_wait_seconds,
            threads=self._config.threads,
            memory_bytes_max=self._config.memory_bytes_max,
        )
        try:
            path.chmod(0o600)
            self._load(connection, path)
        except duckdb.Error as error:
            connection.close()
            raise LedgerWriteFailed(f"the ledger {path} cannot be written: {error}") from error
        except BaseException:
            connection.close()
            raise
        with self._readers:
            self._connection = connection
            self._reader_root = connection.cursor()

    def _load(self, connection: duckdb.DuckDBPyConnection, path: Path) -> None:
        if check_version(connection, path) is None:
            connection.begin()
            for statement in create_statements():
                connection.execute(statement)
            connection.execute("INSERT INTO schema_version VALUES (1, ?, ?)", [SCHEMA_VERSION, self._clock.now()])
            connection.commit()
        self._seqs = {name: newest_seq(connection, name) for name in TABLES}
        self._oldest_log = oldest_log_line(connection)
        self._durable = stored_offsets(connection)
        self._next = dict(self._durable)
        self._waiting = _Waiting()
        self._waiting_ids: set[str] = set()
        self._doomed: list[tuple[float, str]] = []
        self._failed = False
        now = self._clock.monotonic()
        self._flushed_at = self._bulk_at = self._tidied_at = now
        parts = stored_parts(connection)
        self.parts.load(parts)
        self.state.load(connection, [str(self.parts.folder / part.path) for part in parts])

    def reopen(self) -> None:
        """Forget what was not committed, open the file again. Raises what opening raises, and LedgerBusy."""
        self.close()
        self._open()

    def close(self) -> None:
        """Wait for readers, let go of the file. What was not committed is forgotten. May be called twice."""
        with self._readers:
            connection, self._connection = self._connection, None
            root, self._reader_root = self._reader_root, None
            drained = self._readers.wait_for(lambda: self._reader_count == 0, READERS_DRAIN_SECONDS)
        if root is not None:
            root.close()
        if connection is not None:
            connection.close()
        if not drained:
            raise LedgerBusy("queries are still running on the ledger; close it again when they are done")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor of its own for one reader. Raises LedgerBusy while the file is not open."""
        with self._readers:
            if self._reader_root is None:
                raise LedgerBusy("the ledger's file is not open just now; ask again in a few seconds")
            cursor = self._reader_root.cursor()
            self._reader_count += 1
        try:
            yield cursor
        finally:
            cursor.close()
            with self._readers:
                self._reader_count -= 1
                self._readers.notify_all()

    # ---- writing

    def offsets(self) -> dict[TopicPartition, int]:
        """The committed offset to read next of each partition; one that is not here begins at 0."""
        return dict(self._durable)

    def append(self, records: Sequence[Record]) -> list[Rejected]:
        """Take records; they count after `commit`. Those at or below the offset taken last are dropped.

        Returns what cannot be stored: send it to the dead letters before the next `commit`, which passes it.
        """
        rejected = []
        for record in records:
            if record.offset < self._next.get(record.place, 0):
                continue
            try:
                self._take(record)
            except Undecodable as error:
                rejected.append(Rejected(record, error.reason))
            self._next[record.place] = record.offset + 1
        return rejected

    def _take(self, record: Record) -> None:
        message = self._codec.decode(record.headers, record.value)
        check_storable(record, message)
        match message:
            case Metrics():
                if message.steps and message.columns:
                    self.parts.buffer(record.place, record.offset, message)
                self.state.hear(message)
            case Logs():
                self._waiting.logs.extend(log_rows(record, message))
                self.state.hear(message)
            case DeviceMetrics():
                self.parts.buffer(record.place, record.offset, message)
                self.state.hear(message)
            case NodeHeartbeat():
                self.state.hear(message)
            case _:
                self._take_story(record, message)

    def _take_story(self, record: Record, message: Any) -> None:
        entry = entry_of(record, message)
        assert entry is not None, "every other type has a story table"
        identity = entry.identity
        if identity is not None:
            key = f"{entry.table.name}/{identity}"
            if key in self._waiting_ids or self.state.is_known(entry.table.name, identity):
                return  # told again after a crash of its producer
            self._waiting_ids.add(key)
        self._waiting.entries.append(entry)

    def due_seconds(self) -> float:
        """How long `commit` has nothing to do unless something is appended."""
        now = self._clock.monotonic()
        if self._waiting.entries or self.parts.buffered_samples >= self._config.part_samples_max:
            return 0.0
        waits = [self._tidied_at + TIDY_SECONDS - now]
        if self._waiting.logs:
            waits.append(self._bulk_at + self._config.bulk_seconds - now)
        if self._next != self._durable:
            waits.append(self._flushed_at + self._config.flush_seconds - now)
        return max(0.0, min(waits))

    @property
    def is_clean(self) -> bool:
        """Everything that was appended is committed."""
        return self._next == self._durable

    def commit(self, *, force: bool = False) -> bool:
        """Commit what is due: rows at once, log lines after bulk_seconds, parts after flush_seconds.

        True if anything was. Rows and their offsets are one transaction. Raises LedgerWriteFailed.
        """
        assert not self._failed, "reopen after a failed write"
        now = self._clock.monotonic()
        config = self._config
        flush = force or self.parts.buffered_samples >= config.part_samples_max
        flush = flush or now - self._flushed_at >= config.flush_seconds
        bulk = bool(self._waiting.logs) and now - self._bulk_at >= config.bulk_seconds
        wrote = False
        if not self.is_clean and (flush or bulk or self._waiting.entries):
            self._guarded(lambda: self._commit_waiting(flush=flush))
            self.commits += 1
            self.commit_seconds += self._clock.monotonic() - now
            wrote = True
        if flush:
            self._flushed_at = now
            self._guarded(self._merge)
        if now - self._tidied_at >= TIDY_SECONDS:
            self._tidied_at = now
            self._guarded(self._tidy)
        return wrote

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except (duckdb.Error, OSError) as error:
            self._failed = True
            text = str(error).strip().splitlines()[0]
            raise LedgerWriteFailed(
                f"the ledger in {self.folder} cannot be written ({text}); make room on that disk, it is tried again"
            ) from error

    def _commit_waiting(self, *, flush: bool) -> None:
        parts = self.parts.write_buffered() if flush else []
        held_back = set() if flush else {entry.place for entry in self.parts.held().buffered}
        offsets = {
            place: offset
            for place, offset in self._next.items()
            if place not in held_back and self._durable.get(place) != offset
        }
        rows, committed = self._numbered_rows()
        rows["metric_part"] = [part.row([]) for part in parts]
        at = self._clock.now()
        rows["source_offset"] = [(*place, offset, at) for place, offset in sorted(offsets.items())]
        seqs = self._transaction(rows)
        self._seqs.update(seqs)
        self._durable.update(offsets)
        self._waiting = _Waiting()
        self._waiting_ids.clear()
        self._bulk_at = self._clock.monotonic()
        self.state.apply(committed)
        if flush:
            self.parts.swap(parts, (), flushed=True)

    def _numbered_rows(
        self,
    ) -> tuple[dict[str, list[tuple[Any, ...]]], list[tuple[int, str, Any, str | None]]]:
        """Rows by table (without seq), and what the state is told after the commit."""
        rows: dict[str, list[tuple[Any, ...]]] = {"log_line": self._waiting.logs}
        committed = []
        for change, entry in enumerate(self._waiting.entries, start=self.state.change + 1):
            rows.setdefault(entry.table.name, []).append((change, *entry.values))
            committed.append((change, entry.table.name, entry.message, entry.identity))
        return rows, committed

    def _transaction(self, rows: dict[str, list[tuple[Any, ...]]], statements: Iterable[str] = ()) -> dict[str, int]:
        """One transaction of these rows, each table's seq in front; the new highest seqs."""
        connection = self._connection
        assert connection is not None, "the ledger is closed"
        seqs = {}
        connection.begin()
        try:
            for name, values in rows.items():
                if not values:
                    continue
                first = self._seqs[name] + 1
                with connection.appender(name) as appender:
                    appender.append_rows([(seq, *row) for seq, row in enumerate(values, start=first)])
                seqs[name] = self._seqs[name] + len(values)
            for statement in statements:
                connection.execute(statement)
            connection.commit()
        except BaseException:
            with suppress(duckdb.Error):  # a failed commit has ended the transaction already
                connection.rollback()
            raise
        return seqs

    # ---- merging and retention

    def _merge(self) -> None:
        """Make one part of many small ones, at most one merge in a flush."""
        old = self.parts.mergeable()
        connection = self._connection
        if not old or connection is None:
            return
        merged = self.parts.merged_name(old)
        target = str(self.parts.folder / (merged.path + TEMPORARY_SUFFIX)).replace("'", "''")
        connection.execute(
            "COPY (SELECT * FROM read_parquet($paths, union_by_name = true)"
            " ORDER BY job, metric, attempt, rank, node, step, event_at)"
            f" TO '{target}' (FORMAT parquet, COMPRESSION zstd)",
            {"paths": [str(self.parts.folder / part.path) for part in old]},
        )
        self.parts.publish(merged.path)
        names = [part.path for part in old]
        self._seqs.update(self._transaction({"metric_part": [merged.row(names)]}))
        self.parts.swap([merged], names, flushed=False)
        self._doom(names)

    def _tidy(self) -> None:
        """Delete what is over its time or count, and files that no query can be reading any more."""
        now = self._clock.now()
        expired = self.parts.expired(now - self._config.metrics_keep_seconds)
        if expired:
            names = [part.path for part in expired]
            self._seqs.update(self._transaction({"metric_part": [removal_row(expired[0].place, names)]}))
            self.parts.swap((), names, flushed=False)
            self._doom(names)
        lines = self._seqs["log_line"] - self._oldest_log + 1
        first_kept = self._seqs["log_line"] - self._config.log_rows_max + 1
        newest = self._seqs["log_line"]  # stays, because the next seq is counted from it
        before = now - self._config.logs_keep_seconds
        old = f"DELETE FROM log_line WHERE event_at < {before!r} AND seq < {newest}"
        many = f"DELETE FROM log_line WHERE seq < {first_kept}"
        if lines > 0:
            self._transaction({}, (old, many) if lines > self._config.log_rows_max else (old,))
            self._oldest_log = max(self._oldest_log, first_kept)
        moment = self._clock.monotonic()
        self.parts.delete(name for at, name in self._doomed if moment - at >= DOOMED_KEEP_SECONDS)
        self._doomed = [(at, name) for at, name in self._doomed if moment - at < DOOMED_KEEP_SECONDS]

    def _doom(self, names: Iterable[str]) -> None:
        at = self._clock.monotonic()
        self._doomed.extend((at, name) for name in names)

    def row_counts(self) -> dict[str, int]:
        """Rows ever written, by table."""
        return dict(self._seqs)
