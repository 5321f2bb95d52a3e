"""Kafka's rules, as every bus applies them."""

import pytest

from ingest.bus import BusMisconfigured, TopicPartition
from ingest.events import TOPICS
from ingest.partitioning import assign_ranges, key_bytes, key_text, murmur2, partition_of, plan_topics


@pytest.mark.parametrize(
    ("raw", "expected"),
    [  # from Apache Kafka's own UtilsTest.testMurmur2, which has them signed
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(raw: bytes, expected: int) -> None:
    assert murmur2(raw) == expected & 0xFFFFFFFF


def test_a_key_always_has_the_same_partition_within_the_count() -> None:
    for key in ("demo", "", "ü", b"\xff".decode("utf-8", "surrogateescape")):
        assert partition_of(key, 1) == 0
        assert partition_of(key, 7) == partition_of(key, 7) < 7
        assert key_text(key_bytes(key)) == key
    assert key_text(None) == ""


def test_ranges_give_each_member_the_same_numbers_of_each_topic() -> None:
    shares = assign_ranges(
        [("a", ("metrics", "logs")), ("b", ("metrics", "logs")), ("c", ("verdicts",))],
        {"metrics": 3, "logs": 3, "verdicts": 1, "actions": 4},
    )
    assert shares["a"] == {TopicPartition(topic, number) for topic in ("metrics", "logs") for number in (0, 1)}
    assert shares["b"] == {TopicPartition("metrics", 2), TopicPartition("logs", 2)}
    assert shares["c"] == {TopicPartition("verdicts", 0)}


def test_more_members_than_partitions_leave_the_last_ones_idle() -> None:
    shares = assign_ranges([("a", ("logs",)), ("b", ("logs",))], {"logs": 1})
    assert shares == {"a": {TopicPartition("logs", 0)}, "b": frozenset()}


def test_new_topics_follow_the_job_topics_that_exist() -> None:
    assert plan_topics({}, 2) == dict.fromkeys(TOPICS, 2)
    planned = plan_topics({"metrics": 4}, 2)
    assert (planned["logs"], planned["events"], planned["verdicts"]) == (4, 4, 2)
    assert plan_topics(dict.fromkeys(TOPICS, 3), 9) == {}


def test_unequal_job_topics_and_no_partitions_at_all_are_refused() -> None:
    with pytest.raises(BusMisconfigured, match="metrics has 4, logs has 2"):
        plan_topics({"metrics": 4, "logs": 2}, 4)
    with pytest.raises(BusMisconfigured, match="at least one partition"):
        plan_topics({}, 0)
