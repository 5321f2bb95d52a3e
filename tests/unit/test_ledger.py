"""The ledger's writer: exactly once, gapless, atomic, one owner."""

import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import msgspec
import pytest

from ingest.bus import TopicPartition
from ingest.clock import ManualClock, SystemClock
from ingest.codec import cloud_event_headers
from pipelines.ledger.finished import open_finished
from pipelines.ledger.ledger import Ledger, LedgerConfig
from pipelines.ledger.opening import refuse_network_folder
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.shapes import Health, LedgerBusy, LedgerLocked, LedgerUnreadable, LedgerWriteFailed
from pipelines.ledger.tables import STORY_TABLES, TABLES
from tests.ledger_messages import (
    JOB,
    Tape,
    action,
    attempt_started,
    checkpoint,
    command,
    heartbeat,
    logs,
    metrics,
    receipt,
    transition,
    verdict,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def reader_of(ledger: Ledger, clock, **options) -> LocalReader:
    health = Health(status="ok", reason="", lag={}, data_at=0.0)
    return LocalReader(
        ledger.cursor,
        ledger.state,
        ledger.parts,
        now=clock.now,
        health=lambda: health,
        post=lambda _: "",
        **options,
    )


def everything(tape: Tape) -> None:
    tape.tell(attempt_started(), *(metrics(step, rank=rank) for step in range(5) for rank in range(4)))
    tape.tell(logs("one", "two"), checkpoint(3), verdict(), action(), transition(), receipt(), command())


def count(ledger: Ledger, query: str) -> int:
    with ledger.cursor() as cursor:
        row = cursor.execute(query).fetchone()
        assert row is not None
        return int(row[0])


def test_all_messages_are_rows_and_the_same_records_again_change_nothing(tmp_path: Path, clock) -> None:
    tape = Tape()
    everything(tape)
    with Ledger(tmp_path, clock) as ledger:
        assert ledger.append(tape.records) == []
        ledger.append(tape.records)
        assert ledger.commit(force=True)
        ledger.append(tape.records)
        ledger.commit(force=True)
        counts = {name: count(ledger, f"SELECT count(*) FROM {name}") for name in TABLES}
        samples = count(ledger, f"SELECT count(*) FROM read_parquet('{tmp_path}/metrics/*.parquet')")
    assert counts == {
        "verdict": 1, "action": 1, "receipt": 1, "incident": 1, "command": 1, "checkpoint_event": 1,
        "job_event": 1, "retention": 0,
        "log_line": 2, "metric_part": 1, "source_offset": 6, "schema_version": 1,
    }  # fmt: skip
    assert samples == 20


def test_seq_is_gapless_in_each_table_and_change_over_all_across_restarts(tmp_path: Path, clock) -> None:
    tape = Tape()
    for number in range(6):
        told = tape.tell(verdict(number), action(number), transition(number), checkpoint(number))
        with Ledger(tmp_path, clock) as ledger:
            ledger.append(told)
            ledger.commit()
    with Ledger(tmp_path, clock) as ledger, ledger.cursor() as cursor:
        changes = []
        for table in STORY_TABLES:
            rows = cursor.execute(f"SELECT seq, change FROM {table.name} ORDER BY seq").fetchall()
            assert [seq for seq, _ in rows] == list(range(1, len(rows) + 1))
            changes += [change for _, change in rows]
        assert sorted(changes) == list(range(1, 25))


def test_the_body_is_the_message_as_it_came(tmp_path: Path, clock) -> None:
    tape = Tape()
    known = msgspec.to_builtins(verdict())
    value = msgspec.json.encode({**known, "a_field_of_the_future": [1, 2]})
    tape.raw("verdicts", value, cloud_event_headers("verdict.v1", verdict()))
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.records)
        ledger.commit()
        with ledger.cursor() as cursor:
            assert cursor.execute("SELECT body FROM verdict").fetchall() == [(value.decode(),)]


def test_a_message_told_again_at_a_new_offset_is_one_row(tmp_path: Path, clock) -> None:
    """detect and recover say the same thing again after a crash; ids make it one."""
    tape = Tape()
    told = tape.tell(verdict(), verdict(), action(), action(), command(), command(), verdict(revision=1))
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(told)
        ledger.commit()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(verdict(), verdict(revision=1)))
        ledger.commit(force=True)
        assert count(ledger, "SELECT count(*) FROM verdict") == 2
        assert count(ledger, "SELECT count(*) FROM action") == 1
        assert count(ledger, "SELECT count(*) FROM command") == 1
        assert ledger.offsets()[TopicPartition("verdicts", 0)] == 5


