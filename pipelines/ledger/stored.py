"""What the tables say at start: offsets, parts, counters."""

from __future__ import annotations

import json

from ingest.bus import TopicPartition

from .engine import duckdb
from .parts import Part


def stored_offsets(connection: duckdb.DuckDBPyConnection) -> dict[TopicPartition, int]:
    """The newest offset of every partition."""
    rows = connection.execute(
        "SELECT topic, source_partition, max(next_offset) FROM source_offset GROUP BY ALL"
    ).fetchall()
    return {TopicPartition(topic, partition): offset for topic, partition, offset in rows}


def stored_parts(connection: duckdb.DuckDBPyConnection) -> list[Part]:
    """The parts that exist: every part with a row, but for those that a later row replaces."""
    parts: dict[str, Part] = {}
    for row in connection.execute("SELECT * EXCLUDE (seq) FROM metric_part ORDER BY seq").fetchall():
        path, level, topic, partition, first, last, count, min_at, max_at, jobs, replaces = row
        for old in json.loads(replaces):
            parts.pop(old, None)
        if path:
            place = TopicPartition(topic, partition)
            parts[path] = Part(path, level, place, first, last, count, min_at, max_at, frozenset(json.loads(jobs)))
    return list(parts.values())


def newest_seq(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    """The highest seq of a table; 0 where it is empty."""
    return _scalar(connection, f"SELECT coalesce(max(seq), 0) FROM {table}")


def _scalar(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    ((value,),) = connection.execute(query).fetchall()  # fetchone would leave the connection busy
    return int(value)
