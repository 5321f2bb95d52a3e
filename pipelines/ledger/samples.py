"""The series query: one metric by rank and the ranks' median, thinned so that every extreme stays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .engine import duckdb, pa
from .parts import Held, live_table
from .shapes import Series

POINTS_MAX = 200_000  # of one answer, over all ranks
BUCKETS_MIN = 10
MEDIAN_RANK = -2  # in the answer as a table: the median over ranks

# Points of every rank, and the median over the ranks of each step (of samples by time: of two seconds) as rank -2.
# NaN and infinities are kept apart: they would win every maximum.
_POINTS = """
WITH sample AS (
  SELECT attempt, rank, step, event_at, value FROM ({source})
  WHERE job = $job AND metric = $metric
    AND ($attempt IS NULL OR attempt = $attempt)
    AND ($start IS NULL OR event_at >= $start) AND ($stop IS NULL OR event_at < $stop)
), point AS (
  SELECT rank, step, event_at, value FROM sample
  UNION ALL
  SELECT -2, step, min(event_at), median(value) FROM sample WHERE isfinite(value)
  GROUP BY attempt, step, CASE WHEN step < 0 THEN floor(event_at / 2) END
)
"""
_SPAN = """
SELECT min(event_at), max(event_at), count(DISTINCT rank), max(amount) FROM (
  SELECT rank, event_at, count(*) OVER (PARTITION BY rank) AS amount FROM point)
"""
_RAW = "SELECT rank, step, event_at, value FROM point ORDER BY rank, event_at, step"
_THINNED = """
, bucketed AS (
  SELECT *, least(CAST(floor((event_at - $low) / $width) AS BIGINT), $buckets - 1) AS bucket FROM point
), low AS (
  SELECT rank, arg_min(step, value) AS step, arg_min(event_at, value) AS event_at, min(value) AS value
  FROM bucketed WHERE isfinite(value) GROUP BY rank, bucket
), high AS (
  SELECT rank, arg_max(step, value) AS step, arg_max(event_at, value) AS event_at, max(value) AS value
  FROM bucketed WHERE isfinite(value) GROUP BY rank, bucket
), odd AS (
  SELECT rank, arg_min(step, event_at) AS step, min(event_at) AS event_at, arg_min(value, event_at) AS value
  FROM bucketed WHERE NOT isfinite(value) GROUP BY rank, bucket
)
SELECT rank, step, event_at, value FROM (
  SELECT * FROM low UNION SELECT * FROM high UNION ALL SELECT * FROM odd)
ORDER BY rank, event_at, step
"""


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
    """rank (−2: the median over ranks), step, event_at, value; ordered by rank and time."""
    paths = [
        f"{folder}/{part.path}"
        for part in held.parts
        if question.job in part.jobs
        and (question.start is None or part.max_at >= question.start)
        and (question.end is None or part.min_at < question.end)
    ]
    live = live_table(held.buffered, question.job, question.metric)
    cursor.register("live", live)
    source = "SELECT * FROM live"
    parameters: dict[str, object] = {
        "job": question.job,
        "metric": question.metric,
        "attempt": question.attempt,
        "start": question.start,
        "stop": question.end,
    }
    if paths:
        source += " UNION ALL BY NAME SELECT * FROM read_parquet($paths)"
        parameters["paths"] = paths
    points = _POINTS.format(source=source)
    ((low, high, ranks, most),) = cursor.execute(points + _SPAN, parameters).fetchall()
    buckets = question.buckets
    if ranks:
        buckets = min(buckets, max(BUCKETS_MIN, POINTS_MAX // (2 * ranks)))
    if most is None or most <= 2 * buckets:
        return cursor.sql(points + _RAW, params=parameters).to_arrow_table()
    parameters |= {"low": low, "width": max((high - low) / buckets, 1e-9), "buckets": buckets}
    return cursor.sql(points + _THINNED, params=parameters).to_arrow_table()


def series_of(metric: str, table: pa.Table) -> Series:
    """The same as a `Series`."""
    ranks: dict[str, list[tuple[float, int, float | None]]] = {}
    median: list[tuple[float, float | None]] = []
    non_finite: list[tuple[int, int, str]] = []
    columns = (table.column(name).to_pylist() for name in ("rank", "step", "event_at", "value"))
    for rank, step, event_at, value in zip(*columns, strict=True):
        if rank == MEDIAN_RANK:
            median.append((event_at, value))
            continue
        shown: float | None = value
        if not math.isfinite(value):
            non_finite.append((rank, step, _name_of(value)))
            shown = None
        ranks.setdefault(str(rank), []).append((event_at, step, shown))
    return Series(metric=metric, ranks=ranks, median=median, non_finite=non_finite)


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"
