"""Free SQL: SELECT on what there is, and no way out of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from ingest.clock import ManualClock
from pipelines.ledger.finished import open_finished
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.sandbox import Question, Refused, answer
from pipelines.ledger.shapes import BadQuestion, LedgerBusy
from pipelines.ledger.snapshots import Snapshot
from pipelines.ledger.sql import SqlBounds, SqlDesk, answer_of
from tests.ledger_messages import JOB, Tape, logs, metrics, verdict

SECRET = "the-secret-of-another-file"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snapshot]:
    """A ledger's snapshot, and beside it a file that nobody may read."""
    folder = tmp_path_factory.mktemp("sql")
    (folder / "secret.csv").write_text(f"word\n{SECRET}\n")
    clock, tape = ManualClock(1000.0), Tape()
    with Ledger(folder / "ledger", clock) as ledger:
        ledger.append(tape.tell(verdict(), logs("one", "two"), *(metrics(step, train_loss=2.0) for step in range(3))))
        yield taken(ledger)


def taken(ledger: Ledger, fresh_seconds: float = 0.0) -> Snapshot:
    """What a reader's thread is given while the writer goes on."""
    with ThreadPoolExecutor(1) as reader:
        asked = reader.submit(ledger.snapshots.ask, fresh_seconds)
        while not asked.done():
            if ledger.due_seconds() == 0.0:
                ledger.commit()
            wait([asked], 0.01)
    return asked.result()


def question(snapshot: Snapshot, query: str, **bounds: int) -> Question:
    given = {"rows_max": 100, "answer_bytes_max": 2**20, "memory_bytes_max": 2**28, "cpu_seconds_max": 60} | bounds
    return Question(folder=str(snapshot.folder), query=query, **given)


def test_tables_and_samples_can_be_asked(snapshot: Snapshot) -> None:
    assert answer(question(snapshot, "SELECT verdict_id FROM verdict")).to_pylist() == [
        {"verdict_id": f"{JOB}/1/2/logs/1"}
    ]
    table = answer(question(snapshot, "FROM sample SELECT max(step) AS last, metric GROUP BY metric ORDER BY ALL"))
    assert table.column("last").to_pylist() == [2, 2]
    assert answer(question(snapshot, "SHOW TABLES")).num_rows >= 10


ESCAPES = [
    "COPY (SELECT 1) TO '{beside}/out.csv'",
    "COPY verdict TO '{metrics}/out.parquet'",
    "COPY verdict FROM '{beside}/secret.csv'",
    "EXPORT DATABASE '{beside}/out'",
    "ATTACH '{beside}/other.duckdb'",
    "ATTACH ':memory:' AS other",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{beside}/secret.csv'",
    "SET enable_external_access = true",
    "SET memory_limit = '1TB'",
    "RESET lock_configuration",
    "PRAGMA enable_external_access",
    "PRAGMA database_list",
    "CALL pragma_database_size()",
    "CHECKPOINT",
    "DELETE FROM verdict",
    "INSERT INTO verdict SELECT * FROM verdict",
    "UPDATE verdict SET job = 'x'",
    "CREATE TABLE mine AS SELECT 1",
    "CREATE TEMP VIEW mine AS SELECT * FROM read_text('{beside}/secret.csv')",
    "CREATE MACRO mine(x) AS (SELECT content FROM read_text(x))",
    "DROP VIEW sample",
    "ALTER TABLE verdict ADD COLUMN mine INT",
    "EXPLAIN ANALYZE DELETE FROM verdict",
    "PREPARE mine AS DELETE FROM verdict",
    "SELECT 1; DELETE FROM verdict",
    "SELECT 1; SELECT 2",
    "",
    "SELECT * FROM read_text('{beside}/secret.csv')",
    "SELECT * FROM read_blob('{beside}/secret.csv')",
    "SELECT * FROM read_csv('{beside}/secret.csv')",
    "SELECT * FROM read_json('{beside}/secret.csv')",
    "SELECT * FROM '{beside}/secret.csv'",
    "SELECT * FROM sniff_csv('{beside}/secret.csv')",
    "SELECT * FROM read_text('{metrics}/../../../../secret.csv')",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/proc/self/environ')",
    "SELECT * FROM glob('{beside}/*')",
    "SELECT * FROM parquet_metadata('{beside}/secret.csv')",
    "SELECT * FROM read_parquet('http://127.0.0.1:9/x.parquet')",
    "SELECT * FROM 's3://bucket/x.parquet'",
    "SELECT * FROM query('SELECT * FROM read_text(''{beside}/secret.csv'')')",
    "SELECT * FROM query_table('{beside}/secret.csv')",
    "SELECT (SELECT content FROM read_text('{beside}/secret.csv')) FROM verdict",
    "WITH mine AS (SELECT * FROM read_text('{beside}/secret.csv')) SELECT * FROM mine",
    "SELECT getenv('PATH')",
    "SELECT * FROM read_duckdb('{beside}/ledger/ledger.duckdb')",
]


