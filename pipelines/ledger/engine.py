"""DuckDB and pyarrow for this folder, or one error that names the extra."""

from __future__ import annotations

try:
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError(
        "the ledger needs DuckDB, pyarrow and FastAPI: install Transom with its extra 'ledger'"
    ) from error

__all__ = ["duckdb", "pa", "pq"]
