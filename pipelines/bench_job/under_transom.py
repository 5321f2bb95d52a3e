"""A bench's job as a user of Transom runs it: `transom up` beside `transom run`, each a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from detectors.verdict import Verdict
from ingest.clock import Clock
from ingest.codec import Codec, Undecodable
from ingest.events import AttemptStarted, Topic
from pipelines.bench_job.step_log import StepLog
from pipelines.children import Child, Children
from pipelines.open_bus import open_bus, own_command
from pipelines.places import Places
from pipelines.settings import load_settings
from recovery.action import RECOVERY_TYPES, Incident
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import NodeFile

SCRIPT = Path(__file__).with_name("train.py")
READY_SECONDS_MAX = 240.0
POLL_SECONDS = 0.02  # times come from the messages and the step log, never from when we looked
RECORDS_MAX = 2_000
HEARD: tuple[Topic, ...] = ("events", "verdicts", "actions")
OVER = ("resolved", "relapsed", "superseded", "notified", "ignored")
# Beside the defaults: incidents are over after a few steps, so that the next fault may come; and budgets that a month
# would not spend are not spent by a bench that breaks one job a dozen times in minutes.
SETTINGS = """\
state_dir = "{state}"

[recover]
probation_steps = 3
probation_seconds = 1.0
restarts_max = 1000
same_cause_max = 100
flap_restarts_max = 1000
budgets = {{ user = 1000, unknown = 1000, hang = 1000, infra = 1000 }}
{more}
"""
_groups = count()


class BenchFailed(Exception):
    """What was to be measured did not happen; the text says what."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message, and when the bus took it."""

    at: float
    message: Any


class Services:
    """`transom up` in a folder of its own, what the bus tells, and jobs; all of it ends with the context."""

    def __init__(self, folder: Path, clock: Clock, *, more_settings: str = "") -> None:
        self.folder = folder
        self._clock = clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = folder / "transom.toml"
        config.write_text(SETTINGS.format(state=folder / "s", more=more_settings), encoding="utf-8")
        self._arguments = ["--config", str(config)]
        settings = load_settings(config)
        self.places = Places.of(settings)
        self.children = Children(self.places.logs, clock)
        self.bus = open_bus(settings, clock, client="bench")
        self._consumer = self.bus.consumer(f"bench-{os.getpid()}-{next(_groups)}", HEARD, start="latest")
        self._codec = Codec(RECOVERY_TYPES)
        self.heard: list[Heard] = []

    def __enter__(self) -> Services:
        ready = [self.places.api_socket, self.places.state / "detect.ready", self.places.state / "recover.ready"]
        try:
            up = self.children.start("up", own_command("up", "--no-console", *self._arguments))
            self.wait_for(lambda: all(path.exists() for path in ready), "transom up", READY_SECONDS_MAX, up)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.children.stop()
        self._consumer.close()
        self.bus.close()

    # Jobs

    def run(self, job: str, script: Path, arguments: Sequence[str], *flags: str) -> Child:
        """`transom run` of a script; what its ranks print goes to the bus alone."""
        command = own_command("run", "--job", job, "--quiet", *flags, *self._arguments, str(script), *arguments)
        return self.children.start(job, command, environ={"OMP_NUM_THREADS": "1"})

    def launchers(self, job: str) -> dict[str, NodeFile]:
        """The launchers that live, by node."""
        return JobFiles(self.places.jobs, job).nodes()

    # What is told

    def poll(self) -> None:
        """Take in what the bus has."""
        for record in self._consumer.poll(RECORDS_MAX, 0.0):
            try:
                message = self._codec.decode(record.headers, record.value)
            except Undecodable:
                continue
            self.heard.append(Heard(record.appended_at, message))

    def settled_at(self, job: str, attempt: int) -> float | None:
        """When the first settled verdict about an attempt was on the bus."""
        for heard in self.heard:
            message = heard.message
            if isinstance(message, Verdict) and (message.job, message.attempt) == (job, attempt) and message.settled:
                return heard.at
        return None

    def starts(self, job: str) -> dict[int, AttemptStarted]:
        """The attempts of a job as they were started."""
        told = [heard.message for heard in self.heard]
        return {one.attempt: one for one in told if isinstance(one, AttemptStarted) and one.job == job}

    def is_over(self, job: str, attempt: int) -> bool:
        """Whether recovery has brought to its end what it did about an attempt."""
        told = [heard.message for heard in self.heard if isinstance(heard.message, Incident)]
        states = {one.incident_id: one.state for one in told if (one.job, one.attempt) == (job, attempt)}
        return bool(states) and all(state in OVER for state in states.values())

    def wait_for(
        self, condition: Callable[[], object], what: str, seconds_max: float, child: Child | None = None
    ) -> None:
        """Poll until it holds. Raises BenchFailed at the end of the time, or of `child`."""
        give_up_at = self._clock.monotonic() + seconds_max
        while not condition():
            if child is not None and child.process.poll() is not None:
                raise BenchFailed(f"{child.name} ended while {what} was awaited: {child.last_words()}")
            if self._clock.monotonic() > give_up_at:
                raise BenchFailed(f"{what}: not within {seconds_max:.0f} s; see {self.places.logs}")
            self._clock.sleep(POLL_SECONDS)
            self.poll()

    def wait_for_steps(self, log: StepLog, attempt: int, steps: int, child: Child, seconds_max: float) -> None:
        """Until all ranks have ended so many steps in this attempt."""

        def trained() -> bool:
            log.read()
            return log.steps_made(attempt) >= steps

        self.wait_for(trained, f"{steps} steps of attempt {attempt}", seconds_max, child)