@pytest.mark.parametrize("query", ESCAPES)
def test_there_is_no_way_out(snapshot: Snapshot, query: str) -> None:
    beside = snapshot.folder.parents[2]
    before = sorted(beside.rglob("*"))
    asked = query.format(beside=beside, metrics=snapshot.folder / "metrics")
    with pytest.raises(Refused) as refused:
        answer(question(snapshot, asked))
    assert SECRET not in str(refused.value)
    assert sorted(beside.rglob("*")) == before, "nothing was written"
    assert answer(question(snapshot, "SELECT count(*) AS n FROM verdict")).to_pylist() == [{"n": 1}]


def test_the_secret_could_be_read_without_the_guards(snapshot: Snapshot) -> None:
    """Or the tests above would prove nothing."""
    with open_finished(snapshot.folder) as free, free.cursor() as cursor:
        beside = snapshot.folder.parents[2]
        rows = cursor.execute(f"SELECT content FROM read_text('{beside}/secret.csv')").fetchall()
    assert SECRET in rows[0][0]


def test_an_answer_has_bounds(snapshot: Snapshot) -> None:
    assert answer(question(snapshot, "SELECT * FROM range(1000000)", rows_max=10)).num_rows == 11
    with pytest.raises(Refused, match="more than 100 bytes"):
        answer(question(snapshot, "SELECT * FROM range(50)", answer_bytes_max=100))
    hungry = "SELECT list(i) FROM range(100000000) t(i)"
    with pytest.raises(Refused, match=r"(?i)memory"):
        answer(question(snapshot, hungry, memory_bytes_max=32 * 2**20))


def test_the_desk_asks_in_a_process_of_its_own(snapshot: Snapshot) -> None:
    desk = SqlDesk(lambda _: snapshot, SqlBounds(seconds_max=60.0))
    got = answer_of(desk.ask("SELECT seq, text, 1.5::DECIMAL(4,1) AS d FROM log_line ORDER BY seq", limit=1))
    assert got.columns == ("seq", "text", "d")
    assert [row[:2] for row in got.rows] == [[1, "one"]]
    assert got.truncated
    assert got.data_at == 1000.0
    with pytest.raises(BadQuestion, match="only SELECT"):
        desk.ask("DROP TABLE verdict")
    with pytest.raises(BadQuestion, match="limit"):
        desk.ask("SELECT 1", limit=0)


def test_a_query_that_takes_too_long_is_stopped(snapshot: Snapshot) -> None:
    desk = SqlDesk(lambda _: snapshot, SqlBounds(seconds_max=0.2))
    with pytest.raises(LedgerBusy, match="was stopped"):
        desk.ask("SELECT count(*) FROM range(100000) a, range(100000) b, range(1000) c")


def test_queries_beyond_their_number_are_told_to_come_again(snapshot: Snapshot) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(_: float) -> Snapshot:
        inside.set()
        leave.wait()
        raise LedgerBusy("over")

    desk = SqlDesk(slow, SqlBounds(at_once_max=1))

    def first() -> None:
        with pytest.raises(LedgerBusy, match="over"):
            desk.ask("SELECT 1")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with pytest.raises(LedgerBusy, match="already"):
        desk.ask("SELECT 1")
    leave.set()
    thread.join()
