"""A detection state that is damaged or of another version is read anew from the bus; one that cannot be saved waits."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import pipelines.detect
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.events import JOB_TOPICS
from ingest.memory_bus import MemoryBus
from pipelines.detect import STATE, Detect, write_state
from pipelines.detection import PartitionState
from pipelines.places import Places
from pipelines.settings import load_settings
from tests.synthetic_job import SyntheticJob

CODEC = Codec(VERDICT_TYPES)


class Life:
    """One life of the service on a bus that outlives it."""

    def __init__(self, folder: Path, bus: MemoryBus, clock: ManualClock) -> None:
        places = Places(folder / "state", folder / "run")
        settings = load_settings(overrides={"state_dir": places.state, "detect": {"ensemble": False}})
        self.file = places.detection / "partition-0.npz"
        self.clock = clock
        self.detect = Detect(settings, places, bus, clock)
        self.producer = self.detect._producer = bus.producer()
        self.consumer = bus.consumer(
            "detect", JOB_TOPICS, on_assign=self.detect._assigned, on_revoke=self.detect._revoked
        )

    def pass_for(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.1)):
            self.detect._pass(self.consumer, self.producer)
            self.clock.advance(0.1)


@pytest.fixture
def world(tmp_path: Path) -> tuple[MemoryBus, Callable[[], Life], SyntheticJob]:
    job = SyntheticJob(seed=5).start().train(60)
    clock = ManualClock(job.at)
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    return bus, lambda: Life(tmp_path, bus, clock), job


def publish(bus: MemoryBus, job: SyntheticJob, published: int = 0) -> int:
    producer = bus.producer()
    messages = job.ordered()
    for message in messages[published:]:
        producer.send(*CODEC.encode(message))
    producer.close()
    return len(messages)


def said(bus: MemoryBus) -> list[Verdict]:
    consumer = bus.consumer("test", ("verdicts",))
    found = [CODEC.decode(record.headers, record.value) for record in consumer.poll(1_000, 0.0)]
    consumer.close()
    return [verdict for verdict in found if isinstance(verdict, Verdict)]


def of_another_version(path: Path) -> None:
    state = PartitionState(version=99, offsets={"events/0": 10_000}, merges={}, detectors={})
    np.savez(path, allow_pickle=False, **{STATE: np.frombuffer(msgspec.json.encode(state), np.uint8)})


def with_one_job_missing(path: Path) -> None:
    with np.load(path) as arrays:
        state = msgspec.json.decode(arrays[STATE].tobytes(), type=PartitionState)
    write_state(path.parent, 0, msgspec.structs.replace(state, detectors={}), {})


def flipped(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:200] + bytes(byte ^ 0x55 for byte in content[200:400]) + content[400:])


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no archive": lambda path: path.write_bytes(b"PK\x03\x04 and nothing more"),
    "flipped": flipped,
    "another version": of_another_version,
    "a job without its detector": with_one_job_missing,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_of_no_use_is_told_in_one_line_and_the_bus_is_read_anew(
    damage: str,
    world: tuple[MemoryBus, Callable[[], Life], SyntheticJob],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bus, life, job = world
    publish(bus, job)
    first = life()
    first.pass_for(8.0)
    first.consumer.close()
    DAMAGES[damage](first.file)
    capsys.readouterr()
    second = life()
    before = len(job.ordered())
    job.kill(2)
    publish(bus, job, before)
    second.pass_for(10.0)
    told = capsys.readouterr().err
    assert told.count("cannot be used") == 1
    assert "reading the bus anew" in told
    assert {verdict.fault_class for verdict in said(bus)} == {"rank_lost"}  # it knows the attempt from before
    second.consumer.close()
    third = life()
    third.pass_for(1.0)
    assert "cannot be used" not in capsys.readouterr().err
    third.consumer.close()


def test_a_full_disk_is_told_once_commits_nothing_and_leaves_no_half_state(
    world: tuple[MemoryBus, Callable[[], Life], SyntheticJob],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, life, job = world
    published = publish(bus, job)
    running = life()
    full = [True]
    sync = pipelines.detect.os.fsync

    def fsync(descriptor: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(pipelines.detect.os, "fsync", fsync)
    for _ in range(3):
        running.pass_for(6.0)
        job.train(20)
        published = publish(bus, job, published)
    assert capsys.readouterr().err.count("cannot be saved") == 1
    assert list(running.file.parent.iterdir()) == []
    full[0] = False
    job.train(20)
    publish(bus, job, published)
    running.pass_for(6.0)
    assert [path.name for path in running.file.parent.iterdir()] == ["partition-0.npz"]
    running.consumer.close()


def test_what_a_kill_left_half_written_is_taken_away(
    world: tuple[MemoryBus, Callable[[], Life], SyntheticJob],
) -> None:
    _, life, _ = world
    first = life()
    first.consumer.close()
    half = first.file.with_name("partition-0.npz.123.tmp")
    half.write_bytes(b"half")
    life().consumer.close()
    assert not half.exists()
