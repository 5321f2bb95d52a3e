"""What is damaged on disk is set aside: its bytes stay for a person, its step is offered to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.manifest import MANIFEST, complete_steps, read_record, record_name, step_folder
from ckpt_engine.quarantine import PREFIX, set_aside
from ckpt_engine.storage import Storage
from tests.ckpt_lab import put_step
from tests.ckpt_torch import flip_file, shard_path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (10, 20):
        put_step(tmp_path, step, ranks=[0, 1], world_size=2, payload=bytes(range(200)))
    return tmp_path


def steps(directory: Path) -> list[int]:
    return [record.step for record in complete_steps(directory)]


@pytest.mark.parametrize("at", [40, -5], ids=["header", "tensors"])
def test_a_damaged_shard_goes_with_its_record(directory: Path, at: int) -> None:
    path = shard_path(directory, 20, rank=1)
    flip_file(path, at)
    damaged = path.read_bytes()
    assert "checksum" in set_aside(Storage(), directory, 20, 1)
    assert steps(directory) == [10]
    assert path.with_name(PREFIX + path.name).read_bytes() == damaged
    assert read_record(directory, 20, 1, 1) is None, "or the engine would believe that it is written"
    assert shard_path(directory, 20, rank=0).exists()


def test_a_shard_that_is_right_by_now_stays(directory: Path) -> None:
    """It was the reader's memory that failed, or its network."""
    assert set_aside(Storage(), directory, 20, 1) == ""
    assert steps(directory) == [10, 20]


def test_a_manifest_that_cannot_be_read_is_set_aside(directory: Path) -> None:
    path = step_folder(directory, 20) / MANIFEST
    path.write_text("{")
    assert "not readable" in set_aside(Storage(), directory, 20, 0)
    assert not path.exists()
    assert path.with_name(PREFIX + MANIFEST).read_text() == "{"


def test_a_manifest_that_contradicts_a_good_shard_is_what_is_set_aside(directory: Path) -> None:
    record = read_record(directory, 20, 1, 1)
    assert record is not None
    path = step_folder(directory, 20) / MANIFEST
    wrong = f'"header_crc32": {record.checks.header_crc32}'
    path.write_text(path.read_text().replace(wrong, f'"header_crc32": {record.checks.header_crc32 ^ 1}'))
    assert "contradicts the record" in set_aside(Storage(), directory, 20, 1)
    assert shard_path(directory, 20, rank=1).exists()
    assert not path.exists()
    assert steps(directory) == [10]


def test_what_is_gone_or_was_never_there_is_left(directory: Path) -> None:
    assert set_aside(Storage(), directory, 30, 0) == ""
    assert set_aside(Storage(), directory, 20, 7) == ""
    shard_path(directory, 20).unlink()
    assert set_aside(Storage(), directory, 20, 0) == ""
    assert (step_folder(directory, 20) / record_name(0, 1)).exists()


def test_two_engines_that_find_it_do_not_stumble(directory: Path) -> None:
    flip_file(shard_path(directory, 20))
    assert set_aside(Storage(), directory, 20, 0)
    assert set_aside(Storage(), directory, 20, 0) == ""
