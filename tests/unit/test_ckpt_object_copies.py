"""Complete steps go to the object store behind training, and shards come back for ranks that find them nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_engine.clock import HostClock
from ckpt_engine.downloading import Downloader
from ckpt_engine.event import EngineEvent
from ckpt_engine.fetching import read_from_disk
from ckpt_engine.inspection import verify_steps
from ckpt_engine.manifest import complete_steps, read_manifest, step_folder
from ckpt_engine.objectstore import FsspecStore, ObjectStoreError
from ckpt_engine.objecttier import ObjectTier, open_objects
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import Storage
from ckpt_engine.uploading import UploadConfig, Uploader
from ckpt_engine.verification import Verification, add_verification
from tests.ckpt_lab import RawRank, engine_in_thread, eventually, put_step
from tests.ckpt_objects import KINDS, make_store, upload

STORAGE = Storage()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FsspecStore:
    return make_store(request.param, tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "ck"


class Story(list[EngineEvent]):
    def told(self, state: str) -> list[int]:
        return [event.step for event in self if event.state == state and event.tier == "object"]


def uploader(store: FsspecStore, disk: Path, story: Story, **config: object) -> Uploader:
    settings = UploadConfig(disk, **{"retry_seconds_min": 0.01, "retry_seconds_max": 0.02, **config})  # type: ignore[arg-type]
    return Uploader(settings, lambda: ObjectTier(store), story.append, HostClock())


def run_once(work: Uploader) -> None:
    """All that there is to do, until there is nothing more."""
    while work._once():
        pass


def mine(work: Uploader, *steps: int, attempt: int = 1) -> None:
    for step in steps:
        work.wrote(step, attempt, 0)


def test_the_newest_step_is_uploaded_and_old_ones_go(store: FsspecStore, disk: Path) -> None:
    story = Story()
    work = uploader(store, disk, story, retention_steps=2)
    for step in (900, 1000, 9999, 10_000):
        put_step(disk, step)
        mine(work, step)
        run_once(work)
    assert story.told("complete") == [900, 1000, 9999, 10_000]
    assert story.told("evicted") == [900, 1000]
    assert ObjectTier(store).steps() == [9999, 10_000]


def test_a_step_that_is_overtaken_is_left_out_but_for_those_kept_for_ever(store: FsspecStore, disk: Path) -> None:
    story = Story()
    work = uploader(store, disk, story, retention_steps=1, keep_every_steps=1000)
    for step in (1000, 1500, 2000, 2100):
        put_step(disk, step)
        mine(work, step)
    run_once(work)
    assert story.told("complete") == [2100, 2000, 1000]
    assert ObjectTier(store).steps() == [1000, 2000, 2100]


def test_the_last_verified_step_stays_in_the_store(store: FsspecStore, disk: Path) -> None:
    work = uploader(store, disk, Story(), retention_steps=1)
    add_verification(disk, Verification(10, 1), STORAGE, "test")
    for step in (10, 20, 30):
        put_step(disk, step)
        mine(work, step)
        run_once(work)
    assert ObjectTier(store).steps() == [10, 30]


def test_a_stale_higher_step_of_an_older_attempt_does_not_stay_in_the_store(store: FsspecStore, disk: Path) -> None:
    work = uploader(store, disk, Story(), retention_steps=1)
    put_step(disk, 99_999)
    mine(work, 99_999)
    run_once(work)
    put_step(disk, 10, attempt=2)
    mine(work, 10, attempt=2)
    run_once(work)
    assert ObjectTier(store).steps() == [10]


def test_what_another_engine_wrote_is_left_to_it_for_a_while(store: FsspecStore, disk: Path) -> None:
    put_step(disk, 10, ranks=[0, 1], world_size=2)
    one, two = Story(), Story()
    first, second = uploader(store, disk, one), uploader(store, disk, two, takeover_seconds=0.0)
    first.wrote(10, 1, 0)
    assert not first._once()
    assert list(store.sizes("step-00000010")) == ["shard-00000-a0001.safetensors"]
    assert second._once(), "nobody brings the other shard, so this one does"
    assert first._once()
    assert (one.told("complete"), two.told("complete")) == ([], [10])


def test_a_store_that_is_away_costs_a_line_and_is_asked_again(disk: Path, tmp_path: Path) -> None:
    class Away(FsspecStore):
        away = True

        def sizes(self, folder: str) -> dict[str, int]:
            if self.away:
                raise ObjectStoreError("the store is away")
            return super().sizes(folder)

    store, story = Away(f"file://{tmp_path}/objects"), Story()
    work = uploader(store, disk, story)
    put_step(disk, 10)
    mine(work, 10)
    work.start()
    eventually(lambda: work.error)
    eventually(lambda: work._backoff_seconds == 0.02, "the second try")
    assert story.told("failed") == [10]
    store.away = False
    eventually(lambda: story.told("complete") == [10])
    eventually(lambda: work.error == "")
    assert work.stop(10.0)


def test_an_uploader_that_is_told_to_go_uploads_what_has_become_complete(store: FsspecStore, disk: Path) -> None:
    story = Story()
    work = uploader(store, disk, story)
    work.start()
    put_step(disk, 10)
    mine(work, 10)
    assert work.stop(10.0)
    assert story.told("complete") == [10]


def test_a_step_that_retention_removes_meanwhile_is_no_failure(store: FsspecStore, disk: Path) -> None:
    story = Story()
    work = uploader(store, disk, story)
    put_step(disk, 10)
    mine(work, 10)
    manifest = read_manifest(disk, 10)
    work._next = lambda: manifest  # type: ignore[method-assign]
    for path in step_folder(disk, 10).iterdir():
        path.unlink()
    assert not work._once()
    assert story == []


def downloader(store: FsspecStore, directory: Path) -> Downloader:
    return Downloader(directory, "n1", STORAGE, lambda: ObjectTier(store), HostClock())


def test_ranks_that_fetch_to_a_shared_folder_complete_the_step_there(
    store: FsspecStore, disk: Path, tmp_path: Path
) -> None:
    put_step(disk, 10, ranks=[0, 1], world_size=2)
    upload(store, disk, 10)
    fresh = downloader(store, tmp_path / "fresh")
    record = fresh.newest(2)
    assert record is not None
    assert (fresh.newest(3), fresh.newest(2, step=11), fresh.newest(2, without=frozenset({10}))) == (None, None, None)
    fetches = [fresh.fetch(record.step, record.attempt, rank) for rank in (0, 1)]
    assert all(fetch.wait(20) for fetch in fetches)
    assert [fetch.error for fetch in fetches] == ["", ""]
    assert fresh.fetch(record.step, record.attempt, 1) is fetches[1]
    eventually(lambda: complete_steps(tmp_path / "fresh"))
    assert all(verdict.whole for verdict in verify_steps(tmp_path / "fresh"))


def test_a_fetch_that_fails_says_so_and_is_tried_again(store: FsspecStore, disk: Path, tmp_path: Path) -> None:
    put_step(disk, 10)
    upload(store, disk, 10)
    fresh = downloader(store, tmp_path / "fresh")
    late = fresh.fetch(10, 7, 0)
    assert late.wait(20)
    assert "no longer the one of attempt 7" in late.error
    assert fresh.fetch(10, 7, 0) is not late


def test_an_engine_brings_its_steps_to_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    with engine_in_thread(tmp_path, objects_url=url, objects_retention_steps=2) as lab:
        rank = RawRank(lab.socket)
        for step in (1, 2, 3):
            rank.save(step, b"weights")
            assert rank.durable(step) == ""
            eventually(lambda step=step: lab.told("complete", step, "object"))  # type: ignore[misc]
        eventually(lambda: lab.told("evicted", 1, "object"))
        rank.close()
    tier = open_objects(url, "job")()
    assert [record.step for record in tier.complete_steps()] == [2, 3]


def test_without_fsspec_the_engine_names_the_extra(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    story = Story()
    work = Uploader(UploadConfig(disk), open_objects("s3://bucket", "job"), story.append, HostClock())
    put_step(disk, 10)
    assert not work._once()
    assert "pip install 'transom[objects]'" in story[0].reason


def test_steps_that_are_kept_for_ever_stay_however_many_there_are(
    store: FsspecStore, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.objecttier.STEPS_READ_MAX", 2)
    monkeypatch.setattr("ckpt_engine.uploading.STEPS_READ_MAX", 2)
    work = uploader(store, disk, Story(), retention_steps=1, keep_every_steps=10)
    for step in (10, 20, 25, 30, 35, 40):
        put_step(disk, step)
        mine(work, step)
        run_once(work)
    assert ObjectTier(store).steps() == [10, 20, 30, 40]


def test_a_rank_on_a_fresh_node_goes_on_from_the_object_store(tmp_path: Path) -> None:
    """Memory, peers and disk have nothing: two ranks that agree on the newest step load it from the store."""
    url = f"file://{tmp_path}/objects"
    payloads = [b"first rank", b"second rank"]
    with engine_in_thread(tmp_path / "old", objects_url=url) as lab:
        ranks = [RawRank(lab.socket, rank=rank, world_size=2) for rank in (0, 1)]
        for rank, payload in zip(ranks, payloads, strict=True):
            rank.save(7, payload)
        eventually(lambda: lab.told("complete", 7, "object"))
        for rank in ranks:
            rank.close()
    with engine_in_thread(tmp_path / "new", objects_url=url) as lab:
        for number, payload in enumerate(payloads):
            with RawRank(lab.socket, rank=number, world_size=2, attempt=2) as rank:
                reply = eventually(lambda rank=rank: not (answer := rank.load(7)).get("pending") and answer)  # type: ignore[misc]
                assert (reply["tier"], reply["step"], reply["attempt"]) == ("object", 7, 1)
            found = read_from_disk(lab.directory, Identity("job", 1, number, 2, 7))
            assert bytes(found.memory[: len(payload)]) == payload
        eventually(lambda: complete_steps(lab.directory), "both ranks' shards are there now")
