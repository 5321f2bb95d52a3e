"""The console's one way to the ledger: its address, typed reads, the last good answers while it is away."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ingest.events import AttemptStarted
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.shapes import (
    CommandRequest,
    Health,
    IncidentStory,
    IncidentView,
    JobView,
    LedgerError,
    LedgerReader,
    LogRow,
    NotInLedger,
    Row,
    RowTable,
    Series,
)
from ui.views import Start, onset

SOCKET_VARIABLE = "TRANSOM_API_SOCKET"
URL_VARIABLE = "TRANSOM_API_URL"
TOKEN_VARIABLE = "TRANSOM_API_TOKEN"
CONSOLE_TOKEN_VARIABLE = "TRANSOM_CONSOLE_TOKEN"
VIEWER_TOKEN_VARIABLE = "TRANSOM_CONSOLE_VIEWER_TOKEN"
FINISHED_VARIABLE = "TRANSOM_LEDGER_FOLDER"
RULES_VARIABLE = "TRANSOM_RULES_FOLDER"
ANSWERS_MAX = 64  # last good answers kept for when the ledger is away
INCIDENTS_MAX = 500
LOG_LINES_MAX = 200
EVENTS_MAX = 1_000
AUDIT_ROWS_MAX = 500  # of each kind
BUCKETS_MAX = 400
BUCKETS_MIN = 40
SAMPLES_MAX = 40_000  # of one chart's question: with many ranks each gets fewer buckets
FIRST_STEP_SECONDS_MAX = 600.0  # a new attempt's first step is looked for so long after its start
FIRST_STEPS_MAX = 1_000

AnswerT = TypeVar("AnswerT")


class LedgerAway(Exception):
    """The ledger cannot be read now and there is no earlier answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the record service answers (a Unix socket, or a URL with its token), or the folder of a finished ledger;
    the console's own tokens: an operator's, and a viewer's; where the user's log rules lie."""

    socket: str = ""
    url: str = ""
    token: str = ""
    login_token: str = ""
    viewer_token: str = ""
    finished: str = ""
    rules: str = ""


def address() -> Address:
    """What `transom console` hands over; the only place in this room where the environment is read."""
    return Address(
        socket=os.environ.get(SOCKET_VARIABLE, ""),
        url=os.environ.get(URL_VARIABLE, ""),
        token=os.environ.get(TOKEN_VARIABLE, ""),
        login_token=os.environ.get(CONSOLE_TOKEN_VARIABLE, ""),
        viewer_token=os.environ.get(VIEWER_TOKEN_VARIABLE, ""),
        finished=os.environ.get(FINISHED_VARIABLE, ""),
        rules=os.environ.get(RULES_VARIABLE, ""),
    )


def connect(where: Address) -> LedgerReader:
    """A reader for that address. Raises LedgerAway where no address was given or the file cannot be read."""
    if where.finished:
        from pipelines.ledger.finished import open_finished  # needs DuckDB, which a console over the API does not

        try:
            return open_finished(Path(where.finished))
        except LedgerError as error:
            raise LedgerAway(str(error)) from error
    if where.socket:
        return LedgerClient(Path(where.socket))
    if where.url:
        return LedgerClient(where.url, where.token or None)
    raise LedgerAway("The console was not told where the record service is. Start it with `transom console`.")


class Ledger:
    """Reads for pages. While the ledger is away, what it said last stands, and `away` says why."""

    def __init__(self, reader: LedgerReader) -> None:
        self._reader = reader
        self._answers: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._first_steps: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._world_sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self.away = ""  # why the newest question was not answered; empty: it was

    def health(self) -> Health:
        return self._ask(("health",), self._reader.health)

    def jobs(self) -> tuple[JobView, ...]:
        jobs = self._ask(("jobs",), self._reader.jobs)
        self._world_sizes = {job.job: job.world_size for job in jobs}
        return jobs

    def incidents(self, job: str = "") -> tuple[IncidentView, ...]:
        """Newest onset first, at most INCIDENTS_MAX."""
        page = self._ask(("incidents", job), lambda: self._reader.incidents(job=job or None, limit=INCIDENTS_MAX))
        return tuple(sorted(page.incidents, key=lambda row: (onset(row), row.seq), reverse=True))

    def story(self, incident_id: str) -> IncidentStory:
        """Everything about one incident. Raises NotInLedger."""
        return self._ask(("story", incident_id), lambda: self._reader.incident(incident_id))

    def series(
        self,
        job: str,
        metric: str,
        *,
        place: str,
        attempt: int | None = None,
        start: float | None = None,
        end: float | None = None,
    ) -> Series:
        """One metric of all ranks between two times, downsampled by the ledger.

        `place` names the chart it is for: while the ledger is away, each chart keeps its own last answer.
        """
        buckets = buckets_for(self._world_sizes.get(job, 1))
        return self._ask(
            ("series", place, job, metric, attempt),
            lambda: self._reader.series(job, metric, attempt=attempt, start=start, end=end, buckets=buckets),
        )

    def metric_names(self, job: str) -> tuple[str, ...]:
        return self._ask(("metrics", job), lambda: self._reader.metric_names(job))

    def logs(self, job: str, rank: int | None, start: float, end: float) -> tuple[LogRow, ...]:
        """Log records of one rank (or all) between two times, oldest first."""
        return self._ask(
            ("logs", job, rank, start),
            lambda: self._reader.logs(job, rank=rank, start=start, end=end, limit=LOG_LINES_MAX),
        )

    def starts(self, job: str) -> tuple[Start, ...]:
        """The job's attempts as they were started, oldest first."""
        page = self._ask(("events", job), lambda: self._reader.rows("events", job=job, limit=EVENTS_MAX))
        starts: dict[int, Start] = {}
        for row in page.rows:
            message = row.message
            if isinstance(message, AttemptStarted) and message.attempt not in starts:
                nodes = tuple(sorted({place.node for place in message.places}))
                starts[message.attempt] = Start(message.attempt, message.at, message.resume_step, nodes)
        return tuple(starts[attempt] for attempt in sorted(starts))

    def told(self, table: RowTable, job: str) -> tuple[Row, ...]:
        """The newest rows of one list of a job, oldest first."""
        return self._ask(("rows", table, job), lambda: self._reader.rows(table, job=job, limit=AUDIT_ROWS_MAX)).rows

    def checkpoints(self, job: str) -> tuple[Row, ...]:
        """The newest checkpoint events of a job, oldest first."""
        return self._ask(("checkpoints", job), lambda: self._reader.rows("checkpoints", job=job, limit=EVENTS_MAX)).rows

    def first_step_at(self, job: str, start: Start) -> float | None:
        """When an attempt finished its first step; None while it has not. Found once, remembered."""
        key = (job, start.attempt)
        with self._lock:
            if key in self._first_steps:
                return self._first_steps[key]
        series = self.series(
            job,
            "train.step.duration",
            place="first step",
            attempt=start.attempt,
            start=start.at,
            end=start.at + FIRST_STEP_SECONDS_MAX,
        )
        times = [points[0][0] for points in series.ranks.values() if points]
        if not times:
            return None
        with self._lock:
            self._first_steps[key] = min(times)
            while len(self._first_steps) > FIRST_STEPS_MAX:
                self._first_steps.popitem(last=False)
        return min(times)

    def command(self, request: CommandRequest) -> str:
        """Send what a person asks; returns once it is durable. Raises LedgerError."""
        return self._reader.post_command(request)

    def _ask(self, key: tuple[Any, ...], question: Callable[[], AnswerT]) -> AnswerT:
        try:
            answer = question()
        except NotInLedger:
            raise
        except LedgerError as error:
            self.away = str(error)
            with self._lock:
                if key not in self._answers:
                    raise LedgerAway(str(error)) from error
                remembered: AnswerT = self._answers[key]
            return remembered
        self.away = ""
        with self._lock:
            self._answers[key] = answer
            self._answers.move_to_end(key)
            while len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        return answer


def buckets_for(ranks: int) -> int:
    """How finely a chart of so many ranks is asked for."""
    return max(BUCKETS_MIN, min(BUCKETS_MAX, SAMPLES_MAX // max(1, ranks)))
