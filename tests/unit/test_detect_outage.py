"""The bus is away for a while: detection takes nobody's silence for a fault, and still tells the fault that was one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.logs.rule_book import RuleBook
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import BusUnavailable, Record
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.events import Message
from ingest.memory_bus import MemoryBus
from pipelines.detect import Detect, read_state, write_state
from pipelines.detection import Detection
from pipelines.places import Places
from pipelines.settings import load_settings
from pipelines.silence import Silence
from tests.synthetic_job import SyntheticJob

CODEC = Codec(VERDICT_TYPES)
OUTAGE_SECONDS = 15.0


def records_of(messages: list[Message], appended: list[float]) -> list[Record]:
    """As they lie on the bus, in the order in which it took them."""
    offsets = {"metrics": 0, "logs": 0, "events": 0}
    records = []
    for at, message in sorted(zip(appended, messages, strict=True), key=lambda pair: pair[0]):
        encoded = CODEC.encode(message)
        offset = offsets[encoded.topic]
        offsets[encoded.topic] += 1
        records.append(Record(encoded.topic, 0, offset, message.job, encoded.headers, encoded.value, at))
    return records


def job_through_an_outage() -> tuple[list[Record], float]:
    """Rank 2 is killed while the bus is away; node0 is back on it at once, node1 one and a half seconds later."""
    job = SyntheticJob(seed=5).start().train(60)
    away_from = job.at
    job.train(int(OUTAGE_SECONDS / 0.1 * 0.7)).kill(2)
    back_at = max(job.at, away_from + OUTAGE_SECONDS)
    messages = job.ordered()
    delay = {"node0": 0.0, "node1": 1.5}
    appended = [
        message.at if message.at < away_from else max(message.at, back_at + delay[message.node]) for message in messages
    ]
    return records_of(messages, appended), back_at


def test_an_outage_of_the_bus_blames_no_node_and_hides_no_death() -> None:
    detection = Detection(DetectorConfig(ensemble=EnsembleConfig(on=False)), RuleBook.shipped())
    records, _ = job_through_an_outage()
    said: list[Verdict] = []
    now = 0.0
    for record in records:
        if record.appended_at > now + 0.05:
            said += detection.conclude(now)
        now = record.appended_at
        assert detection.feed(record) is None
    for tick in range(400):
        said += detection.conclude(now + tick * 0.05)
    assert [(verdict.fault_class, [culprit.rank for culprit in verdict.culprits]) for verdict in said[:1]] == [
        ("rank_lost", [2])
    ]
    before_the_end = [verdict.fault_class for verdict in said if verdict.at < records[-1].appended_at]
    assert set(before_the_end) <= {"rank_lost"}


def test_wall_time_stands_still_while_the_bus_is_away_and_until_producers_are_back() -> None:
    silence = Silence(100.0)
    silence.answered(100.5)
    assert silence.heard_until == 100.5
    assert not silence.should_ask(101.0)
    assert silence.should_ask(101.5)
    assert silence.heard_until == 100.5
    silence.answered(120.0)  # away for 20 s
    silence.answered(121.0)
    assert silence.heard_until == 100.5
    for now in (123.0, 125.0, 127.0, 129.0, 130.5):
        silence.answered(now)
    assert silence.heard_until == 130.5


class AwayBus(MemoryBus):
    """A bus that gives nothing while `away` is set, and says so when it is asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.away = Event()

    def consumer(self, *arguments: Any, **options: Any) -> Any:
        consumer = super().consumer(*arguments, **options)
        poll, lag = consumer.poll, consumer.lag

        def asked() -> Any:
            if self.away.is_set():
                raise BusUnavailable("the broker is away")
            return lag()

        consumer.poll = lambda most, wait: [] if self.away.is_set() else poll(most, 0.0)  # type: ignore[method-assign]
        consumer.lag = asked  # type: ignore[method-assign]
        return consumer

    def producer(self) -> Any:
        producer = super().producer()
        flush = producer.flush

        def flushed(timeout_seconds: float) -> None:
            if self.away.is_set():
                raise BusUnavailable("the broker is away")
            flush(timeout_seconds)

        producer.flush = flushed  # type: ignore[method-assign]
        return producer


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "state", tmp_path / "run")


class Service:
    """The detect service, pass by pass, on a clock of ours."""

    def __init__(self, places: Places, bus: AwayBus, clock: ManualClock) -> None:
        settings = load_settings(overrides={"state_dir": places.state, "detect": {"ensemble": False}})
        self.detect = Detect(settings, places, bus, clock)
        self.producer = bus.producer()
        self.detect._producer = self.producer
        self.consumer = bus.consumer(
            "detect", ("metrics", "logs", "events"), on_assign=self.detect._assigned, on_revoke=self.detect._revoked
        )
        self.clock = clock

    def pass_for(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.1)):
            with suppress(BusUnavailable):
                self.detect._pass(self.consumer, self.producer)
            self.clock.advance(0.1)


