"""Faults that a launcher does to a rank from outside, when `transom inject` asks: signals, neighbours, a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ingest.clock import Clock

from .procfs import all_processes, kill_exactly
from .rank import LocalRank

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
PARAMETERS: Mapping[str, Mapping[str, float]] = {  # and what they are where nothing is said
    "kill": {}, "stop": {}, "cont": {}, "kill_worker": {},
    "cpu_hog": {"processes": 2.0, "seconds": 8.0},
    "disk_full": {"seconds": 8.0},
}  # fmt: skip
PROCESSES_MAX = 64
SECONDS_MAX = 3_600.0
DISK_BYTES_MAX = 2 * 2**30  # a larger one is somebody's
FILLER = "transom-inject-disk-full"
WRITE_BYTES = 2**20
WORKER_NAME = "pt_data_worker"  # as torch calls the thread of a data loader's worker
HOG = """
import os, sys, time
end, parent = time.monotonic() + float(sys.argv[1]), os.getppid()
os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[2].split(",")})
while time.monotonic() < end and os.getppid() == parent:
    sum(range(100_000))
"""


class OutsideFaults:
    """Does them, and undoes what has to end. Called from the launcher's loop."""

    def __init__(self, clock: Clock, checkpoints: Path | None, python: str = sys.executable) -> None:
        self._clock = clock
        self._checkpoints = checkpoints
        self._python = python
        self._hogs: list[subprocess.Popen[bytes]] = []
        self._fillers: list[tuple[float, Path]] = []  # when each is taken away
        self._filling: threading.Thread | None = None

    def problem(self, fault: str, rank: LocalRank, given: Mapping[str, float]) -> str:
        """Why it cannot be done, in a sentence; empty where it can."""
        unknown = set(given) - set(PARAMETERS[fault])
        if unknown:
            known = ", ".join(sorted(PARAMETERS[fault])) or "none"
            return f"parameters of {fault} are {known}, not {min(unknown)}"
        asked = {**PARAMETERS[fault], **given}
        if not 0.0 < asked.get("seconds", 1.0) <= SECONDS_MAX:
            return f"the seconds are {asked['seconds']:g}, they must be above 0 and at most {SECONDS_MAX:g}"
        if not 1 <= asked.get("processes", 1.0) <= PROCESSES_MAX:
            return f"the processes are {asked['processes']:g}, they must be between 1 and {PROCESSES_MAX}"
        if fault == "kill_worker" and worker_of(rank.pid) is None:
            return f"rank {rank.rank} has no worker of a data loader; this fault needs DataLoader(num_workers=…)"
        return self._disk_problem() if fault == "disk_full" else ""

    def do(self, fault: str, rank: LocalRank, given: Mapping[str, float]) -> None:
        """Do what `problem` has nothing against."""
        asked = {**PARAMETERS[fault], **given}
        if fault in SIGNALS:
            rank.send_signal(SIGNALS[fault])
        elif fault == "kill_worker":
            worker = worker_of(rank.pid)
            if worker is not None:
                kill_exactly(*worker)
        elif fault == "cpu_hog":
            self._hog(rank.pid, int(asked["processes"]), asked["seconds"])
        elif fault == "disk_full":
            self._fill(asked["seconds"])

    def tick(self) -> None:
        """Take away what has been there for its time."""
        now = self._clock.monotonic()
        for until, filler in self._fillers:
            if now >= until:
                filler.unlink(missing_ok=True)
        self._fillers = [(until, filler) for until, filler in self._fillers if now < until]

    def close(self) -> None:
        """Nothing that was done from outside stays."""
        for hog in self._hogs:
            with suppress(ProcessLookupError):
                hog.kill()
            hog.wait()
        for _, filler in self._fillers:
            filler.unlink(missing_ok=True)
        self._hogs, self._fillers = [], []

    def _hog(self, pid: int, processes: int, seconds: float) -> None:
        """Busy neighbours on the rank's processors, each in a session of its own, as another job's would be."""
        cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(pid)))
        for _ in range(processes):
            self._hogs.append(
                subprocess.Popen(
                    [self._python, "-I", "-S", "-c", HOG, str(seconds), cpus],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )  # fmt: skip

    def _disk_problem(self) -> str:
        folder = self._checkpoints
        if folder is None:
            return "this job saves no checkpoints, so there is no disk to fill; start it without --no-checkpoints"
        disk = os.statvfs(folder)
        size_bytes = disk.f_blocks * disk.f_frsize
        if size_bytes > DISK_BYTES_MAX:
            return (
                f"the checkpoints in {folder} are on a disk of {size_bytes / 2**30:.0f} GiB, and only one of at most "
                f"{DISK_BYTES_MAX // 2**30} GiB is filled on purpose; mount a small tmpfs there before the job starts"
            )
        return ""

    def _fill(self, seconds: float) -> None:
        """Fill the disk, in a thread: it may take seconds, and the launcher has ranks to look after."""
        assert self._checkpoints is not None
        filler = self._checkpoints / FILLER
        self._fillers.append((self._clock.monotonic() + seconds, filler))
        self._filling = threading.Thread(target=fill_up, args=(filler,), name="transom-disk-full", daemon=True)
        self._filling.start()


def fill_up(filler: Path) -> None:
    """Make `filler` so large that its disk is full: all that is free at once, and then until the kernel refuses."""
    disk = os.statvfs(filler.parent)
    with filler.open("ab", buffering=0) as file:
        with suppress(OSError):  # a disk that cannot reserve space is filled by writing alone
            os.posix_fallocate(file.fileno(), 0, max(1, disk.f_bavail * disk.f_frsize))
        try:
            file.seek(0, os.SEEK_END)
            while file.write(b"\0" * WRITE_BYTES):
                pass
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def worker_of(pid: int) -> tuple[int, int] | None:
    """Id and start time of the oldest data-loader worker of a rank: its child of that name, else any child."""
    children = sorted((stat.start_time, stat.pid) for stat in all_processes() if stat.parent == pid)
    workers = [(start, child) for start, child in children if _name_of(child) == WORKER_NAME] or children
    return (workers[0][1], workers[0][0]) if workers else None


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
