"""Power cut at every operation of a commit: afterwards there is the old or the new, and what is named is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.commit import remove_temporaries, retain
from ckpt_engine.manifest import complete_steps, read_manifest, read_records, shard_name, step_folder
from ckpt_engine.rejection import Rejection, add_rejection, read_rejections
from ckpt_engine.shardfile import check_shard
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import put_step


class PowerCut(Exception):
    """The machine is off."""


class CutFile(OutputFile):
    def __init__(self, path: Path, storage: CutStorage) -> None:
        super().__init__(path)
        self._storage = storage
        storage.unsynced[path] = None

    def write(self, piece: bytes | memoryview) -> None:
        self._storage.tick()
        super().write(piece)

    def sync(self) -> None:
        self._storage.tick()
        super().sync()
        del self._storage.unsynced[self.path]


class CutStorage(Storage):
    """A disk that keeps only what was synced: bytes by fsync of the file, names by fsync of its folder.

    `names_survive` says what happens to names that were not: a real file system may do either.
    """

    def __init__(self, operations: int, *, names_survive: bool) -> None:
        self.left = operations
        self.names_survive = names_survive
        self.unsynced: dict[Path, None] = {}
        self.undo: list[tuple[Path, Callable[[], object]]] = []  # (folder, how to take the change back)

    def tick(self) -> None:
        if self.left == 0:
            self.collapse()
            raise PowerCut
        self.left -= 1

    def create(self, path: Path) -> OutputFile:
        self.tick()
        return CutFile(path, self)

    def rename(self, source: Path, target: Path) -> None:
        self.tick()
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        if source in self.unsynced:
            del self.unsynced[source]
            self.unsynced[target] = None
        self.undo.append((target.parent, lambda: target.write_bytes(before) if before is not None else target.unlink()))

    def remove(self, path: Path) -> None:
        self.tick()
        if path.exists():
            before = path.read_bytes()
            super().remove(path)
            self.undo.append((path.parent, lambda: path.parent.is_dir() and path.write_bytes(before)))

    def sync_folder(self, path: Path) -> None:
        self.tick()
        super().sync_folder(path)
        self.undo = [(folder, back) for folder, back in self.undo if folder != path]

    def collapse(self) -> None:
        if not self.names_survive:
            for _, back in reversed(self.undo):
                back()
        for path in self.unsynced:
            if path.exists():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def everything_named_is_whole(directory: Path) -> list[int]:
    """Read every complete step through to its last byte; their numbers."""
    records = complete_steps(directory)
    for record in records:
        manifest = read_manifest(directory, record.step)
        assert manifest is not None
        for shard in manifest.shards:
            check_shard(step_folder(directory, record.step) / shard.file, shard.checks)
    return [record.step for record in records]


def sweep(
    folder: Path, prepare: Callable[[Path], None], work: Callable[[Path, Storage], None], good: Callable[[Path], None]
) -> int:
    """Cut `work` after 0, 1, 2 … operations until it runs through; the number of operations it has."""
    for names_survive in (True, False):
        for operations in range(1000):
            directory = folder / f"{names_survive}-{operations}"
            prepare(directory)
            try:
                work(directory, CutStorage(operations, names_survive=names_survive))
            except PowerCut:
                good(directory)
                continue
            good(directory)
            break
    return operations


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