def test_nothing_appended_counts_before_the_commit(tmp_path: Path, clock) -> None:
    tape = Tape()
    everything(tape)
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.records)
    with Ledger(tmp_path, clock) as ledger:
        assert ledger.offsets() == {}
        assert count(ledger, "SELECT count(*) FROM verdict") == 0
        assert reader_of(ledger, clock).incidents().incidents == ()


def test_rows_and_offsets_are_one_transaction(tmp_path: Path, clock, monkeypatch) -> None:
    """A failure while the offsets are written takes the rows before them back."""
    tape = Tape()
    ledger = Ledger(tmp_path, clock)
    ledger.append(tape.tell(verdict(1)))
    ledger.commit()
    ledger.append(tape.tell(verdict(2), checkpoint(1)))
    connection = ledger._connection

    class Torn:
        def __getattr__(self, name):
            return getattr(connection, name)

        def appender(self, table):
            if table == "source_offset":
                raise duckdb.IOException("IO Error: No space left on device")
            return connection.appender(table)

    monkeypatch.setattr(ledger, "_connection", Torn())
    with pytest.raises(LedgerWriteFailed, match="make room"):
        ledger.commit()
    monkeypatch.undo()
    assert count(ledger, "SELECT count(*) FROM verdict") == 1
    assert len(reader_of(ledger, clock).incidents().incidents) == 1
    ledger.reopen()
    assert ledger.offsets() == {TopicPartition("verdicts", 0): 1}
    ledger.append(tape.records)
    ledger.commit(force=True)
    assert count(ledger, "SELECT count(*) FROM verdict") == 2
    assert count(ledger, "SELECT max(seq) FROM verdict") == 2
    assert ledger.offsets() == {TopicPartition("verdicts", 0): 2, TopicPartition("events", 0): 1}
    ledger.close()


def test_a_full_disk_stops_the_commit_and_loses_nothing(tmp_path: Path, clock) -> None:
    """A real refused write (file size limit) for a full disk: after it, the same records go in once."""
    tape = Tape()
    ledger = Ledger(tmp_path, clock)

    def fill() -> None:
        for number in range(200):
            ledger.append(tape.tell(verdict(number, summary=os.urandom(10_000).hex())))
            ledger.commit()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(LedgerWriteFailed, match="cannot be written"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ledger.reopen()
    committed = ledger.offsets()[TopicPartition("verdicts", 0)]
    assert committed < len(tape.records)
    ledger.append(tape.records)
    ledger.commit()
    assert count(ledger, "SELECT count(DISTINCT source_offset) FROM verdict") == len(tape.records)
    assert count(ledger, "SELECT count(*) FROM verdict") == len(tape.records)
    ledger.close()


def test_verdicts_are_committed_at_once_log_lines_within_a_second_metrics_with_their_part(
    tmp_path: Path, clock
) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(logs("slow")))
        assert 0.0 < ledger.due_seconds() <= 1.0
        assert not ledger.commit()
        ledger.append(tape.tell(metrics(1)))
        ledger.append(tape.tell(verdict()))
        assert ledger.due_seconds() == 0.0
        assert ledger.commit()
        assert TopicPartition("verdicts", 0) in ledger.offsets()
        assert TopicPartition("metrics", 0) not in ledger.offsets()
        assert not ledger.is_clean
        clock.advance(5.0)
        assert ledger.due_seconds() == 0.0
        assert ledger.commit()
        assert ledger.offsets()[TopicPartition("metrics", 0)] == 1
        assert ledger.is_clean


