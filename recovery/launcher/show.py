"""Shows the ranks' output to a person, from a thread of its own: a paused terminal holds up nobody."""

from __future__ import annotations

import os
import threading
from collections import deque

from .config import ShowOutput

WAITING_BYTES_MAX = 8 * 1024 * 1024


class Shown:
    """A bounded queue before a sink that may block; the oldest is dropped, and that is said."""

    def __init__(self, sink: ShowOutput | int | None) -> None:
        self._sink = sink
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="show", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, lines: bytes) -> None:
        """Show whole lines, soon."""
        if self._sink is None or not lines:
            return
        with self._changed:
            self._waiting.append(lines)
            self._waiting_bytes += len(lines)
            while self._waiting_bytes > WAITING_BYTES_MAX:
                lost = len(self._waiting.popleft())
                self._waiting_bytes -= lost
                self._dropped_bytes += lost
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Show what waits, for at most `seconds`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                lines = b"".join(self._waiting)
                if self._dropped_bytes:
                    lines = f"transom: {self._dropped_bytes} bytes of output not shown\n".encode() + lines
                self._waiting.clear()
                self._waiting_bytes = self._dropped_bytes = 0
            try:
                self._write(lines)
            except (OSError, ValueError):  # nobody looks any more: the pipe or file is closed
                self._sink = None

    def _write(self, lines: bytes) -> None:
        if callable(self._sink):
            self._sink(lines)
        elif self._sink is not None:
            while lines:
                lines = lines[os.write(self._sink, lines) :]
