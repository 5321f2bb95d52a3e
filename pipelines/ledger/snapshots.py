"""Snapshots: folders like the ledger's own, for the duckdb command line, notebooks and `transom sql`.

The file is copied after a checkpoint by a child process (closing a descriptor of it in this one would drop DuckDB's
lock), the parts are hard links, and the newest is found under one name that is replaced in one step.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ingest.clock import Clock

from .opening import FILE_NAME, METRICS_FOLDER
from .shapes import LedgerBusy, LedgerWriteFailed

FOLDER = "snapshots"
NEWEST = "snapshot"  # a link to the newest
KEPT = 2  # whoever reads the one before the newest may finish
COPY_SECONDS_MAX = 120.0
WAIT_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One finished snapshot: complete up to `taken_at` (UTC seconds)."""

    folder: Path
    taken_at: float
    size_bytes: int


class Snapshots:
    """The snapshots of one ledger. The writer makes them; any thread may ask for one and wait."""

    def __init__(self, ledger_folder: Path, clock: Clock) -> None:
        self._ledger = ledger_folder
        self._folder = ledger_folder / FOLDER
        self._clock = clock
        self._changed = threading.Condition()
        self._wanted = False
        self._failure = ""
        self._newest: Snapshot | None = None
        self._count = 0

    def forget_unfinished(self) -> None:
        """At a start: whatever was not finished is deleted, numbers go on after the newest."""
        newest = self._ledger / NEWEST
        kept = newest.readlink().name if newest.is_symlink() else ""
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            if folder.name == kept:
                self._count = max(self._count, int(kept) if kept.isdecimal() else 0)
            else:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def wanted(self) -> bool:
        """Somebody waits for one."""
        return self._wanted

    def ask(self, fresh_seconds: float, wait_seconds: float = WAIT_SECONDS_MAX) -> Snapshot:
        """One that is not older than `fresh_seconds`, made if need be. Raises LedgerBusy, LedgerWriteFailed."""
        with self._changed:
            since = self._clock.now() - fresh_seconds
            if self._newest is not None and fresh_seconds > 0 and self._newest.taken_at >= since:
                return self._newest
            self._wanted, self._failure = True, ""
            self._changed.wait_for(lambda: not self._wanted, wait_seconds)
            if self._failure:
                raise LedgerWriteFailed(self._failure)
            if self._wanted or self._newest is None:
                raise LedgerBusy("the ledger has no time for a snapshot just now; ask again in a few seconds")
            return self._newest

    def make(self, parts: Iterable[Path]) -> None:
        """Copy the file, which was checkpointed just now, and link its parts. A failure is told to who asked."""
        self._count += 1
        folder = self._folder / f"{self._count:06d}"
        newest, failure = None, ""
        try:
            newest = self._copied(folder, parts)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            failure = f"a snapshot cannot be written to {self._folder} ({error}); make room on that disk"
        with self._changed:
            self._newest = newest or self._newest
            self._wanted, self._failure = False, failure
            self._changed.notify_all()

    def _copied(self, folder: Path, parts: Iterable[Path]) -> Snapshot:
        taken_at = self._clock.now()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (folder / METRICS_FOLDER).mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
        target = folder / FILE_NAME
        subprocess.run(
            ["cp", "--reflink=auto", "--", str(self._ledger / FILE_NAME), str(target)],
            check=True,
            timeout=COPY_SECONDS_MAX,
            capture_output=True,
        )
        target.chmod(0o600)
        for part in parts:
            os.link(part, folder / METRICS_FOLDER / part.name)
        aside = self._ledger / f"{NEWEST}.tmp"
        aside.unlink(missing_ok=True)
        aside.symlink_to(Path(FOLDER) / folder.name)
        aside.replace(self._ledger / NEWEST)
        for old in sorted(self._folder.iterdir())[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return Snapshot(folder, taken_at, target.stat().st_size)
