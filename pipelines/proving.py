"""Which checkpoints training has proved good: whole for a while, trained past, and nothing wrong with the job since.

What is marked so is what `policy="verified"` loads, and what retention never removes. A verdict that comes later still
rejects it: rejections win.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

LOOKS = 10  # in the time that proves a checkpoint
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.2, 60.0

logger = logging.getLogger("transom.ckpt")


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that a job may resume from, on disk as a whole since `saved_at` (UTC seconds)."""

    step: int
    attempt: int
    saved_at: float


class MarkingCatalog(Protocol):
    """What knows the checkpoints of jobs, and can mark them."""

    def saved_steps(self, job: str) -> list[SavedStep]:
        """Those that a restart could load, ascending; rejected ones are left out."""
        ...

    def mark_verified(self, job: str, step: int, attempt: int, reason: str) -> None:
        """Idempotent; what is rejected stays rejected."""
        ...


def proved(saved: Sequence[SavedStep], now: float, seconds: float) -> SavedStep | None:
    """The newest that is at least so old, and that training has gone on from: a newer one is complete too."""
    by_newness = sorted(saved, key=lambda one: (one.attempt, one.step))
    return next((one for one in reversed(by_newness[:-1]) if now - one.saved_at >= seconds), None)


class Proving:
    """Marks what is proved, in a thread of its own: nobody waits for an engine or a disk. `seconds` 0: never.

    `quiet` names the jobs that run and have no open incident, whenever it is time to look.
    """

    def __init__(self, catalog: MarkingCatalog, seconds: float, quiet: Callable[[], Sequence[str]]) -> None:
        self._catalog = catalog
        self._seconds = seconds
        self._quiet = quiet
        self._not_before = float("-inf")
        self._marked: dict[str, SavedStep] = {}
        self._thread = ThreadPoolExecutor(1, "proving")
        self._looking: Future[None] | None = None

    def tick(self, now: float) -> None:
        """Call it often; it returns at once."""
        busy = self._looking is not None and not self._looking.done()
        if not self._seconds or busy or now < self._not_before:
            return
        self._not_before = now + min(max(self._seconds / LOOKS, LOOK_SECONDS_MIN), LOOK_SECONDS_MAX)
        self._looking = self._thread.submit(self._look, list(self._quiet()), now)

    def close(self) -> None:
        """What is under way comes to its end."""
        self._thread.shutdown(wait=True)

    def _look(self, jobs: Sequence[str], now: float) -> None:
        for job in jobs:
            try:
                found = proved(self._catalog.saved_steps(job), now, self._seconds)
                if found is not None and self._marked.get(job) != found:
                    age = now - found.saved_at
                    reason = f"{age:.0f} s of training after it, and no incident open"
                    self._catalog.mark_verified(job, found.step, found.attempt, reason)
                    self._marked[job] = found
            # One job's folder or engine must not keep the others from being looked at, and there is a next look.
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing is marked
                logger.warning("the checkpoints of %s could not be looked at: %s", job, error)
