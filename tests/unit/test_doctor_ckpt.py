"""What `transom doctor` says of checkpoints: the tier of the next restart for each job and node, keeper, limits."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.memory_room import MemoryRoom
from ckpt_engine.status import AgreedStep, EngineStatus, ShardStatus
from pipelines import doctor_ckpt
from pipelines.checkpoints import EngineCatalog, catalog_of
from pipelines.doctor_ckpt import examine_checkpoints
from pipelines.finding import Finding
from pipelines.places import Places
from pipelines.run import RunOptions, register_job
from pipelines.settings import CheckpointSettings, ObjectsSettings, Settings
from recovery.backend import CheckpointChoice, Unavailable
from recovery.launcher.protocol import JobSpec
from tests.ckpt_lab import Lab, RawRank, engine_in_thread, eventually

JOB = "job"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "s")


@pytest.fixture
def places(settings: Settings) -> Places:
    made = Places.of(settings)
    register_job(made, JobSpec(job=JOB, script="train.py", nodes=1, nproc_per_node=1), RunOptions(spares=1))
    return made


@pytest.fixture
def lab(places: Places, tmp_path: Path) -> Iterator[Lab]:
    config = {"socket_path": places.socket(JOB, "node0", "ckpt"), "directory": places.checkpoints(JOB)}
    with engine_in_thread(tmp_path, node="node0", keeper_seconds_max=30.0, **config) as lab:
        yield lab


def finding(settings: Settings, name: str) -> Finding:
    return next(found for found in examine_checkpoints(settings) if found.name == name)


def test_what_only_the_object_store_has_is_said_and_chosen(tmp_path: Path, places: Places) -> None:
    store = f"file://{tmp_path}/store"
    settings = Settings(state_dir=tmp_path / "s", checkpoint=CheckpointSettings(objects=ObjectsSettings(url=store)))
    directory = places.checkpoints(JOB)
    with engine_in_thread(tmp_path, directory=directory, objects_url=store) as lab, RawRank(lab.socket) as rank:
        rank.save(7, b"weights")
        eventually(lambda: lab.told("complete", 7, "object"), "the upload")
    shutil.rmtree(directory)
    catalog = catalog_of(settings, places)
    assert catalog.newest_complete(JOB, before_step=None, places=[(0, "node0")]) == CheckpointChoice(7, "object")
    assert catalog.newest_complete(JOB, before_step=7, places=[(0, "node0")]) is None
    assert "a restart would load step 7 from object" in finding(settings, "checkpoints of job on node0").text
    assert [record.step for record in catalog.object_steps(JOB)] == [7]
    broken = EngineCatalog(places, objects_url="nothing-such://store")
    with pytest.raises(Unavailable, match="the object store cannot be asked for checkpoints of job"):
        broken.newest_complete(JOB, before_step=None, places=[(0, "node0")])


def test_a_job_in_memory_with_a_keeper_is_said_to_be_so(settings: Settings, lab: Lab) -> None:
    rank = RawRank(lab.socket)
    rank.save(7, b"weights")
    found = finding(settings, "checkpoints of job on node0")
    assert found.grade == "ok"
    assert "a restart would load step 7 from memory; a keeper (process " in found.text
    spare = finding(settings, "checkpoints of job on node1")
    assert spare.grade == "note"
    assert "no engine answers" in spare.text
    assert spare.mend == "transom ckpt serve --job job --node node1"
    assert rank.durable(7) == ""
    eventually(lambda: lab.told("complete", 7))
    lab.engine._table.void(lab.engine._table.sealed()[0][1], lab.engine._table.sealed()[0][2])
    assert "a restart would load step 7 from disk" in finding(settings, "checkpoints of job on node0").text
    rank.close()


def test_a_job_without_a_checkpoint_begins_anew(settings: Settings, lab: Lab) -> None:
    assert "no step is whole on all ranks" in finding(settings, "checkpoints of job on node0").text


def test_an_engine_without_a_keeper_is_said_to_lose_its_memory(
    settings: Settings, places: Places, tmp_path: Path
) -> None:
    config = {"socket_path": places.socket(JOB, "node0", "ckpt"), "directory": places.checkpoints(JOB)}
    with engine_in_thread(tmp_path, node="node0", **config):
        found = finding(settings, "checkpoints of job on node0")
    assert found.grade == "note"
    assert "memory ends with the engine: this engine was started without a keeper" in found.text


def test_a_job_that_is_over_is_not_looked_at(settings: Settings, places: Places) -> None:
    (places.job(JOB) / "outcome.json").write_text("{}")
    assert [found.name for found in examine_checkpoints(settings) if JOB in found.name] == []


def test_a_job_whose_rejections_cannot_be_read_says_so(settings: Settings, places: Places) -> None:
    (places.checkpoints(JOB) / "rejected.json").write_text("{")
    assert "rejected.json is not readable" in finding(settings, "checkpoints of job").text


@pytest.mark.parametrize(
    ("tier", "held", "word"),
    [
        ("memory+disk", (0,), "disk"),
        ("memory+disk", (0, 1), "memory"),
        ("memory+peer", (0,), "peer"),
        ("disk", (), "disk"),
    ],
)
def test_the_tier_is_that_of_the_node(tier: str, held: tuple[int, ...], word: str) -> None:
    shards = tuple(ShardStatus(rank, 10, 2, 2, "sealed", 1, True, False) for rank in held)
    status = EngineStatus(JOB, "node0", 2, (*shards, ShardStatus(1, 9, 2, 2, "sealed", 1, True, True)), (), 0, 0)
    said = doctor_ckpt._would_load([0, 1], status, AgreedStep(10, 2, tier))
    assert said == f"a restart would load step 10 from {word}"


def test_too_little_room_is_named_with_its_limit(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    room = MemoryRoom("the memory cgroup /pod (v2)", 2 << 30, 1 << 30)
    monkeypatch.setattr(doctor_ckpt, "tightest_room", lambda: room)
    found = finding(settings, "checkpoint memory")
    assert found.grade == "note"
    assert "the memory cgroup /pod (v2) has 1024 of 2048 MiB left, checkpoint.memory_bytes_max is 8192" in found.text


@pytest.mark.parametrize(("hard", "grade"), [(1024, "note"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_the_limit_of_open_files_is_judged_by_what_engines_may_raise_it_to(
    monkeypatch: pytest.MonkeyPatch, hard: int, grade: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, hard))
    assert doctor_ckpt._open_files().grade == grade


@pytest.mark.parametrize(("answer", "word"), [(True, "takes O_DIRECT"), (False, "does not take O_DIRECT")])
def test_whether_the_folder_takes_direct_writes_is_tried(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, answer: bool, word: str
) -> None:
    asked: list[Path] = []

    def takes(folder: Path) -> bool:
        asked.append(folder)
        return answer

    monkeypatch.setattr(doctor_ckpt, "takes_direct", takes)
    assert word in finding(settings, "checkpoint folder").text
    assert asked == [settings.state_dir.absolute()]


def test_a_folder_that_cannot_be_written_is_a_finding(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_ckpt, "takes_direct", full)
    assert "No space left on device" in finding(settings, "checkpoint folder").text


def test_metrics_of_a_job_name_the_engines_that_do_not_answer(places: Places, lab: Lab) -> None:
    text = EngineCatalog(places).metrics(JOB)
    assert 'transom_ckpt_engine_up{job="job",node="node0"} 1' in text
    assert 'transom_ckpt_engine_up{job="job",node="node1"} 0' in text
    assert text.count("# TYPE transom_ckpt_engine_up gauge") == 1
    assert 'transom_ckpt_keeper_up{job="job",node="node0"} 1' in text
