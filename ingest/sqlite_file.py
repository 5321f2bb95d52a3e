"""The file under the embedded bus: where it may lie, how it is opened, its tables, what its errors mean."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from .bus import BusError, BusMisconfigured, BusUnavailable

SCHEMA_VERSION = 1
OFFSET_BITS = 40  # a record's rowid is log << OFFSET_BITS | offset: each log lies together in the file
OPEN_SECONDS_MAX = 10.0
JOURNAL_BYTES_MAX = 64 * 1024 * 1024

# WAL needs memory that all processes share and locks that work; these file systems promise neither.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "beegfs",
        "gpfs",
        "ncpfs",
        "orangefs",
        "pvfs2",
        "panfs",
        "wekafs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.juicefs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.rclone",
    }
)

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS logs(log INTEGER PRIMARY KEY,"
    " topic TEXT NOT NULL, partition INTEGER NOT NULL,"
    " first_offset INTEGER NOT NULL DEFAULT 0, next_offset INTEGER NOT NULL DEFAULT 0,"
    " UNIQUE(topic, partition))",
    "CREATE TABLE IF NOT EXISTS records(id INTEGER PRIMARY KEY, key BLOB NOT NULL, headers BLOB NOT NULL,"
    " value BLOB NOT NULL, appended_at REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS groups(name TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS members(name TEXT NOT NULL, member INTEGER NOT NULL, topics TEXT NOT NULL,"
    " seen_at REAL NOT NULL, process TEXT NOT NULL, PRIMARY KEY(name, member)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS owners(name TEXT NOT NULL, log INTEGER NOT NULL, member INTEGER NOT NULL,"
    " PRIMARY KEY(name, log)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS offsets(name TEXT NOT NULL, log INTEGER NOT NULL,"
    " next_offset INTEGER NOT NULL, PRIMARY KEY(name, log)) WITHOUT ROWID",
    f"PRAGMA user_version={SCHEMA_VERSION}",
)


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds `path`, by the text of /proc/self/mountinfo; empty if unknown."""
    best, found = -1, ""
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5 or not right:
            continue
        point = Path(_unescape(fields[4]))
        # A later mount at the same point hides the earlier one, so equal lengths replace.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), right.split(" ")[0]
    return found


def refuse_network_path(path: Path, mountinfo: str) -> None:
    """Raise BusMisconfigured where `path` lies on a file system on which SQLite's WAL loses or corrupts."""
    kind = file_system_of(path, mountinfo)
    if kind in NETWORK_FILE_SYSTEMS:
        raise BusMisconfigured(
            f"{path} lies on {kind}, a network file system, where processes on two machines would corrupt "
            "the embedded bus; put state_dir on a local disk, or use --bus kafka"
        )


def prepare(path: Path) -> None:
    """Create the folder (0700) and the file (0600) with its tables, or check those that are there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _create(path)
    except OSError as error:
        raise BusMisconfigured(
            f"the bus file {path} cannot be created or written ({error.strerror}); choose a state_dir that is writable"
        ) from error
    connection = connect(path)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version < SCHEMA_VERSION:
            _create_tables(connection, path)
        if version > SCHEMA_VERSION:
            raise BusMisconfigured(
                f"{path} was written by a newer transom (format {version}, we know {SCHEMA_VERSION}); "
                "upgrade, or use another state_dir"
            )
    except sqlite3.Error as error:
        raise explain(error, path) from error
    finally:
        connection.close()


def _create(path: Path) -> None:
    """Make the file aside and link it in whole: nobody ever opens one that is not in WAL mode yet.

    The file itself is never opened by anything but SQLite: closing any other descriptor of it would drop the
    locks of all connections that this process has.
    """
    aside = path.with_name(f"{path.name}.new-{os.getpid()}-{threading.get_ident()}")
    aside.unlink(missing_ok=True)
    try:
        # SQLite gives its -wal and -shm files the mode of the main file.
        os.close(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = connect(aside)
        try:
            _create_tables(connection, aside)
        finally:
            connection.close()
        with contextlib.suppress(FileExistsError):  # another process was first: its file is as good as ours
            path.hardlink_to(aside)
    finally:
        aside.unlink(missing_ok=True)


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    with transaction(connection, path, OPEN_SECONDS_MAX):
        for statement in _SCHEMA:
            connection.execute(statement)


def connect(path: Path) -> sqlite3.Connection:
    """One connection in WAL mode, autocommit; `transaction` makes the write transactions."""
    try:
        # Used by one thread at a time, but not always by the same one.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=OPEN_SECONDS_MAX)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA journal_size_limit={JOURNAL_BYTES_MAX}")
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise explain(error, path) from error
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path, busy_seconds: float) -> Iterator[None]:
    """A write transaction that waits at most `busy_seconds` for the lock; rolled back on any exception."""
    try:
        connection.execute(f"PRAGMA busy_timeout={max(0, int(busy_seconds * 1000))}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise explain(error, path) from error


def explain(error: sqlite3.Error, path: Path) -> BusError:
    """What an error of SQLite means for the caller."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BusUnavailable(f"another process holds the write lock of {path}; is a process stopped inside a commit?")
    if code == sqlite3.SQLITE_FULL:
        return BusUnavailable(f"the disk that holds {path} is full; free some space, nothing sent is lost until then")
    if code == sqlite3.SQLITE_IOERR:
        return BusUnavailable(f"reading or writing {path} failed ({error}); look at the disk and the kernel log")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return BusMisconfigured(f"{path} is not an intact bus file ({error}); move it away and start again")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return BusMisconfigured(f"{path} cannot be opened for writing ({error}); check its owner and mode")
    return BusUnavailable(f"the bus file {path} did not do what was asked ({error})")


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
