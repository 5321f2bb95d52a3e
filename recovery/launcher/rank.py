"""One rank of this node: its process, its pipes, and what is known of it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from ingest.events import ErrorRecord, RankPlace
from ingest.flight_recorder import Flight
from ingest.rank_socket import Hello

from .error_file import read_error
from .output import LinePrefixer
from .procfs import ProcessStat, catches, kill_session, stat_of
from .protocol import RankProcess, RankState
from .rank_log import RankLog

STACKS_SIGNAL = signal.SIGRTMIN + 5  # users and Slurm have their own meaning for SIGUSR1 and SIGUSR2
READ_BYTES = 65536
READS_PER_LOOK_MAX = 16
ERROR_FILE_BYTES_MAX = 256 * 1024
STACKS_BYTES_MAX = 128 * 1024
ERROR_CHARACTERS_MAX = 4_000  # of an error, as whoever observes the rank is told it
STOPPED_STATES = ("T", "t")


class LocalRank:
    """A process from before its fork until its exit has been told. Owns the descriptors."""

    def __init__(self, place: RankPlace, error_file: Path | None = None) -> None:
        self.place = place
        self._error_file = error_file  # where torch would leave its error
        self._last_error: ErrorRecord | None = None
        self.rank = place.rank
        self.log = RankLog()
        self.pid = 0
        self.start_time = 0
        self._pidfd = -1
        self.forked_at = 0.0  # monotonic; 0.0: not yet
        self.hello: Hello | None = None
        self.announced = False
        self.step = -1
        self.flight: Flight | None = None  # how far its collectives got, when it was asked last
        self.flight_known = False  # it has a flight recorder
        self.phase = ""
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.ended_at: float | None = None  # monotonic
        self.ended_wall_at: float | None = None  # UTC seconds
        self.stopped_by_us = False
        self.closed = False  # its exit has been told
        self.reported_state = ""  # the letter of the last rank_stalled
        self.first_look = ("", 0.0)  # letter and when it was first seen
        self.looks = 0
        self.refusal = ""  # why there never was a process
        self._ends: dict[str, int] = {}  # pipes, ours
        self._theirs: list[int] = []
        for stream in ("stdout", "stderr"):
            reading, writing = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reading, False)
            self._ends[stream] = reading
            self._theirs.append(writing)
        self._stacks = os.memfd_create(f"stacks-{self.rank}", os.MFD_CLOEXEC)
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)
        self._errors = os.memfd_create(f"error-{self.rank}", os.MFD_CLOEXEC)
        prefix = f"[rank{self.rank}]: ".encode()
        self._prefixers = {stream: LinePrefixer(prefix) for stream in self._ends}

    @property
    def alive(self) -> bool:
        return self.pid > 0 and self.ended_at is None

    @property
    def pending(self) -> bool:
        """Ordered and not forked yet."""
        return self.pid == 0 and self.ended_at is None

    @property
    def pipes(self) -> dict[str, int]:
        """Our ends of the pipes that are still open."""
        return dict(self._ends)

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        """What the rank is given: stdout, stderr, stacks file, error file."""
        return self._theirs[0], self._theirs[1], self._stacks, self._errors

    def forked(self, pid: int, pidfd: int, monotonic: float) -> None:
        """The process exists; only it holds the writing ends from now on."""
        self.pid, self._pidfd, self.forked_at = pid, pidfd, monotonic
        stat = stat_of(pid)
        self.start_time = stat.start_time if stat else 0
        self._close_theirs()

    def ended(self, code: int | None, number: int | None, monotonic: float, at: float | None = None) -> None:
        """The process is gone, or never came to be; `at`: by the wall clock."""
        self.exit_code, self.signal, self.ended_at, self.ended_wall_at = code, number, monotonic, at
        self._close_theirs()

    def stat(self) -> ProcessStat | None:
        """The process in /proc, as long as it is that very one."""
        stat = stat_of(self.pid) if self.alive else None
        return stat if stat is not None and stat.start_time == self.start_time else None

    def send_signal(self, number: int) -> bool:
        """To the rank's own process only; whether it is still there."""
        if not self.alive:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        """SIGTERM to the rank and its workers."""
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to everything in the rank's session."""
        if self._signal_group(signal.SIGKILL):
            kill_session(self.pid, self.start_time)

    def read(self, stream: str, at: float) -> tuple[bytes, bool]:
        """Take in what is in a pipe now: what to show of it, and whether the pipe is still open."""
        shown = b""
        descriptor = self._ends.get(stream)
        for _ in range(READS_PER_LOOK_MAX):
            if descriptor is None:
                return shown, False
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            if not chunk:
                return shown, False
            self.log.feed(stream, chunk, at)
            shown += self._prefixers[stream].feed(chunk, at)
        return shown, True

    def flush_shown(self, before: float = float("inf")) -> bytes:
        """Lines without an end that should be shown now."""
        return b"".join(prefixer.flush(before) for prefixer in self._prefixers.values())

    def close_pipe(self, stream: str) -> None:
        descriptor = self._ends.pop(stream, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of everything but what ended it. May be called twice."""
        if self.ended_at is not None and not self.closed:
            self._last_error = self.error()
        for stream in list(self._ends):
            self.close_pipe(stream)
        self._close_theirs()
        for descriptor in (self._stacks, self._errors, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._stacks = self._errors = self._pidfd = -1
        self.closed = True

    def ask_stacks(self) -> bool:
        """Have the rank write its stacks; False where it cannot (it would die of the signal)."""
        if not self.alive or not catches(self.pid, STACKS_SIGNAL):
            return False
        os.ftruncate(self._stacks, 0)
        return self.send_signal(STACKS_SIGNAL)

    def stacks(self) -> str:
        """What it has written so far."""
        return os.pread(self._stacks, STACKS_BYTES_MAX, 0).decode("utf-8", "replace") if self._stacks >= 0 else ""

    def error(self) -> ErrorRecord | None:
        """The exception that ended it: as the rank itself says, else as its last traceback does."""
        if self.refusal:
            return ErrorRecord(type="StartFailure", text=self.refusal)
        if self.exit_code in (0, None):
            return None
        if self.closed:
            return self._last_error
        raw = os.pread(self._errors, ERROR_FILE_BYTES_MAX, 0)
        if raw:
            with suppress(ValueError, TypeError):  # the rank could write there whatever it likes
                said = json.loads(raw)
                return ErrorRecord(type=str(said["type"]), text=str(said["text"]), traceback=str(said["traceback"]))
        left = read_error(self._error_file) if self._error_file is not None else None
        return left or self.log.error

    def view(self) -> RankState:
        """The rank for whoever observes."""
        state = self.stat() if self.alive else None
        stopped = state is not None and state.state in STOPPED_STATES
        gone = self.ended_at is not None
        error = self.error() if gone else None
        return RankState(
            rank=self.rank,
            local_rank=self.place.local_rank,
            pid=self.pid,
            state="exited" if gone else "stopped" if stopped else "running",
            step=self.step,
            phase=self.phase,
            exit_code=self.exit_code,
            signal=self.signal,
            stopped_by_launcher=self.stopped_by_us and gone,
            error=f"{error.type}: {error.text}"[:ERROR_CHARACTERS_MAX] if error is not None else "",
            ended_at=self.ended_wall_at,
        )

    def process(self) -> RankProcess:
        return RankProcess(rank=self.rank, pid=self.pid, start_time=self.start_time)

    def _signal_group(self, number: int) -> bool:
        if not self.send_signal(0):  # gone: its id may be somebody else's soon
            return False
        self.stopped_by_us = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        return True

    def _close_theirs(self) -> None:
        for descriptor in self._theirs:
            os.close(descriptor)
        self._theirs.clear()
