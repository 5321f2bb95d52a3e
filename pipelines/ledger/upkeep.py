"""The writer's housework: small parts become large ones, what is over its time goes, files follow their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ingest.clock import Clock

from .engine import duckdb
from .parts import TEMPORARY_SUFFIX, PartStore, removal_row
from .retention import OFFSET_ROWS_MAX, Keep, counted, removals, superseded_offsets, superseded_parts

DOOMED_KEEP_SECONDS = 30.0  # a query that started before a merge may still read the old parts
Transaction = Callable[[Mapping[str, Sequence[tuple[Any, ...]]], Iterable[str]], None]


class Upkeep:
    """Belongs to the writer's thread; `transaction` commits rows (without seq) and statements together."""

    def __init__(self, parts: PartStore, keep: Keep, clock: Clock, transaction: Transaction) -> None:
        self._parts = parts
        self._keep = keep
        self._clock = clock
        self._transaction = transaction
        self._doomed: list[tuple[float, str]] = []
        self._forgot_at: dict[str, int] = {}  # seq of the table when its superseded rows went last

    def merge(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Make one part of many small ones, at most one merge in a flush."""
        old = self._parts.mergeable()
        if not old:
            return
        merged = self._parts.merged_name(old)
        target = str(self._parts.folder / (merged.path + TEMPORARY_SUFFIX)).replace("'", "''")
        connection.execute(
            "COPY (SELECT * FROM read_parquet($paths, union_by_name = true)"
            " ORDER BY job, metric, attempt, rank, node, step, event_at)"
            f" TO '{target}' (FORMAT parquet, COMPRESSION zstd)",
            {"paths": [str(self._parts.folder / part.path) for part in old]},
        )
        self._parts.publish(merged.path)
        names = [part.path for part in old]
        self._transaction({"metric_part": [merged.row(names)]}, ())
        self._parts.swap([merged], names, flushed=False)
        self._doom(names)

    def tidy(self, connection: duckdb.DuckDBPyConnection, seqs: Mapping[str, int]) -> None:
        """Delete what is over its time or count, and files that no query can be reading any more."""
        now = self._clock.now()
        expired = self._parts.expired(now - self._keep.metrics_seconds)
        if expired:
            names = [part.path for part in expired]
            self._transaction({"metric_part": [removal_row(expired[0].place, names)]}, ())
            self._parts.swap((), names, flushed=False)
            self._doom(names)
        self._forget_rows(connection, seqs, now)
        moment = self._clock.monotonic()
        self._parts.delete(name for at, name in self._doomed if moment - at >= DOOMED_KEEP_SECONDS)
        self._doomed = [(at, name) for at, name in self._doomed if moment - at < DOOMED_KEEP_SECONDS]

    def _forget_rows(self, connection: duckdb.DuckDBPyConnection, seqs: Mapping[str, int], now: float) -> None:
        rows, statements = [], []
        for removal in removals(self._keep, now, seqs):
            count, highest = counted(connection, removal)
            if count:
                rows.append((now, removal.table, highest + 1, count))
                statements.append(f"DELETE FROM {removal.table} WHERE {removal.condition}")
        if self._have_piled_up("source_offset", seqs):
            statements.append(superseded_offsets())
        if self._have_piled_up("metric_part", seqs):
            statements.append(superseded_parts([part.path for part in self._parts.held().parts]))
        if statements:
            self._transaction({"retention": rows}, statements)

    def _have_piled_up(self, table: str, seqs: Mapping[str, int]) -> bool:
        if seqs[table] - self._forgot_at.get(table, 0) <= OFFSET_ROWS_MAX:
            return False
        self._forgot_at[table] = seqs[table]
        return True

    def _doom(self, names: Iterable[str]) -> None:
        at = self._clock.monotonic()
        self._doomed.extend((at, name) for name in names)
