"""The record service as a whole: bus in, HTTP out, and what it does when the bus or the disk fails."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ingest.bus import BusUnavailable
from ingest.clock import SystemClock
from ingest.memory_bus import MemoryBus
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.ledger import Ledger, LedgerConfig
from pipelines.ledger.serving import CannotServe
from pipelines.ledger.shapes import CommandRequest, LedgerLocked
from pipelines.record import Record, RecordConfig
from pipelines.recording import read_recording
from tests.ledger_messages import CODEC, JOB, attempt_started, heartbeat, logs, metrics, verdict
from tests.record_process import RecordProcesses

CLOCK = SystemClock()
DEADLINE_SECONDS = 60.0


def eventually(condition: Callable[[], Any]) -> Any:
    """What `condition` gives once it is true."""
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while not (result := condition()):
        assert CLOCK.monotonic() < deadline, "this did not come true"
        CLOCK.sleep(0.02)
    return result


@dataclass
class Service:
    """A record service in a thread, on a bus in memory."""

    folder: Path
    bus: Any = field(default_factory=lambda: MemoryBus(clock=CLOCK))
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.bus.create_topics(2)
        self.producer = self.bus.producer()
        config = RecordConfig(
            ledger_folder=self.folder / "ledger",
            socket_path=self.folder / "ledger.sock",
            recording_folder=self.folder / "recordings",
            ledger=LedgerConfig(flush_seconds=0.3, bulk_seconds=0.1),
            group_seconds=0.02,
            idle_poll_seconds=0.1,
            retry_seconds=0.05,
            lag_seconds=0.1,
        )
        self.record = Record(config, self.bus, CLOCK)
        self.client = LedgerClient(config.socket_path or "")
        self.thread = threading.Thread(target=self.record.run, args=(self.stop,))
        self.thread.start()
        assert self.record.ready.wait(DEADLINE_SECONDS)

    def tell(self, *messages: object) -> None:
        for message in messages:
            self.producer.send(*CODEC.encode(message))
        self.producer.flush(5.0)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(DEADLINE_SECONDS)
        self.client.close()
        assert not self.thread.is_alive()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.end()


def test_what_is_told_on_the_bus_is_seen_over_http(service: Service) -> None:
    service.tell(attempt_started(), *(metrics(step) for step in range(5)), logs("hello"), verdict())
    client = service.client
    assert eventually(lambda: client.incidents().incidents)[0].fault_class == "rank_lost"
    assert eventually(lambda: client.logs(JOB))[0].text == "hello"
    eventually(lambda: client.jobs()[0].last_step == 4)
    assert len(client.series(JOB, "train.step.duration").ranks["0"]) == 5
    health = eventually(lambda: client.health() if client.health().data_at else None)
    assert (health.status, health.reason) == ("ok", "")
    eventually(lambda: set(client.health().lag) >= {"metrics", "verdicts"} and not any(client.health().lag.values()))


def test_a_command_comes_back_as_the_incidents_state(service: Service) -> None:
    service.tell(verdict())
    (view,) = eventually(lambda: service.client.incidents().incidents)
    request = CommandRequest(verb="acknowledge", incident_id=view.incident_id, author="ada", note="looking")
    command_id = service.client.post_command(request)
    (changed,) = eventually(lambda: service.client.incidents(after=view.seq).incidents)
    assert changed.acknowledged_by == "ada"
    assert service.client.incident(view.incident_id).commands[0].command_id == command_id


def test_poison_goes_to_the_dead_letters_and_the_stream_goes_on(service: Service) -> None:
    service.producer.send("verdicts", JOB, (("ce_type", b"org.transom.verdict.v9"),), b"{}")
    service.producer.send("metrics", JOB, (), b"\x00\xff")
    service.tell(verdict())
    eventually(lambda: service.client.incidents().incidents)
    consumer = service.bus.consumer("test", ("dead-letters",))
    letters = []
    eventually(lambda: letters.extend(consumer.poll(10, 0.0)) or len(letters) == 2)
    consumer.close()
    assert {letter.value for letter in letters} == {b"{}", b"\x00\xff"}
    assert {key for key, _ in letters[0].headers} >= {"dlq_topic", "dlq_offset", "dlq_reason"}


def test_what_the_bus_has_at_the_end_is_in_the_ledger(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.tell(*(verdict(number) for number in range(200)), *(metrics(step) for step in range(200)))
    service.end()
    with Ledger(tmp_path / "ledger", CLOCK) as ledger:
        assert ledger.row_counts()["verdict"] == 200
        assert sum(part.row_count for part in ledger.parts.held().parts) == 200
    assert len(list(read_recording(tmp_path / "recordings" / JOB))) == 400


def test_a_restart_goes_on_where_the_ledger_ended_whatever_the_group_has_stored(tmp_path: Path) -> None:
    first = Service(tmp_path)
    first.tell(verdict(1), metrics(1))
    first.end()
    # The group claims to have read everything: the ledger knows better.
    second_bus = first.bus
    first.tell(verdict(2), metrics(2))
    thief = second_bus.consumer("record", ("verdicts", "metrics"))
    assert thief.poll(10, 0.0)
    thief.commit()
    thief.close()
    second = Service(tmp_path, bus=second_bus)
    eventually(lambda: len(second.client.incidents().incidents) == 2)
    steps = eventually(lambda: second.client.series(JOB, "train.step.duration").ranks.get("0", [])[1:])
    assert [step for _, step, _ in steps] == [2]
    second.end()


class LimpingBus(MemoryBus):
    """A bus whose consumers fail while `away` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.away = threading.Event()

    def consumer(self, *arguments: Any, **options: Any) -> Any:
        consumer = super().consumer(*arguments, **options)
        poll = consumer.poll

        def limping(records_max: int, timeout_seconds: float) -> Any:
            if self.away.is_set():
                raise BusUnavailable("the broker is away; it is tried again")
            return poll(records_max, timeout_seconds)

        consumer.poll = limping  # type: ignore[method-assign]
        return consumer


