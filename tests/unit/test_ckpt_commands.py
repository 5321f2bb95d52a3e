"""`transom ckpt`: what stands there, is it whole, and memory brought to disk; with exit codes and JSON for programs."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckpt_engine.manifest import complete_steps, step_folder
from ckpt_engine.storage import OutputFile, Storage
from ckpt_engine.verification import Verification, add_verification
from pipelines.__main__ import app
from pipelines.places import Places
from pipelines.run import RunOptions, register_job
from pipelines.settings import load_settings
from recovery.launcher.protocol import JobSpec
from tests.ckpt_lab import Lab, RawRank, engine_in_thread, put_step


class Closed(Storage):
    """Shards are not taken while it is closed."""

    def __init__(self) -> None:
        self.closed = False

    def create(self, path: Path) -> OutputFile:
        if self.closed and "safetensors" in path.name:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return super().create(path)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.chdir(tmp_path)
    places = Places.of(load_settings(overrides={"state_dir": str(tmp_path / "s")}))
    register_job(places, JobSpec(job="job", script="train.py"), RunOptions())
    return places


@pytest.fixture
def storage() -> Closed:
    return Closed()


@pytest.fixture
def lab(places: Places, storage: Closed) -> Iterator[Lab]:
    socket, directory = places.socket("job", "node0", "ckpt"), places.checkpoints("job")
    with engine_in_thread(places.state, node="node0", storage=storage, socket_path=socket, directory=directory) as lab:
        yield lab


def typed(*words: str) -> tuple[int, Any]:
    """The exit code, and what was printed as JSON."""
    said = CliRunner().invoke(app, ["ckpt", *words, "--json"])
    return said.exit_code, json.loads(said.stdout)


def test_draining_brings_memory_to_disk(lab: Lab, places: Places, storage: Closed) -> None:
    storage.closed = True
    with RawRank(lab.socket) as rank:
        rank.save(1, b"kept")
        words = ("drain", "--job", "job", "--state-dir", "s", "--timeout", "0.3")
        code, (engine,) = typed(*words)
        assert (code, engine["node"], engine["done"]) == (1, "node0", False)
        assert "raise the quota" in engine["reason"]
        storage.closed = False
        assert typed(*words[:-1], "20") == (0, [{"node": "node0", "done": True, "reason": ""}])
        assert [record.step for record in complete_steps(places.checkpoints("job"))] == [1]


def test_draining_a_job_without_engines_is_no_success(places: Places) -> None:
    assert typed("drain", "--job", "job", "--state-dir", "s") == (1, [])


def test_the_list_says_which_steps_are_verified(places: Places) -> None:
    directory = places.checkpoints("job")
    for step in (10, 20):
        put_step(directory, step)
    add_verification(directory, Verification(10, 1), Storage(), "test")
    code, listed = typed("ls", "--job", "job", "--state-dir", "s")
    assert code == 0
    assert [(entry["step"], entry["state"], entry["verified"]) for entry in listed["disk"]] == [
        (10, "complete", True), (20, "complete", False),
    ]  # fmt: skip
    said = CliRunner().invoke(app, ["ckpt", "ls", "--job", "job", "--state-dir", "s"])
    assert "complete, verified" in said.stdout


def test_verifying_reads_every_byte_and_names_the_shard(places: Places) -> None:
    directory = places.checkpoints("job")
    put_step(directory, 10, ranks=[0, 1], world_size=2)
    code, verdicts = typed("verify", str(directory))
    assert (code, [verdict["reason"] for verdict in verdicts]) == (0, ["", ""])
    path = sorted(step_folder(directory, 10).glob("*.safetensors"))[1]
    raw = path.read_bytes()
    for at in (9, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        code, verdicts = typed("verify", str(directory), "--step", "10")
        assert (code, [bool(verdict["reason"]) for verdict in verdicts]) == (1, [False, True])
        assert path.name in verdicts[1]["reason"]


def test_inspecting_shows_what_is_in_a_shard(places: Places) -> None:
    directory = places.checkpoints("job")
    put_step(directory, 10)
    code, (shard,) = typed("inspect", str(directory), "--step", "10")
    assert (code, shard["tensors"][0]["name"], shard["stored_by"]) == (0, "bytes", None)
