"""Snapshots, retention and older files: what is kept, what goes, and what nobody ever sees half done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from ingest.bus import TopicPartition
from ingest.clock import ManualClock
from pipelines.ledger import retention, upkeep
from pipelines.ledger.finished import open_finished
from pipelines.ledger.ledger import Ledger, LedgerConfig
from pipelines.ledger.migrations import MIGRATIONS
from pipelines.ledger.shapes import LedgerBusy, LedgerWriteFailed
from pipelines.ledger.tables import SCHEMA_VERSION, TABLES
from tests.ledger_messages import JOB, Tape, metrics, verdict
from tests.unit.test_ledger_sql import taken


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def rows(ledger: Ledger, query: str) -> list[tuple]:
    with ledger.cursor() as cursor:
        return cursor.execute(query).fetchall()


def test_a_snapshot_holds_everything_that_was_appended_and_opens_while_the_ledger_goes_on(tmp_path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(verdict(1), *(metrics(step, train_loss=1.0) for step in range(4))))
        made = taken(ledger)
        ledger.append(tape.tell(verdict(2)))
        ledger.commit()
        with open_finished(tmp_path / "snapshot") as finished:
            assert len(finished.incidents().incidents) == 1
            assert len(finished.series(JOB, "train.loss").ranks["0"]) == 4
        assert taken(ledger, fresh_seconds=60.0) == made, "a fresh one is not made again"
        clock.advance(61.0)
        newer = taken(ledger, fresh_seconds=60.0)
        with open_finished(tmp_path / "snapshot") as finished:
            assert len(finished.incidents().incidents) == 2
        assert made.folder.exists(), "whoever reads the one before may finish"
        taken(ledger)
        assert not made.folder.exists()
        assert newer.folder.exists()
        assert (newer.folder / "ledger.duckdb").stat().st_mode & 0o777 == 0o600
        assert newer.folder.stat().st_mode & 0o077 == 0


def test_copying_does_not_drop_the_lock(tmp_path, clock) -> None:
    with Ledger(tmp_path, clock) as ledger:
        taken(ledger)
        other = subprocess.run(
            [sys.executable, "-c", f"import duckdb; duckdb.connect({str(tmp_path / 'ledger.duckdb')!r})"],
            capture_output=True,
            check=False,
        )
        assert b"lock" in other.stderr


def test_snapshots_come_by_themselves_where_anything_changed(tmp_path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock, LedgerConfig(snapshot_seconds=100.0)) as ledger:
        ledger.append(tape.tell(verdict(1)))
        ledger.commit()
        assert not (tmp_path / "snapshot").exists()
        clock.advance(101.0)
        ledger.commit()
        first = (tmp_path / "snapshot").readlink()
        clock.advance(101.0)
        ledger.commit()
        assert (tmp_path / "snapshot").readlink() == first


def test_a_snapshot_that_cannot_be_written_is_said_and_the_ledger_goes_on(tmp_path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        (tmp_path / "snapshots").write_text("in the way")
        with pytest.raises(LedgerWriteFailed, match="make room"):
            taken(ledger)
        ledger.append(tape.tell(verdict(1)))
        assert ledger.commit()


def test_nobody_waits_for_a_snapshot_for_ever(tmp_path, clock) -> None:
    with Ledger(tmp_path, clock) as ledger, pytest.raises(LedgerBusy, match="no time"):
        ledger.snapshots.ask(0.0, wait_seconds=0.01)


def test_what_a_kill_left_of_a_snapshot_is_gone_at_the_next_start(tmp_path, clock) -> None:
    with Ledger(tmp_path, clock) as ledger:
        made = taken(ledger)
    half = tmp_path / "snapshots" / "000009"
    half.mkdir()
    with Ledger(tmp_path, clock):
        assert not half.exists()
        assert made.folder.exists()


def test_the_story_goes_by_age_and_its_numbers_go_on(tmp_path, clock) -> None:
    config, tape = LedgerConfig(story_keep_seconds=100.0), Tape()
    with Ledger(tmp_path, clock, config) as ledger:
        ledger.append(tape.tell(*(verdict(number, at=1000.0) for number in range(5))))
        ledger.commit()
        clock.advance(200.0)
        ledger.append(tape.tell(verdict(5, at=1200.0)))
        ledger.commit()
        clock.advance(61.0)
        ledger.commit(force=True)
        assert rows(ledger, "SELECT seq FROM verdict") == [(6,)]
        assert rows(ledger, "SELECT table_name, before_seq, row_count FROM retention") == [("verdict", 6, 5)]
        clock.advance(1000.0)
        ledger.commit(force=True)
        assert rows(ledger, "SELECT seq FROM verdict") == [(6,)], "the next number is counted from it"
    with Ledger(tmp_path, clock, config) as ledger:
        assert ledger.offsets()[TopicPartition("verdicts", 0)] == 6
        ledger.append(tape.records)
        ledger.append(tape.tell(verdict(6, at=2300.0)))
        ledger.commit()
        assert rows(ledger, "SELECT max(seq), max(change) FROM verdict") == [(7, 7)]


def test_offsets_and_rows_of_parts_do_not_pile_up_and_none_that_counts_is_lost(tmp_path, clock, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "OFFSET_ROWS_MAX", 40)
    tapes = [Tape(0), Tape(1)]
    with Ledger(tmp_path, clock) as ledger:
        for step in range(70):
            ledger.append([record for tape in tapes for record in tape.tell(metrics(step), verdict(step))])
            ledger.commit(force=True)
        before = ledger.offsets()
        clock.advance(61.0)
        ledger.append(tapes[0].tell(verdict(1000)))
        ledger.commit(force=True)
        assert rows(ledger, "SELECT count(*) FROM source_offset")[0][0] <= 5
        parts = {part.path for part in ledger.parts.held().parts}
        assert {path for (path,) in rows(ledger, "SELECT path FROM metric_part")} == parts
        samples = rows(ledger, f"SELECT count(*) FROM read_parquet('{tmp_path}/metrics/*.parquet')")
    with Ledger(tmp_path, clock) as ledger:
        assert ledger.offsets() == {**before, TopicPartition("verdicts", 0): 71}
        assert {part.path for part in ledger.parts.held().parts} == parts
        assert sum(part.row_count for part in ledger.parts.held().parts) == 140
        assert samples >= [(140,)], "files of merged parts stay until no query can read them"


def test_removals_never_name_the_newest_row() -> None:
    keep = retention.Keep(log_rows_max=0, logs_seconds=0.0, metrics_seconds=0.0, story_seconds=0.0)
    for removal in retention.removals(keep, 1e9, dict.fromkeys(TABLES, 7)):
        assert "seq < 7" in removal.condition


def test_a_file_of_the_first_schema_is_brought_up_and_keeps_its_rows(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(verdict(1), metrics(1)))
        ledger.commit(force=True)
    with duckdb.connect(str(tmp_path / "ledger.duckdb")) as old:
        old.execute("DROP TABLE retention")
        old.execute("UPDATE schema_version SET version = 1")
    with open_finished(tmp_path) as finished:
        assert len(finished.incidents().incidents) == 1, "read only, an old file is read as it is"
    with Ledger(tmp_path, clock) as ledger:
        assert rows(ledger, "SELECT seq, version FROM schema_version ORDER BY seq") == [(1, 1), (2, SCHEMA_VERSION)]
        made = rows(
            ledger, "SELECT column_name, data_type FROM information_schema.columns WHERE table_name='retention'"
        )
        assert made == list(TABLES["retention"])
        assert rows(ledger, "SELECT count(*) FROM verdict") == [(1,)]
        assert ledger.offsets()[TopicPartition("verdicts", 0)] == 1
    with Ledger(tmp_path, clock) as again:
        assert rows(again, "SELECT count(*) FROM schema_version") == [(2,)]


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, clock, monkeypatch) -> None:
    Ledger(tmp_path, clock).close()
    with duckdb.connect(str(tmp_path / "ledger.duckdb")) as old:
        old.execute("DROP TABLE retention")
        old.execute("UPDATE schema_version SET version = 1")
    monkeypatch.setattr("pipelines.ledger.migrations.MIGRATIONS", {1: (*MIGRATIONS[1], "SELECT * FROM nowhere")})
    with pytest.raises(LedgerWriteFailed):
        Ledger(tmp_path, clock)
    with duckdb.connect(str(tmp_path / "ledger.duckdb")) as old:
        assert old.execute("SELECT max(version) FROM schema_version").fetchall() == [(1,)]


def test_every_older_schema_has_a_step() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))
