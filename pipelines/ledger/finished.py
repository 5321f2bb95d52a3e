"""A ledger that nobody writes any more (a finished replay), opened read-only behind the same questions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from ingest.clock import Clock, SystemClock

from .engine import duckdb
from .opening import FILE_NAME, METRICS_FOLDER, check_version, open_database
from .parts import PartStore
from .reader import LocalReader
from .shapes import CommandRequest, Health, LedgerUnavailable, LedgerUnreadable
from .state import LedgerState
from .stored import stored_parts


class FinishedLedger(LocalReader):
    """The questions of a ledger whose file this process holds open read-only; `now` is its newest event."""

    def __init__(self, folder: Path, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        state = LedgerState()
        parts = PartStore(folder / METRICS_FOLDER)
        known = stored_parts(connection)
        parts.adopt(known)
        state.load(connection, [str(parts.folder / part.path) for part in known])
        super().__init__(
            self.cursor,
            state,
            parts,
            now=state.newest_at,
            health=self._finished_health,
            post=self._refuse,
        )

    @contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor of its own for one reader."""
        cursor = self._connection.cursor()
        try:
            yield cursor
        finally:
            cursor.close()

    def _finished_health(self) -> Health:
        return Health(status="ok", reason="a finished ledger, read only", lag={}, data_at=self._state.newest_at())

    def _refuse(self, request: CommandRequest) -> str:
        raise LedgerUnavailable(
            f"{request.verb} needs a live ledger, and this one is finished; "
            "start one with `transom up` or `transom record`"
        )

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_finished(folder: Path, clock: Clock | None = None) -> FinishedLedger:
    """The ledger in `folder`. Raises LedgerUnreadable, and LedgerLocked while `record` holds it."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise LedgerUnreadable(f"there is no ledger in {folder}; `transom replay` makes one")
    connection = open_database(path, clock or SystemClock(), read_only=True, lock_wait_seconds=1.0)
    try:
        if check_version(connection, path) is None:
            raise LedgerUnreadable(f"the ledger {path} is empty; `transom replay` makes one")
        return FinishedLedger(Path(folder), connection)
    except BaseException:
        connection.close()
        raise
