"""Where a table's rows come from: Parquet and CSV files as DuckDB reads them, and whatever gives rows one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from pipelines.ledger.engine import duckdb, pa

from .run import NotARun

FILE = "file_"  # the column that says which file a row is from
COLUMNS_MAX = 4_096
BATCH_ROWS = 8_192
MEMORY_BYTES_MAX = 2**30
NUMERIC = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "HUGEINT",
           "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN")  # fmt: skip

Cell: TypeAlias = float | str | None
Row: TypeAlias = Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class Columns:
    """A table's columns. `text` may hold numbers too, as CSV has them."""

    numbers: tuple[str, ...]
    text: tuple[str, ...] = ()
    times: tuple[str, ...] = ()


class Table(Protocol):
    """Rows of one run."""

    @property
    def kind(self) -> str: ...
    @property
    def files(self) -> Sequence[Path]: ...

    def open(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, Columns]:
        """What to select from, once (a stream can be read once), and what is in it. Raises NotARun."""
        ...


def connect(spill: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory on one core; what does not fit there goes to the folder `spill`."""
    return duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",  # without a network it would stall instead of failing
            "autoload_known_extensions": "false",
            "threads": "1",  # the same order in every run
            "memory_limit": f"{MEMORY_BYTES_MAX}B",
            "temp_directory": str(spill),
        },
    )


def quoted(name: str) -> str:
    """A column's name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True, slots=True)
class ParquetTable:
    """Parquet files; columns are joined by name."""

    files: Sequence[Path]
    kind: str = "Parquet"

    def open(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, Columns]:
        source = f"read_parquet({_list(self.files)}, union_by_name=true, filename='{FILE}')"
        return source, _described(connection, source)


@dataclass(frozen=True, slots=True)
class CsvTable:
    """Files of separated values with a header; every column is read as text, and made a number where it is one."""

    files: Sequence[Path]
    kind: str = "CSV"

    def open(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, Columns]:
        source = (
            f"read_csv({_list(self.files)}, all_varchar=true, header=true, union_by_name=true, filename='{FILE}',"
            " null_padding=true)"
        )
        found = _described(connection, source)
        names = [name for name in found.text if name != FILE]
        if not names:
            raise NotARun(f"{self.files[0]} has no columns; a CSV file begins with a line of their names")
        shares = ", ".join(f"count(TRY_CAST({quoted(name)} AS DOUBLE)), count({quoted(name)})" for name in names)
        counts = connection.execute(f"SELECT {shares} FROM (SELECT * FROM {source} LIMIT 20000)").fetchone()
        assert counts is not None
        told = zip(names, counts[::2], counts[1::2], strict=True)
        numbers = tuple(name for name, numeric, filled in told if numeric and 2 * numeric >= filled)
        return source, Columns(numbers, (FILE, *(name for name in names if name not in numbers)))


@dataclass(slots=True)
class RowTable:
    """Rows that a reader gives, once to learn the columns and once to be read."""

    kind: str
    files: Sequence[Path]
    rows: Callable[[], Iterator[Row]]
    _columns: Columns | None = field(default=None, init=False)

    def open(self, connection: duckdb.DuckDBPyConnection) -> tuple[str, Columns]:
        columns = self._columns = self._columns or self._learn()
        fields = [(name, pa.float64()) for name in columns.numbers] + [(name, pa.string()) for name in columns.text]
        schema = pa.schema(fields)
        connection.register("rows", pa.RecordBatchReader.from_batches(schema, self._batches(schema, columns)))
        return "rows", columns

    def _learn(self) -> Columns:
        kinds: dict[str, bool] = {FILE: False}
        for row in self.rows():
            for name, cell in row.items():
                if cell is not None and kinds.get(name, True):
                    kinds[name] = not isinstance(cell, str)
            if len(kinds) > COLUMNS_MAX:
                raise NotARun(f"{self.files[0]} has more than {COLUMNS_MAX} different names; is it a run's metrics?")
        numbers = tuple(name for name, number in kinds.items() if number)
        return Columns(numbers, tuple(name for name, number in kinds.items() if not number))

    def _batches(self, schema: pa.Schema, columns: Columns) -> Iterator[pa.RecordBatch]:
        held: list[Row] = []
        for row in self.rows():
            held.append(row)
            if len(held) == BATCH_ROWS:
                yield _batch(held, schema, columns)
                held = []
        yield _batch(held, schema, columns)


def _batch(rows: Sequence[Row], schema: pa.Schema, columns: Columns) -> pa.RecordBatch:
    arrays = [pa.array([row.get(name) for row in rows], pa.float64()) for name in columns.numbers]
    for name in columns.text:
        cells = [row.get(name) for row in rows]
        texts = [cell if cell is None or isinstance(cell, str) else repr(cell) for cell in cells]
        arrays.append(pa.array(texts, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _list(files: Sequence[Path]) -> str:
    return "[" + ", ".join(literal(str(file)) for file in files) + "]"


def _described(connection: duckdb.DuckDBPyConnection, source: str) -> Columns:
    try:
        rows = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    except duckdb.Error as error:
        raise NotARun(f"the table cannot be read: {str(error).splitlines()[0]}") from error
    kinds = {str(name): str(kind) for name, kind, *_ in rows}
    if len(kinds) > COLUMNS_MAX:
        raise NotARun(f"the table has more than {COLUMNS_MAX} columns; is it a run's metrics?")
    numbers = tuple(name for name, kind in kinds.items() if kind.startswith(NUMERIC))
    times = tuple(name for name, kind in kinds.items() if kind.startswith(("TIMESTAMP", "DATE")))
    return Columns(numbers, tuple(name for name, kind in kinds.items() if kind == "VARCHAR"), times)
