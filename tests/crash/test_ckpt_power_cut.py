"""Power cut at every operation of a commit: afterwards there is the old or the new, and what is named is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.commit import commit_replica, commit_shard, finish_step, remove_temporaries, retain
from ckpt_engine.fetching import read_from_disk
from ckpt_engine.manifest import read_records, shard_name, step_folder
from ckpt_engine.rejection import Rejection, add_rejection, read_rejections
from ckpt_engine.replicas import same_as_stored
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import Storage
from ckpt_engine.verification import Verification, add_verification, read_verifications
from tests.ckpt_lab import put_step, raw_segment
from tests.ckpt_power_cut import CutStorage, everything_named_is_whole, sweep


def test_a_cut_while_a_step_is_written_leaves_the_last_one(tmp_path: Path) -> None:
    def prepare(directory: Path) -> None:
        put_step(directory, 10, ranks=[0, 1], world_size=2)

    def work(directory: Path, storage: Storage) -> None:
        put_step(directory, 20, ranks=[0, 1], world_size=2, payload=b"new weights", storage=storage)

    def good(directory: Path) -> None:
        there = everything_named_is_whole(directory)
        assert there in ([10], [10, 20])
        # and the next engine can write the step after all
        remove_temporaries(Storage(), directory, writer="n0")
        put_step(directory, 20, ranks=[0, 1], world_size=2, payload=b"new weights")
        assert everything_named_is_whole(directory) == [10, 20]

    assert sweep(tmp_path, prepare, work, good) >= 20


def test_a_cut_while_a_step_is_trained_again_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    def prepare(directory: Path) -> None:
        put_step(directory, 10, attempt=1, payload=b"old")

    def work(directory: Path, storage: Storage) -> None:
        put_step(directory, 10, attempt=2, payload=b"new", storage=storage)
        retain(storage, directory, 1)

    def good(directory: Path) -> None:
        assert everything_named_is_whole(directory) == [10]

    assert sweep(tmp_path, prepare, work, good) >= 12


def test_what_has_returned_survives_a_cut(tmp_path: Path) -> None:
    """Names and bytes: a shard that was called durable, and a step that was called complete."""
    for ranks, found in (([0], []), ([0, 1], [20])):
        directory = tmp_path / str(len(ranks))
        storage = CutStorage(1000, names_survive=False)
        put_step(directory, 20, ranks=ranks, world_size=2, storage=storage)
        storage.collapse()
        assert everything_named_is_whole(directory) == found
        assert [record.rank for record in read_records(directory, 20, 1)] == ranks
        assert (step_folder(directory, 20) / shard_name(0, 1)).exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_cut_while_old_steps_are_removed_leaves_the_kept_ones(tmp_path: Path, keep: int) -> None:
    def prepare(directory: Path) -> None:
        for step in (10, 20, 30):
            put_step(directory, step)

    def work(directory: Path, storage: Storage) -> None:
        retain(storage, directory, keep)

    def good(directory: Path) -> None:
        there = everything_named_is_whole(directory)
        assert there[-keep:] == [10, 20, 30][-keep:]

    sweep(tmp_path, prepare, work, good)


def test_a_cut_while_rejecting_leaves_the_old_or_the_new_list(tmp_path: Path) -> None:
    def prepare(directory: Path) -> None:
        add_rejection(directory, Rejection(100, 2, "first"), Storage(), "n0")

    def work(directory: Path, storage: Storage) -> None:
        add_rejection(directory, Rejection(50, 1, "second"), storage, "n0")

    def good(directory: Path) -> None:
        reasons = [rejection.reason for rejection in read_rejections(directory)]
        assert reasons in (["first"], ["first", "second"])

    assert sweep(tmp_path, prepare, work, good) >= 5


def put_replicas(directory: Path, step: int, payload: bytes, storage: Storage) -> None:
    """Rank 0 with its tensors, rank 1 with a header that refers to them."""
    header, view = raw_segment(step, payload, Identity("job", 1, 0, 2, -1))
    source = commit_shard(storage, directory, header, view, writer="n0")
    header, view = raw_segment(step, payload, Identity("job", 1, 1, 2, -1))
    record = commit_replica(
        storage, directory, header, view, source,
        lambda tensors: same_as_stored(tensors, step_folder(directory, step), source), writer="n1",
    )  # fmt: skip
    assert record is not None
    finish_step(storage, directory, step, 1, writer="n1")


def test_a_cut_while_replicas_share_a_file_leaves_the_last_step(tmp_path: Path) -> None:
    def prepare(directory: Path) -> None:
        put_step(directory, 10, ranks=[0, 1], world_size=2)

    def work(directory: Path, storage: Storage) -> None:
        put_replicas(directory, 20, b"shared tensors", storage)

    def good(directory: Path) -> None:
        assert everything_named_is_whole(directory) in ([10], [10, 20])
        for writer in ("n0", "n1"):
            remove_temporaries(Storage(), directory, writer=writer)
        put_replicas(directory, 20, b"shared tensors", Storage())
        assert everything_named_is_whole(directory) == [10, 20]
        assert bytes(read_from_disk(directory, Identity("job", 1, 1, 2, 20)).memory[:6]) == b"shared"

    assert sweep(tmp_path, prepare, work, good) >= 18


def test_a_cut_while_a_step_is_called_verified_leaves_the_old_or_the_new_list(tmp_path: Path) -> None:
    def prepare(directory: Path) -> None:
        add_verification(directory, Verification(10, 1, "first"), Storage(), "n0")

    def work(directory: Path, storage: Storage) -> None:
        add_verification(directory, Verification(20, 1, "second"), storage, "n0")

    def good(directory: Path) -> None:
        steps = [entry.step for entry in read_verifications(directory)]
        assert steps in ([10], [10, 20])

    assert sweep(tmp_path, prepare, work, good) >= 5
