"""What each of our processes does to itself: step back from the ranks' processors, and go when its parent goes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "TRANSOM_PARENT_PID"  # set by Children: the process that must not outlive it
NICE = 19
GARBAGE_THRESHOLDS = (100_000, 50, 100)
OPEN_FILES_MAX = 65_536


def step_back(nice: int = NICE) -> None:
    """Lowest processor priority (or `nice`), within the session and across sessions.

    Ranks run in sessions of their own; with the kernel's autogroups, nice alone does nothing across sessions.
    """
    os.nice(nice)
    try:
        Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")
    except OSError:
        return  # no autogroups in this kernel, or not ours to write: nice is all there is


@contextlib.contextmanager
def stepped_back(nice: int = NICE) -> Iterator[None]:
    """The same for a while, in a command that a person started: the priority of their session is theirs again."""
    group = Path("/proc/self/autogroup")
    before = None
    with contextlib.suppress(OSError, ValueError):
        before = int(group.read_text(encoding="ascii").rsplit(maxsplit=1)[-1])  # "/autogroup-12 nice 0"
    step_back(nice)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):  # only root may raise a priority
                group.write_text(str(before), encoding="ascii")


def tell(text: str) -> None:
    """A line on standard error; where that goes to a full disk or nobody, saying it is not worth dying for."""
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - a person reads this
    except OSError:
        return


def go_with_parent(environ: MutableMapping[str, str]) -> None:
    """Ask the kernel for SIGTERM when the parent that `Children` named ends; nothing where nobody was named."""
    parent = environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


class Stop(threading.Event):
    """Set by a signal, and knows which."""

    number = 0

    @property
    def exit_code(self) -> int:
        """As a shell says it of a process that this signal ended: 130 after Ctrl-C."""
        return 128 + self.number


def stop_on_signal(also: Callable[[], None] | None = None) -> Stop:
    """An event that SIGTERM and SIGINT set. Call from the main thread."""
    stop = Stop()

    def set_stop(number: int, _frame: object) -> None:
        stop.number = number
        stop.set()
        if also is not None:
            also()

    signal.signal(signal.SIGTERM, set_stop)
    signal.signal(signal.SIGINT, set_stop)
    return stop


@contextlib.contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does: contexts are left in order, and nothing that they started stays."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_open_files_max() -> None:
    """As many open files as this process may have: many hosts begin with 1,024 although far more are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def collect_garbage_seldom() -> None:
    """For a process that makes and drops many small objects: Python's own pace costs detection a third of its time.

    What is there already is never looked at again; cycles, of which messages have none, are still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
