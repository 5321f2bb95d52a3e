"""Recorded runs: the same records come back, a kill costs at most the end, nothing is there twice."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.bus import Record
from ingest.clock import ManualClock
from ingest.events import FaultInjected
from pipelines import recording
from pipelines.recording import (
    MESSAGES_FILE,
    RUN_FILE,
    NotARecording,
    RecordingWriter,
    in_bus_order,
    read_recording,
    read_run,
    recording_folder_of,
)
from pipelines.recordings import OPEN_MAX, Recordings
from tests.ledger_messages import CODEC, JOB, Tape, attempt_started, logs, metrics, verdict


def fault(step: int = 3) -> FaultInjected:
    return FaultInjected(
        job=JOB, attempt=1, rank=2, node="node-1", sequence=step, at=1005.0, fault="kill", parameters={"step": 3.0}
    )


def a_run() -> Tape:
    tape = Tape()
    tape.tell(
        attempt_started(), *(metrics(step) for step in range(20)), logs("größe", "two\nlines"), fault(), verdict()
    )
    return tape


def essence(record: Record) -> tuple:
    return (
        record.place,
        record.offset,
        record.key,
        record.value,
        record.appended_at,
        CODEC.decode(record.headers, record.value),
    )


def test_what_is_read_is_what_was_written_in_the_same_order(tmp_path: Path) -> None:
    tape = a_run()
    with RecordingWriter(tmp_path, JOB, now=1000.0) as writer:
        for record in tape.records:
            writer.write(record)
    assert [essence(record) for record in read_recording(tmp_path)] == [essence(record) for record in tape.records]
    run = read_run(tmp_path)
    assert (run.format, run.version, run.job, run.created_at) == ("transom-recording", 1, JOB, 1000.0)
    assert run.labels == (fault(),)


def side_by_side() -> list[Record]:
    tape = Tape()
    for step in range(20):
        tape.tell(msgspec.structs.replace(metrics(step), at=1000.0 + step), logs("a", at=1000.5 + step))
    return tape.records


def test_topics_that_a_recorder_took_one_after_another_are_put_side_by_side() -> None:
    records = side_by_side()
    behind = sorted(records, key=lambda record: (record.topic, record.offset))
    assert behind != records
    assert list(in_bus_order(behind)) == records


def test_a_partition_keeps_its_own_order_whatever_its_times_say() -> None:
    records = side_by_side()
    set_back = [replace(record, appended_at=1.0) if record.offset == 7 else record for record in records]
    for topic in ("logs", "metrics"):
        assert [record.offset for record in in_bus_order(set_back) if record.topic == topic] == list(range(20))


def test_no_more_records_are_held_back_than_said() -> None:
    taken = 0

    def counted() -> Iterator[Record]:
        nonlocal taken
        for record in side_by_side():
            taken += 1
            yield record

    next(in_bus_order(counted(), held_max=5))
    assert taken == 6


def test_a_line_is_json_with_the_documented_keys_and_the_file_is_gzip(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, JOB, now=1000.0) as writer:
        writer.write(Tape().tell(verdict())[0])
    (line,) = gzip.decompress((tmp_path / MESSAGES_FILE).read_bytes()).splitlines()
    fields = json.loads(line)
    assert set(fields) == {"topic", "partition", "offset", "key", "type", "appended_at", "value"}
    assert fields["value"]["fault_class"] == "rank_lost"
    assert json.loads((tmp_path / RUN_FILE).read_text())["format"] == "transom-recording"


def test_members_are_rotated_and_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MEMBER_BYTES_MAX", 2_000)
    monkeypatch.setattr(recording, "READ_BYTES", 100)
    tape = a_run()
    with RecordingWriter(tmp_path, JOB, now=1000.0) as writer:
        for record in tape.records:
            writer.write(record)
    raw = (tmp_path / MESSAGES_FILE).read_bytes()
    assert raw.count(b"\x1f\x8b\x08") > 2
    assert len(gzip.decompress(raw).splitlines()) == len(tape.records)
    assert len(list(read_recording(tmp_path))) == len(tape.records)


def test_a_kill_loses_only_what_was_not_flushed_and_going_on_doubles_nothing(tmp_path: Path) -> None:
    tape = a_run()
    half = len(tape.records) // 2
    writer = RecordingWriter(tmp_path, JOB, now=1000.0)
    for record in tape.records[:half]:
        writer.write(record)
    writer.flush()
    for record in tape.records[half:]:
        writer.write(record)
    path = tmp_path / MESSAGES_FILE
    flushed = path.read_bytes()  # what is in the file at a kill: the rest is in the writer's memory
    writer.abandon()
    path.write_bytes(flushed)
    assert len(list(read_recording(tmp_path))) == half
    with RecordingWriter(tmp_path, JOB, now=2000.0) as again:
        for record in tape.records:
            again.write(record)
    assert [essence(record) for record in read_recording(tmp_path)] == [essence(record) for record in tape.records]
    assert len(gzip.decompress((tmp_path / MESSAGES_FILE).read_bytes()).splitlines()) == len(tape.records)
    assert read_run(tmp_path).created_at == 1000.0


@pytest.mark.parametrize("cut", range(1, 60, 4))
def test_a_file_torn_anywhere_gives_its_whole_lines_and_is_mended(tmp_path: Path, cut: int) -> None:
    tape = a_run()
    with RecordingWriter(tmp_path, JOB, now=1000.0) as writer:
        for record in tape.records:
            writer.write(record)
            writer.flush()
    path = tmp_path / MESSAGES_FILE
    path.write_bytes(path.read_bytes()[: -cut * 11])
    kept = list(read_recording(tmp_path))
    assert [essence(record) for record in kept] == [essence(record) for record in tape.records[: len(kept)]]
    with RecordingWriter(tmp_path, JOB, now=1000.0) as writer:
        for record in tape.records:
            writer.write(record)
    assert [record.value for record in read_recording(tmp_path)] == [record.value for record in tape.records]


@given(value=st.binary(max_size=60) | st.sampled_from([b"null", b" {}", b"{}\n", b'{"a":\n1}', b"1e400", b'"\\ud800"']))
def test_any_bytes_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, value: bytes) -> None:
    folder = tmp_path_factory.mktemp("r")
    record = Record("events", 0, 7, "k\udc80", (("ce_type", b"org.transom.x.v1"),), value, 1.0)
    with RecordingWriter(folder, JOB, now=0.0) as writer:
        writer.write(record)
    (back,) = read_recording(folder)
    assert (back.value, back.offset) == (value, 7)


def test_a_record_without_a_type_comes_back_without_one(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, JOB, now=0.0) as writer:
        writer.write(Record("events", 0, 0, JOB, (), b"{}", 1.0))
    (back,) = read_recording(tmp_path)
    assert back.headers == ()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "cannot be read"),
        ({RUN_FILE: b"nonsense"}, "not the file of a recorded run"),
        ({RUN_FILE: b'{"format":"other","version":1,"job":"j","created_at":0}'}, "format 'other'"),
        ({RUN_FILE: b'{"format":"transom-recording","version":9,"job":"j","created_at":0}'}, "version 9"),
        ({RUN_FILE: b'{"format":"transom-recording","version":1,"job":"j","created_at":0}'}, "no messages"),
    ],
)
def test_a_folder_that_is_no_recording_is_refused_at_once(tmp_path: Path, files: dict, words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(NotARecording, match=words) as caught:
        read_recording(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"{}",
        b'{"topic":"nowhere","partition":0,"offset":0,"key":"","appended_at":0,"value":{}}',
        b'{"topic":"events","partition":0,"offset":0,"key":"","appended_at":0,"value_base64":"*"}',
    ],
)
def test_a_damaged_line_is_said_with_its_file(tmp_path: Path, line: bytes) -> None:
    RecordingWriter(tmp_path, JOB, now=0.0).close()
    (tmp_path / MESSAGES_FILE).write_bytes(gzip.compress(line + b"\n"))
    with pytest.raises(NotARecording, match="damaged"):
        list(read_recording(tmp_path))


def test_another_job_does_not_write_into_a_recording(tmp_path: Path) -> None:
    RecordingWriter(tmp_path, JOB, now=0.0).close()
    with pytest.raises(NotARecording, match="give another folder"):
        RecordingWriter(tmp_path, "other", now=0.0)


@pytest.mark.parametrize("job", ["../up", "a/b", ".", "..", "", "ü", "x" * 300, "a\0b", "-rf"])
def test_any_job_name_is_one_folder_below(tmp_path: Path, job: str) -> None:
    folder = recording_folder_of(tmp_path, job)
    assert folder.parent == tmp_path
    folder.mkdir()
    assert recording_folder_of(tmp_path, "gpt-small.1") == tmp_path / "gpt-small.1"


def test_every_job_has_a_recording_of_its_own_however_many_there_are(tmp_path: Path) -> None:
    jobs = [f"job-{number}" for number in range(OPEN_MAX + 4)]
    recordings = Recordings(tmp_path, ManualClock(5.0))
    tape = Tape()
    for _ in range(2):
        for job in jobs:
            recordings.write([tape.raw("events", b"{}", key=job)])
        recordings.flush()
    recordings.close()
    assert all(len(list(read_recording(recording_folder_of(tmp_path, job)))) == 2 for job in jobs)


def test_without_a_folder_nothing_is_recorded(tmp_path: Path) -> None:
    recordings = Recordings(None, ManualClock(0.0))
    recordings.write(a_run().records)
    recordings.close()
    assert list(tmp_path.iterdir()) == []


def test_labels_are_written_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path, JOB, now=0.0)
    tape = Tape()
    for record in tape.tell(fault(1), fault(1), fault(2)):
        writer.write(record)
    assert [
        label.sequence
        for label in msgspec.json.decode((tmp_path / RUN_FILE).read_bytes(), type=recording.RunFile).labels
    ] == [1, 2]
    writer.close()
