"""Where this room's time enters; the product passes its own clock, which has the same shape."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stamps, monotonic time for durations and dead-lines."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go backwards."""
        ...


class HostClock:
    """The host's own clock, for a rank or an engine that is given no other."""

    def now(self) -> float:
        return time.time()  # noqa: TID251 - this room imports no other, so it has this door of its own

    def monotonic(self) -> float:
        return time.monotonic()
