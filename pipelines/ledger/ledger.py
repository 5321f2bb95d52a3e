"""The ledger's one writer: records of the bus become rows, parts and offsets, each exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from .migrations import migrate
from .opening import FILE_NAME, METRICS_FOLDER, check_version, open_database, refuse_network_folder
from .parts import PartStore
from .retention import Keep
from .shapes import LedgerBusy, LedgerWriteFailed
from .snapshots import Snapshots
from .state import LedgerState
from .stored import newest_seq, stored_offsets, stored_parts
from .tables import SCHEMA_VERSION, TABLES, Entry, check_storable, create_statements, entry_of, log_rows
from .upkeep import Upkeep

READERS_DRAIN_SECONDS = 15.0
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
    story_keep_seconds: float | None = None  # verdicts, actions, events …: for ever
    snapshot_seconds: float | None = None  # a snapshot so often, where anything changed
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
        self.snapshots = Snapshots(self.folder, clock)
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
        version = check_version(connection, path)
        if version is not None:
            migrate(connection, version, self._clock.now())
        else:
            connection.begin()
            for statement in create_statements():
                connection.execute(statement)
            connection.execute("INSERT INTO schema_version VALUES (1, ?, ?)", [SCHEMA_VERSION, self._clock.now()])
            connection.commit()
        self._seqs = {name: newest_seq(connection, name) for name in TABLES}
        self._durable = stored_offsets(connection)
        self._next = dict(self._durable)
        self._waiting = _Waiting()
        self._waiting_ids: set[str] = set()
        keep = Keep(
            self._config.log_rows_max,
            self._config.logs_keep_seconds,
            self._config.metrics_keep_seconds,
            self._config.story_keep_seconds,
        )
        self._upkeep = Upkeep(self.parts, keep, self._clock, self._transaction)
        self._failed = False
        now = self._clock.monotonic()
        self._flushed_at = self._bulk_at = self._tidied_at = self._snapshot_at = now
        self._snapshot_commits = self.commits
        self.snapshots.forget_unfinished()
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
        full = self.parts.buffered_samples >= self._config.part_samples_max
        if self._waiting.entries or full or self._snapshot_due(now):
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
        snapshot = self._snapshot_due(now)
        flush = force or snapshot or self.parts.buffered_samples >= config.part_samples_max
        flush = flush or now - self._flushed_at >= config.flush_seconds
        bulk = bool(self._waiting.logs) and now - self._bulk_at >= config.bulk_seconds
        wrote = False
        if not self.is_clean and (flush or bulk or self._waiting.entries):
            self._guarded(lambda: self._commit_waiting(flush=flush))
            self.commits += 1
            self.commit_seconds += self._clock.monotonic() - now
            wrote = True
        connection = self._connection
        assert connection is not None, "the ledger is closed"
        if flush:
            self._flushed_at = now
            self._guarded(lambda: self._upkeep.merge(connection))
        if now - self._tidied_at >= TIDY_SECONDS:
            self._tidied_at = now
            self._guarded(lambda: self._upkeep.tidy(connection, self._seqs))
        if snapshot:
            self._guarded(lambda: self._take_snapshot(connection))
        return wrote

    def _snapshot_due(self, now: float) -> bool:
        period = self._config.snapshot_seconds
        changed = self.commits != self._snapshot_commits
        return self.snapshots.wanted or (period is not None and changed and now - self._snapshot_at >= period)

    def _take_snapshot(self, connection: duckdb.DuckDBPyConnection) -> None:
        connection.execute("CHECKPOINT")
        self.snapshots.make(self.parts.folder / part.path for part in self.parts.held().parts)
        self._snapshot_at, self._snapshot_commits = self._clock.monotonic(), self.commits

    def _guarded(self, write: Callable[[], object]) -> None:
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
        self._transaction(rows)
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

    def _transaction(self, rows: Mapping[str, Sequence[tuple[Any, ...]]], statements: Iterable[str] = ()) -> None:
        """One transaction of these rows, each table's seq in front, and these statements."""
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
        self._seqs.update(seqs)

    # ---- figures

    def row_counts(self) -> dict[str, int]:
        """Rows ever written, by table."""
        return dict(self._seqs)
