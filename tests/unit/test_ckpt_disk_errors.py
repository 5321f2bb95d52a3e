"""A disk that is full, broken, read-only or away: training goes on, memory keeps, nothing half is named, it heals."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckpt_engine.clock import HostClock
from ckpt_engine.commit import commit_shard
from ckpt_engine.completion import NobodyWatches, PersistConfig, StepCompletion
from ckpt_engine.manifest import MANIFEST, complete_steps, step_folder
from ckpt_engine.rejection import REJECTED
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import EngineProcess, RawRank, engine_in_thread, eventually, put_step, raw_segment

TROUBLES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS]
OPERATIONS = ["make_folder", "create", "write", "sync", "rename", "sync_folder"]


class Broken(Storage):
    """While `error` is set, `operation` fails; for files whose names hold `name`."""

    def __init__(self, operation: str, name: str = "") -> None:
        self.operation = operation
        self.name = name
        self.error: int | None = None
        self.failures = 0

    def fail(self, operation: str, path: Path) -> None:
        if self.error is not None and operation == self.operation and self.name in str(path):
            self.failures += 1
            raise OSError(self.error, "trouble", str(path))

    def make_folder(self, path: Path) -> None:
        self.fail("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> OutputFile:
        self.fail("create", path)
        return BrokenFile(path, self)

    def rename(self, source: Path, target: Path) -> None:
        self.fail("rename", target)
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self.fail("sync_folder", path)
        super().sync_folder(path)


class BrokenFile(OutputFile):
    def __init__(self, path: Path, storage: Broken) -> None:
        super().__init__(path)
        self._storage = storage

    def write(self, piece: bytes | memoryview) -> None:
        super().write(piece[: len(piece) // 2])  # half of it is on the disk when the error comes
        self._storage.fail("write", self.path)
        super().write(piece[len(piece) // 2 :])

    def sync(self) -> None:
        self._storage.fail("sync", self.path)
        super().sync()


@pytest.mark.parametrize("number", TROUBLES, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_training_goes_on_memory_keeps_and_it_heals(tmp_path: Path, operation: str, number: int) -> None:
    storage = Broken(operation)
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, b"good")
        assert rank.durable(1) == ""
        storage.error = number
        rank.save(2, b"kept")
        eventually(lambda: lab.told("failed", 2))
        assert rank.load(2)["payload"] == b"kept"
        assert [record.step for record in complete_steps(lab.directory)] == [1]
        assert lab.admin.status().persist_error
        rank.save(3, b"also kept")
        eventually(lambda: storage.failures >= 3)
        storage.error = None
        assert rank.durable(3) == ""
        eventually(lambda: lab.admin.status().persist_error == "")
        eventually(lambda: lab.told("complete", 3))
        rank.close()
    assert [record.step for record in complete_steps(lab.directory)][-1] == 3
    assert list(lab.directory.rglob("*.tmp")) == []


@pytest.mark.parametrize("operation", OPERATIONS[1:])
@pytest.mark.parametrize("name", ["safetensors", "shard-00000-a0001.json", MANIFEST])
def test_a_writer_that_fails_publishes_nothing(tmp_path: Path, operation: str, name: str) -> None:
    storage = Broken(operation, name if operation != "sync_folder" else "")
    put_step(tmp_path, 1)
    storage.error = errno.EIO
    try:
        put_step(tmp_path, 2, storage=storage)
    except OSError:
        assert [record.step for record in complete_steps(tmp_path)] == [1]
    assert storage.failures == 1
    storage.error = None
    put_step(tmp_path, 2, storage=storage)
    assert [record.step for record in complete_steps(tmp_path)] == [1, 2]


def test_a_failed_write_gives_a_full_disk_its_space_back(tmp_path: Path) -> None:
    for name in ("safetensors", ".json"):
        storage = Broken("sync", name)
        storage.error = errno.ENOSPC
        header, view = raw_segment(7, b"x" * 10_000, Identity("job", 1, 0, 1, -1))
        with pytest.raises(OSError, match="trouble"):
            commit_shard(storage, tmp_path, header, view, writer="n0")
        assert list(tmp_path.rglob("*.tmp")) == []


def test_a_name_that_could_not_be_synced_is_synced_before_it_is_believed(tmp_path: Path) -> None:
    """Shard and record stand there, but a power cut could still take their names away."""
    storage = Broken("sync_folder", "step-")
    header, view = raw_segment(7, b"shard", Identity("job", 1, 0, 1, -1))
    storage.error = errno.EIO
    for _ in range(2):
        with pytest.raises(OSError, match="trouble"):
            commit_shard(storage, tmp_path, header, view, writer="n0")
    assert storage.failures == 2
    storage.error = None
    assert commit_shard(storage, tmp_path, header, view, writer="n0").step == 7


@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_record_whose_file_is_not_there_is_no_shard_and_it_is_written_again(tmp_path: Path, harm: str) -> None:
    put_step(tmp_path, 7)
    path = next(step_folder(tmp_path, 7).glob("*.safetensors"))
    whole = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-1])
    put_step(tmp_path, 7)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "raise the quota"), (errno.EROFS, "mount it for writing")],
)
def test_the_event_says_what_to_do(tmp_path: Path, number: int, advice: str) -> None:
    storage = Broken("write")
    with engine_in_thread(tmp_path, storage=storage) as lab:
        storage.error = number
        rank = RawRank(lab.socket)
        rank.save(1, b"kept")
        (event, *_) = eventually(lambda: lab.told("failed", 1))
        assert advice in event.reason
        assert "memory keeps it, next try in" in event.reason
        storage.error = None
        assert rank.durable(1) == ""
        rank.close()


def test_retries_come_less_and_less_often(tmp_path: Path) -> None:
    storage = Broken("write")
    storage.error = errno.EIO
    with engine_in_thread(tmp_path, storage=storage, retry_seconds_min=0.01, retry_seconds_max=0.04) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, b"kept")
        events = eventually(lambda: len(lab.told("failed", 1)) >= 4 and lab.told("failed", 1))
        waits = [event.reason.rpartition("next try in ")[2] for event in events[:4]]
        assert waits == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
        storage.error = None
        assert rank.durable(1) == ""
        rank.close()


def test_an_engine_whose_disk_is_not_there_yet_serves_memory(tmp_path: Path) -> None:
    storage = Broken("make_folder")
    storage.error = errno.EROFS
    with engine_in_thread(tmp_path, storage=storage) as lab:
        assert "cannot be written yet" in lab.admin.status().persist_error
        rank = RawRank(lab.socket)
        rank.save(1, b"kept")
        assert rank.load(1)["payload"] == b"kept"
        eventually(lambda: lab.told("failed", 1))
        storage.error = None
        assert rank.durable(1) == ""
        rank.close()


def test_a_manifest_that_could_not_be_written_is_written_when_the_disk_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: the shards are there, and one file is all that the step lacks."""
    monkeypatch.setattr("ckpt_engine.persist.RECHECK_SECONDS", 0.01)
    monkeypatch.setattr("ckpt_engine.completion.RECHECKS_MAX", 2)
    storage = Broken("create", MANIFEST)
    storage.error = errno.ENOSPC
    with engine_in_thread(tmp_path, storage=storage) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, b"shard")
        eventually(lambda: storage.failures > 10, "many tries")
        whole_step = [event for event in lab.told("failed", 1) if event.rank == -1]
        assert len(whole_step) == 1, "told once, not at each try"
        storage.error = None
        eventually(lambda: lab.told("complete", 1))
        rank.close()


