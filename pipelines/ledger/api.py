"""The HTTP API of the ledger: named reads in JSON (Arrow for series), commands, health, metrics."""

from __future__ import annotations

import hmac
import io
from collections.abc import Awaitable, Callable
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
    BadQuestion,
    CommandRequest,
    LedgerBusy,
    LedgerError,
    LedgerUnavailable,
    NotInLedger,
    RowTable,
    row_object,
)

try:
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise missing_extra("ledger", "the ledger's API (FastAPI)") from error

ARROW_STREAM = "application/vnd.apache.arrow.stream"
BODY_BYTES_MAX = 64 * 1024
_STATUS = {NotInLedger: 404, BadQuestion: 422, LedgerBusy: 503, LedgerUnavailable: 503}

Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT_MAX)]
After = Annotated[int | None, Query(ge=0)]
Buckets = Annotated[int, Query(ge=1, le=BUCKETS_MAX)]


def create_app(reader: LocalReader, exposition: Callable[[], bytes], *, token: str | None = None) -> FastAPI:
    """The API over `reader`; with a token every request but /healthz must carry it as a bearer token."""
    app = FastAPI(title="Transom ledger", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    if token is not None:
        _require_token(app, token)
    _add_errors(app)
    _add_state(app, reader, exposition)
    _add_rows(app, reader)
    _add_samples(app, reader)
    _add_commands(app, reader)
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
            return Response(_arrow(table), media_type=ARROW_STREAM)
        return _json(reader.series(job, metric, attempt=attempt, start=start, end=end, buckets=buckets))

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


def _add_commands(app: FastAPI, reader: LocalReader) -> None:
    decoder = msgspec.json.Decoder(CommandRequest)

    @app.post("/v1/commands")
    async def commands(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                return _error(413, f"a command has at most {BODY_BYTES_MAX} bytes")
        try:
            command = decoder.decode(body)
        except msgspec.DecodeError as error:
            return _error(422, f"not a command: {error}")
        except UnicodeDecodeError:
            return _error(422, "not a command: the body is not UTF-8 text")
        return _json({"command_id": await run_in_threadpool(reader.post_command, command)})


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status_code=status, media_type="application/json")


def _error(status: int, sentence: str) -> Response:
    return _json({"error": sentence}, status)


def _arrow(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
