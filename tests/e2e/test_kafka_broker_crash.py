"""A real broker is killed and started again in mid-stream: nothing is lost, nothing lies there twice."""

import threading
from pathlib import Path

import pytest

from ingest.bus import BusFull, BusUnavailable, Consumer, Producer
from ingest.clock import SystemClock
from ingest.kafka_bus import KafkaBus
from tests.kafka_fixture import make_broker

CLOCK = SystemClock()
MESSAGES = 1_500
DEADLINE_SECONDS = 90.0


def publish(producer: Producer, progress: list[int], errors: list[BaseException]) -> None:
    """What a launcher does: send, flush now and then, go on through BusUnavailable."""
    try:
        for number in range(MESSAGES):
            while True:
                try:
                    producer.send("metrics", f"job-{number % 3}", [], b"%d" % number)
                    break
                except BusFull:
                    CLOCK.sleep(0.05)
            if number % 50 == 49:
                flush_through(producer)
                CLOCK.sleep(0.01)
            progress[0] = number + 1
        flush_through(producer)
    except BaseException as error:
        errors.append(error)
        raise


def flush_through(producer: Producer) -> None:
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            producer.flush(0.5)
            return
        except BusUnavailable:
            assert CLOCK.monotonic() < deadline


def test_a_broker_killed_and_restarted_in_mid_stream_loses_and_doubles_nothing(tmp_path: Path) -> None:
    broker = make_broker(tmp_path)
    broker.start()
    try:
        bus = KafkaBus(broker.bootstrap, clock=CLOCK, prefix="crash", buffered_max=200)
        bus.create_topics(2)
        # A group that starts at the end and has committed nothing: the one that would lose its place.
        consumer = bus.consumer("g", ("metrics",), start="latest")
        deadline = CLOCK.monotonic() + DEADLINE_SECONDS
        while len(consumer.assignment()) < 2:
            assert CLOCK.monotonic() < deadline
            consumer.poll(1, 0.2)
        producer = bus.producer()
        progress, errors = [0], []
        thread = threading.Thread(target=publish, args=(producer, progress, errors))
        thread.start()
        found: dict[tuple[int, int], int] = {}
        killed = False
        try:
            while len(found) < MESSAGES and not errors:
                assert CLOCK.monotonic() < deadline, f"{len(found)} of {MESSAGES} read, {progress[0]} sent"
                if not killed and progress[0] >= MESSAGES // 3:
                    broker.kill()
                    killed = True
                    producer_waits_while_down(producer)
                    consumer_knows_that_nothing_is_not_silence(consumer, found)
                    broker.start()
                try:
                    for record in consumer.poll(500, 0.2):
                        found[record.partition, record.offset] = int(record.value)
                    consumer.commit()
                except BusUnavailable:
                    continue
        finally:
            thread.join(DEADLINE_SECONDS)
        assert not errors
        assert killed
        assert sorted(found.values()) == list(range(MESSAGES))  # each once, at one place
        for partition in (0, 1):
            offsets = sorted(offset for place, offset in found if place == partition)
            assert offsets == list(range(len(offsets)))
            for key in range(3):
                numbers = [found[partition, offset] for offset in offsets if found[partition, offset] % 3 == key]
                assert numbers == sorted(numbers)
        producer.close()
        consumer.close()
        bus.close()
    finally:
        broker.kill()


def producer_waits_while_down(producer: Producer) -> None:
    """While the broker is down a flush says so, in bounded time, and the messages stay."""
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while CLOCK.monotonic() < deadline:
        try:
            producer.flush(0.3)  # returns while nothing more has been sent
        except BusUnavailable as error:
            said = str(error)
            break
    assert "they are kept and sent again" in said


def consumer_knows_that_nothing_is_not_silence(consumer: Consumer, found: dict[tuple[int, int], int]) -> None:
    """While the broker is down a poll gives nothing; whoever asks is told that this means nothing."""
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while records := consumer.poll(500, 0.2):  # what had been fetched before
        assert CLOCK.monotonic() < deadline
        found.update(((record.partition, record.offset), int(record.value)) for record in records)
    with pytest.raises(BusUnavailable):
        consumer.lag()
