"""How a rank leaves: the end of the interpreter, an exception nobody caught, a fork.

A rank that raises would linger for up to 3 s in the destructors of its process groups while its peers wait;
so our hook lets the traceback be printed, sends what is left, runs the exit functions, and ends the process
with code 1.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Protocol

from .events import ErrorRecord

FRAMES_MAX = 50
TEXT_CHARS_MAX = 4_000
TRACEBACK_CHARS_MAX = 16_000
EXIT_FUNCTIONS_SECONDS = 1.0
EXIT_CODE = 1


class Reporting(Protocol):
    """What a leaving process has to tell: the part of a Run that is needed here."""

    def finish(self) -> None: ...

    def stop(self) -> None: ...

    def see_error(self, error: ErrorRecord) -> None: ...

    def become_inert(self) -> None: ...


class ProcessHooks:
    """Installed once per rank; knows whether this process is still the rank or a forked child of it."""

    def __init__(self, run: Reporting) -> None:
        self._run = run
        self._owned = True
        self._raised = False

    def install(self) -> None:
        """Hook exit, fork and exceptions."""
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._in_child)
        self.hook_exceptions()

    def hook_exceptions(self) -> None:
        """Become the outermost exception hook. May be called again after somebody has wrapped us."""
        if not isinstance(sys.excepthook, _ExceptHook):
            sys.excepthook = _ExceptHook(self)

    def failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """This is what ends the process."""
        if self._owned:
            lines = traceback.format_exception(kind, error, trace, limit=-FRAMES_MAX)
            text = "".join(lines)[-TRACEBACK_CHARS_MAX:]
            words = str(error)[:TEXT_CHARS_MAX]
            self._run.see_error(ErrorRecord(type=kind.__name__, text=_unicode(words), traceback=_unicode(text)))

    def raised(self, *, leave: bool) -> None:
        """An exception ends this process; `leave` is false where an outer hook has yet to print it."""
        if not self._owned:
            return
        self._raised = True
        self._run.stop()
        if leave:
            threading.Timer(EXIT_FUNCTIONS_SECONDS, _end_process).start()  # one that hangs must not hold us
            atexit._run_exitfuncs()
            _end_process()

    def _at_exit(self) -> None:
        if not self._owned:
            return
        if self._raised:  # our hook was wrapped, so that it could not leave; now everything is printed
            self._run.stop()
            _end_process()
        self._run.finish()

    def _in_child(self) -> None:
        self._owned = False
        self._run.become_inert()


class _ExceptHook:
    """sys.excepthook while we are installed; calls the one that was there before it."""

    def __init__(self, hooks: ProcessHooks) -> None:
        self._hooks = hooks
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):  # Ctrl-C keeps Python's own way out
            self._hooks.failed(kind, error, trace)
            self._hooks.raised(leave=sys.excepthook is self)


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a lone surrogate is no JSON text


def _end_process() -> None:
    _terminate_daemon_children()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed pipe, a missing stream
            stream.flush()
    os._exit(EXIT_CODE)


def _terminate_daemon_children() -> None:
    """Data loader workers would notice only after 5 s, and hold our output open until then."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
