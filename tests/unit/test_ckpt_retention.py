"""Which checkpoints stay: the newest, the last verified, every thousandth, and what is being written right now."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckpt_engine.commit import retain
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.manifest import complete_steps, step_folder
from ckpt_engine.rejection import Rejection, add_rejection
from ckpt_engine.storage import Storage
from ckpt_engine.verification import VERIFIED, Verification, add_verification, read_verifications
from tests.ckpt_lab import RawRank, engine_in_thread, eventually, put_step

STORAGE = Storage()


def steps(directory: Path) -> list[int]:
    return [record.step for record in complete_steps(directory)]


def verify(directory: Path, step: int, attempt: int = 1) -> bool:
    return add_verification(directory, Verification(step, attempt, "20 steps without a fault"), STORAGE, "test")


def test_the_last_verified_step_is_never_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        put_step(tmp_path, step)
    verify(tmp_path, 10)
    verify(tmp_path, 20)
    assert retain(STORAGE, tmp_path, 2) == [10, 30]
    assert steps(tmp_path) == [20, 40, 50]
    put_step(tmp_path, 60)
    verify(tmp_path, 50)
    assert retain(STORAGE, tmp_path, 1) == [20, 40], "a newer one is verified, the older ones may go"
    assert steps(tmp_path) == [50, 60]


def test_a_verified_step_that_was_rejected_later_protects_nothing(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        put_step(tmp_path, step, attempt=1 if step < 40 else 2)
    verify(tmp_path, 10)
    verify(tmp_path, 20)
    add_rejection(tmp_path, Rejection(15, 1, "NaN"), STORAGE, "test")
    retain(STORAGE, tmp_path, 1)
    assert steps(tmp_path) == [10, 40]


def test_verifying_twice_is_verifying_once(tmp_path: Path) -> None:
    assert verify(tmp_path, 20)
    assert not verify(tmp_path, 20)
    assert verify(tmp_path, 20, attempt=2)
    assert [(entry.step, entry.attempt) for entry in read_verifications(tmp_path)] == [(20, 1), (20, 2)]


@pytest.mark.parametrize(
    "text", ["{", '{"verified": 3}', '{"verified": [{"step": 1}]}', '{"verified": [{"step": true}]}']
)
def test_unreadable_verifications_stop_the_cleaning(tmp_path: Path, text: str) -> None:
    """Which step is the last verified one is not known, so none may go."""
    for step in (10, 20, 30):
        put_step(tmp_path, step)
    (tmp_path / VERIFIED).write_text(text)
    with pytest.raises(CheckpointDamaged, match=r"verified\.json is not readable"):
        retain(STORAGE, tmp_path, 1)
    assert steps(tmp_path) == [10, 20, 30]


def test_every_nth_step_is_kept_for_ever(tmp_path: Path) -> None:
    for step in (900, 1000, 1100, 2000, 2100, 9999, 10_000, 10_100, 10_200):
        put_step(tmp_path, step)
    assert retain(STORAGE, tmp_path, 2, keep_every_steps=1000) == [900, 1100, 2100, 9999]
    assert steps(tmp_path) == [1000, 2000, 10_000, 10_100, 10_200]
    assert retain(STORAGE, tmp_path, 2) == [1000, 2000, 10_000], "once nobody asks for them any more they go"


def test_an_abandoned_or_rejected_nth_step_is_not_kept(tmp_path: Path) -> None:
    put_step(tmp_path, 1000)
    put_step(tmp_path, 3000)
    put_step(tmp_path, 2500, attempt=2)
    put_step(tmp_path, 2600, attempt=2)
    assert retain(STORAGE, tmp_path, 1, keep_every_steps=1000) == [2500, 3000]
    assert steps(tmp_path) == [1000, 2600]


def test_a_stale_highest_step_of_an_older_attempt_goes_and_the_newest_stay(tmp_path: Path) -> None:
    put_step(tmp_path, 99_999, attempt=1)
    for step in (900, 1000, 9999, 10_000):
        put_step(tmp_path, step, attempt=2)
    assert retain(STORAGE, tmp_path, 3) == [900, 99_999]
    assert steps(tmp_path) == [1000, 9999, 10_000]


def test_busy_steps_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put_step(tmp_path, step)
    assert retain(STORAGE, tmp_path, 1, busy=frozenset({10})) == [20]


@pytest.mark.parametrize("name", [".claim-0123456789abcdef-a0001", ".shard-00000-a0001.safetensors.node-a7.tmp"])
def test_a_step_that_is_being_written_stays_whatever_the_writer_is_called(tmp_path: Path, name: str) -> None:
    """A node named `node-a7` is not attempt 7."""
    for step in (10, 20):
        put_step(tmp_path, step)
    step_folder(tmp_path, 30).mkdir()
    path = step_folder(tmp_path, 30) / name
    path.touch()
    inside = step_folder(tmp_path, 20) / ".shard-00001-a0002.safetensors.node-a0.tmp"
    inside.touch()
    assert retain(STORAGE, tmp_path, 1) == [10]
    assert path.exists()
    assert inside.exists(), "a later attempt writes into a step that is kept"


class FailingNow(Storage):
    def __init__(self) -> None:
        self.failing = False

    def rename(self, source: Path, target: Path) -> None:
        if self.failing:
            raise OSError(errno.EIO, "not now")
        super().rename(source, target)


def test_saves_that_fail_cost_no_checkpoint(tmp_path: Path) -> None:
    """What stands is removed only for something that is complete."""
    storage = FailingNow()
    with engine_in_thread(tmp_path, storage=storage, retention_steps=1) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, b"good")
        eventually(lambda: lab.told("complete", 1))
        storage.failing = True
        for step in (2, 3, 4):
            rank.save(step, b"fails")
            eventually(lambda: lab.told("failed"))
        assert steps(lab.directory) == [1]
        storage.failing = False
        eventually(lambda: lab.told("complete", 4))
        rank.close()
    assert steps(lab.directory) == [4]


def test_an_engine_keeps_every_nth_step(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, retention_steps=1, keep_every_steps=2) as lab:
        rank = RawRank(lab.socket)
        for step in range(1, 6):
            rank.save(step, b"x")
            assert rank.durable(step) == ""
        eventually(lambda: lab.told("evicted", 3))
        rank.close()
    assert steps(lab.directory) == [2, 4, 5]
