"""The series query: one metric by rank and the ranks' median, thinned so that every extreme stays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingest.events import LAUNCHER_RANK

from .columns import live_table
from .engine import duckdb, pa
from .parts import Held
from .shapes import Series

POINTS_MAX = 200_000  # of one answer, over all ranks
BUCKETS_MIN = 10
MEDIAN_RANK = -2  # in the answer as a table: the median over ranks

# Points of every rank, and the median over the ranks of each step (of samples by time: of two seconds) as rank -2.
# What a whole node measured (rank -1) is a line for each node and device. NaN and infinities are kept apart: they would
# win every maximum.
_POINTS = """
WITH sample AS (
  SELECT attempt, rank, CASE WHEN rank < 0 THEN node || '/' || coalesce(device, '') ELSE '' END AS place,
    step, event_at, value
  FROM ({source})
  WHERE job = $job AND metric = $metric
    AND ($attempt IS NULL OR attempt = $attempt)
    AND ($start IS NULL OR event_at >= $start) AND ($stop IS NULL OR event_at < $stop)
), point AS (
  SELECT rank, place, step, event_at, value FROM sample
  UNION ALL
  SELECT -2, '', step, min(event_at), median(value) FROM sample WHERE isfinite(value) AND rank >= 0
  GROUP BY attempt, step, CASE WHEN step < 0 THEN floor(event_at / 2) END
)
"""
_SPAN = """
SELECT min(low), max(high), count(*), max(amount), sum(odd) FROM (
  SELECT rank, place, min(event_at) AS low, max(event_at) AS high, count(*) AS amount,
    count_if(NOT isfinite(value)) AS odd
  FROM sample GROUP BY rank, place)
"""
_RAW = "SELECT rank, place, step, event_at, value FROM point ORDER BY rank, place, event_at, step"
_THINNED = """
, bucketed AS (
  SELECT *, CASE WHEN isfinite(value) THEN value END AS finite,
    least(CAST(floor((event_at - $low) / $width) AS BIGINT), $buckets - 1) AS bucket
  FROM point
), extreme AS (
  SELECT rank, place, min(finite) AS low, max(finite) AS high,
    arg_min(step, finite) AS low_step, arg_min(event_at, finite) AS low_at,
    arg_max(step, finite) AS high_step, arg_max(event_at, finite) AS high_at
  FROM bucketed GROUP BY rank, place, bucket
)
SELECT rank, place, step, event_at, value FROM (
  SELECT rank, place, low_step AS step, low_at AS event_at, low AS value FROM extreme WHERE low_at IS NOT NULL
  UNION ALL
  SELECT rank, place, high_step, high_at, high FROM extreme
  WHERE high_at IS NOT NULL AND (high_at <> low_at OR high_step <> low_step){odd})
ORDER BY rank, place, event_at, step
"""
_ODD = """
  UNION ALL
  SELECT rank, place, arg_min(step, event_at), min(event_at), arg_min(value, event_at)
  FROM bucketed WHERE finite IS NULL GROUP BY rank, place, bucket"""  # asked only where there are any


@dataclass(frozen=True, slots=True)
class SeriesQuestion:
    """Which samples, and into how many buckets of time for each rank."""

    job: str
    metric: str
    attempt: int | None
    start: float | None
    end: float | None
    buckets: int


def series_table(cursor: duckdb.DuckDBPyConnection, held: Held, folder: str, question: SeriesQuestion) -> pa.Table:
    """rank (−2: the median over ranks), place, step, event_at, value; ordered by rank, place and time.

    `place` is NODE/DEVICE where rank is −1, else empty.
    """
    source, parameters = _source(cursor, held, folder, question)
    points = _POINTS.format(source=source)
    ((low, high, ranks, most, odd),) = cursor.execute(points + _SPAN, parameters).fetchall()
    buckets = question.buckets
    if ranks:
        buckets = min(buckets, max(BUCKETS_MIN, POINTS_MAX // (2 * ranks)))
    if most is None or most <= 2 * buckets:
        return cursor.sql(points + _RAW, params=parameters).to_arrow_table()
    parameters |= {"low": low, "width": max((high - low) / buckets, 1e-9), "buckets": buckets}
    return cursor.sql(points + _THINNED.format(odd=_ODD if odd else ""), params=parameters).to_arrow_table()


def raw_table(
    cursor: duckdb.DuckDBPyConnection,
    held: Held,
    folder: str,
    question: SeriesQuestion,
    *,
    rank: int | None,
    limit: int,
) -> pa.Table:
    """Samples as they came, at most `limit`, by attempt, rank and time; an empty metric asks for all of them."""
    source, parameters = _source(cursor, held, folder, question)
    query = f"""
SELECT attempt, rank, node, coalesce(device, '') AS device, metric, step, event_at, value FROM ({source})
WHERE job = $job AND ($metric = '' OR metric = $metric) AND ($attempt IS NULL OR attempt = $attempt)
  AND ($rank IS NULL OR rank = $rank)
  AND ($start IS NULL OR event_at >= $start) AND ($stop IS NULL OR event_at < $stop)
ORDER BY metric, attempt, rank, node, device, event_at, step LIMIT $limit
"""
    return cursor.sql(query, params=parameters | {"rank": rank, "limit": limit}).to_arrow_table()


def _source(
    cursor: duckdb.DuckDBPyConnection, held: Held, folder: str, question: SeriesQuestion
) -> tuple[str, dict[str, object]]:
    """A query over parts and buffer that may hold what is asked, and the parameters of it and of the question."""
    paths = [
        f"{folder}/{part.path}"
        for part in held.parts
        if question.job in part.jobs
        and (question.start is None or part.max_at >= question.start)
        and (question.end is None or part.min_at < question.end)
    ]
    cursor.register("live", live_table(held.buffered, question.job, question.metric or None))
    source = "SELECT * FROM live"
    parameters: dict[str, object] = {
        "job": question.job,
        "metric": question.metric,
        "attempt": question.attempt,
        "start": question.start,
        "stop": question.end,
    }
    if paths:
        source += " UNION ALL BY NAME SELECT * FROM read_parquet($paths, union_by_name = true)"
        parameters["paths"] = paths
    return source, parameters


def series_of(metric: str, table: pa.Table) -> Series:
    """The same as a `Series`."""
    ranks: dict[str, list[tuple[float, int, float | None]]] = {}
    median: list[tuple[float, float | None]] = []
    non_finite: list[tuple[int, int, str]] = []
    hosts: dict[str, list[tuple[float, float | None]]] = {}
    columns = (table.column(name).to_pylist() for name in ("rank", "place", "step", "event_at", "value"))
    for rank, place, step, event_at, value in zip(*columns, strict=True):
        if rank == MEDIAN_RANK:
            median.append((event_at, value))
            continue
        shown: float | None = value
        if not math.isfinite(value):
            non_finite.append((rank, step, _name_of(value)))
            shown = None
        if rank == LAUNCHER_RANK:
            hosts.setdefault(place, []).append((event_at, shown))
            continue
        ranks.setdefault(str(rank), []).append((event_at, step, shown))
    return Series(metric=metric, ranks=ranks, median=median, non_finite=non_finite, hosts=hosts)


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"