def test_an_engine_completes_what_the_one_before_it_left_without_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.persist.RECHECK_SECONDS", 0.01)
    put_step(tmp_path / "ck", 10)
    put_step(tmp_path / "ck", 20, ranks=[0, 1], world_size=2)
    (step_folder(tmp_path / "ck", 20) / MANIFEST).unlink()
    with engine_in_thread(tmp_path) as lab:
        eventually(lambda: lab.told("complete", 20))
    assert [record.step for record in complete_steps(tmp_path / "ck")] == [10, 20]


def test_marks_that_cannot_be_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nothing is written, because it might be rejected; afterwards it is, without another save."""
    monkeypatch.setattr("ckpt_engine.persist.RECHECK_SECONDS", 0.01)
    with engine_in_thread(tmp_path) as lab:
        (lab.directory / REJECTED).write_text("{")
        rank = RawRank(lab.socket)
        rank.save(1, b"kept")
        assert rank.durable(1, 0.1) != ""
        (lab.directory / REJECTED).unlink()
        eventually(lambda: lab.told("durable", 1))
        rank.close()


def test_steps_that_wait_for_their_manifest_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.completion.UNFINISHED_MAX", 3)
    config = PersistConfig(tmp_path, "n0", 3, 0.1, 0.2)
    completion = StepCompletion(config, Storage(), lambda event: None, HostClock(), lambda text: None, NobodyWatches())
    for step in range(1, 7):
        put_step(tmp_path, step, ranks=[0], world_size=2)
        completion.finish(step, 1)
    assert [key[0] for key in completion._unfinished] == [4, 5, 6]


ON_TINY_DISK = (
    "unshare", "--mount", "--map-root-user", "sh", "-c",
    'mount -t tmpfs -o size=6m,mode=0700 none "$0" && exec "$@"',
)  # fmt: skip


def test_a_real_disk_that_is_full_and_gets_room_again(tmp_path: Path) -> None:
    """A file system of 6 MiB of its own. Three shards of 2 MiB do not fit; when one file of 4 MiB goes, they do."""
    (tmp_path / "ck").mkdir()
    with EngineProcess(tmp_path, *ON_TINY_DISK, str(tmp_path / "ck")) as engine:
        disk = Path(f"/proc/{engine.process.pid}/root{engine.directory}")
        (disk / "ballast").write_bytes(bytes(4 << 20))
        rank = RawRank(engine.socket)
        payloads = {step: bytes([step]) * (2 << 20) for step in (1, 2)}
        for step, payload in payloads.items():
            rank.save(step, payload)
            eventually(lambda step=step: ["failed", step, 0, "disk"] in [row[:4] for row in engine.events()])  # type: ignore[misc]
        assert "No space left on device" in engine.events()[-1][4]
        assert complete_steps(disk) == []
        assert rank.load(2)["payload"] == payloads[2], "memory has it"
        (disk / "ballast").unlink()
        assert rank.durable(2) == ""
        eventually(lambda: [record.step for record in complete_steps(disk)])
        found = next(step_folder(disk, 2).glob("*.safetensors")).read_bytes()
        assert found.endswith(payloads[2])
        rank.close()
        assert engine.end(15) == 0
