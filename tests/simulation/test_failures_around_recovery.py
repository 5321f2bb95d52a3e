"""Failures of what is around recovery, one named test each: its disk, its bus, a stopped rank.

The numbers are those of docs/recovery.md. The disk is a real small one, the stopped rank a real process.
"""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.memory_bus import MemoryBus
from pipelines.places import Places
from pipelines.recover import Recover
from pipelines.settings import Settings
from recovery.action import RECOVERY_TYPES
from recovery.backend import NoCheckpoints, StartRequest
from recovery.calls import Result
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore, StoreError
from recovery.workers import ThreadWorkers
from tests.launcher_lab import JOB as LAB_JOB
from tests.launcher_lab import lab_in_short_folder, wait_for
from tests.machine import small_disk
from tests.recovery_world import World, verdict

DEADLINE_SECONDS = 60.0


@pytest.fixture
def two_megabytes(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "2m") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """Leave no room on the disk of that folder."""
    file = folder / "others"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, b"\0" * 4096)
    except OSError:
        return file
    finally:
        os.close(descriptor)


def send_until_it_is_full(world: World) -> None:
    """What SQLite has for itself already is used up first."""
    for number in range(5000):
        world.send(verdict("rank_lost", f"v{number}"))
        world.round(0.0)


def test_13_on_a_full_disk_nothing_is_done_and_with_room_again_it_is_done_once(two_megabytes: Path) -> None:
    world = World(two_megabytes)
    others = fill(two_megabytes)
    try:
        with pytest.raises(StoreError, match=r"cannot be relied on .*so nothing is done; make room"):
            send_until_it_is_full(world)
        assert len(world.attempts()) <= 2, "what was written before the disk was full may be done, once"
        others.unlink()
        world.store.close()
        world.begin_life()
        world.offset = 0
        world.run(100)
        assert world.attempts() == [1, 2]
    finally:
        world.store.close()


def test_14_garbage_on_the_bus_is_a_dead_letter_and_the_verdict_behind_it_is_taken(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    recover = Recover(Settings(state_dir=tmp_path), Places(tmp_path, tmp_path), bus, clock, Random(0))
    producer, consumer = bus.producer(), bus.consumer("recover", ("verdicts", "commands"))
    good = Codec(RECOVERY_TYPES).encode(verdict("rank_lost"))
    unknown = (("ce_specversion", b"1.0"), ("ce_type", b"org.transom.verdict.v99"), ("content-type", b"text/html"))
    for headers, value in (
        ((), b"\xff\xfe"),
        (good.headers, b"{}"),
        (good.headers, b"[" * 5000),
        (unknown, good.value),
    ):
        producer.send("verdicts", "job", headers, value)
    producer.send(good.topic, good.key, good.headers, good.value)
    producer.flush(1.0)
    recover._read(consumer, producer)
    letters = bus.consumer("test", ("dead-letters",)).poll(100, 0.0)
    assert len(letters) == 4
    assert [entry.verdict.verdict_id for entry in recover._store.new_verdicts(10)] == ["v"]
    assert consumer.poll(100, 0.0) == [], "all of it is committed"
    recover._proving.close()
    recover._store.close()


def test_20_a_stopped_rank_is_killed_for_a_hang_and_the_job_runs_again(tmp_path: Path) -> None:
    with lab_in_short_folder(nodes=2) as lab:
        lab.launch_all(lab.script("import time; time.sleep(600)"))
        lab.backend.start(StartRequest(LAB_JOB, 1, "t1"))
        before = lab.pids()
        os.kill(before[1], signal.SIGSTOP)
        wait_for(lambda: "stopped" in {rank.state for rank in lab.backend.observe(LAB_JOB).ranks}, "it is stopped")
        store = RecoveryStore(tmp_path / "recovery.sqlite", durable=False)
        config = replace(PolicyConfig(), stop_grace_seconds=30.0, evidence_seconds_max=0.5)
        workers: ThreadWorkers[Result] = ThreadWorkers()
        controller = Controller(store, lab.backend, NoCheckpoints(), config, random.Random(1), workers)
        controller.accept(verdict("hang", job=LAB_JOB, culprits=(), at=lab.clock.now()), lab.clock.now())

        def runs_again() -> bool:
            controller.tick(lab.clock.now())
            return lab.backend.observe(LAB_JOB).attempt == 2 and len(lab.pids()) == 2

        wait_for(runs_again, "attempt 2 runs", DEADLINE_SECONDS)
        assert not set(lab.pids().values()) & set(before.values())
        store.close()
