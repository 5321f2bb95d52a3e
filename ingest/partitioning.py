"""Which partition a key belongs to, which member owns it, how many partitions a topic has: Kafka's own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .bus import BusMisconfigured, TopicPartition
from .events import JOB_TOPICS, TOPICS, Topic

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(raw: bytes) -> int:
    """MurmurHash2 as Apache Kafka's clients compute it, unsigned 32 bits."""
    length = len(raw)
    state = (_SEED ^ length) & _MASK
    whole = length & ~3
    for start in range(0, whole, 4):
        word = (int.from_bytes(raw[start : start + 4], "little") * _MULTIPLIER) & _MASK
        word = ((word ^ (word >> 24)) * _MULTIPLIER) & _MASK
        state = ((state * _MULTIPLIER) & _MASK) ^ word
    if length > whole:
        state ^= int.from_bytes(raw[whole:], "little")
        state = (state * _MULTIPLIER) & _MASK
    state = ((state ^ (state >> 13)) * _MULTIPLIER) & _MASK
    return state ^ (state >> 15)


def key_bytes(key: str) -> bytes:
    """A key as it lies on the bus. Keys that were no UTF-8 come back as the bytes they were."""
    return key.encode("utf-8", "surrogateescape")


def key_text(raw: bytes | None) -> str:
    """The inverse of `key_bytes`; a message without a key has the empty one."""
    return (raw or b"").decode("utf-8", "surrogateescape")


def partition_of(key: str, partitions: int) -> int:
    """The partition of `key`, as Kafka's default partitioner chooses it."""
    assert partitions > 0
    return (murmur2(key_bytes(key)) & 0x7FFFFFFF) % partitions


def assign_ranges(
    members: Sequence[tuple[str, Sequence[str]]], partitions: Mapping[Topic, int]
) -> dict[str, frozenset[TopicPartition]]:
    """Kafka's range assignor: for each topic, consecutive partitions to its members in the order given.

    Members that subscribe to the same topics therefore get the same partition numbers of each, which is what
    lets one member see all streams of a job.
    """
    owned: dict[str, set[TopicPartition]] = {member: set() for member, _ in members}
    for topic, count in partitions.items():
        interested = [member for member, topics in members if topic in topics]
        if not interested:
            continue
        share, rest = divmod(count, len(interested))
        first = 0
        for index, member in enumerate(interested):
            size = share + (1 if index < rest else 0)
            owned[member].update(TopicPartition(topic, number) for number in range(first, first + size))
            first += size
    return {member: frozenset(places) for member, places in owned.items()}


def plan_topics(existing: Mapping[Topic, int], partitions: int) -> dict[Topic, int]:
    """The topics to create, with their partition counts.

    Raises BusMisconfigured where metrics, logs and events exist with different counts.
    """
    if partitions < 1:
        raise BusMisconfigured(f"topics need at least one partition, not {partitions}")
    counts = {topic: existing[topic] for topic in JOB_TOPICS if topic in existing}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{topic} has {count}" for topic, count in counts.items())
        raise BusMisconfigured(
            f"metrics, logs and events must have equal partition counts, but {found}; "
            "add partitions to the smaller ones, or delete them and create the topics again"
        )
    of_jobs = next(iter(counts.values()), partitions)
    return {topic: of_jobs if topic in JOB_TOPICS else partitions for topic in TOPICS if topic not in existing}