def verdicts_on(bus: AwayBus) -> list[Verdict]:
    consumer = bus.consumer("test", ("verdicts",))
    found = [CODEC.decode(record.headers, record.value) for record in consumer.poll(1_000, 0.0)]
    consumer.close()
    return found


def tell(bus: AwayBus, messages: list[Message]) -> None:
    producer = bus.producer()
    for message in messages:
        producer.send(*CODEC.encode(message))
    producer.close()


def test_a_service_that_cannot_reach_the_bus_takes_no_job_for_silent(places: Places) -> None:
    job = SyntheticJob(seed=5).start().train(60)
    clock = ManualClock(job.at)
    bus = AwayBus(clock=clock)
    bus.create_topics(1)
    service = Service(places, bus, clock)
    tell(bus, job.ordered())
    service.pass_for(0.5)
    bus.away.set()
    service.pass_for(60.0)
    bus.away.clear()
    service.pass_for(9.0)  # the bus is back before its producers are
    assert verdicts_on(bus) == []
    service.pass_for(15.0)  # now it is the job that is silent
    assert {verdict.fault_class for verdict in verdicts_on(bus)} == {"node_lost"}


def test_no_state_is_saved_that_has_a_verdict_behind_it_which_the_bus_has_not_taken(places: Places) -> None:
    job = SyntheticJob(seed=5).start().train(60).kill(2)
    for _ in range(3):
        job.train(10)
    clock = ManualClock(job.at)
    bus = AwayBus(clock=clock)
    bus.create_topics(1)
    service = Service(places, bus, clock)
    tell(bus, job.ordered())
    refuse, flush = [True], service.producer.flush

    def flushed(timeout_seconds: float) -> None:
        if refuse[0]:
            raise BusUnavailable("the broker does not acknowledge")
        flush(timeout_seconds)

    service.producer.flush = flushed  # type: ignore[method-assign]
    service.pass_for(8.0)
    assert service.detect._unflushed  # there was a verdict
    service.consumer.close()  # the partition is taken away
    assert read_state(places.detection, 0) is None
    refuse[0] = False
    clock.advance(1.0)
    successor = Service(places, bus, clock)
    successor.pass_for(8.0)
    said = {verdict.message_id: verdict for verdict in verdicts_on(bus)}
    assert {verdict.fault_class for verdict in said.values()} == {"rank_lost"}
    successor.consumer.close()
    assert read_state(places.detection, 0) is not None


def test_who_takes_a_partition_over_reads_what_was_missed_before_time_passes(places: Places) -> None:
    job = SyntheticJob(seed=5).start().train(60)
    clock = ManualClock(job.at)
    bus = AwayBus(clock=clock)
    bus.create_topics(1)
    service = Service(places, bus, clock)
    tell(bus, job.ordered())
    service.pass_for(0.5)
    service.consumer.close()  # nobody detects for a while
    told = len(job.messages)
    job.train(100).kill(2).train(10)
    tell(bus, sorted(job.messages[told:], key=lambda message: message.at))
    clock.advance_to(job.at)
    successor = Service(places, bus, clock)
    successor.pass_for(5.0)
    (kept,) = successor.detect._detection._jobs.values()
    assert kept.merge.late == 0
    assert [verdict.fault_class for verdict in verdicts_on(bus)][:1] == ["rank_lost"]


def test_two_detectors_that_write_the_state_of_one_partition_leave_one_whole_state(places: Places) -> None:
    places.detection.mkdir(parents=True)
    detection = Detection(DetectorConfig(ensemble=EnsembleConfig(on=False)), RuleBook.shipped())
    records, _ = job_through_an_outage()
    for record in records[:50]:
        detection.feed(record)
    older = detection.save(0)
    for record in records[50:100]:
        detection.feed(record)
    newer = detection.save(0)
    write_state(places.detection, 0, *newer)
    write_state(places.detection, 0, *older)  # one that was thought dead
    for state, arrays in (older, newer):
        write_state(places.detection, 0, state, arrays)
        loaded = read_state(places.detection, 0)
        assert loaded is not None
        assert loaded[0] == state
        assert loaded[1].keys() == arrays.keys()
    assert [path.name for path in places.detection.iterdir()] == ["partition-0.npz"]
