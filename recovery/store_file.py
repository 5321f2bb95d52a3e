"""Recovery's SQLite file: opened by one controller, brought to this version, written in fenced transactions."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from .lease import Lease
from .store_schema import SCHEMA_STEPS, SCHEMA_VERSION


class StoreError(Exception):
    """The file cannot be relied on, so recovery must not act; the text is one sentence with what to do."""


class Fenced(StoreError):
    """A newer controller has opened this file; this one must stop at once."""


class StoreFile:
    """Lease, connection and transactions. `durable=False` leaves the syncing to the kernel: for simulations."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lease = Lease(path.with_name(path.name + ".lock"))
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        except (OSError, sqlite3.DatabaseError):
            self._lease.release()
            raise
        try:
            self._open(durable)
        except (sqlite3.DatabaseError, StoreError) as error:
            self.close()
            raise (error if isinstance(error, StoreError) else self._unreliable(error)) from error
        self._in_transaction = False
        self._together = False
        self._forget()

    def _forget(self) -> None:
        """Drop what memory holds of the file: nothing yet, or no more after a rollback. Stores above add theirs."""

    def _flush(self) -> None:
        """Write what was kept back for the end of a transaction. Stores above add theirs."""

    def _open(self, durable: bool) -> None:
        run = self._connection.execute
        run("PRAGMA journal_mode=WAL")
        run(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        verdict = run("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(" ".join(str(verdict).split()))
        run("BEGIN IMMEDIATE")
        self._migrate(run("PRAGMA user_version").fetchone()[0])
        run("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
        self.epoch: int = run("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0]
        run("COMMIT")

    def _migrate(self, version: int) -> None:
        """Bring the file to this version, in the transaction that opens it: all of it happens, or nothing."""
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} has schema version {version}, this recovery reads {SCHEMA_VERSION} and older; "
                "use the version of Transom that wrote it, or move the file aside"
            )
        for step in SCHEMA_STEPS[version:]:
            for statement in step.split(";\n"):
                if statement.strip():
                    self._connection.execute(statement)
        if version == 0:
            self._connection.execute("INSERT INTO meta VALUES ('epoch', 0)")
        self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _unreliable(self, error: sqlite3.DatabaseError) -> StoreError:
        return StoreError(
            f"recovery's state file {self.path} cannot be relied on ({error}), so nothing is done; make room "
            "or move the file aside and start again, attempts are then read from the backend"
        )

    def close(self) -> None:
        """Give the file and the lease back; what was not committed is as if it never was. Idempotent."""
        self._connection.close()
        self._lease.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside happen, or none. Raises Fenced if somebody else has opened the file since."""
        if self._together:
            if not self._in_transaction:
                self._begin()
            yield
            return
        assert not self._in_transaction
        with self._ending():
            self._begin()
            yield
            self._commit()

    @contextmanager
    def together(self) -> Iterator[None]:
        """One commit for all transactions inside, at the end, and none where there is none: a hundred decisions then
        wait for the disk once. Nothing that they allow may be done before. Raises Fenced if somebody else has opened
        the file since, also where nothing is written: what memory holds of it would be old."""
        assert not self._in_transaction
        with self._ending():
            self._refuse_fenced()
            self._together = True
            yield
            if self._in_transaction:
                self._commit()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise self._unreliable(error) from error
        finally:
            self._in_transaction = self._together = False
            if self._connection.in_transaction:
                self._connection.rollback()
                self._forget()

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._in_transaction = True
        self._refuse_fenced()

    def _refuse_fenced(self) -> None:
        newest = self._one("SELECT value FROM meta WHERE key = 'epoch'")[0]
        if newest != self.epoch:
            raise Fenced(f"a newer recovery (epoch {newest}, ours is {self.epoch}) has taken over {self.path}")

    def _commit(self) -> None:
        self._flush()
        self._connection.execute("COMMIT")

    def _write(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._in_transaction
        return self._connection.execute(statement, values)

    def _write_all(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        assert self._in_transaction
        self._connection.executemany(statement, rows)

    def _one(self, query: str, *values: Any) -> Any:
        return self._connection.execute(query, values).fetchone()

    def _all(self, query: str, *values: Any) -> list[Any]:
        return self._connection.execute(query, values).fetchall()


def copy_store(path: Path, target: Path) -> None:
    """A copy of the file as it stands, also while a controller writes it: for who only looks. Raises StoreError."""
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"recovery's state file {path} cannot be read ({error}); is this its state folder?") from error
