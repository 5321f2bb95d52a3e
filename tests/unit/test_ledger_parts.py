"""Metric samples: every one exactly once, live within the moment, thinned without losing a spike."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ingest.clock import ManualClock
from ingest.events import DeviceMetrics
from pipelines.ledger.finished import open_finished
from pipelines.ledger.ledger import Ledger, LedgerConfig
from pipelines.ledger.parts import MERGE_PARTS
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.shapes import BadQuestion, Health, Series
from tests.ledger_messages import JOB, Tape, metrics


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def reader_of(ledger: Ledger, clock: ManualClock) -> LocalReader:
    health = Health(status="ok", reason="", lag={}, data_at=0.0)
    return LocalReader(
        ledger.cursor, ledger.state, ledger.parts, now=clock.now, health=lambda: health, post=lambda _: ""
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "metrics").iterdir())


def steps(series: Series, rank: int = 0) -> list[int]:
    return [step for _, step, _ in series.ranks.get(str(rank), [])]


def test_samples_are_served_before_and_after_their_part_is_written_and_never_twice(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        reader = reader_of(ledger, clock)
        ledger.append(tape.tell(*(metrics(step, train_loss=1.0) for step in range(3))))
        assert steps(reader.series(JOB, "train.loss")) == [0, 1, 2]
        ledger.commit(force=True)
        assert steps(reader.series(JOB, "train.loss")) == [0, 1, 2]
        ledger.append(tape.tell(*(metrics(step, train_loss=1.0) for step in range(3, 5))))
        assert steps(reader.series(JOB, "train.loss")) == [0, 1, 2, 3, 4]
        assert reader.metric_names(JOB) == ("train.loss", "train.step.duration")
    with Ledger(tmp_path, clock) as ledger:
        assert steps(reader_of(ledger, clock).series(JOB, "train.loss")) == [0, 1, 2]
        assert reader_of(ledger, clock).metric_names(JOB) == ("train.loss", "train.step.duration")


def test_parts_have_the_long_format_and_their_row_names_them(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(metrics(7, rank=3, train_loss=math.nan)))
        ledger.commit(force=True)
        with ledger.cursor() as cursor:
            (row,) = cursor.execute(
                "SELECT path, source_topic, source_partition, first_offset, last_offset, row_count,"
                " min_at, max_at"
                " FROM metric_part"
            ).fetchall()
    assert row[1:] == ("metrics", 0, 0, 0, 2, 1007.0, 1007.0)
    table = pq.read_table(tmp_path / "metrics" / row[0])
    assert table.column_names == ["job", "attempt", "rank", "node", "device", "step", "event_at", "metric", "value"]
    values = {entry["metric"]: entry["value"] for entry in table.to_pylist()}
    assert values["train.step.duration"] == 0.5
    assert math.isnan(values["train.loss"])


def test_a_part_is_written_when_enough_samples_wait(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock, LedgerConfig(part_samples_max=10)) as ledger:
        ledger.append(tape.tell(*(metrics(step) for step in range(9))))
        assert not ledger.commit()
        ledger.append(tape.tell(metrics(9)))
        assert ledger.due_seconds() == 0.0
        assert ledger.commit()
        assert len(files(tmp_path)) == 1


def test_files_without_a_row_are_deleted_at_start(tmp_path: Path, clock) -> None:
    """A kill between the rename and the commit leaves one; its records come again from the bus."""
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(metrics(1)))
        ledger.commit(force=True)
        ledger.append(tape.tell(metrics(2)))
        ledger.parts.write_buffered()
        (tmp_path / "metrics" / "half.parquet.tmp").write_bytes(b"half")
        assert len(files(tmp_path)) == 3
    with Ledger(tmp_path, clock) as ledger:
        assert files(tmp_path) == ["metrics-0-0-0-0.parquet"]
        ledger.append(tape.records)
        ledger.commit(force=True)
        assert steps(reader_of(ledger, clock).series(JOB, "train.step.duration")) == [1, 2]


def test_a_failed_commit_leaves_the_buffer_to_the_bus(tmp_path: Path, clock, monkeypatch) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(metrics(1)))
        monkeypatch.setattr(ledger, "_transaction", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(Exception, match="No space left"):
            ledger.commit(force=True)
        monkeypatch.undo()
        ledger.reopen()
        assert files(tmp_path) == []
        ledger.append(tape.records)
        ledger.commit(force=True)
        assert steps(reader_of(ledger, clock).series(JOB, "train.step.duration")) == [1]


def test_many_small_parts_become_one_and_no_sample_is_lost_or_doubled(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        reader = reader_of(ledger, clock)
        for step in range(MERGE_PARTS + 3):
            ledger.append(tape.tell(metrics(step)))
            ledger.commit(force=True)
        assert steps(reader.series(JOB, "train.step.duration")) == list(range(MERGE_PARTS + 3))
        assert ledger.parts.part_count == 4
        assert len(files(tmp_path)) == 4 + MERGE_PARTS, "a query that began before may still read the old ones"
        clock.advance(100.0)
        ledger.commit(force=True)
        assert len(files(tmp_path)) == 4
    with Ledger(tmp_path, clock) as ledger:
        assert ledger.parts.part_count == 4
        assert steps(reader_of(ledger, clock).series(JOB, "train.step.duration")) == list(range(MERGE_PARTS + 3))
    assert steps(open_finished(tmp_path, clock).series(JOB, "train.step.duration")) == list(range(MERGE_PARTS + 3))


def test_old_parts_go_by_age(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock, LedgerConfig(metrics_keep_seconds=1_000.0)) as ledger:
        ledger.append(tape.tell(metrics(1, at=1000.0)))
        ledger.commit(force=True)
        clock.advance(1_500.0)
        ledger.append(tape.tell(metrics(2, at=2500.0)))
        ledger.commit(force=True)
        assert steps(reader_of(ledger, clock).series(JOB, "train.step.duration")) == [2]
        clock.advance(100.0)
        ledger.commit(force=True)
        assert len(files(tmp_path)) == 1


def test_a_spike_of_one_sample_survives_thinning(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        for step in range(3_000):
            low = step == 1_111
            value = 99.0 if step == 1_234 else 0.001 if low else 0.5
            ledger.append(tape.tell(metrics(step, at=1000.0 + step / 10, train_loss=value)))
        for flushed in (False, True):
            if flushed:
                ledger.commit(force=True)
            series = reader_of(ledger, clock).series(JOB, "train.loss", buckets=50)
            points = series.ranks["0"]
            assert len(points) <= 100
            assert (1123.4, 1234, 99.0) in points
            assert (1111.1, 1111, 0.001) in points
            assert max(value for _, value in series.median if value is not None) == 99.0


def test_nan_and_infinity_are_named_not_numbers(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        for step in range(500):
            value = {100: math.nan, 200: math.inf, 300: -math.inf}.get(step, 1.0)
            ledger.append(tape.tell(metrics(step, rank=2, train_loss=value)))
        ledger.commit(force=True)
        for buckets in (2_000, 20):
            series = reader_of(ledger, clock).series(JOB, "train.loss", buckets=buckets)
            assert series.non_finite == [(2, 100, "nan"), (2, 200, "inf"), (2, 300, "-inf")]
            assert [step for _, step, value in series.ranks["2"] if value is None] == [100, 200, 300]
            assert {value for _, value in series.median} == {1.0}


def test_the_median_is_over_the_ranks_of_a_step(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(*(metrics(5, rank=rank, train_loss=float(rank)) for rank in range(3))))
        series = reader_of(ledger, clock).series(JOB, "train.loss")
    assert series.median == [(1005.0, 1.0)]
    assert sorted(series.ranks) == ["0", "1", "2"]


def test_what_a_ranks_process_and_gpu_measure_is_a_series_by_time(tmp_path: Path, clock) -> None:
    def device(rank: int, at: float, value: float) -> DeviceMetrics:
        return DeviceMetrics(
            job=JOB, attempt=1, rank=rank, node="node-0", sequence=int(at), at=at, device="process",
            sampled_at=(at,), columns={"process.memory.usage": (value,)},
        )  # fmt: skip

    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        reader = reader_of(ledger, clock)
        told = [device(rank, at, 100.0 * rank + at) for at in (10.0, 12.0) for rank in (-1, 0, 1)]
        ledger.append(tape.tell(*told))
        live = reader.series(JOB, "process.memory.usage")
        ledger.commit(force=True)
        assert reader.series(JOB, "process.memory.usage") == live
        assert live.ranks == {"0": [(10.0, -1, 10.0), (12.0, -1, 12.0)], "1": [(10.0, -1, 110.0), (12.0, -1, 112.0)]}
        assert live.hosts == {"node-0/process": [(10.0, -90.0), (12.0, -88.0)]}
        assert live.median == [(10.0, 60.0), (12.0, 62.0)]
        assert "process.memory.usage" in reader.metric_names(JOB)


def test_a_series_can_be_cut_by_attempt_and_time(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(*(metrics(step, attempt=1 + step // 5) for step in range(10))))
        reader = reader_of(ledger, clock)
        for flushed in (False, True):
            if flushed:
                ledger.commit(force=True)
            assert steps(reader.series(JOB, "train.step.duration", attempt=2)) == [5, 6, 7, 8, 9]
            assert steps(reader.series(JOB, "train.step.duration", start=1003.0, end=1006.0)) == [3, 4, 5]
        assert reader.series("nobody", "train.step.duration").ranks == {}
        with pytest.raises(BadQuestion, match="buckets"):
            reader.series(JOB, "train.step.duration", buckets=2_001)


def test_samples_that_a_rank_does_not_have_are_no_rows(tmp_path: Path, clock) -> None:
    tape = Tape()
    with Ledger(tmp_path, clock) as ledger:
        ledger.append(tape.tell(metrics(1, train_loss=None)))
        ledger.commit(force=True)
        assert reader_of(ledger, clock).series(JOB, "train.loss").ranks == {}
