"""One query on one snapshot in a process of its own that can write no file, open no other and load nothing.

python -m pipelines.ledger.sandbox: the question as JSON on standard input, the rows as an Arrow stream on standard
output, a refusal as one sentence on standard error with exit code 3.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec

from pipelines.ledger.engine import duckdb, pa
from pipelines.ledger.opening import FILE_NAME, METRICS_FOLDER

REFUSED = 3
FILES_MAX = 4_096
_SAMPLES = "SELECT * FROM read_parquet('{glob}', union_by_name = true)"
_NO_SAMPLES = (
    "SELECT ''::VARCHAR AS job, 0::BIGINT AS attempt, 0::BIGINT AS rank, ''::VARCHAR AS node, ''::VARCHAR AS device,"
    " 0::BIGINT AS step, 0.0::DOUBLE AS event_at, ''::VARCHAR AS metric, 0.0::DOUBLE AS value WHERE false"
)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, of which folder, within which bounds."""

    folder: str
    query: str
    rows_max: int
    answer_bytes_max: int
    memory_bytes_max: int
    cpu_seconds_max: int


class Refused(Exception):
    """The query is not answered; the text says why."""


def confine(question: Question) -> None:
    """What this process can never do again: write a file, dump its memory, use the processor for ever."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (question.cpu_seconds_max, question.cpu_seconds_max + 1))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_max = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard))


def open_confined(question: Question) -> duckdb.DuckDBPyConnection:
    """The snapshot read only, its parts as the view `sample`, and a configuration that no query can change."""
    folder = Path(question.folder)
    metrics = folder / METRICS_FOLDER
    connection = duckdb.connect(
        str(folder / FILE_NAME),
        read_only=True,
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "threads": "1",
            "memory_limit": f"{question.memory_bytes_max}B",
            "max_temp_directory_size": "0B",
        },
    )
    glob = str(metrics / "*.parquet").replace("'", "''")
    if any(metrics.glob("*.parquet")):
        connection.execute(f"CREATE TEMP VIEW sample AS {_SAMPLES.format(glob=glob)}")
    else:
        connection.execute(f"CREATE TEMP VIEW sample AS {_NO_SAMPLES}")
    allowed = str(metrics).replace("'", "''")
    connection.execute(f"SET allowed_directories = ['{allowed}']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def check_statement(query: str) -> None:
    """Raise Refused for anything but one SELECT."""
    statements = duckdb.extract_statements(query)
    if len(statements) != 1:
        raise Refused(f"one SELECT is answered at a time, and these are {len(statements)} statements; ask for one")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise Refused(
            f"only SELECT is answered, and this is {statements[0].type.name}; the ledger is written by `record` alone"
        )


def answer(question: Question) -> pa.Table:
    """At most rows_max + 1 rows. Raises Refused."""
    try:
        with open_confined(question) as connection:
            check_statement(question.query)
            found = connection.sql(question.query)
            table = found.limit(question.rows_max + 1).to_arrow_table()
    except duckdb.Error as error:
        raise Refused(str(error).strip().replace("\n", " ")) from error
    if table.nbytes > question.answer_bytes_max:
        raise Refused(f"the answer has more than {question.answer_bytes_max} bytes; ask for fewer rows or columns")
    return table


def main() -> int:
    """Answer standard input."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    confine(question)
    try:
        table = answer(question)
    except Refused as error:
        sys.stderr.write(str(error))
        return REFUSED
    with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
        writer.write_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
