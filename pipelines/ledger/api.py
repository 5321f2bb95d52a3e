"""The HTTP API of the ledger: named reads in JSON (Arrow for series), commands, health, metrics."""

from __future__ import annotations

import hmac
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from pipelines.extras import missing_extra

from .engine import pa
from .reader import LocalReader
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
    LedgerBusy,
    LedgerError,
    LedgerUnavailable,
    NotInLedger,
    RowTable,
    SnapshotView,
    SqlRequest,
    row_object,
)
from .snapshots import Snapshot
from .sql import SqlDesk, answer_of

try:
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise missing_extra("ledger", "the ledger's API (FastAPI)") from error

ARROW_STREAM = "application/vnd.apache.arrow.stream"
TRUNCATED = "transom-truncated"  # header of an answer in Arrow: there was more than its limit
BODY_BYTES_MAX = 128 * 1024
_STATUS = {NotInLedger: 404, BadQuestion: 422, LedgerBusy: 503, LedgerUnavailable: 503}

Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT_MAX)]
After = Annotated[int | None, Query(ge=0)]
Buckets = Annotated[int, Query(ge=1, le=BUCKETS_MAX)]


@dataclass(frozen=True, slots=True)
class Doors:
    """What only a live ledger offers."""

    sql: SqlDesk
    snapshot: Callable[[float], Snapshot]


def create_app(
    reader: LocalReader, exposition: Callable[[], bytes], *, doors: Doors | None = None, token: str | None = None
) -> FastAPI:
    """The API over `reader`; with a token every request but /healthz must carry it as a bearer token."""
    app = FastAPI(title="Transom ledger", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    if token is not None:
        _require_token(app, token)
    _add_errors(app)
    _add_state(app, reader, exposition)
    _add_rows(app, reader)
    _add_samples(app, reader)
    _add_commands(app, reader)
    if doors is not None:
        _add_sql(app, doors)
    return app


def _require_token(app: FastAPI, token: str) -> None:
    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if request.url.path != "/healthz" and not hmac.compare_digest(given, expected):
            return _error(401, "this address needs the ledger's token: send it as `Authorization: Bearer TOKEN`")
        return await call_next(request)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(LedgerError)
    async def refused(_: Request, error: LedgerError) -> Response:
        return _error(_STATUS.get(type(error), 500), str(error))

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return _error(422, f"{name}: {str(first['msg']).lower()}, got {first.get('input')!r}")

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return _error(404, f"there is no {request.url.path}; /openapi.json lists what there is")
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def _add_state(app: FastAPI, reader: LocalReader, exposition: Callable[[], bytes]) -> None:
    @app.get("/healthz")
    def healthz() -> Response:
        return _json(reader.health())

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/jobs")
    def jobs() -> Response:
        return _json({"jobs": reader.jobs()})

    @app.get("/v1/incidents")
    def incidents(
        job: str | None = None,
        state: str | None = None,
        fault_class: str | None = None,
        severity: str | None = None,
        after: After = None,
        limit: Limit = LIST_LIMIT_DEFAULT,
    ) -> Response:
        return _json(
            reader.incidents(job=job, state=state, fault_class=fault_class, severity=severity, after=after, limit=limit)
        )

    @app.get("/v1/incidents/{incident_id:path}")
    def incident(incident_id: str) -> Response:
        return _json(reader.incident(incident_id))


def _add_rows(app: FastAPI, reader: LocalReader) -> None:
    def add(table: RowTable) -> None:
        @app.get(f"/v1/{table}", name=table)
        def rows(job: str | None = None, after: After = None, limit: Limit = LIST_LIMIT_DEFAULT) -> Response:
            page = reader.rows(table, job=job, after=after, limit=limit)
            return _json({"rows": [row_object(row) for row in page.rows], "next": page.next})

    for table in ROW_TABLES:
        add(table)  # type: ignore[arg-type]


def _add_samples(app: FastAPI, reader: LocalReader) -> None:
    @app.get("/v1/series")
    def series(
        request: Request,
        job: str,
        metric: str,
        attempt: int | None = None,
        start: float | None = None,
        end: float | None = None,
        buckets: Buckets = BUCKETS_DEFAULT,
    ) -> Response:
        if ARROW_STREAM in request.headers.get("accept", ""):
            table = reader.series_table(job, metric, attempt=attempt, start=start, end=end, buckets=buckets)
            return _arrow_response(table)
        return _json(reader.series(job, metric, attempt=attempt, start=start, end=end, buckets=buckets))

    @app.get("/v1/samples")
    def samples(
        job: str,
        metric: str = "",
        attempt: int | None = None,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: Annotated[int, Query(ge=1, le=SAMPLES_MAX)] = SAMPLES_DEFAULT,
    ) -> Response:
        table = reader.samples(job, metric=metric, attempt=attempt, rank=rank, start=start, end=end, limit=limit)
        return _arrow_response(table.slice(0, limit), truncated=table.num_rows > limit)

    @app.get("/v1/metrics_names")
    def metrics_names(job: str) -> Response:
        return _json({"metrics": reader.metric_names(job)})

    @app.get("/v1/logs")
    def logs(
        job: str,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: Limit = LIST_LIMIT_DEFAULT,
    ) -> Response:
        return _json({"lines": reader.logs(job, rank=rank, start=start, end=end, limit=limit)})


def _add_sql(app: FastAPI, doors: Doors) -> None:
    decoder = msgspec.json.Decoder(SqlRequest)

    @app.post("/v1/sql")
    async def sql(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _error(413, f"a query has at most {BODY_BYTES_MAX} bytes")
        try:
            asked = decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(422, f"not a query: {error}")
        answer = await run_in_threadpool(doors.sql.ask, asked.query, asked.limit)
        if ARROW_STREAM in request.headers.get("accept", ""):
            return _arrow_response(answer.table, truncated=answer.truncated)
        return _json(answer_of(answer))

    @app.post("/v1/snapshots")
    def snapshots(fresh_seconds: Annotated[float, Query(ge=0.0, le=86_400.0)] = 0.0) -> Response:
        made = doors.snapshot(fresh_seconds)
        return _json(SnapshotView(folder=str(made.folder), taken_at=made.taken_at, size_bytes=made.size_bytes))


def _add_commands(app: FastAPI, reader: LocalReader) -> None:
    decoder = msgspec.json.Decoder(CommandRequest)

    @app.post("/v1/commands")
    async def commands(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _error(413, f"a command has at most {BODY_BYTES_MAX} bytes")
        try:
            command = decoder.decode(body)
        except msgspec.DecodeError as error:
            return _error(422, f"not a command: {error}")
        except UnicodeDecodeError:
            return _error(422, "not a command: the body is not UTF-8 text")
        return _json({"command_id": await run_in_threadpool(reader.post_command, command)})


async def _body(request: Request) -> bytes | None:
    """The whole body; None of one that is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            return None
    return body


def _json(answer: Any, status: int = 200) -> Response:
    encoded = msgspec.json.encode(answer, enc_hook=str)  # SQL has types that JSON has no word for
    return Response(encoded, status_code=status, media_type="application/json")


def _error(status: int, sentence: str) -> Response:
    return _json({"error": sentence}, status)


def _arrow_response(table: pa.Table, *, truncated: bool = False) -> Response:
    return Response(_arrow(table), media_type=ARROW_STREAM, headers={TRUNCATED: str(truncated).lower()})


def _arrow(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
