"""What every bus promises (ingest/bus.py), held by each implementation."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ingest.bus import Bus, BusFull, BusMisconfigured, BusUnavailable, Consumer, Record, TopicPartition
from ingest.clock import SystemClock
from ingest.codec import MESSAGE_BYTES_MAX
from ingest.memory_bus import MemoryBus
from ingest.partitioning import partition_of
from ingest.sqlite_bus import SqliteBus

DEADLINE_SECONDS = 30.0
CLOCK = SystemClock()


@dataclass
class Ground:
    """One bus, and how to open it again as another process would."""

    kind: str
    open: Callable[..., Bus]
    opened: list[Bus] = field(default_factory=list)
    members: list[Consumer] = field(default_factory=list)

    def bus(self, partitions: int = 2, **options: int) -> Bus:
        bus = self.open(**options)
        self.opened.append(bus)
        bus.create_topics(partitions)
        return bus

    def join(self, bus: Bus, group: str = "g", topics: tuple[str, ...] = ("metrics",), **options) -> Consumer:
        consumer = bus.consumer(group, topics, **options)
        self.members.append(consumer)
        return consumer


@pytest.fixture(params=["memory", "sqlite", "kafka"])
def ground(request: pytest.FixtureRequest, tmp_path) -> Iterator[Ground]:
    kind = request.param
    if kind == "memory":
        shared: list[MemoryBus] = []

        def open_memory(**options: int) -> Bus:
            if not shared:
                shared.append(MemoryBus(clock=CLOCK, **options))
            return shared[0]

        ground = Ground(kind, open_memory)
    elif kind == "sqlite":
        path = tmp_path / "bus.sqlite"
        ground = Ground(kind, lambda **options: SqliteBus(path, clock=CLOCK, mountinfo="", **options))
    else:
        from ingest.kafka_bus import KafkaBus

        bootstrap = request.getfixturevalue("kafka_bootstrap")
        prefix = request.getfixturevalue("kafka_prefix")
        ground = Ground(kind, lambda **options: KafkaBus(bootstrap, prefix=prefix, clock=CLOCK, **options))
    yield ground
    for member in ground.members:
        member.close()
    for bus in ground.opened:
        bus.close()


def send(bus: Bus, count: int, *, topic: str = "metrics", keys: int = 3, first: int = 0) -> None:
    producer = bus.producer()
    for number in range(first, first + count):
        producer.send(topic, f"job-{number % keys}", [("n", b"%d" % number)], b"%d" % number)
    producer.flush(DEADLINE_SECONDS)
    producer.close()


def take(consumer: Consumer, count: int, *, records_max: int = 100) -> list[Record]:
    """Poll until `count` records came."""
    records: list[Record] = []
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while len(records) < count:
        assert CLOCK.monotonic() < deadline, f"{len(records)} of {count} records"
        records += consumer.poll(min(records_max, count - len(records)), 0.2)
    return records


def settle(members: list[Consumer], *, owned: int) -> None:
    """Poll all members in threads until together they own `owned` partitions, each of them at least one."""
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    errors: list[BaseException] = []

    def drive(member: Consumer) -> None:
        try:
            while CLOCK.monotonic() < deadline and not done():
                assert member.poll(1, 0.1) == []
        except BaseException as error:
            errors.append(error)
            raise

    def done() -> bool:
        shares = [member.assignment() for member in members]
        return all(shares) and sum(map(len, shares)) == owned and len(frozenset().union(*shares)) == owned

    threads = [threading.Thread(target=drive, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert done(), [member.assignment() for member in members]


def values(records: list[Record]) -> list[int]:
    return sorted(int(record.value) for record in records)


def test_records_of_one_key_arrive_whole_and_in_the_order_sent(ground: Ground) -> None:
    bus = ground.bus(partitions=3)
    send(bus, 200, keys=5)
    records = take(ground.join(bus), 200)
    assert values(records) == list(range(200))
    for key in {record.key for record in records}:
        numbers = [int(record.value) for record in records if record.key == key]
        assert numbers == sorted(numbers)
    first = min(records, key=lambda record: int(record.value))
    assert first.headers == (("n", b"0"),)
    assert first.topic == "metrics"
    assert abs(first.appended_at - CLOCK.now()) < 120.0
    for record in records:
        assert record.partition == partition_of(record.key, 3)
    by_place: dict[TopicPartition, list[int]] = {}
    for record in records:
        by_place.setdefault(record.place, []).append(record.offset)
    assert all(offsets == list(range(len(offsets))) for offsets in by_place.values())


def test_poll_returns_at_most_records_max(ground: Ground) -> None:
    bus = ground.bus()
    send(bus, 30)
    consumer = ground.join(bus)
    records: list[Record] = []
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while len(records) < 30 and CLOCK.monotonic() < deadline:
        batch = consumer.poll(7, 0.2)
        assert len(batch) <= 7
        records += batch
    assert values(records) == list(range(30))


def test_what_was_polled_but_not_committed_is_delivered_again(ground: Ground) -> None:
    bus = ground.bus()
    send(bus, 10)
    first = ground.join(bus)
    assert values(take(first, 10)) == list(range(10))
    first.close()
    assert values(take(ground.join(bus), 10)) == list(range(10))


def test_commit_covers_exactly_what_poll_returned(ground: Ground) -> None:
    bus = ground.bus(partitions=1)
    send(bus, 20)
    first = ground.join(bus)
    assert values(take(first, 8)) == list(range(8))
    first.commit()
    assert values(take(first, 5)) == list(range(8, 13))
    first.close()
    assert values(take(ground.join(bus), 12)) == list(range(8, 20))


def test_groups_do_not_disturb_each_other(ground: Ground) -> None:
    bus = ground.bus()
    send(bus, 6)
    one = ground.join(bus, "one")
    take(one, 6)
    one.commit()
    assert values(take(ground.join(bus, "two"), 6)) == list(range(6))
    assert one.poll(10, 0.2) == []


def test_two_members_share_the_partitions_and_the_last_one_gets_all_back(ground: Ground) -> None:
    bus = ground.bus(partitions=4)
    calls: list[tuple[str, int]] = []
    first = ground.join(
        bus,
        topics=("metrics", "logs"),
        on_assign=lambda places: calls.append(("assign", threading.get_ident())),
        on_revoke=lambda places: calls.append(("revoke", threading.get_ident())),
    )
    settle([first], owned=8)
    second = ground.join(bus, topics=("metrics", "logs"))
    settle([first, second], owned=8)
    # Range assignment: the same partition numbers of both topics, so that a job's streams meet in one member.
    for member in (first, second):
        numbers = {
            topic: {p.partition for p in member.assignment() if p.topic == topic} for topic in ("metrics", "logs")
        }
        assert numbers["metrics"] == numbers["logs"] != set()
    send(bus, 40, keys=20)
    seen: list[Record] = []
    deadline = CLOCK.monotonic() + DEADLINE_SECONDS
    while len(seen) < 40 and CLOCK.monotonic() < deadline:
        seen += first.poll(100, 0.1) + second.poll(100, 0.1)
    assert values(seen) == list(range(40))
    first.commit()
    second.commit()
    second.close()
    settle([first], owned=8)
    assert [kind for kind, _ in calls][:2] == ["assign", "revoke"]


def test_callbacks_run_in_the_thread_that_polls_and_may_seek_and_commit(ground: Ground) -> None:
    bus = ground.bus(partitions=2)
    send(bus, 10, keys=10)
    threads: set[int] = set()
    stored: dict[TopicPartition, int] = {}

    def assigned(places: frozenset[TopicPartition]) -> None:
        threads.add(threading.get_ident())
        first.seek({place: 2 for place in places})

    def revoked(places: frozenset[TopicPartition]) -> None:
        threads.add(threading.get_ident())
        first.commit()
        stored.update((place, 0) for place in places)

    first = ground.join(bus, on_assign=assigned, on_revoke=revoked)
    records = take(first, 6)
    assert min(record.offset for record in records) == 2
    first.close()
    assert threads == {threading.get_ident()}
    assert set(stored) == {TopicPartition("metrics", 0), TopicPartition("metrics", 1)}
    second = ground.join(bus)
    settle([second], owned=2)
    assert second.lag() == {place: 0 for place in stored}


def test_seek_delivers_from_there_and_a_foreign_partition_is_refused(ground: Ground) -> None:
    bus = ground.bus(partitions=1)
    send(bus, 10)
    consumer = ground.join(bus)
    take(consumer, 10)
    place = TopicPartition("metrics", 0)
    consumer.seek({place: 4})
    assert consumer.lag() == {place: 6}
    assert values(take(consumer, 6)) == list(range(4, 10))
    with pytest.raises(BusMisconfigured, match="logs/0 is not assigned"):
        consumer.seek({TopicPartition("logs", 0): 0})


def test_a_sought_partition_keeps_its_stored_offset_until_polled(ground: Ground) -> None:
    bus = ground.bus(partitions=1)
    send(bus, 10)
    first = ground.join(bus)
    take(first, 6)
    first.commit()
    first.seek({TopicPartition("metrics", 0): 0})
    first.commit()
    first.close()
    assert values(take(ground.join(bus), 4)) == list(range(6, 10))


def test_lag_counts_what_was_not_given_yet(ground: Ground) -> None:
    bus = ground.bus(partitions=1)
    consumer = ground.join(bus)
    settle([consumer], owned=1)
    place = TopicPartition("metrics", 0)
    assert consumer.lag() == {place: 0}
    send(bus, 9)
    assert consumer.lag() == {place: 9}
    take(consumer, 4)
    assert consumer.lag() == {place: 5}


def test_a_group_that_starts_latest_stores_that_decision_at_once(ground: Ground) -> None:
    bus = ground.bus()
    send(bus, 6, keys=6)
    first = ground.join(bus, start="latest")
    settle([first], owned=2)
    first.close()  # never polled a record, never committed
    send(bus, 6, keys=6, first=100)
    second = ground.join(bus, start="latest")
    assert values(take(second, 6)) == list(range(100, 106))


def test_a_full_buffer_refuses_the_message_and_keeps_the_others(ground: Ground) -> None:
    bus = ground.open(buffered_max=5)
    ground.opened.append(bus)
    producer = bus.producer()  # no topics yet: nothing can be delivered
    for number in range(5):
        producer.send("metrics", "job", [], b"%d" % number)
    with pytest.raises(BusFull, match="5 messages wait"):
        producer.send("metrics", "job", [], b"5")
    bus.create_topics(1)
    producer.flush(DEADLINE_SECONDS)
    producer.send("metrics", "job", [], b"6")
    producer.flush(DEADLINE_SECONDS)
    producer.close()
    producer.close()
    assert values(take(ground.join(bus), 6)) == [0, 1, 2, 3, 4, 6]


def test_flushing_to_a_topic_that_does_not_exist_says_how_to_create_it(ground: Ground) -> None:
    bus = ground.open()
    ground.opened.append(bus)
    producer = bus.producer()
    producer.send("metrics", "job", [], b"0")
    with pytest.raises((BusMisconfigured, BusUnavailable), match=r"create.topics|topics create"):
        producer.flush(1.0)
    bus.create_topics(1)
    producer.flush(DEADLINE_SECONDS)
    producer.close()


def test_oversized_messages_and_unknown_topics_are_refused_at_send(ground: Ground) -> None:
    bus = ground.bus()
    producer = bus.producer()
    with pytest.raises(BusMisconfigured, match="over the limit"):
        producer.send("metrics", "job", [], b"x" * (MESSAGE_BYTES_MAX + 1))
    with pytest.raises(BusMisconfigured, match="headers of"):
        producer.send("metrics", "job", [("h", b"x" * 40_000)], b"")
    with pytest.raises(BusMisconfigured, match="there is no topic 'metric'"):
        producer.send("metric", "job", [], b"")
    producer.send("metrics", "job", [("h", b"x" * 30_000)], os.urandom(MESSAGE_BYTES_MAX))  # the largest one passes
    producer.flush(DEADLINE_SECONDS)
    producer.close()
    (record,) = take(ground.join(bus), 1)
    assert len(record.value) == MESSAGE_BYTES_MAX
    with pytest.raises(BusMisconfigured, match="closed"):
        producer.send("metrics", "job", [], b"")


def test_keys_and_headers_that_are_no_text_come_back_as_they_were(ground: Ground) -> None:
    bus = ground.bus()
    key = b"\xff\x00job".decode("utf-8", "surrogateescape")
    producer = bus.producer()
    producer.send("metrics", key, [("a", b"\xff\x00"), ("a", b""), ("ü", b"2")], b"\x00\xff")
    producer.flush(DEADLINE_SECONDS)
    producer.close()
    (record,) = take(ground.join(bus), 1)
    assert (record.key, record.value) == (key, b"\x00\xff")
    assert record.headers == (("a", b"\xff\x00"), ("a", b""), ("ü", b"2"))


def test_creating_topics_again_changes_nothing_and_job_topics_stay_equal(ground: Ground) -> None:
    bus = ground.bus(partitions=3)
    send(bus, 5)
    bus.create_topics(1)
    bus.create_topics(7)
    consumer = ground.join(bus, topics=("metrics", "logs", "events"))
    settle_records = take(consumer, 5)
    assert values(settle_records) == list(range(5))
    assert len(consumer.assignment()) == 9


def test_closed_twice_is_closed_once_and_a_closed_consumer_says_so(ground: Ground) -> None:
    bus = ground.bus()
    revoked: list[frozenset[TopicPartition]] = []
    consumer = ground.join(bus, on_revoke=revoked.append)
    settle([consumer], owned=2)
    consumer.close()
    consumer.close()
    assert len(revoked) == 1
    with pytest.raises(BusMisconfigured, match="closed"):
        consumer.poll(1, 0.0)
