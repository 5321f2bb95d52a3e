"""Steps in an object store: whole or not there, by any store that fsspec knows, and back to a disk that has nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.errors import CheckpointDamaged, CheckpointNotFound
from ckpt_engine.manifest import FETCHED, MANIFEST, complete_steps, read_manifest, step_folder
from ckpt_engine.objectstore import FsspecStore, ObjectStoreError
from ckpt_engine.objecttier import ObjectTier
from ckpt_engine.rejection import Rejection, add_rejection
from ckpt_engine.storage import Storage
from ckpt_engine.stored import open_stored
from ckpt_engine.verification import Verification, add_verification
from tests.ckpt_lab import ROOT, put_step
from tests.ckpt_objects import KINDS, make_store, upload

STORAGE = Storage()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FsspecStore:
    return make_store(request.param, tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "ck"


def payload_of(directory: Path, step: int, rank: int, name: str = MANIFEST) -> bytes:
    manifest = read_manifest(directory, step, name)
    assert manifest is not None
    header, memory = open_stored(directory, manifest, rank)
    return bytes(memory[: header.layout.payload_bytes])


def test_objects_are_kept_by_name(store: FsspecStore) -> None:
    assert store.folders() == []
    assert store.sizes("step-1") == {}
    assert store.read("step-1/a", 100) is None
    store.put("step-1/a", [b"one", memoryview(b"two")])
    store.put("step-1/deep/b", [b"x"])
    store.put("step-10/c", [])
    assert store.read("step-1/a", 6) == b"onetwo"
    assert store.sizes("step-1") == {"a": 6, "deep/b": 1}
    assert store.folders() == ["step-1", "step-10"]
    assert b"".join(store.stream("step-1/a")) == b"onetwo"
    assert list(store.stream("step-10/c")) == []
    store.put("step-1/a", [b"new"])
    assert store.read("step-1/a", 100) == b"new"
    with pytest.raises(ObjectStoreError, match="more than 2 bytes"):
        store.read("step-1/a", 2)
    with pytest.raises(ObjectStoreError, match="could not be read"):
        list(store.stream("none"))
    store.remove("step-1/a")
    store.remove("step-1/a")
    assert store.sizes("step-1") == {"deep/b": 1}
    for name in ("", "../x", "a//b", "/etc/passwd", "a/./b"):
        with pytest.raises(ValueError, match="no name of an object"):
            store.put(name, [b"x"])


def test_a_large_object_comes_back_piece_by_piece(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.objectstore.READ_BYTES", 1000)
    whole = bytes(range(256)) * 20
    store.put("a", [whole[:100], whole[100:]])
    pieces = list(store.stream("a"))
    assert [len(piece) for piece in pieces] == [1000] * 5 + [120]
    assert b"".join(pieces) == whole


def test_a_step_is_complete_in_the_store_when_all_of_it_is_there(store: FsspecStore, disk: Path) -> None:
    put_step(disk, 10, ranks=[0, 1], world_size=2)
    tier, manifest = ObjectTier(store), read_manifest(disk, 10)
    assert manifest is not None
    assert not tier.finish(manifest)
    tier.put_shard(disk, manifest.shards[0])
    assert not tier.finish(manifest)
    assert tier.complete_steps() == []
    tier.put_shard(disk, manifest.shards[1])
    assert not tier.is_complete(manifest)
    assert tier.finish(manifest)
    assert tier.is_complete(manifest)
    assert tier.complete_steps() == complete_steps(disk)
    assert tier.manifest(10) == manifest


def test_a_shard_whose_file_is_damaged_is_not_uploaded(store: FsspecStore, disk: Path) -> None:
    put_step(disk, 10)
    tier, manifest = ObjectTier(store), read_manifest(disk, 10)
    assert manifest is not None
    path = step_folder(disk, 10) / manifest.shards[0].file
    for at in (3, 100, -1):
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CheckpointDamaged, match="does not match its checksums"):
            tier.put_shard(disk, manifest.shards[0])
        assert store.sizes("step-00000010") == {}
        raw[at] ^= 1
        path.write_bytes(raw)
    tier.put_shard(disk, manifest.shards[0])
    assert tier.finish(manifest)


def test_a_manifest_that_cannot_be_read_completes_nothing_and_is_replaced(store: FsspecStore, disk: Path) -> None:
    put_step(disk, 10)
    upload(store, disk, 10)
    store.put("step-00000010/manifest.json", [b'{"half'])
    assert ObjectTier(store).complete_steps() == []
    assert upload(store, disk, 10)
    assert [record.step for record in ObjectTier(store).complete_steps()] == [10]


def test_a_store_that_changes_what_it_is_given_is_found_out(disk: Path, tmp_path: Path) -> None:
    class Lossy(FsspecStore):
        def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
            super().put(name, [b"".join(pieces)[:-1] if name.endswith(MANIFEST) else b"".join(pieces)])

    put_step(disk, 10)
    with pytest.raises(CheckpointDamaged, match="not what was written"):
        upload(Lossy(f"file://{tmp_path}/objects"), disk, 10)


def test_a_later_attempt_has_the_last_word(store: FsspecStore, disk: Path, tmp_path: Path) -> None:
    put_step(disk, 10, attempt=2, payload=b"later")
    upload(store, disk, 10)
    put_step(tmp_path / "other", 10, attempt=1, payload=b"early")
    assert upload(store, tmp_path / "other", 10)
    assert [record.attempt for record in ObjectTier(store).complete_steps()] == [2]


def test_a_node_without_a_disk_copy_gets_its_ranks_shards(store: FsspecStore, disk: Path, tmp_path: Path) -> None:
    put_step(disk, 10, ranks=[0, 1], world_size=2, payload=b"weights")
    upload(store, disk, 10)
    fresh, tier = tmp_path / "fresh", ObjectTier(store)
    manifest = tier.manifest(10)
    assert manifest is not None
    tier.fetch(STORAGE, fresh, manifest, 1, writer="n1")
    assert payload_of(fresh, 10, 1, FETCHED) == b"weights"
    assert complete_steps(fresh) == [], "one shard is not a step"
    assert not list(fresh.rglob("*.tmp"))
    tier.fetch(STORAGE, fresh, manifest, 1, writer="n1")


@pytest.mark.parametrize("harm", ["flip", "short", "gone"])
def test_what_does_not_come_as_it_was_stored_is_not_put_on_disk(
    store: FsspecStore, disk: Path, tmp_path: Path, harm: str
) -> None:
    put_step(disk, 10, payload=b"weights")
    upload(store, disk, 10)
    manifest = read_manifest(disk, 10)
    assert manifest is not None
    name = f"step-00000010/{manifest.shards[0].file}"
    raw = bytearray(b"".join(store.stream(name)))
    if harm == "flip":
        raw[-2] ^= 4
        store.put(name, [bytes(raw)])
    elif harm == "short":
        store.put(name, [bytes(raw[:-1])])
    else:
        store.remove(name)
    fresh = tmp_path / "fresh"
    with pytest.raises((CheckpointDamaged, CheckpointNotFound)):
        ObjectTier(store).fetch(STORAGE, fresh, manifest, 0, writer="n1")
    assert [path.name for path in fresh.rglob("*") if path.is_file()] == []


def test_marks_travel_both_ways(store: FsspecStore, disk: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        put_step(disk, step)
        upload(store, disk, step)
    add_rejection(disk, Rejection(20, 1, "NaN"), STORAGE, "test")
    add_verification(disk, Verification(10, 1, "good"), STORAGE, "test")
    tier = ObjectTier(store)
    tier.put_marks(disk)
    tier.put_marks(disk)
    assert [record.step for record in tier.complete_steps()] == [10]
    fresh = tmp_path / "fresh"
    tier.fetch_marks(STORAGE, fresh, writer="n1")
    assert tier.rejections() == (Rejection(20, 1, "NaN"),)
    tier.put_marks(tmp_path / "empty")
    assert tier.rejections() == (Rejection(20, 1, "NaN"),), "a disk that knows less takes nothing away"
    store.put("rejected.json", [b"{"])
    with pytest.raises(CheckpointDamaged, match=r"rejected\.json in .* is not readable"):
        tier.complete_steps()


def test_a_store_that_nobody_knows_is_refused_in_one_sentence() -> None:
    with pytest.raises(ObjectStoreError, match="cannot be opened"):
        FsspecStore("nosuch://place")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def test_fsspec_has_one_door() -> None:
    doors = [path.name for path in (ROOT / "ckpt_engine").rglob("*.py") if "fsspec" in imports_of(path)]
    assert doors == ["objectstore.py"]
