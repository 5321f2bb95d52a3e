"""`transom attend`: a scheduler's job gets its first attempt once its launchers are there, and is seen to its end."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from ingest.clock import Clock
from pipelines.backends import OverLaunchers
from recovery.backend import Ambiguous, Backend, Conflict, Observation, StartRequest, TooFewNodes, Unavailable
from recovery.launcher.protocol import JobEnd

LOOK_SECONDS = 0.5
TELL_AGAIN_SECONDS = 60.0  # the same thing is said no more often

Tell = Callable[[str], None]


class Attendance:
    """Several may attend one job, and each may leave at any time: what is started is started once.

    Restarts are recovery's. A job that has finished is concluded here, by whoever sees it.
    """

    def __init__(self, backend: Backend, job: str, clock: Clock) -> None:
        self._backend = backend
        self._job = job
        self._clock = clock
        self._token = secrets.token_hex(8)
        self._said = ("", 0.0)

    def run(self, stop: threading.Event, tell: Tell) -> int:
        """Until the job is over (0 finished, 1 otherwise) or `stop` (0: the job goes on)."""
        while not stop.is_set():
            try:
                end = self._end()
                if end is not None:
                    return self._over(end, tell)
                self._look(tell)
            except (Unavailable, Ambiguous, TooFewNodes) as error:
                self._say_once(str(error), tell)
            except Conflict:
                continue  # somebody else has started it
            stop.wait(LOOK_SECONDS)
        tell(f"job {self._job} goes on; `transom attend --job {self._job}` comes back to it")
        return 0

    def _look(self, tell: Tell) -> None:
        seen = self._backend.observe(self._job)
        token = self._first_token(seen)
        if token:
            seen = self._backend.start(StartRequest(self._job, 1, token))
            if seen.phase != "starting":
                tell(f"job {self._job}: attempt 1 with {len(seen.ranks)} ranks has started")
        self._say(seen, tell)
        if seen.phase == "finished":
            self._backend.finish(self._job, "finished", "every rank ended with exit code 0")

    def _end(self) -> JobEnd | None:
        """How the job has ended, where its backend can tell that apart from how an attempt has."""
        if isinstance(self._backend, OverLaunchers):
            return self._backend.end(self._job)
        seen = self._backend.observe(self._job)
        return JobEnd(outcome="finished", reason="", at=0.0) if seen.phase == "finished" else None

    def _first_token(self, seen: Observation) -> str:
        """The token to start attempt 1 with; empty where that is not to be done.

        One that somebody has begun to start and not brought to its end goes on under its own token.
        """
        if seen.held or seen.attempt > 1:
            return ""
        if seen.attempt == 1:
            return seen.token if seen.phase == "starting" else ""
        ready = sum(node.state == "spare" for node in seen.nodes)
        return self._token if seen.phase == "stopped" and 0 < seen.nodes_wanted <= ready else ""

    def _say(self, seen: Observation, tell: Tell) -> None:
        ready = sum(node.state in ("spare", "active") for node in seen.nodes)
        if seen.held:
            self._say_once(f"an operator holds it: {seen.held}", tell)
        elif seen.attempt == 0:
            self._say_once(seen.note or f"{ready} of {seen.nodes_wanted} launchers answer", tell)
        elif seen.phase in ("failed", "stopped"):
            why = f"attempt {seen.attempt} {seen.phase}" + (f" ({seen.reason})" if seen.reason else "")
            self._say_once(f"{why}; `transom recover` restarts it, or says why not", tell)
        else:
            self._say_once(f"attempt {seen.attempt} is {seen.phase}" + (f": {seen.note}" if seen.note else ""), tell)

    def _say_once(self, text: str, tell: Tell) -> None:
        now = self._clock.monotonic()
        said, at = self._said
        if text != said or now - at > TELL_AGAIN_SECONDS:
            self._said = (text, now)
            tell(f"job {self._job}: {text}")

    def _over(self, end: JobEnd, tell: Tell) -> int:
        tell(f"job {self._job}: {end.outcome}; {end.reason}")
        return 0 if end.outcome == "finished" else 1
