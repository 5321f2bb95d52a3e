"""Tells the silence of a job from the silence of the bus: while the bus is away, no wall time passes for detection."""

from __future__ import annotations

ASK_SECONDS = 1.0  # without records for so long, the bus is asked whether it is there
OUTAGE_SECONDS = 3.0  # without an answer for so long, it was away
RECONNECT_SECONDS = 10.0  # so long after an outage a job that says nothing may only not be back on the bus


class Silence:
    """Up to which wall time everything that was said has been heard. Times are UTC seconds."""

    def __init__(self, now: float) -> None:
        self._answered_at = now
        self._heard_until = now
        self._reconnecting_until = now

    @property
    def heard_until(self) -> float:
        """Stands still while the bus does not answer, and until its producers have had time to come back."""
        return self._heard_until

    def should_ask(self, now: float) -> bool:
        """Nothing has come for a while: is that because nobody speaks?"""
        return now - self._answered_at >= ASK_SECONDS

    def answered(self, now: float) -> None:
        """The bus gave records, or said that it has none."""
        if now - self._answered_at > OUTAGE_SECONDS:
            self._reconnecting_until = now + RECONNECT_SECONDS
        self._answered_at = now
        if now >= self._reconnecting_until:
            self._heard_until = now
