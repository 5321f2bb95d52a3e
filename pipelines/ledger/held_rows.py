"""Which stretch of the bus each table of a ledger was made from: what a rebuild must find there again."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.bus import TopicPartition
from recovery.action import RECOVERY_TYPES

from .engine import duckdb
from .tables import TABLE_OF_KIND


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of one table that came from one partition, by the lowest and highest offset among them."""

    table: str
    place: TopicPartition
    first_offset: int
    last_offset: int


def held_rows(cursor: duckdb.DuckDBPyConnection) -> tuple[HeldRows, ...]:
    """Of all tables, and of the parts that exist, as `metric_part`."""
    topic_of = {table: RECOVERY_TYPES[kind][0] for kind, table in TABLE_OF_KIND.items()} | {"log_line": "logs"}
    found = []
    for table, topic in topic_of.items():
        rows = cursor.execute(
            f"SELECT source_partition, min(source_offset), max(source_offset) FROM {table} GROUP BY ALL"
        ).fetchall()
        found += [
            HeldRows(table, TopicPartition(topic, partition), first, last) for partition, first, last in sorted(rows)
        ]
    parts = cursor.execute(
        "SELECT source_partition, min(first_offset), max(last_offset) FROM metric_part WHERE path <> ''"
        " AND path NOT IN (SELECT unnest(from_json(replaces, '[\"VARCHAR\"]')) FROM metric_part) GROUP BY ALL"
    ).fetchall()
    found += [
        HeldRows("metric_part", TopicPartition("metrics", partition), first, last)
        for partition, first, last in sorted(parts)
    ]
    return tuple(found)
