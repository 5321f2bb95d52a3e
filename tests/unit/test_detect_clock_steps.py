"""Clocks that step: time that no bus has seen pass makes nobody silent, and nobody lost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.logs.rule_book import RuleBook
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import Message, Metrics
from pipelines.detection import Detection
from tests.synthetic_job import SyntheticJob

CODEC = Codec(VERDICT_TYPES)


def stepped(message: Message, seconds: float) -> Message:
    """The message as its producer stamps it whose clock is off."""
    changes: dict[str, object] = {"at": message.at + seconds}
    if isinstance(message, Metrics):
        changes["ended_at"] = tuple(at + seconds for at in message.ended_at)
    return msgspec.structs.replace(message, **changes)


def said_of(messages: list[Message], clock: Callable[[Message], float]) -> list[Verdict]:
    """Verdicts where the bus's clock is right, and producers' are off by what `clock` says."""
    detection = Detection(DetectorConfig(ensemble=EnsembleConfig(on=False)), RuleBook.shipped())
    offsets = {"metrics": 0, "logs": 0, "events": 0}
    said: list[Verdict] = []
    now = 0.0
    for message in messages:
        if message.at > now + 0.1:
            now = message.at
            said += detection.conclude(now)
        encoded = CODEC.encode(stepped(message, clock(message)))
        offset = offsets[encoded.topic]
        offsets[encoded.topic] += 1
        detection.feed(Record(encoded.topic, 0, offset, message.job, encoded.headers, encoded.value, message.at + 0.02))
    return said


@pytest.mark.parametrize("seconds", [90.0, -90.0, 3_600.0, -3_600.0])
@pytest.mark.parametrize("who", [("node0", "node1"), ("node1",)], ids=["all", "one"])
def test_a_clock_that_steps_makes_no_node_lost_and_no_rank_hang(who: tuple[str, ...], seconds: float) -> None:
    job = SyntheticJob(seed=5, at=100_000.0).start().train(80)
    at = job.at
    messages = job.train(150).ordered()
    said = said_of(messages, lambda message: seconds if message.node in who and message.at > at else 0.0)
    assert [verdict.fault_class for verdict in said] == []


def test_a_silence_that_the_bus_has_seen_too_is_one() -> None:
    job = SyntheticJob(seed=5, at=100_000.0).start().train(80)
    job.silent_nodes.add("node1")
    said = said_of(job.train(120).ordered(), lambda message: 0.0)
    assert said[0].fault_class == "node_lost"
    assert [culprit.node for culprit in said[0].culprits] == ["node1"]
