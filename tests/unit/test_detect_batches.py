"""What is quicker says the same: messages observed in batches, recordings read as messages."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job_detector import JobDetector
from detectors.merge import Merge, Merged
from ingest.bus import Record
from ingest.codec import Codec, Undecodable
from ingest.events import Message
from pipelines.recorded_messages import RecordedMessage, read_messages
from pipelines.recording import RecordingWriter, in_bus_order, read_recording
from pipelines.replay import replay_messages, replay_records
from pipelines.settings import Settings
from tests.synthetic_job import SyntheticJob, with_places

PLAIN = DetectorConfig(ensemble=EnsembleConfig(on=False))
SIX_FAULTS = Path(__file__).resolve().parents[2] / "data" / "six-faults"


def two_attempts() -> SyntheticJob:
    """A slow rank, a death, another attempt with other ranks' steps, an evaluation, and a stop."""
    job = SyntheticJob(seed=5).start().train(50).train(20, slow={1: 1.9}).train(10).kill(2)
    job.restart(30)
    return job.train(40).stop(0, seconds=4.0).train(10).end()


def arrivals(*, late: int) -> list[Merged]:
    """In the merge's order; every `late`-th message of the first attempt comes again long after its time."""
    merge = Merge()
    placed = with_places(two_attempts().ordered())
    for message, place in placed:
        merge.put(message, place)
    merge.advance(1e9)
    told = merge.take()
    again = [msgspec.structs.replace(one, late=True) for one in told[: len(told) // 2 : late]]
    return [*told[: 2 * len(told) // 3], *again, *told[2 * len(told) // 3 :]]


@pytest.mark.parametrize("size", [1, 7, 400, 100_000])
def test_a_batch_of_messages_is_observed_as_one_after_another(size: int) -> None:
    told = arrivals(late=9)
    one, many = JobDetector("job", PLAIN), JobDetector("job", PLAIN)
    for begin in range(0, len(told), size):
        batch = told[begin : begin + size]
        for merged in batch:
            one.observe(merged.message, merged.place)
        many.observe_all(batch)
        until = batch[-1].message.at
        assert many.advance(until) == one.advance(until)
    (state, arrays), (mine, parts) = one.to_state(), many.to_state()
    assert mine == state
    assert all(np.array_equal(parts[name], array, equal_nan=array.dtype.kind == "f") for name, array in arrays.items())
    assert one.counts.older_attempts > 0
    assert one.counts.late > 0


def test_a_replay_of_messages_says_what_a_replay_of_records_says() -> None:
    settings = Settings()
    told = replay_messages(read_messages(SIX_FAULTS), settings)
    assert told.verdicts
    records = replay_records(read_recording(SIX_FAULTS), settings)
    assert (told.lines(), told.live) == (records.lines(), records.live)


def decoded(record: Record | RecordedMessage) -> Message | None:
    if isinstance(record, RecordedMessage):
        return record.value
    try:
        message: Message = Codec().decode(record.headers, record.value)
    except Undecodable:
        return None
    return message


def test_messages_are_those_of_the_records_and_what_is_none_stays_a_record(tmp_path: Path) -> None:
    records = list(read_recording(SIX_FAULTS))[:300]
    broken = [
        msgspec.json.encode({"job": "j"}), b"not json", b"\xff\xfe",
        b'{"job":"j","attempt":1,"rank":0,"node":"n","sequence":1,"at":1.0,"phase":"train","step":1,"steps":[1,2]}',
    ]  # fmt: skip
    sample = next(record for record in records if record.topic == "metrics")
    newest = max(record.offset for record in records if record.topic == "metrics")
    extra = [
        Record("metrics", sample.partition, newest + 1 + index, sample.key, sample.headers, value, 2e9 + index)
        for index, value in enumerate(broken)
    ]
    strange = tuple((name, b"org.transom.metrics.v9" if name == "ce_type" else raw) for name, raw in sample.headers)
    extra.append(Record("metrics", sample.partition, newest + 9, sample.key, strange, sample.value, 2e9 + 9))
    with RecordingWriter(tmp_path, "job", now=1.0) as writer:
        for record in [*records, *extra]:
            writer.write(record)
    as_records, as_messages = list(in_bus_order(read_recording(tmp_path))), list(read_messages(tmp_path))
    assert [(one.topic, one.partition, one.offset, one.appended_at) for one in as_messages] == [
        (one.topic, one.partition, one.offset, one.appended_at) for one in as_records
    ]
    assert [decoded(one) for one in as_messages] == [decoded(one) for one in as_records]
    assert [isinstance(one, Record) for one in as_messages[-5:]] == [True] * 5
    assert sum(isinstance(one, RecordedMessage) for one in as_messages) > 250
