"""The ledger as the command line and the console see it: the questions of `LedgerReader` over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from pipelines.extras import missing_extra

from .shapes import (
    BUCKETS_DEFAULT,
    LIST_LIMIT_DEFAULT,
    SQL_ROWS_DEFAULT,
    BadQuestion,
    CommandRequest,
    Health,
    IncidentPage,
    IncidentStory,
    JobView,
    LedgerBusy,
    LedgerUnavailable,
    LogRow,
    NotInLedger,
    RowPage,
    RowTable,
    Series,
    SnapshotView,
    SqlAnswer,
    SqlRequest,
    row_of_object,
)

try:
    import httpcore
    import httpx
except ImportError as error:  # pragma: no cover - the message itself is tested in a process of its own
    raise missing_extra("ledger", "reading the ledger (httpx)") from error

TIMEOUT_SECONDS = 15.0  # the server stops a query after 10
SQL_TIMEOUT_SECONDS = 90.0  # free SQL after 30, and a snapshot may have to be made before
CONNECT_SECONDS = 2.0
_T = TypeVar("_T")


class _Jobs(msgspec.Struct):
    jobs: tuple[JobView, ...]


class _Names(msgspec.Struct):
    metrics: tuple[str, ...]


class _Lines(msgspec.Struct):
    lines: tuple[LogRow, ...]


class _Rows(msgspec.Struct):
    rows: list[dict[str, Any]]
    next: int


class _CommandId(msgspec.Struct):
    command_id: str


class _Error(msgspec.Struct):
    error: str


class _UnixBackend(httpcore.SyncBackend):
    """httpcore leaves the socket of a refused connection to the garbage collector; this one closes it."""

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
            knock.settimeout(timeout)
            try:
                knock.connect(path)
            except OSError as error:
                raise httpcore.ConnectError(error.strerror or str(error)) from error
        return super().connect_unix_socket(path, timeout, socket_options)


class _UnixTransport(httpx.HTTPTransport):
    """httpx over one Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__(uds=path, verify=False)  # no TLS here, so no second spent on certificates
        self._pool = httpcore.ConnectionPool(uds=path, network_backend=_UnixBackend())


class LedgerClient:
    """A LedgerReader over a Unix socket (a path) or TCP (an http:// address and a token), for any thread."""

    def __init__(
        self, address: str | Path, token: str | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        text = str(address)
        self._address = text
        timeout = self._timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if text.startswith(("http://", "https://")):
            self._http = httpx.Client(base_url=text, headers=headers, timeout=timeout, trust_env=False)
        else:
            self._http = httpx.Client(
                base_url="http://ledger",
                transport=_UnixTransport(text),
                headers=headers,
                timeout=timeout,
                trust_env=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def jobs(self) -> tuple[JobView, ...]:
        return self._get("/v1/jobs", _Jobs).jobs

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
        return self._get(
            "/v1/incidents",
            IncidentPage,
            job=job,
            state=state,
            fault_class=fault_class,
            severity=severity,
            after=after,
            limit=limit,
        )

    def incident(self, incident_id: str) -> IncidentStory:
        return self._get(f"/v1/incidents/{quote(incident_id, safe='')}", IncidentStory)

    def rows(
        self,
        table: RowTable,
        *,
        job: str | None = None,
        after: int | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> RowPage:
        answer = self._get(f"/v1/{table}", _Rows, job=job, after=after, limit=limit)
        try:
            return RowPage(rows=tuple(row_of_object(fields) for fields in answer.rows), next=answer.next)
        except (msgspec.ValidationError, KeyError) as error:
            raise LedgerUnavailable(f"the ledger answered with a row this version cannot read: {error}") from error

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
        return self._get(
            "/v1/series",
            Series,
            job=job,
            metric=metric,
            attempt=attempt,
            start=start,
            end=end,
            buckets=buckets,
        )

    def metric_names(self, job: str) -> tuple[str, ...]:
        return self._get("/v1/metrics_names", _Names, job=job).metrics

    def logs(
        self,
        job: str,
        *,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> tuple[LogRow, ...]:
        return self._get("/v1/logs", _Lines, job=job, rank=rank, start=start, end=end, limit=limit).lines

    def health(self) -> Health:
        return self._get("/healthz", Health)

    def sql(self, query: str, limit: int = SQL_ROWS_DEFAULT) -> SqlAnswer:
        """One SELECT on a snapshot a few seconds old. Raises BadQuestion, LedgerBusy."""
        content = msgspec.json.encode(SqlRequest(query=query, limit=limit))
        return self._ask("POST", "/v1/sql", SqlAnswer, content=content, timeout_seconds=SQL_TIMEOUT_SECONDS)

    def snapshot(self, fresh_seconds: float = 0.0) -> SnapshotView:
        """A snapshot not older than this, on the ledger's own machine."""
        return self._ask(
            "POST",
            "/v1/snapshots",
            SnapshotView,
            parameters={"fresh_seconds": fresh_seconds},
            timeout_seconds=SQL_TIMEOUT_SECONDS,
        )

    def post_command(self, request: CommandRequest) -> str:
        return self._ask("POST", "/v1/commands", _CommandId, content=msgspec.json.encode(request)).command_id

    def _get(self, path: str, type_: type[_T], **parameters: str | float | None) -> _T:
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._ask("GET", path, type_, parameters=given)

    def _ask(
        self,
        method: str,
        path: str,
        type_: type[_T],
        *,
        parameters: Mapping[str, str | float] | None = None,
        content: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> _T:
        timeout = self._timeout if timeout_seconds is None else httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        try:
            response = self._http.request(method, path, params=parameters, content=content, timeout=timeout)
        except (httpx.TransportError, OSError) as error:
            raise LedgerUnavailable(
                f"nobody answers for the ledger at {self._address} ({_why(error)}); "
                "start it with `transom up` or `transom record`"
            ) from error
        if response.status_code != 200:
            raise _refusal(response)
        try:
            return msgspec.json.decode(response.content, type=type_)
        except msgspec.DecodeError as error:
            raise LedgerUnavailable(
                f"what answers at {self._address} is not a ledger of this version ({error}); "
                "start one with `transom up` or `transom record`"
            ) from error


def _refusal(response: httpx.Response) -> BadQuestion | LedgerBusy | LedgerUnavailable | NotInLedger:
    try:
        sentence = msgspec.json.decode(response.content, type=_Error).error
    except msgspec.DecodeError:
        sentence = f"the ledger answered {response.status_code}"
    match response.status_code:
        case 404:
            return NotInLedger(sentence)
        case 413 | 422:
            return BadQuestion(sentence)
        case 503:
            return LedgerBusy(sentence)
        case _:
            return LedgerUnavailable(sentence)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
