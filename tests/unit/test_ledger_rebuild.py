"""The ledger made anew from the bus: the same rows, and never fewer than there were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ingest.bus import Record
from ingest.clock import ManualClock
from ingest.memory_bus import MemoryBus
from pipelines.ledger.finished import open_finished
from pipelines.ledger.ledger import Ledger
from pipelines.rebuild import CannotRebuild, rebuild
from pipelines.recordings import Recordings
from tests.ledger_messages import CODEC, JOB, Tape, action, logs, metrics, verdict

QUERIES = (
    "SELECT seq, source_offset, body FROM verdict ORDER BY seq",
    "SELECT seq, source_offset, body FROM action ORDER BY seq",
    "SELECT seq, text FROM log_line ORDER BY seq",
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def told(clock: ManualClock, *messages: object) -> MemoryBus:
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    producer = bus.producer()
    for message in messages:
        producer.send(*CODEC.encode(message))
    producer.send("events", JOB, (), b"poison")
    producer.flush(1.0)
    return bus


STORY = (
    verdict(1), verdict(2), action(1), logs("one", "two"), *(metrics(step, train_loss=1.0) for step in range(3)),
)  # fmt: skip


def of(folder: Path) -> list[list[Any]]:
    with open_finished(folder) as finished, finished.cursor() as cursor:
        rows: list[list[Any]] = [cursor.execute(query).fetchall() for query in QUERIES]
        rows.append([(step,) for _, step, _ in finished.series(JOB, "train.loss").ranks["0"]])
        return rows


def test_a_lost_ledger_comes_back_from_the_bus(tmp_path: Path, clock: ManualClock) -> None:
    folder, tape, read = tmp_path / "ledger", Tape(), list[int]()
    with Ledger(folder, clock) as ledger:
        ledger.append(tape.tell(*STORY))
        ledger.commit(force=True)
    before = of(folder)
    done = rebuild(folder, told(clock, *STORY), clock, read.append)
    assert of(folder) == before
    assert (done.records, done.rejected) == (8, 1)
    assert read[-1] == 8
    assert done.before is not None
    assert of(done.before) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger", done.before.name]


def test_where_there_was_none_one_is_made(tmp_path: Path, clock: ManualClock) -> None:
    done = rebuild(tmp_path / "ledger", told(clock, *STORY), clock, lambda _: None)
    assert done.before is None
    assert of(tmp_path / "ledger")[2] == [(1, "one"), (2, "two")]


@pytest.mark.parametrize(
    ("table", "message"), [("verdict", verdict(9)), ("log_line", logs("old")), ("metric_part", metrics(99))]
)
def test_what_the_bus_has_lost_is_named_and_nothing_is_replaced(
    tmp_path: Path, clock: ManualClock, table: str, message: Any
) -> None:
    """The ledger has what lay before all that the bus still has."""
    folder = tmp_path / "ledger"
    encoded = CODEC.encode(message)
    with Ledger(folder, clock) as ledger:
        ledger.append([Record(encoded.topic, 3, 17, JOB, encoded.headers, encoded.value, 1000.0)])
        ledger.commit(force=True)
    with pytest.raises(CannotRebuild, match=rf"{table} of {encoded.topic}\[3\] from offset 17"):
        rebuild(folder, told(clock, *STORY), clock, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"]
    with open_finished(folder) as finished, finished.cursor() as cursor:
        assert cursor.execute("SELECT max(next_offset) FROM source_offset").fetchall() == [(18,)]


def test_recordings_go_when_nothing_was_added_for_long(tmp_path: Path, clock: ManualClock) -> None:
    tape = Tape()
    recordings = Recordings(tmp_path, clock, keep_seconds=100.0)
    recordings.write(tape.tell(metrics(1)))
    recordings.flush()
    old = tmp_path / "quiet"
    old.mkdir()
    for folder in (old, tmp_path / JOB):
        file = folder / "messages.jsonl.gz"
        file.touch()
        os.utime(file, (1.0, 1.0))
    clock.advance(601.0)
    recordings.forget_old()
    assert not old.exists()
    assert (tmp_path / JOB).exists(), "it is being written"
    recordings.close()
