"""One controller per host: an exclusive lock on a file, which dies with its process."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

LOOKS_MAX = 5
LOOK_SECONDS = 0.02


class ControllerRuns(Exception):
    """Another process has the lease; the text is one sentence that says which."""


class Lease:
    """An exclusive flock on `<path>`; held until `release` or the end of the process, whichever is first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not self._lock():
            owner = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise ControllerRuns(f"recovery already runs here (process {owner} holds {path}); stop that one first")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _lock(self) -> bool:
        """Somebody who only looks (`is_held`) has the lock for an instant: that must not keep us out."""
        assert self._descriptor is not None
        for _ in range(LOOKS_MAX):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                threading.Event().wait(LOOK_SECONDS)
            else:
                return True
        return False

    def release(self) -> None:
        """Give it back. Idempotent. The file stays: unlinking would let two processes lock two files."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(path: Path) -> bool:
    """Whether somebody has the lease on `<path>` now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
