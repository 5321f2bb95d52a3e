"""What the Kafka bus does when something is wrong: no broker, no topics, no extra, a stuck library, poison."""

import socket
import sys
from collections.abc import Iterator

import pytest

from ingest.bus import BusMisconfigured, BusUnavailable, Record, TopicPartition
from ingest.clock import SystemClock
from ingest.codec import Codec, Undecodable
from ingest.dead_letters import dead_letter, original
from ingest.kafka_bus import ClosingSelector, KafkaBus, KafkaSecurity
from tests.wire_examples import EXAMPLES

CLOCK = SystemClock()
DEADLINE_SECONDS = 30.0
METRICS_0 = TopicPartition("metrics", 0)


@pytest.fixture
def bus(kafka_bootstrap: str, kafka_prefix: str) -> Iterator[KafkaBus]:
    bus = KafkaBus(kafka_bootstrap, clock=CLOCK, prefix=kafka_prefix, stall_seconds=0.5)
    bus.create_topics(1)
    yield bus
    bus.close()


def publish(bus: KafkaBus, *values: bytes) -> None:
    producer = bus.producer()
    for value in values:
        producer.send("metrics", "job", [], value)
    producer.flush(DEADLINE_SECONDS)
    producer.close()


def poll_until(consumer, count: int) -> list[Record]:
    records: list[Record] = []
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while len(records) < count:
        assert CLOCK.monotonic() < deadline, f"{len(records)} of {count}"
        records += consumer.poll(100, 0.2)
    return records


@pytest.fixture(params=["nobody listens", "somebody listens and never answers"])
def dead_address(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param.startswith("somebody"):
            listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_without_a_broker_each_way_in_says_so_in_bounded_time(dead_address: str) -> None:
    bus = KafkaBus(dead_address, clock=CLOCK, connect_seconds=0.5)
    began = CLOCK.monotonic()
    for connect in (bus.producer, lambda: bus.consumer("g", ("metrics",)), lambda: bus.create_topics(1)):
        with pytest.raises(BusUnavailable, match=rf"no Kafka broker at {dead_address} answered.*is it running"):
            connect()
    assert CLOCK.monotonic() - began < 20.0  # three half-seconds; the library's own default is half a minute each


def test_a_missing_extra_is_one_sentence_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name == "kafka" or name.startswith("kafka.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "kafka", None)
    with pytest.raises(BusMisconfigured, match=r"pip install 'transom\[kafka\]'"):
        KafkaBus("127.0.0.1:1", clock=CLOCK)


def test_topics_have_their_retention_and_unequal_job_topics_are_reported(
    kafka_bootstrap: str, kafka_prefix: str
) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    bus = KafkaBus(kafka_bootstrap, clock=CLOCK, prefix=kafka_prefix)
    admin = KafkaAdminClient(bootstrap_servers=kafka_bootstrap, selector=ClosingSelector)
    try:
        admin.create_topics({f"{kafka_prefix}.metrics": {"num_partitions": 2, "replication_factor": 1}})
        bus.create_topics(4)  # follows what is there
        topics = ["metrics", "logs", "events", "verdicts", "dead-letters"]
        names = [f"{kafka_prefix}.{topic}" for topic in topics]
        counts = {found["name"]: len(found["partitions"]) for found in admin.describe_topics(names)}
        assert [counts[name] for name in names] == [2, 2, 2, 4, 4]
        configs = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names[1:]])
        text = repr(configs)
        assert str(14 * 24 * 3600 * 1000) in text
        assert "LogAppendTime" in text
        admin.delete_topics([f"{kafka_prefix}.logs"])
        deadline = CLOCK.monotonic() + DEADLINE_SECONDS
        while any(found["error_code"] == 0 for found in admin.describe_topics([f"{kafka_prefix}.logs"])):
            assert CLOCK.monotonic() < deadline
        admin.create_topics({f"{kafka_prefix}.logs": {"num_partitions": 3, "replication_factor": 1}})
        admin.wait_for_topics([f"{kafka_prefix}.logs"])
        with pytest.raises(BusMisconfigured, match="metrics has 2, logs has 3"):
            bus.create_topics(2)
    finally:
        admin.close()


def test_a_library_that_gives_no_records_although_there_are_some_is_made_anew(bus: KafkaBus) -> None:
    told: list[str] = []
    consumer = bus.consumer(
        "g", ("metrics",),
        on_assign=lambda places: told.append("assign"), on_revoke=lambda places: told.append("revoke"),
    )  # fmt: skip
    publish(bus, b"1")
    assert [record.value for record in poll_until(consumer, 1)] == [b"1"]
    consumer.commit()
    stuck = consumer._connection.kafka
    stuck.pause(*stuck.assignment())  # what the library's own stalls look like from outside
    publish(bus, b"2")
    assert [record.value for record in poll_until(consumer, 1)] == [b"2"]
    assert told == ["assign", "revoke", "assign"]
    consumer.close()


