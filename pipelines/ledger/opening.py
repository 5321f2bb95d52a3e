"""Opening the ledger's file: the lock error names its holder, wrong files are refused."""

from __future__ import annotations

import re
from pathlib import Path

from ingest.clock import Clock
from ingest.sqlite_file import NETWORK_FILE_SYSTEMS, file_system_of

from .engine import duckdb
from .shapes import LedgerLocked, LedgerUnreadable
from .tables import SCHEMA_VERSION

FILE_NAME = "ledger.duckdb"
METRICS_FOLDER = "metrics"
MOUNTINFO = Path("/proc/self/mountinfo")
RETRY_SECONDS = 0.2
_LOCK = re.compile(r"Could not set lock on file|Conflicting lock is held")
_HOLDER = re.compile(r"held in (?P<command>.+?) \(PID (?P<pid>\d+)\)")
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",  # without a network it would stall instead of failing
    "autoload_known_extensions": "false",
}


def open_database(
    path: Path,
    clock: Clock,
    *,
    read_only: bool = False,
    lock_wait_seconds: float = 5.0,
    threads: int = 2,
    memory_bytes_max: int = 2**30,
) -> duckdb.DuckDBPyConnection:
    """A connection. Raises LedgerLocked (after waiting for a passing reader) or LedgerUnreadable."""
    config: dict[str, str | bool | int | float | list[str]] = {
        **_CONFIG,
        "threads": str(threads),
        "memory_limit": f"{memory_bytes_max}B",
    }
    if not read_only:
        config["storage_compatibility_version"] = "v1.5.0"  # so that the duckdb command line of 1.5 reads snapshots
    deadline = clock.monotonic() + lock_wait_seconds
    while True:
        try:
            connection = duckdb.connect(str(path), read_only=read_only, config=config)
            break
        except duckdb.IOException as error:
            if not _LOCK.search(str(error)):
                raise LedgerUnreadable(f"the ledger {path} cannot be opened: {_first_line(error)}") from error
            if clock.monotonic() >= deadline:
                raise locked(str(error), path) from error
            clock.sleep(RETRY_SECONDS)
        except duckdb.Error as error:
            raise LedgerUnreadable(
                f"{path} is not a ledger ({_first_line(error)}); move it away, and `transom record` makes a new one"
            ) from error
    return connection


def refuse_network_folder(folder: Path, mountinfo: str | None = None) -> None:
    """Raise LedgerUnreadable where the file's lock does not hold. `mountinfo`: None reads /proc/self/mountinfo."""
    if mountinfo is None:
        mountinfo = MOUNTINFO.read_text(errors="replace") if MOUNTINFO.exists() else ""
    kind = file_system_of(folder.resolve(), mountinfo)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerUnreadable(
            f"{folder} lies on {kind}, a network file system, where the ledger's lock does not hold; "
            "put state_dir on a local disk"
        )


def locked(message: str, path: Path) -> LedgerLocked:
    """The lock error of DuckDB as a sentence of ours."""
    match = _HOLDER.search(message)
    if match is None:
        return LedgerLocked(
            f"the ledger {path} is held by another process; "
            "read it through `transom incidents` or the API, or stop that process"
        )
    pid = int(match["pid"])
    return LedgerLocked(
        f"the ledger is held by process {pid} ({_command_of(pid) or match['command']}); read it through "
        "`transom incidents` or the API, or stop that process",
        pid,
    )


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words if word)[:200]


def check_version(connection: duckdb.DuckDBPyConnection, path: Path) -> int | None:
    """The schema version of the file; None where it is empty. Raises LedgerUnreadable for a foreign one."""
    names = {row[0] for row in connection.execute("SELECT table_name FROM information_schema.tables").fetchall()}
    if not names:
        return None
    if "schema_version" not in names:
        raise LedgerUnreadable(f"{path} is a DuckDB file but not a ledger; give another folder")
    ((version,),) = connection.execute("SELECT max(version) FROM schema_version").fetchall()
    if version is not None and version > SCHEMA_VERSION:
        raise LedgerUnreadable(
            f"{path} was made by a newer Transom (schema {version}, this one knows {SCHEMA_VERSION}); upgrade Transom"
        )
    return None if version is None else int(version)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
