"""What a save returns: whether memory has it, and, later, whether another node and the disk have it."""

from __future__ import annotations

from collections.abc import Callable

Ask = Callable[[float | None], str | None]  # waits; "" reached, a reason: never, None: not known yet

NO_PEER = "there is no peer: no other node keeps copies of this one's memory"


class Mark:
    """Something that a save reaches, or fails to with a `reason`."""

    def __init__(self, ask: Ask | None = None, outcome: str | None = None) -> None:
        self._ask = ask
        self._outcome = outcome

    @property
    def settled(self) -> bool:
        """Whether it is known how this ended, without asking anybody."""
        return self._outcome is not None

    @property
    def reached(self) -> bool:
        return self._outcome == ""

    @property
    def reason(self) -> str:
        """Why it was not reached; empty while it may still be."""
        return self._outcome or ""

    def settle(self, outcome: str) -> None:
        """Note how it ended (as `Ask` says it), where that was open."""
        if self._outcome is None:
            self._outcome = outcome

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True once reached; False where it failed (`reason` says why) or the time is up (`settled` is
        False). Without a time it waits until it is known how this ends."""
        if self._outcome is None and self._ask is not None:
            self._outcome = self._ask(timeout_seconds)
        return self.reached


class Ticket:
    """One save of one rank. `sealed`: whole in the engine's memory. `backed_up`: whole in the memory of another node.
    `durable`: whole on disk.

    A save never raises because of the engine or the disk: training goes on, and the ticket says what is
    missing.
    """

    def __init__(self, step: int, sealed: Mark, durable: Mark, backed_up: Mark | None = None) -> None:
        self.step = step
        self.sealed = sealed
        self.durable = durable
        self.backed_up = backed_up or Mark(outcome=sealed.reason or NO_PEER)

    @property
    def failed(self) -> str:
        """Why this save will not survive the rank; empty where it does."""
        return "" if self.sealed.reached or self.durable.reached else self.sealed.reason or self.durable.reason

    @classmethod
    def refused(cls, step: int, reason: str) -> Ticket:
        """A save that did not take place."""
        return cls(step, Mark(outcome=reason), Mark(outcome=reason), Mark(outcome=reason))

    def __repr__(self) -> str:
        return f"Ticket(step={self.step}, sealed={self.sealed.reached}, failed={self.failed!r})"
