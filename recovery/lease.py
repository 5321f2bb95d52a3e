"""Who may act: at most one controller at a time, by a lock on this host or by the scheduler's own lease.

On one host an exclusive flock dies with its process. Where controllers of several hosts may serve the same jobs, the
scheduler keeps the lease (`ControllerLease`): it lapses by time, so whoever holds it has to renew it, and a controller
that slept through its end must notice before it acts again. Both fence by an epoch that grows with each holder.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Protocol

LOOKS_MAX = 5
LOOK_SECONDS = 0.02


class ControllerRuns(Exception):
    """Another process has the lease; the text is one sentence that says which."""


class LeaseLost(Exception):
    """Somebody else has the lease now, or may have it: this controller must not act; the text is one sentence."""


class ControllerLease(Protocol):
    """A lease that outlives hosts. Implemented where a scheduler offers one; `OwnHost` where nobody does.

    `epoch` grows with each holder and never again belongs to another. `take` and `renew` may ask over a network and
    are called beside the loop; `is_ours` asks nobody: it says whether the time that was granted last still runs.
    """

    @property
    def epoch(self) -> int:
        """Of our last hold; 0 before the first."""
        ...

    def take(self) -> bool:
        """Take the lease if it is free or has lapsed, or keep it where it is ours. False: somebody else has it."""
        ...

    def renew(self) -> None:
        """Lengthen it; call it at least three times in the time that is granted. Raises LeaseLost."""
        ...

    def is_ours(self) -> bool:
        """Whether we may act now, from any thread."""
        ...

    def release(self) -> None:
        """Let others have it at once. Idempotent."""
        ...


class OwnHost:
    """A `ControllerLease` for one host, whose file lock already sees to it that nobody else acts."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def take(self) -> bool:
        return True

    def renew(self) -> None:
        return None

    def is_ours(self) -> bool:
        return True

    def release(self) -> None:
        return None


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
