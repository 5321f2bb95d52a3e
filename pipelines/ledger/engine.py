"""DuckDB and pyarrow for this folder, or one error that names the extra."""

from __future__ import annotations

from pipelines.extras import missing_extra

try:
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise missing_extra("ledger", "the ledger (DuckDB, pyarrow)") from error

__all__ = ["duckdb", "pa", "pq"]