def test_a_bus_that_is_away_is_said_and_survived(tmp_path: Path) -> None:
    bus = LimpingBus(clock=CLOCK)
    service = Service(tmp_path, bus=bus)
    bus.away.set()
    health = eventually(lambda: service.client.health() if service.client.health().status == "degraded" else None)
    assert "the broker is away" in health.reason
    service.tell(verdict())
    assert service.client.incidents().incidents == ()
    bus.away.clear()
    eventually(lambda: service.client.incidents().incidents)
    eventually(lambda: service.client.health().status == "ok")
    service.end()


def test_a_full_disk_stops_it_and_afterwards_everything_is_there_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.tell(verdict(1), metrics(1))
    eventually(lambda: service.client.incidents().incidents)
    full = threading.Event()
    full.set()
    write = Ledger._transaction

    def refused(self: Ledger, *arguments: Any) -> Any:
        if full.is_set():
            raise duckdb.IOException("IO Error: Could not write file: No space left on device")
        return write(self, *arguments)

    monkeypatch.setattr(Ledger, "_transaction", refused)
    service.tell(verdict(2), metrics(2), verdict(3))
    client = service.client
    health = eventually(lambda: client.health() if client.health().status == "degraded" else None)
    assert "No space left on device" in health.reason
    assert "make room" in health.reason
    full.clear()
    eventually(lambda: len(client.incidents().incidents) == 3)
    eventually(lambda: client.health().status == "ok")
    eventually(lambda: len(client.series(JOB, "train.step.duration").ranks.get("0", [])) == 2)
    assert [row.seq for row in client.rows("verdicts").rows] == [1, 2, 3]


def test_heartbeats_keep_a_job_alive_without_a_row(service: Service) -> None:
    at = CLOCK.now()
    service.tell(attempt_started(at=at - 300.0))
    eventually(lambda: [job.state for job in service.client.jobs()] == ["lost"])
    service.tell(heartbeat(at))
    eventually(lambda: [job.state for job in service.client.jobs()] == ["running"])
    assert len(service.client.rows("events").rows) == 1


def test_tcp_without_a_token_is_refused_at_start(tmp_path: Path) -> None:
    config = RecordConfig(ledger_folder=tmp_path / "ledger", tcp_host="127.0.0.1")
    with pytest.raises(CannotServe, match="only with a token"):
        Record(config, MemoryBus(clock=CLOCK), CLOCK).run(threading.Event())


def test_a_second_record_process_is_told_who_has_the_ledger_and_disturbs_nobody(tmp_path: Path) -> None:
    services = RecordProcesses(tmp_path)
    services.start()
    config = RecordConfig(
        ledger_folder=tmp_path / "ledger",
        socket_path=tmp_path / "run" / "ledger.sock",
        ledger=LedgerConfig(lock_wait_seconds=0.1),
    )
    with pytest.raises(LedgerLocked, match=f"process {services.pid} "):
        Record(config, MemoryBus(clock=CLOCK), CLOCK).run(threading.Event())
    with LedgerClient(tmp_path / "run" / "ledger.sock") as client:
        assert client.jobs() == ()
    assert services.end(signal.SIGTERM) == 0
    services.close()