def test_heartbeats_alone_commit_only_with_the_flush(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        for beat in range(4):
            ledger.append(tape.tell(heartbeat(1000.0 + beat)))
            assert not ledger.commit()
            clock.advance(1.0)
        clock.advance(1.0)
        assert ledger.commit()
        assert ledger.offsets() == {TopicPartition("events", 0): 4}
        assert count(ledger, "SELECT count(*) FROM job_event") == 0
        assert count(ledger, "SELECT count(*) FROM source_offset") == 1


def test_undecodable_records_are_handed_back_and_the_stream_goes_on(tmp_path: Path, clock) -> None:
    tape = Tape()
    tape.raw("verdicts", b"\xff\x00 not json", cloud_event_headers("verdict.v1", verdict()))
    tape.raw("events", b"{}", ())
    tape.raw("metrics", msgspec.json.encode(verdict()), cloud_event_headers("verdict.v1", verdict()))
    ragged = {**msgspec.to_builtins(metrics(1)), "columns": {"train.loss": [1.0, 2.0]}}
    tape.raw("metrics", msgspec.json.encode(ragged), cloud_event_headers("metrics.v1", metrics(1)))
    tape.tell(msgspec.structs.replace(metrics(1), steps=(2**63 + 1,)))
    tape.tell(verdict(attempt=2**63 + 1), verdict(2))
    with Ledger(tmp_path, clock) as ledger:
        rejected = ledger.append(tape.records)
        ledger.commit(force=True)
        assert count(ledger, "SELECT count(*) FROM verdict") == 1
        assert ledger.is_clean
    assert len(rejected) == 6
    assert all(entry.reason for entry in rejected)
    assert "belongs on the topic verdicts" in rejected[2].reason


def test_files_are_closed_to_others(tmp_path: Path, clock) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir(mode=0o755)
    with Ledger(folder, clock) as ledger:
        ledger.append(Tape().tell(verdict()))
        ledger.commit()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "metrics").stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "ledger.duckdb").stat().st_mode) == 0o600


def test_a_second_owner_is_told_who_holds_the_file_and_what_to_do(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from ingest.clock import SystemClock\n"
        "from pipelines.ledger.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]), SystemClock()); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path.cwd(),
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        for attempt in (
            lambda: Ledger(tmp_path, SystemClock(), LedgerConfig(lock_wait_seconds=0.2)),
            lambda: open_finished(tmp_path),
        ):
            with pytest.raises(LedgerLocked) as caught:
                attempt()
            assert caught.value.pid == owner.pid
            assert f"process {owner.pid} (" in str(caught.value)
            assert sys.executable in str(caught.value)
            assert "transom incidents" in str(caught.value)
        owner.communicate(b"")
    Ledger(tmp_path, SystemClock()).close()


def test_a_passing_reader_only_delays_the_owner(tmp_path: Path) -> None:
    Ledger(tmp_path, SystemClock()).close()
    program = (
        "import duckdb, sys, time; c = duckdb.connect(sys.argv[1], read_only=True)\n"
        "print('open', flush=True); time.sleep(0.5)"
    )
    command_line = [sys.executable, "-c", program, str(tmp_path / "ledger.duckdb")]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE) as passing:
        assert passing.stdout is not None
        passing.stdout.readline()
        Ledger(tmp_path, SystemClock(), LedgerConfig(lock_wait_seconds=30.0)).close()


@pytest.mark.parametrize("content", [b"not a database at all, only text", b"\0" * 20_000])
def test_a_file_that_is_no_ledger_is_refused_in_one_sentence(tmp_path: Path, clock, content: bytes) -> None:
    (tmp_path / "ledger.duckdb").write_bytes(content)
    with pytest.raises(LedgerUnreadable, match=r"ledger\.duckdb") as caught:
        Ledger(tmp_path, clock)
    assert "\n" not in str(caught.value)


def test_a_network_file_system_is_refused_because_its_locks_do_not_hold(tmp_path: Path) -> None:
    mountinfo = f"24 1 0:22 / / rw - ext4 /dev/sda rw\n36 24 0:40 / {tmp_path} rw - nfs4 server:/x rw\n"
    with pytest.raises(LedgerUnreadable, match="nfs4"):
        refuse_network_folder(tmp_path / "ledger", mountinfo)
    refuse_network_folder(tmp_path.parent, mountinfo)


def test_a_foreign_database_and_a_newer_ledger_are_refused(tmp_path: Path, clock) -> None:
    (tmp_path / "a").mkdir()
    with duckdb.connect(str(tmp_path / "a/ledger.duckdb")) as foreign:
        foreign.execute("CREATE TABLE mine (x INT)")
    with pytest.raises(LedgerUnreadable, match="not a ledger"):
        Ledger(tmp_path / "a", clock)
    Ledger(tmp_path / "b", clock).close()
    with duckdb.connect(str(tmp_path / "b/ledger.duckdb")) as newer:
        newer.execute("INSERT INTO schema_version VALUES (2, 99, 0)")
    with pytest.raises(LedgerUnreadable, match="newer Transom"):
        Ledger(tmp_path / "b", clock)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, clock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerWriteFailed, match="give one that can be written"):
        Ledger(tmp_path / "file" / "ledger", clock)


