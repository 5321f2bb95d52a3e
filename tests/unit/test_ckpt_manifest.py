"""What counts as complete on disk, what is rejected, what a newer attempt has left behind, and what retention keeps."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.commit import commit_shard, finish_step, remove_temporaries, retain
from ckpt_engine.errors import CheckpointDamaged, StepTaken
from ckpt_engine.fetching import read_from_disk
from ckpt_engine.manifest import (
    MANIFEST,
    StepRecord,
    complete_steps,
    read_manifest,
    rejection_of,
    shard_name,
    step_folder,
)
from ckpt_engine.rejection import REJECTED, Rejection, add_rejection, read_rejections
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import Storage
from tests.ckpt_lab import put_step, raw_segment

STORAGE = Storage()


def steps(directory: Path) -> list[tuple[int, int]]:
    return [(record.step, record.attempt) for record in complete_steps(directory)]


def reject(directory: Path, from_step: int, up_to_attempt: int, reason: str = "nan") -> bool:
    return add_rejection(directory, Rejection(from_step, up_to_attempt, reason), STORAGE, "test")


def test_a_folder_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "nowhere") == []


def test_a_step_is_complete_when_every_rank_is_there(tmp_path: Path) -> None:
    assert not put_step(tmp_path, 10, ranks=[0, 2], world_size=3)
    assert complete_steps(tmp_path) == []
    assert put_step(tmp_path, 10, ranks=[1], world_size=3)
    (record,) = complete_steps(tmp_path)
    assert (record.step, record.attempt, record.world_size, record.ranks) == (10, 1, 3, (0, 1, 2))
    assert record.size_bytes == sum(path.stat().st_size for path in step_folder(tmp_path, 10).glob("*.safetensors"))


def test_shards_of_two_attempts_do_not_make_a_step(tmp_path: Path) -> None:
    assert not put_step(tmp_path, 10, attempt=1, ranks=[0], world_size=2)
    assert not put_step(tmp_path, 10, attempt=2, ranks=[1], world_size=2)
    assert complete_steps(tmp_path) == []


def test_shards_of_two_world_sizes_do_not_make_a_step(tmp_path: Path) -> None:
    put_step(tmp_path, 10, ranks=[0], world_size=2)
    assert not put_step(tmp_path, 10, ranks=[1], world_size=3)
    assert finish_step(STORAGE, tmp_path, 10, 1, writer="n0") is None


def test_steps_are_in_order_of_number_not_of_name(tmp_path: Path) -> None:
    for step in (10_000, 900, 123_456_789):
        put_step(tmp_path, step)
    assert [step for step, _ in steps(tmp_path)] == [900, 10_000, 123_456_789]


@pytest.mark.parametrize("harm", ["missing", "short", "manifest"])
def test_a_step_whose_files_are_not_all_right_is_not_complete(tmp_path: Path, harm: str) -> None:
    put_step(tmp_path, 10)
    put_step(tmp_path, 20)
    folder = step_folder(tmp_path, 20)
    shard = folder / shard_name(0, 1)
    if harm == "missing":
        shard.unlink()
    elif harm == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (folder / MANIFEST).write_text("{}")
    assert steps(tmp_path) == [(10, 1)]


def test_finishing_twice_writes_one_manifest(tmp_path: Path) -> None:
    assert put_step(tmp_path, 10)
    assert finish_step(STORAGE, tmp_path, 10, 1, writer="other") is None


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    put_step(tmp_path / "ck", 10)
    for path in [tmp_path / "ck", *(tmp_path / "ck").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_rejection_covers_the_attempts_it_names_and_later_steps_only(tmp_path: Path) -> None:
    put_step(tmp_path, 110, attempt=3)
    put_step(tmp_path, 120, attempt=4)
    put_step(tmp_path, 130, attempt=4)
    assert reject(tmp_path, 120, 4)
    assert steps(tmp_path) == [(110, 3)]
    found = rejection_of(tmp_path, 130, 4)
    assert found is not None
    assert found.reason == "nan"
    assert rejection_of(tmp_path, 120, 5) is None


def test_the_next_attempt_trains_rejected_steps_again_and_they_count(tmp_path: Path) -> None:
    put_step(tmp_path, 110, attempt=4)
    put_step(tmp_path, 120, attempt=4, payload=b"nan")
    reject(tmp_path, 120, 4)
    assert put_step(tmp_path, 120, attempt=5, payload=b"good")
    assert steps(tmp_path) == [(110, 4), (120, 5)]
    shard = read_from_disk(tmp_path, Identity("job", 5, 0, 1, 120))
    assert bytes(shard.memory[:4]) == b"good"


def test_the_old_step_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """A rolled back job that saves a step number again must not take the old checkpoint away while it does."""
    put_step(tmp_path, 120, attempt=4, ranks=[0, 1], world_size=2, payload=b"old")
    put_step(tmp_path, 120, attempt=5, ranks=[0], world_size=2, payload=b"new")
    assert steps(tmp_path) == [(120, 4)]
    assert bytes(read_from_disk(tmp_path, Identity("job", 4, 0, 2, 120)).memory[:3]) == b"old"
    put_step(tmp_path, 120, attempt=5, ranks=[1], world_size=2, payload=b"new")
    assert steps(tmp_path) == [(120, 5)]


def test_a_late_shard_of_an_old_attempt_does_not_take_the_step_back(tmp_path: Path) -> None:
    put_step(tmp_path, 120, attempt=5)
    assert not put_step(tmp_path, 120, attempt=4)
    assert steps(tmp_path) == [(120, 5)]


def test_a_damaged_manifest_is_replaced(tmp_path: Path) -> None:
    put_step(tmp_path, 10)
    (step_folder(tmp_path, 10) / MANIFEST).write_text("{")
    assert finish_step(STORAGE, tmp_path, 10, 1, writer="n0") is not None
    assert steps(tmp_path) == [(10, 1)]


def test_the_same_attempt_cannot_save_a_step_twice_with_other_bytes(tmp_path: Path) -> None:
    """A manifest may name the first bytes; overwriting them would make a complete step a broken one."""
    put_step(tmp_path, 10, payload=b"first")
    put_step(tmp_path, 10, payload=b"first")
    with pytest.raises(StepTaken, match="needs a new attempt number"):
        put_step(tmp_path, 10, payload=b"other")
    assert bytes(read_from_disk(tmp_path, Identity("job", 1, 0, 1, 10)).memory[:5]) == b"first"


def test_memory_that_is_found_to_have_changed_is_not_written(tmp_path: Path) -> None:
    header, view = raw_segment(10, b"weights", Identity("job", 1, 0, 1, -1))

    def disagree(crc: int) -> None:
        raise CheckpointDamaged("changed")

    with pytest.raises(CheckpointDamaged, match="changed"):
        commit_shard(STORAGE, tmp_path, header, view, writer="n0", on_read=disagree)
    assert list(step_folder(tmp_path, 10).iterdir()) == []


def test_rejecting_twice_is_rejecting_once(tmp_path: Path) -> None:
    assert reject(tmp_path, 120, 4)
    assert not reject(tmp_path, 120, 4)
    assert not reject(tmp_path, 130, 3)
    assert reject(tmp_path, 100, 5)
    assert read_rejections(tmp_path) == (Rejection(100, 5, "nan"),)


class SlowStorage(Storage):
    """Between reading and replacing a file there is time for somebody else to do the same."""

    def __init__(self, slow: str = "") -> None:
        self._slow = slow

    def write_whole(self, path: Path, content: bytes, *, writer: str) -> None:
        if self._slow in content.decode():
            threading.Event().wait(0.2)
        super().write_whole(path, content, writer=writer)


def together(*work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_engines_that_reject_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    rejections = [Rejection(100, 2, "a"), Rejection(101, 3, "b")]
    together(*(lambda entry=entry: add_rejection(tmp_path, entry, SlowStorage(), entry.reason) for entry in rejections))  # type: ignore[misc]
    assert sorted(read_rejections(tmp_path), key=lambda entry: entry.from_step) == rejections


def test_an_older_attempt_does_not_have_the_last_word_on_a_step(tmp_path: Path) -> None:
    for attempt in (4, 5):
        put_shard(tmp_path, 120, attempt)
    slow = SlowStorage('"attempt": 4')
    together(
        lambda: finish_step(slow, tmp_path, 120, 4, writer="n0"),
        lambda: finish_step(slow, tmp_path, 120, 5, writer="n1"),
    )
    assert steps(tmp_path) == [(120, 5)]


def put_shard(directory: Path, step: int, attempt: int) -> None:
    header, view = raw_segment(step, b"weights", Identity("job", attempt, 0, 1, -1))
    commit_shard(STORAGE, directory, header, view, writer="n0")


def test_unreadable_rejections_let_no_checkpoint_through(tmp_path: Path) -> None:
    put_step(tmp_path, 10)
    (tmp_path / REJECTED).write_text("{")
    with pytest.raises(CheckpointDamaged, match=r"rejected\.json is not readable"):
        complete_steps(tmp_path)


def test_what_a_newer_attempt_has_trained_past_is_off_the_line(tmp_path: Path) -> None:
    """Attempt 2 resumed at 30 although 40 and 50 stood: they are not where the job is now."""
    for step in (30, 40, 50):
        put_step(tmp_path, step, attempt=1)
    put_step(tmp_path, 35, attempt=2)
    assert steps(tmp_path) == [(30, 1), (35, 2)]


def test_a_plain_continuation_keeps_the_whole_line(tmp_path: Path) -> None:
    for step, attempt in ((10, 1), (20, 1), (30, 2), (40, 5)):
        put_step(tmp_path, step, attempt=attempt)
    assert steps(tmp_path) == [(10, 1), (20, 1), (30, 2), (40, 5)]


def test_retention_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (900, 1000, 9999, 10_000):
        put_step(tmp_path, step)
    assert retain(STORAGE, tmp_path, 2) == [900, 1000]
    assert [step for step, _ in steps(tmp_path)] == [9999, 10_000]
    assert not step_folder(tmp_path, 900).exists()


def test_retention_never_removes_the_last_complete_step(tmp_path: Path) -> None:
    put_step(tmp_path, 10)
    put_step(tmp_path, 20, ranks=[0], world_size=2)
    for _ in range(3):
        assert retain(STORAGE, tmp_path, 1) == []
    assert steps(tmp_path) == [(10, 1)]
    assert step_folder(tmp_path, 20).exists(), "a newer step is being written"


def test_retention_clears_a_stale_higher_step_when_enough_good_ones_stand(tmp_path: Path) -> None:
    """A step of an abandoned line must not hold one of the places for ever, however high its number."""
    put_step(tmp_path, 99_999, attempt=1)
    put_step(tmp_path, 10, attempt=2)
    assert retain(STORAGE, tmp_path, 2) == []
    put_step(tmp_path, 20, attempt=2)
    assert retain(STORAGE, tmp_path, 2) == [99_999]
    assert steps(tmp_path) == [(10, 2), (20, 2)]


def test_rejected_steps_go_later_and_take_no_place(tmp_path: Path) -> None:
    put_step(tmp_path, 110, attempt=4)
    put_step(tmp_path, 120, attempt=4)
    reject(tmp_path, 120, 4)
    assert retain(STORAGE, tmp_path, 2) == []
    put_step(tmp_path, 115, attempt=5)
    assert retain(STORAGE, tmp_path, 2) == [120]
    assert steps(tmp_path) == [(110, 4), (115, 5)]


def test_a_step_being_trained_again_is_not_swept_away_with_its_rejected_shards(tmp_path: Path) -> None:
    put_step(tmp_path, 110, attempt=4)
    put_step(tmp_path, 120, attempt=4, ranks=[0], payload=b"nan")
    reject(tmp_path, 120, 4)
    put_step(tmp_path, 115, attempt=5)
    put_step(tmp_path, 120, attempt=5, ranks=[0], world_size=2)
    assert retain(STORAGE, tmp_path, 2) == []
    assert put_step(tmp_path, 120, attempt=5, ranks=[1], world_size=2)


def test_a_folder_that_another_engine_has_just_made_is_left_to_it(tmp_path: Path) -> None:
    for step in (2, 3):
        put_step(tmp_path, step)
    for step in (1, 4):
        step_folder(tmp_path, step).mkdir()
    retain(STORAGE, tmp_path, 2)
    assert [step_folder(tmp_path, step).exists() for step in (1, 2, 3, 4)] == [False, True, True, True]


def test_the_replaced_shards_of_an_older_attempt_are_removed(tmp_path: Path) -> None:
    put_step(tmp_path, 120, attempt=4)
    put_step(tmp_path, 120, attempt=5)
    retain(STORAGE, tmp_path, 1)
    names = {path.name for path in step_folder(tmp_path, 120).iterdir()}
    assert names == {"shard-00000-a0005.safetensors", "shard-00000-a0005.json", MANIFEST}


def test_two_engines_that_clean_up_together_do_not_stumble(tmp_path: Path) -> None:
    for step in range(1, 40):
        put_step(tmp_path, step)
    failures: list[BaseException] = []

    def clean() -> None:
        try:
            retain(STORAGE, tmp_path, 2)
        except OSError as error:
            failures.append(error)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that they do meet in the middle of a step
    try:
        together(*[clean] * 4)
    finally:
        sys.setswitchinterval(usual)
    assert not failures
    assert [step for step, _ in steps(tmp_path)] == [38, 39]


def test_a_new_engine_removes_what_its_predecessor_left_half_written(tmp_path: Path) -> None:
    put_step(tmp_path, 10)
    ours = step_folder(tmp_path, 10) / ".shard-00000-a0002.safetensors.n0.tmp"
    other = step_folder(tmp_path, 10) / ".shard-00001-a0002.safetensors.n1.tmp"
    for path in (ours, other):
        path.write_bytes(b"half")
    remove_temporaries(STORAGE, tmp_path, writer="n0")
    assert not ours.exists()
    assert other.exists()


def test_the_manifest_is_plain_json_that_says_whose_it_is(tmp_path: Path) -> None:
    put_step(tmp_path, 10, attempt=3)
    document = json.loads((step_folder(tmp_path, 10) / MANIFEST).read_text())
    assert (document["job"], document["attempt"], document["step"], document["world_size"]) == ("job", 3, 10, 1)
    manifest = read_manifest(tmp_path, 10)
    assert manifest is not None
    assert document["shards"][0]["payload_crc32"] == manifest.shards[0].checks.payload_crc32


def test_a_step_record_needs_no_size() -> None:
    assert StepRecord(1, 1, 1, (0,)).size_bytes == 0
