"""How fast something may go: a token bucket on the clock it is given."""

from __future__ import annotations

from .clock import Clock

CREDIT_SECONDS_MAX = 0.5  # what an idle time may be made up for afterwards


class TokenBucket:
    """At most `bytes_per_second_max` on the average; for the use of one thread."""

    def __init__(self, bytes_per_second_max: float, clock: Clock) -> None:
        if bytes_per_second_max <= 0:
            raise ValueError(f"a rate must be above 0 bytes a second, not {bytes_per_second_max:g}")
        self._rate = bytes_per_second_max
        self._clock = clock
        self._free_at = clock.monotonic()

    def take(self, size_bytes: int) -> float:
        """Account for `size_bytes`; the seconds to wait before they may go."""
        now = self._clock.monotonic()
        self._free_at = max(self._free_at, now - CREDIT_SECONDS_MAX)
        wait_seconds = max(self._free_at - now, 0.0)
        self._free_at += size_bytes / self._rate
        return wait_seconds
