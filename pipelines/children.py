"""Our own child processes: started together, watched, and stopped together, in reverse order."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.own_process import PARENT_VARIABLE

STOP_SECONDS_MAX = 15.0
LOG_TAIL_BYTES_MAX = 4_000


class ChildFailed(StatedError):
    """A service of ours ended by itself; the text holds the end of its log."""


@dataclass(slots=True)
class Child:
    """One process of ours and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Children:
    """Starts our services from the main thread (the kernel ties a parent-death signal to the thread that forked)."""

    def __init__(self, log_folder: Path, clock: Clock) -> None:
        self._log_folder = log_folder
        self._clock = clock
        self._children: list[Child] = []
        log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(
        self, name: str, command: Sequence[str], *, environ: Mapping[str, str] | None = None, show: bool = False
    ) -> Child:
        """Start `command`; its output goes to `logs/<name>.log`, or (show) to ours."""
        log = self._log_folder / f"{name}.log"
        environment = {**os.environ, **(environ or {}), PARENT_VARIABLE: str(os.getpid())}
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=None if show else subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: we stop them in order
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self, *, but: Child | None = None) -> None:
        """Raise ChildFailed if one of them (`but` that one) has ended by itself."""
        for child in self._children:
            if child is but:
                continue
            code = child.process.poll()
            if code is not None:
                raise ChildFailed(
                    f"{child.name} ended by itself (exit code {code}); the end of {child.log}:\n{tail(child.log)}"
                )

    def ended(self) -> list[Child]:
        """Those that have ended by themselves and are still counted among ours."""
        return [child for child in self._children if child.process.poll() is not None]

    def forget(self, child: Child) -> None:
        """Count a child that has ended no longer."""
        assert child.process.poll() is not None
        self._children.remove(child)

    def running(self) -> dict[str, int]:
        """Process ids by name of those that live."""
        return {child.name: child.process.pid for child in self._children if child.process.poll() is None}

    def stop(self, name: str | None = None, number: int = signal.SIGTERM) -> None:
        """Stop one or all: `number`, then SIGKILL after a bounded while; newest first."""
        chosen = [child for child in reversed(self._children) if name is None or child.name == name]
        for child in chosen:
            if child.process.poll() is None:
                child.process.send_signal(number)
        deadline = self._clock.monotonic() + STOP_SECONDS_MAX
        for child in chosen:
            try:
                child.process.wait(max(0.1, deadline - self._clock.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self._children.remove(child)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def tail(log: Path, bytes_max: int = LOG_TAIL_BYTES_MAX) -> str:
    """The end of a log file, as text."""
    with log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - bytes_max))
        return stream.read().decode("utf-8", "replace")
