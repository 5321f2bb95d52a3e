"""`transom replay`: the live pipeline's detection over a recorded run, under the recording's own clock."""

from __future__ import annotations

from collections.abc import Iterable

from detectors.clues import Place
from detectors.verdict import VERDICT_TYPES
from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import JOB_TOPICS
from pipelines.detection import Detection
from pipelines.recorded_messages import RecordedMessage
from pipelines.recording import in_bus_order
from pipelines.replayed import Replayed
from pipelines.room_configs import detector_config
from pipelines.rule_folder import rules_for
from pipelines.settings import Settings

CONCLUDE_SECONDS = 0.05  # as often as the service looks
AFTERWARDS_SECONDS = 10.0  # what only time decides (silence, coalescing) is decided within it


def replay_records(records: Iterable[Record], settings: Settings) -> Replayed:
    """Replay the records of a recording as they were recorded."""
    return replay_messages(in_bus_order(records), settings)


def replay_messages(messages: Iterable[RecordedMessage | Record], settings: Settings) -> Replayed:
    """Feed what a recording holds, in the order of the bus; time is what the bus had stamped on it."""
    detection = Detection(detector_config(settings), rules_for(settings.detect.rules_dir))
    codec = Codec(VERDICT_TYPES)
    result = Replayed()
    concluded_at = now = 0.0
    for record in messages:
        if isinstance(record, Record) and record.topic == "verdicts":
            result.live.append(codec.decode(record.headers, record.value))
        if record.topic not in JOB_TOPICS:
            continue
        at = record.appended_at
        if at > now:
            now = at
        if isinstance(record, Record):
            trouble = detection.feed(record)
        else:
            place = Place(record.topic, record.partition, record.offset, at)
            trouble = detection.hear(record.value, place, at)
        result.unreadable += trouble is not None
        if now - concluded_at >= CONCLUDE_SECONDS:
            result.say(detection.conclude(now), now)
            concluded_at = now
    for tick in range(int(AFTERWARDS_SECONDS / CONCLUDE_SECONDS)):
        at = now + tick * CONCLUDE_SECONDS
        result.say(detection.conclude(at), at)
    return result
