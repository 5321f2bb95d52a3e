"""`transom` as a person types it: a real process, what it said, what is left of it; libraries can be made missing."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Seen = TypeVar("Seen")
TIMEOUT_SECONDS = 60.0
MARK = "TEST_COMMAND_MARK"  # in the environment of everything that a command starts
HIDE = """\
import os, sys
sys.modules.update(dict.fromkeys(filter(None, os.environ.get("TEST_HIDDEN_MODULES", "").split(","))))
"""


@dataclass(frozen=True, slots=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def sentence(self, code: int = 1) -> str:
        """The one sentence of a refusal; fails where it is not exactly that."""
        assert self.code == code, self
        assert "Traceback" not in self.out + self.err, self
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self
        assert lines[0].startswith("transom: "), self
        return lines[0].removeprefix("transom: ")


class Commands:
    """Starts commands in one folder; `close` fails where one of them left a process behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self._running: list[subprocess.Popen[str]] = []
        hiding = folder / "hiding"
        hiding.mkdir()
        (hiding / "sitecustomize.py").write_text(HIDE)

    def start(self, *words: str, hidden: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
        """Start `transom WORDS` without the modules in `hidden`."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines", *words],
            cwd=self.folder,
            env={
                **os.environ, "PYTHONPATH": str(self.folder / "hiding"), "TEST_HIDDEN_MODULES": ",".join(hidden),
                MARK: self.mark, **environ,
            },
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._running.append(process)
        return process

    def run(self, *words: str, hidden: Sequence[str] = (), **environ: str) -> Said:
        """Run `transom WORDS` to its end."""
        return self.end(self.start(*words, hidden=hidden, **environ))

    def end(self, process: subprocess.Popen[str], number: int | None = None) -> Said:
        """Wait for the end of a command, after the signal if one is given."""
        if number is not None:
            process.send_signal(number)
        try:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{process.args} did not end: {out}{err}") from None
        return Said(process.returncode, out, err)

    def alive(self) -> dict[int, str]:
        """Command lines of all processes that our commands started and that still live."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                self.end(process, signal.SIGINT)
        left = self.alive()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, left


def until(condition: Callable[[], Seen], what: str, seconds: float = TIMEOUT_SECONDS) -> Seen:
    """Poll until `condition` is true, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (seen := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return seen


def line_of(process: subprocess.Popen[str], text: str) -> str:
    """Read standard output up to the line that holds `text`."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{process.args} ended without saying {text!r}: {process.stderr and process.stderr.read()}")


@contextmanager
def commands_in(folder: Path) -> Iterator[Commands]:
    """Commands that are all gone when the test is over."""
    commands = Commands(folder)
    try:
        yield commands
    finally:
        commands.close()
