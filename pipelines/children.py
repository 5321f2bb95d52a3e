"""Our own child processes: started together, watched, and stopped together, in reverse order."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.own_process import PARENT_VARIABLE

STOP_SECONDS_MAX = 15.0
ENGINE_STOP_SECONDS_MAX = 130.0  # a checkpoint engine writes what its memory holds: disk and object store, 60 s each
LOG_TAIL_BYTES_MAX = 4_000
QUIET_SECONDS = 60.0  # a process that has lived so long has done nothing wrong yet
REVIVE_SECONDS_MAX = 30.0
SENTENCE = "transom: "  # how a known error of ours begins on standard error


class ChildFailed(StatedError):
    """A service of ours ended by itself; the text holds the end of its log."""


@dataclass(slots=True, eq=False)
class Child:
    """One process of ours and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    command: tuple[str, ...]
    log_start: int = 0  # bytes of earlier lives in the log
    environ: Mapping[str, str] | None = None
    show: bool = False
    started_at: float = 0.0  # by the monotonic clock
    falls: int = 0  # in a row, each after a short life
    again_at: float | None = None  # when it is started again
    stop_seconds_max: float = STOP_SECONDS_MAX  # after SIGTERM, before SIGKILL

    def last_words(self) -> str:
        """What it said at its end: the one sentence of a known error, or else the end of its log."""
        text = tail(self.log, since=self.log_start).strip()
        last = text.rpartition("\n")[2]
        return last.removeprefix(SENTENCE) if last.startswith(SENTENCE) else f"the end of {self.log}:\n{text}"


class Children:
    """Starts our services from the main thread (the kernel ties a parent-death signal to the thread that forked)."""

    def __init__(self, log_folder: Path, clock: Clock) -> None:
        self._log_folder = log_folder
        self._clock = clock
        self._children: list[Child] = []
        log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        show: bool = False,
        stop_seconds_max: float = STOP_SECONDS_MAX,
    ) -> Child:
        """Start `command`; its output goes to `logs/<name>.log`, or (show) to ours. `stop_seconds_max`: how long it
        may take to end when it is told to, before it is killed."""
        log = self._log_folder / f"{name}.log"
        log_start, process = self._spawn(log, command, environ, show=show)
        now = self._clock.monotonic()
        child = Child(
            name, process, log, tuple(command), log_start, environ, show, now, stop_seconds_max=stop_seconds_max
        )  # fmt: skip
        self._children.append(child)
        return child

    def revive(self, tell: Callable[[str], None], *, but: Collection[Child] = ()) -> None:
        """Start those (`but` some) again that have ended by themselves: at once, or after longer and longer waits.

        Call it now and then. What ends again and again may wait for something, a full disk for instance.
        """
        now = self._clock.monotonic()
        for child in self._children:
            if child in but or child.process.poll() is None:
                continue
            if child.again_at is None:
                child.falls = 1 if now - child.started_at >= QUIET_SECONDS else child.falls + 1
                wait = 0.0 if child.falls == 1 else min(REVIVE_SECONDS_MAX, 2.0 ** min(child.falls - 2, 8))
                child.again_at = now + wait
                when = f" in {wait:.0f} s" if wait else ""
                code = child.process.returncode
                tell(f"{child.name} ended with exit code {code}; starting it again{when} (see {child.log})")
            if now >= child.again_at:
                child.again_at = None
                child.started_at = now
                try:
                    child.log_start, child.process = self._spawn(
                        child.log, child.command, child.environ, show=child.show
                    )
                except OSError as error:
                    child.again_at = now + REVIVE_SECONDS_MAX
                    tell(f"{child.name} cannot be started ({error.strerror}); trying again")

    def _spawn(
        self, log: Path, command: Sequence[str], environ: Mapping[str, str] | None, *, show: bool
    ) -> tuple[int, subprocess.Popen[bytes]]:
        environment = {**os.environ, **(environ or {}), PARENT_VARIABLE: str(os.getpid())}
        with log.open("ab") as output:
            return output.tell(), subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=None if show else subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: we stop them in order
            )

    def check(self, *, but: Child | None = None) -> None:
        """Raise ChildFailed if one of them (`but` that one) has ended by itself."""
        for child in self._children:
            if child is but:
                continue
            code = child.process.poll()
            if code is not None:
                raise ChildFailed(f"{child.name} ended by itself (exit code {code}): {child.last_words()}")

    def ended(self) -> list[Child]:
        """Those that have ended by themselves and are still counted among ours."""
        return [child for child in self._children if child.process.poll() is not None]

    def running(self) -> dict[str, int]:
        """Process ids by name of those that live."""
        return {child.name: child.process.pid for child in self._children if child.process.poll() is None}

    def stop(self, name: str | None = None, number: int = signal.SIGTERM) -> None:
        """Stop one or all: `number`, then SIGKILL after as long as each may take; newest first."""
        chosen = [child for child in reversed(self._children) if name is None or child.name == name]
        for child in chosen:
            if child.process.poll() is None:
                child.process.send_signal(number)
        told_at = self._clock.monotonic()
        for child in chosen:
            try:
                child.process.wait(max(0.1, told_at + child.stop_seconds_max - self._clock.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self._children.remove(child)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def tail(log: Path, bytes_max: int = LOG_TAIL_BYTES_MAX, *, since: int = 0) -> str:
    """The end of a log file, as text; nothing from before byte `since`."""
    with log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(since, stream.tell() - bytes_max))
        return stream.read().decode("utf-8", "replace")
