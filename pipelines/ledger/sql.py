"""Free SQL for readers: one SELECT at a time on a snapshot, in a confined process, within bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from .engine import pa
from .sandbox import REFUSED, Question
from .shapes import SQL_ROWS_DEFAULT, SQL_ROWS_MAX, BadQuestion, LedgerBusy, SqlAnswer
from .snapshots import Snapshot

QUERY_CHARACTERS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class SqlBounds:
    """Of one query; `at_once_max` of them run beside each other."""

    seconds_max: float = 30.0
    memory_bytes_max: int = 512 * 2**20
    answer_bytes_max: int = 64 * 2**20
    at_once_max: int = 2
    fresh_seconds: float = 5.0  # a snapshot younger than that is not made again


@dataclass(frozen=True, slots=True)
class SqlTable:
    """The rows; `truncated`: there were more. `data_at`: the instant that was asked (UTC seconds)."""

    table: pa.Table
    truncated: bool
    data_at: float


class SqlDesk:
    """Answers queries from any thread."""

    def __init__(self, snapshot: Callable[[float], Snapshot], bounds: SqlBounds | None = None) -> None:
        self._snapshot = snapshot
        self._bounds = bounds or SqlBounds()
        self._free = threading.BoundedSemaphore(self._bounds.at_once_max)

    def ask(self, query: str, limit: int = SQL_ROWS_DEFAULT) -> SqlTable:
        """Raises BadQuestion for what is no SELECT or goes over a bound, LedgerBusy where others are asking."""
        if not 1 <= limit <= SQL_ROWS_MAX:
            raise BadQuestion(f"limit is {limit}; give 1 to {SQL_ROWS_MAX}")
        if len(query) > QUERY_CHARACTERS_MAX:
            raise BadQuestion(f"the query has more than {QUERY_CHARACTERS_MAX} characters; shorten it")
        if not self._free.acquire(blocking=False):
            raise LedgerBusy(f"{self._bounds.at_once_max} queries are running already; ask again when one is done")
        try:
            snapshot = self._snapshot(self._bounds.fresh_seconds)
            table = self._run(snapshot, query, limit)
        finally:
            self._free.release()
        return SqlTable(table.slice(0, limit), table.num_rows > limit, snapshot.taken_at)

    def _run(self, snapshot: Snapshot, query: str, limit: int) -> pa.Table:
        bounds = self._bounds
        question = Question(
            folder=str(snapshot.folder),
            query=query,
            rows_max=limit,
            answer_bytes_max=bounds.answer_bytes_max,
            memory_bytes_max=bounds.memory_bytes_max,
            cpu_seconds_max=int(bounds.seconds_max) + 1,
        )
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "pipelines.ledger.sandbox"],
                input=msgspec.json.encode(question),
                capture_output=True,
                timeout=bounds.seconds_max,
                check=False,
                env={},  # nothing of ours is in reach of a query
            )
        except subprocess.TimeoutExpired:
            raise LedgerBusy(
                f"the query took more than {bounds.seconds_max:g} s and was stopped; ask for a shorter time or for less"
            ) from None
        if done.returncode == REFUSED:
            raise BadQuestion(done.stderr.decode("utf-8", "replace"))
        if done.returncode != 0:
            raise BadQuestion(f"the query ended its process (exit code {done.returncode}); ask for less")
        return pa.ipc.open_stream(done.stdout).read_all()


def answer_of(answer: SqlTable) -> SqlAnswer:
    """The same as rows."""
    columns = [column.to_pylist() for column in answer.table.columns]
    rows: list[list[Any]] = [list(row) for row in zip(*columns, strict=True)]
    return SqlAnswer(
        columns=tuple(answer.table.column_names), rows=rows, truncated=answer.truncated, data_at=answer.data_at
    )
