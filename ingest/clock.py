"""The only place where wall time enters: a clock is a parameter everywhere else."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stamps, monotonic time for durations, and a sleep that a test can drive."""

    def now(self) -> float:
        """Seconds since the epoch, UTC. May jump when the host's clock is set."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go backwards; only differences mean anything."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock."""
        ...


class SystemClock:
    """The host's own clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to: replay, simulation and tests."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; a negative value is our own mistake."""
        assert seconds >= 0.0
        with self._lock:
            self._now += seconds

    def advance_to(self, now: float) -> None:
        """Move forward to `now`, or stay where the clock is if that has passed."""
        with self._lock:
            self._now = max(self._now, now)