def test_a_join_that_the_library_forgot_is_finished(bus: KafkaBus) -> None:
    told: list[str] = []
    consumer = bus.consumer("g", ("metrics",), on_assign=lambda places: told.append("assign"))
    publish(bus, b"1")
    poll_until(consumer, 1)
    coordinator = consumer._connection.kafka._coordinator
    coordinator.rejoining = True  # as it is left when a poll runs out of time between JoinGroup and SyncGroup
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while told != ["assign", "assign"]:
        assert CLOCK.monotonic() < deadline
        consumer.poll(1, 0.1)
    assert not coordinator.rejoining
    consumer.close()


def test_what_the_library_gives_up_is_sent_again_through_a_new_connection(bus: KafkaBus) -> None:
    producer = bus.producer()
    producer.send("metrics", "job", [], b"1")
    producer.flush(DEADLINE_SECONDS)
    broken = producer._kafka
    broken.close(timeout=1.0)  # every send through it fails from now on
    producer.send("metrics", "job", [], b"2")
    producer.send("metrics", "job", [], b"3")
    producer.flush(DEADLINE_SECONDS)
    assert producer._kafka is not broken
    producer.close()
    consumer = bus.consumer("g", ("metrics",))
    assert [record.value for record in poll_until(consumer, 3)] == [b"1", b"2", b"3"]
    consumer.close()


def test_a_poll_without_time_does_not_block_and_what_it_fetched_is_not_lost(bus: KafkaBus) -> None:
    publish(bus, *(b"%d" % number for number in range(20)))
    consumer = bus.consumer("g", ("metrics",))
    records: list[Record] = []
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while len(records) < 20:
        assert CLOCK.monotonic() < deadline
        records += consumer.poll(3, 0.0)
    assert [int(record.value) for record in records] == list(range(20))
    consumer.close()


def test_poison_goes_to_the_dead_letters_and_does_not_block_the_partition(bus: KafkaBus) -> None:
    codec = Codec()
    good = codec.encode(EXAMPLES["metrics.v1"])
    producer = bus.producer()
    producer.send("metrics", "demo", good.headers, b'{"half of a mess')
    producer.send("metrics", "demo", good.headers, good.value)
    producer.flush(DEADLINE_SECONDS)
    consumer = bus.consumer("g", ("metrics",))
    messages = []
    for record in poll_until(consumer, 2):
        try:
            messages.append(codec.decode(record.headers, record.value))
        except Undecodable as error:
            producer.send(*dead_letter(record, error.reason, CLOCK))
    producer.flush(DEADLINE_SECONDS)
    consumer.commit()
    assert messages == [EXAMPLES["metrics.v1"]]
    assert consumer.lag() == {METRICS_0: 0}
    consumer.close()
    undertaker = bus.consumer("undertaker", ("dead-letters",))
    (letter,) = poll_until(undertaker, 1)
    assert original(letter) == (good.headers, b'{"half of a mess')
    assert dict(letter.headers)["dlq_topic"] == b"metrics"
    assert b"not a metrics.v1 message" in dict(letter.headers)["dlq_reason"]
    undertaker.close()
    producer.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"protocol": "SASL_SSL"}, "do not go together"),
        ({"sasl_mechanism": "PLAIN", "sasl_username": "a", "sasl_password": "b"}, "do not go together"),
        ({"protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "a"}, "a user name and a password"),
    ],
)
def test_security_options_that_contradict_each_other_are_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(BusMisconfigured, match=reason):
        KafkaSecurity(**options)


def test_a_broker_that_refuses_the_protocol_is_reported_in_bounded_time(kafka_bootstrap: str) -> None:
    security = KafkaSecurity("SASL_PLAINTEXT", sasl_mechanism="PLAIN", sasl_username="a", sasl_password="b")
    bus = KafkaBus(kafka_bootstrap, clock=CLOCK, security=security, connect_seconds=1.0)
    with pytest.raises((BusUnavailable, BusMisconfigured), match=kafka_bootstrap):
        bus.producer()


def test_a_closed_selector_closes_every_socket_it_was_shown() -> None:
    selector = ClosingSelector()
    one, two = socket.socketpair()
    selector.register(one, 1)
    selector.register(two, 1)
    selector.unregister(two)  # as a cancelled connect does
    selector.close()
    assert one.fileno() == two.fileno() == -1
