"""Whether a process still lives, although its number may be given to another: by a pidfd, or by its start time."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from pathlib import Path

OpenPidfd = Callable[[int], int]
PIDFD_OPEN: OpenPidfd | None = getattr(os, "pidfd_open", None)  # None: a Python built for a kernel before 5.3
_PROC = Path("/proc")


def start_time_of(pid: int, proc: Path = _PROC) -> int | None:
    """When the process started, in ticks since boot; None where there is none, or only its exit status is left."""
    try:
        text = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()  # the name before it may hold anything
    if len(fields) < 20 or fields[0] in (b"Z", b"X") or not fields[19].isdigit():
        return None
    return int(fields[19])


class ProcessWatch:
    """One process. `start_time` is the one it had when the caller knew it was meant; None: as it is now."""

    def __init__(
        self, pid: int, start_time: int | None = None, open_pidfd: OpenPidfd | None = PIDFD_OPEN, proc: Path = _PROC
    ) -> None:
        self.pid = pid
        self._proc = proc
        self._pidfd = -1
        if open_pidfd is not None and pid > 0:
            with contextlib.suppress(OSError, OverflowError):  # ESRCH: gone; ENOSYS: a kernel before 5.3
                self._pidfd = open_pidfd(pid)
        now = start_time_of(pid, proc) if pid > 0 else None  # after the pidfd: what both speak of is one process
        self._start_time = now if start_time is None else start_time
        self._ended = pid > 0 and (now is None or now != self._start_time)

    def fileno(self) -> int:
        """A descriptor that is readable when the process has ended; -1 where one has to ask."""
        return self._pidfd

    def ended(self) -> bool:
        """Whether it is gone. A process that cannot be seen from here (number 0) never is."""
        if self._ended or self.pid <= 0:
            return self._ended
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._ended = bool(poll.poll(0))
        else:
            self._ended = start_time_of(self.pid, self._proc) != self._start_time
        return self._ended

    def close(self) -> None:
        if self._pidfd >= 0:
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)

    def __enter__(self) -> ProcessWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
