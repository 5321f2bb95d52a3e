"""From the schema of an older ledger to this one's: each step once, all of them in one transaction."""

from __future__ import annotations

from collections.abc import Mapping

from .engine import duckdb
from .tables import SCHEMA_VERSION

MIGRATIONS: Mapping[int, tuple[str, ...]] = {  # version that a step begins from: its statements
    1: (
        "CREATE TABLE retention (seq BIGINT, removed_at DOUBLE, table_name VARCHAR, before_seq BIGINT,"
        " row_count BIGINT)",
    ),
}


def migrate(connection: duckdb.DuckDBPyConnection, version: int, now: float) -> None:
    """Bring a file of `version` to SCHEMA_VERSION; a kill in between leaves it as it was."""
    if version == SCHEMA_VERSION:
        return
    connection.begin()
    try:
        for step in range(version, SCHEMA_VERSION):
            for statement in MIGRATIONS[step]:
                connection.execute(statement)
            connection.execute(
                "INSERT INTO schema_version SELECT max(seq) + 1, ?, ? FROM schema_version", [step + 1, now]
            )
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
