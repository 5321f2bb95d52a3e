"""kill −9 of a real record process at random moments while records flow: the ledger equals the bus, exactly."""

import random
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from ingest.bus import Record
from ingest.clock import SystemClock
from ingest.sqlite_bus import SqliteBus
from pipelines.ledger.finished import open_finished
from pipelines.recording import read_recording
from tests.ledger_messages import (
    CODEC,
    JOB,
    action,
    attempt_started,
    checkpoint,
    logs,
    metrics,
    receipt,
    transition,
    verdict,
)
from tests.record_process import RecordProcesses

KILLS = 5


class Flow(threading.Thread):
    """Somebody who keeps telling the story until told to stop."""

    def __init__(self, bus: SqliteBus) -> None:
        super().__init__()
        self.enough = threading.Event()
        self._producer = bus.producer()

    def run(self) -> None:
        number = 0
        self._tell(attempt_started())
        while not self.enough.wait(0.01):
            self._tell(*(metrics(number, rank=rank, train_loss=1.0) for rank in range(4)))
            self._tell(logs(f"line {number}", "another", sequence=number))
            if number % 3 == 0:
                self._tell(verdict(number), action(number), receipt(number), transition(number), checkpoint(number))
            if number % 10 == 0:
                self._producer.send("events", JOB, (), b"poison %d" % number)
            self._producer.flush(10.0)
            number += 1
        self._producer.close()

    def _tell(self, *messages: object) -> None:
        for message in messages:
            self._producer.send(*CODEC.encode(message))


def whole_bus(bus: SqliteBus, *topics: str) -> list[Record]:
    consumer = bus.consumer("the test", topics)
    records: list[Record] = []
    while batch := consumer.poll(5_000, 0.0):
        records += batch
    consumer.close()
    return records


@pytest.fixture
def survived(tmp_path: Path) -> SqliteBus:
    """A bus and the ledger after all those kills and a last orderly run."""
    bus = SqliteBus(tmp_path / "bus.sqlite", clock=SystemClock())
    bus.create_topics(1)
    dice = random.Random(20261)
    flow = Flow(bus)
    flow.start()
    services = RecordProcesses(tmp_path)
    for _ in range(KILLS):
        services.start()
        threading.Event().wait(dice.uniform(0.05, 0.6))  # waits for nothing: the kill may come at any time
        assert services.end(signal.SIGKILL) == -signal.SIGKILL
    flow.enough.set()
    flow.join()
    services.start()
    assert services.end(signal.SIGTERM) == 0
    services.close()
    return bus


def test_after_any_kill_the_ledger_equals_the_bus(survived: SqliteBus, tmp_path: Path) -> None:
    records = whole_bus(survived, "metrics", "logs", "events", "verdicts", "actions")
    by_topic = Counter(record.topic for record in records)
    assert by_topic["verdicts"] > 20
    with open_finished(tmp_path / "ledger") as finished, finished.cursor() as cursor:

        def column(query: str) -> list:
            return cursor.execute(query).fetchall()

        for table in ("verdict", "action", "receipt", "incident", "checkpoint_event"):
            rows = column(f"SELECT seq, source_offset, body FROM {table} ORDER BY seq")
            expected = [
                (record.offset, record.value.decode())
                for record in records
                if ("ce_type", f"org.transom.{table.removesuffix('_event')}.v1".encode()) in record.headers
            ]
            assert [row[1:] for row in rows] == expected
            assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
        lines = column("SELECT source_offset, line, text FROM log_line ORDER BY seq")
        assert lines == [
            (record.offset, index, line.text)
            for record in records
            if record.topic == "logs"
            for index, line in enumerate(CODEC.decode(record.headers, record.value).lines)
        ]
        samples = column(
            f"SELECT rank, step, metric, count(*) FROM read_parquet('{tmp_path}/ledger/metrics/*.parquet') GROUP BY ALL"
        )
        assert Counter({row[:3]: row[3] for row in samples}) == Counter(
            (message.rank, step, name)
            for record in records
            if record.topic == "metrics"
            for message in [CODEC.decode(record.headers, record.value)]
            for step in message.steps
            for name in message.columns
        )
        ((part_samples,),) = column("SELECT sum(row_count) FROM metric_part WHERE replaces = '[]'")
        assert part_samples == 2 * by_topic["metrics"]
    poison = {record.value for record in records if record.value.startswith(b"poison")}
    letters = whole_bus(survived, "dead-letters")
    assert {letter.value for letter in letters} == poison
    recorded = list(read_recording(tmp_path / "recordings" / JOB))
    assert Counter((record.place, record.offset) for record in recorded) == Counter(
        (record.place, record.offset) for record in records
    )