def test_reading_the_folder_while_it_is_open_does_not_drop_the_lock(tmp_path: Path) -> None:
    """Closing any descriptor of the live file would: start, commit, merge and tidying never open it."""
    config = LedgerConfig(flush_seconds=0.0)
    tape = Tape()
    with Ledger(tmp_path, SystemClock(), config) as ledger:
        for step in range(40):
            ledger.append(tape.tell(metrics(step)))
            ledger.commit(force=True)
        ledger._tidied_at = -1e9
        ledger.commit(force=True)
        program = "import duckdb, sys; duckdb.connect(sys.argv[1])"
        other = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "ledger.duckdb")], capture_output=True, check=False
        )
        assert other.returncode != 0
        assert b"Could not set lock" in other.stderr


def test_readers_get_a_cursor_each_and_none_while_the_file_is_closed(tmp_path: Path, clock) -> None:
    """Sharing one connection between threads returns wrong answers; a cursor each never does."""
    tape = Tape()
    ledger = Ledger(tmp_path, clock)
    ledger.append(tape.tell(*(verdict(number) for number in range(500))))
    ledger.commit()
    reader = reader_of(ledger, SystemClock())
    wrong: list[object] = []

    def ask() -> None:
        for _ in range(15):
            page = reader.rows("verdicts", after=0, limit=1000)
            if [row.seq for row in page.rows][:500] != list(range(1, 501)):
                wrong.append(page)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(500, 520):
        ledger.append(tape.tell(verdict(number)))
        ledger.commit()
    for thread in threads:
        thread.join()
    assert wrong == []
    ledger.close()
    with pytest.raises(LedgerBusy), ledger.cursor():
        pass


def test_a_slow_query_is_stopped_with_a_sentence(tmp_path: Path, clock) -> None:
    with Ledger(tmp_path, clock) as ledger:
        reader = reader_of(ledger, clock, query_seconds_max=0.1)
        with pytest.raises(LedgerBusy, match=r"more than 0\.1 s"), reader._cursor() as cursor:
            cursor.execute("SELECT sum(a.i * b.i) FROM range(10000000) a(i), range(1000000) b(i)").fetchall()
        assert reader.rows("verdicts").rows == ()


def test_log_lines_are_bounded_by_count_and_by_age(tmp_path: Path, clock) -> None:
    config = LedgerConfig(log_rows_max=10, logs_keep_seconds=100.0)
    tape = Tape()
    with Ledger(tmp_path, clock, config) as ledger:
        ledger.append(tape.tell(*(logs(f"line {number}", at=1000.0) for number in range(25))))
        clock.advance(61.0)
        ledger.commit(force=True)
        assert count(ledger, "SELECT count(*) FROM log_line") == 10
        clock.advance(100.0)
        ledger.append(tape.tell(logs("new", at=clock.now())))
        ledger.commit(force=True)
        assert count(ledger, "SELECT count(*) FROM log_line") == 1
        clock.advance(200.0)
        ledger.commit(force=True)
    with Ledger(tmp_path, clock, config) as ledger:
        ledger.append(tape.tell(logs("newest", at=clock.now())))
        ledger.commit(force=True)
        assert count(ledger, "SELECT max(seq) FROM log_line") == 27


def test_without_the_extra_one_error_names_it() -> None:
    for module, blocked in (
        ("pipelines.ledger.ledger", "duckdb"),
        ("pipelines.ledger.finished", "pyarrow"),
        ("pipelines.ledger.api", "fastapi"),
        ("pipelines.ledger.client", "httpx"),
    ):
        program = f"import sys; sys.modules['{blocked}'] = None; import {module}"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert "transom[ledger]" in result.stderr.splitlines()[-1]


def test_a_new_job_shows_up_by_name(tmp_path: Path, clock) -> None:
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(Tape().tell(attempt_started()))
        ledger.commit()
        assert [job.job for job in reader_of(ledger, clock).jobs()] == [JOB]
