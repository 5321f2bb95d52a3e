"""The questions that can be asked of a ledger, answered from tables, parts and memory, one cursor each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import msgspec

from detectors.verdict import Verdict
from recovery.action import RECOVERY_TYPES, Action, Command, Incident, Receipt

from .engine import duckdb, pa
from .incidents import IncidentBook, measured_alone
from .parts import PartStore
from .samples import SeriesQuestion, raw_table, series_of, series_table
from .shapes import (
    BUCKETS_DEFAULT,
    BUCKETS_MAX,
    LIST_LIMIT_DEFAULT,
    LIST_LIMIT_MAX,
    ROW_TABLES,
    SAMPLES_DEFAULT,
    SAMPLES_MAX,
    BadQuestion,
    CommandRequest,
    Health,
    IncidentPage,
    IncidentStory,
    IncidentView,
    JobView,
    LedgerBusy,
    LogRow,
    NotInLedger,
    Row,
    RowPage,
    RowTable,
    Series,
)
from .state import LedgerState

QUERY_SECONDS_MAX = 10.0
STORY_ROWS_MAX = 1_000  # of each kind, of one incident

_T = TypeVar("_T")
Cursors = Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]
_decoders = {kind: msgspec.json.Decoder(type_) for kind, (_, type_) in RECOVERY_TYPES.items()}


class LocalReader:
    """A LedgerReader inside the process that has the file open; any thread may ask."""

    def __init__(
        self,
        cursors: Cursors,
        state: LedgerState,
        parts: PartStore,
        *,
        now: Callable[[], float],
        health: Callable[[], Health],
        post: Callable[[CommandRequest], str],
        query_seconds_max: float = QUERY_SECONDS_MAX,
    ) -> None:
        self._cursors = cursors
        self._state = state
        self._parts = parts
        self._now = now
        self._health = health
        self._post = post
        self._query_seconds_max = query_seconds_max

    def jobs(self) -> tuple[JobView, ...]:
        return self._state.jobs(self._now())

    def incidents(
        self,
        *,
        job: str | None = None,
        state: str | None = None,
        fault_class: str | None = None,
        severity: str | None = None,
        after: int | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> IncidentPage:
        return self._state.incidents(
            job=job,
            state=state,
            fault_class=fault_class,
            severity=severity,
            after=after,
            limit=_bounded(limit),
        )

    def incident(self, incident_id: str) -> IncidentStory:
        with self._cursor() as cursor:
            messages = self._messages_of(cursor, incident_id)
        view = self._state.incident(incident_id) or _rebuilt(messages, incident_id)
        if view is None:
            raise NotInLedger(f"there is no incident {incident_id!r}; `transom incidents` lists those there are")
        return IncidentStory(
            incident=view,
            verdicts=_only(messages, Verdict),
            actions=_only(messages, Action),
            receipts=_only(messages, Receipt),
            transitions=_only(messages, Incident),
            commands=_only(messages, Command),
        )

    def _messages_of(self, cursor: duckdb.DuckDBPyConnection, incident_id: str) -> list[tuple[int, Any]]:
        query = " UNION ALL ".join(
            f"(SELECT change, kind, body FROM {table} WHERE {condition} ORDER BY change DESC LIMIT {STORY_ROWS_MAX})"
            for table, condition in (
                ("verdict", "verdict_id = $id"),
                ("action", "verdict_id = $id"),
                ("receipt", "action_id IN (SELECT action_id FROM action WHERE verdict_id = $id)"),
                ("incident", "incident_id = $id"),
                ("command", "incident_id = $id"),
            )
        )
        rows = cursor.execute(f"SELECT * FROM ({query}) ORDER BY change", {"id": incident_id}).fetchall()
        return [(change, _decoders[kind].decode(body)) for change, kind, body in rows]

    def rows(
        self,
        table: RowTable,
        *,
        job: str | None = None,
        after: int | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> RowPage:
        name = ROW_TABLES.get(table)
        if name is None:
            raise BadQuestion(f"there is no list {table!r}; there are {', '.join(ROW_TABLES)}")
        parameters: dict[str, Any] = {"job": job, "limit": _bounded(limit)}
        where = "($job IS NULL OR job = $job)"
        order = "DESC"
        if after is not None:
            parameters["after"] = after
            where += " AND seq > $after"
            order = "ASC"
        query = f"SELECT seq, kind, body FROM {name} WHERE {where} ORDER BY seq {order} LIMIT $limit"
        with self._cursor() as cursor:
            found = cursor.execute(query, parameters).fetchall()
        rows = tuple(Row(seq=seq, kind=kind, message=_decoders[kind].decode(body)) for seq, kind, body in sorted(found))
        return RowPage(rows=rows, next=rows[-1].seq if rows else after or 0)

    def series(
        self,
        job: str,
        metric: str,
        *,
        attempt: int | None = None,
        start: float | None = None,
        end: float | None = None,
        buckets: int = BUCKETS_DEFAULT,
    ) -> Series:
        table = self.series_table(job, metric, attempt=attempt, start=start, end=end, buckets=buckets)
        return series_of(metric, table)

    def series_table(
        self,
        job: str,
        metric: str,
        *,
        attempt: int | None = None,
        start: float | None = None,
        end: float | None = None,
        buckets: int = BUCKETS_DEFAULT,
    ) -> pa.Table:
        """The same as a table: rank (−2: the median over ranks), step, event_at, value."""
        if not 1 <= buckets <= BUCKETS_MAX:
            raise BadQuestion(f"buckets is {buckets}; give 1 to {BUCKETS_MAX}")
        question = SeriesQuestion(job, metric, attempt, start, end, buckets)
        with self._cursor() as cursor:
            return series_table(cursor, self._parts.held(), str(self._parts.folder), question)

    def samples(
        self,
        job: str,
        *,
        metric: str = "",
        attempt: int | None = None,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int = SAMPLES_DEFAULT,
    ) -> pa.Table:
        """Samples as they came, at most `limit` + 1: attempt, rank, node, device, metric, step, event_at, value."""
        if not 1 <= limit <= SAMPLES_MAX:
            raise BadQuestion(f"limit is {limit}; give 1 to {SAMPLES_MAX}")
        question = SeriesQuestion(job, metric, attempt, start, end, BUCKETS_MAX)
        with self._cursor() as cursor:
            return raw_table(cursor, self._parts.held(), str(self._parts.folder), question, rank=rank, limit=limit + 1)

    def metric_names(self, job: str) -> tuple[str, ...]:
        return self._state.metric_names(job)

    def logs(
        self,
        job: str,
        *,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> tuple[LogRow, ...]:
        query = (
            "SELECT event_at, rank, node, stream, text FROM log_line WHERE job = $job"
            " AND ($rank IS NULL OR rank = $rank) AND ($start IS NULL OR event_at >= $start)"
            " AND ($stop IS NULL OR event_at < $stop) ORDER BY event_at DESC, seq DESC LIMIT $limit"
        )
        parameters = {"job": job, "rank": rank, "start": start, "stop": end, "limit": _bounded(limit)}
        with self._cursor() as cursor:
            found = cursor.execute(query, parameters).fetchall()
        return tuple(
            LogRow(event_at=event_at, rank=rank_, node=node, stream=stream, text=text)
            for event_at, rank_, node, stream, text in reversed(found)
        )

    def health(self) -> Health:
        return self._health()

    def post_command(self, request: CommandRequest) -> str:
        return self._post(request)

    def close(self) -> None:
        """The file belongs to whoever opened it."""

    @contextmanager
    def _cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor whose query is interrupted when it takes too long."""
        with self._cursors() as cursor:
            timer = threading.Timer(self._query_seconds_max, cursor.interrupt)
            timer.daemon = True
            timer.start()
            try:
                yield cursor
            except duckdb.InterruptException as error:
                raise LedgerBusy(
                    f"the query took more than {self._query_seconds_max:g} s and was stopped; "
                    "ask for a shorter time or for less"
                ) from error
            finally:
                timer.cancel()


def _bounded(limit: int) -> int:
    if not 1 <= limit <= LIST_LIMIT_MAX:
        raise BadQuestion(f"limit is {limit}; give 1 to {LIST_LIMIT_MAX}")
    return limit


def _only(messages: list[tuple[int, Any]], type_: type[_T]) -> tuple[_T, ...]:
    return tuple(message for _, message in messages if isinstance(message, type_))


def _rebuilt(messages: list[tuple[int, Any]], incident_id: str) -> IncidentView | None:
    """An incident that is too old for the memory, from its messages."""
    book = IncidentBook()
    for change, message in messages:
        book.apply(change, message)
    state = book.get(incident_id)
    return state.view(measured_alone(state)) if state is not None else None
