"""A backend that does nothing and says that it did: what recovery would do is seen without doing it (`--dry-run`)."""

from __future__ import annotations

from typing import Literal

from recovery.backend import Observation, StartRequest

Phase = Literal["running", "failed", "stopped", "finished"]


class PretendBackend:
    """Every job is down in the attempt that a verdict told of last, stops at once, and starts when it is asked to."""

    name = "pretend"

    def __init__(self) -> None:
        self._attempts: dict[str, tuple[int, str]] = {}
        self._over: dict[str, Phase] = {}

    def meet(self, job: str, attempt: int) -> None:
        """Somebody tells of this attempt: the job is at least there."""
        if attempt > self._attempts.get(job, (0, ""))[0]:
            self._attempts[job] = (attempt, "")

    def observe(self, job: str) -> Observation:
        attempt, token = self._attempts.get(job, (0, ""))
        over = self._over.get(job)
        return Observation(job, attempt, token, over or "failed", ended=over is not None)

    def start(self, request: StartRequest) -> Observation:
        self._attempts[request.job] = (request.attempt, request.token)
        return Observation(request.job, request.attempt, request.token, "running")

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        return True

    def finish(self, job: str, outcome: Literal["finished", "failed", "stopped"], reason: str) -> None:
        self._over.setdefault(job, outcome)

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        return {}
