"""What is deleted when: statements for one transaction, decided from configuration, time and counts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .engine import duckdb
from .tables import STORY_TABLES

OFFSET_ROWS_MAX = 10_000  # of source_offset and metric_part, of which the newest state counts


@dataclass(frozen=True, slots=True)
class Keep:
    """How long rows and parts stay, in seconds, and how many log lines at most; None: for ever."""

    log_rows_max: int
    logs_seconds: float
    metrics_seconds: float
    story_seconds: float | None


@dataclass(frozen=True, slots=True)
class Removal:
    """Rows of one table that go: `condition` names them."""

    table: str
    condition: str


def removals(keep: Keep, now: float, newest_seqs: Mapping[str, int]) -> list[Removal]:
    """Which rows go. The newest row of each table stays whatever its age: the next seq is counted from it."""
    newest = newest_seqs["log_line"]
    first_kept = newest - keep.log_rows_max + 1
    found = [
        Removal(
            "log_line",
            f"seq < {newest} AND (event_at < {now - keep.logs_seconds!r} OR seq < {first_kept})",
        ),
    ]
    if keep.story_seconds is not None:
        before = now - keep.story_seconds
        # by the time the bus took it: a producer whose clock is wrong deletes nothing
        found += [
            Removal(table.name, f"seq < {newest_seqs[table.name]} AND appended_at < {before!r}")
            for table in STORY_TABLES
        ]
    return found


def counted(connection: duckdb.DuckDBPyConnection, removal: Removal) -> tuple[int, int]:
    """How many rows that are, and the highest seq among them (0 of none)."""
    ((count, highest),) = connection.execute(
        f"SELECT count(*), coalesce(max(seq), 0) FROM {removal.table} WHERE {removal.condition}"
    ).fetchall()
    return int(count), int(highest)


def superseded_offsets() -> str:
    """Deletes offsets that newer ones of their partition have replaced; the newest of each is never touched."""
    return (
        "DELETE FROM source_offset WHERE seq NOT IN (SELECT arg_max(seq, next_offset) FROM source_offset"
        " GROUP BY topic, source_partition) AND seq < (SELECT max(seq) FROM source_offset)"
    )


def superseded_parts(existing: Sequence[str]) -> str:
    """Deletes the rows of parts that exist no more; all of them at once, so that none comes back."""
    names = ", ".join("'" + path.replace("'", "''") + "'" for path in existing) or "''"
    return f"DELETE FROM metric_part WHERE path NOT IN ({names}) AND seq < (SELECT max(seq) FROM metric_part)"
