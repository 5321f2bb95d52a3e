"""Shared memory that nobody can pull away, and what a person is told of a checkpoint folder."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from ckpt_engine.errors import CheckpointDamaged, CheckpointNotFound
from ckpt_engine.fetching import check_memory, read_from_memory
from ckpt_engine.inspection import inspect_step, list_steps, verify_steps
from ckpt_engine.manifest import MANIFEST, shard_name, step_folder
from ckpt_engine.memfd import adopt_segment, create_segment
from ckpt_engine.rejection import Rejection, add_rejection
from ckpt_engine.shardfile import Identity
from ckpt_engine.storage import Storage
from tests.ckpt_lab import fill_segment, put_step, raw_header

PAGES = 4 * 4096


@pytest.mark.parametrize("size", [4096, 2 * PAGES])
def test_a_segment_can_neither_shrink_nor_grow(size: int) -> None:
    """Shrunk under a rank, its next store would be a SIGBUS."""
    segment = create_segment(PAGES)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, size)
    segment.close()


def test_every_page_of_a_segment_is_there_from_the_start() -> None:
    segment = create_segment(PAGES)
    assert os.fstat(segment.descriptor).st_blocks * 512 == PAGES
    segment.close()


def test_a_segment_is_taken_back_with_its_content() -> None:
    segment = create_segment(PAGES)
    segment.view[100:104] = b"kept"
    again = adopt_segment(segment.duplicate())
    segment.close()
    assert bytes(again.view[100:104]) == b"kept"
    again.close()


def test_only_a_sealed_memfd_of_whole_pages_is_taken_back(tmp_path: Path) -> None:
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    unsealed = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGES)
    try:
        for descriptor in (plain, unsealed):
            with pytest.raises(CheckpointDamaged, match="memfd"):
                adopt_segment(descriptor)
    finally:
        os.close(plain)
        os.close(unsealed)


@pytest.mark.parametrize("wrong", [{"job": "other"}, {"attempt": 2}, {"rank": 1}, {"world_size": 3}, {"step": 8}])
def test_a_slot_of_somebody_else_is_not_loaded(wrong: dict[str, object]) -> None:
    identity = Identity("job", 1, 0, 2, 7)
    header, layout = raw_header(7, 4, identity)
    segment = create_segment(PAGES)
    fill_segment(segment.view, header, layout, b"mine")
    wanted = {"job": "job", "attempt": 1, "rank": 0, "world_size": 2, "step": 7, **wrong}
    with pytest.raises(CheckpointDamaged, match="the slot holds"):
        read_from_memory(segment.duplicate(), Identity(**wanted))  # type: ignore[arg-type]
    with pytest.raises(CheckpointDamaged, match="do not match their checksum"):
        check_memory(segment.descriptor, identity, 12345, 1)
    check_memory(segment.descriptor, identity, zlib.crc32(b"mine"), 1)
    segment.close()


def test_a_folder_is_listed_with_what_each_step_is_worth(tmp_path: Path) -> None:
    put_step(tmp_path, 10)
    put_step(tmp_path, 20)
    put_step(tmp_path, 30)
    put_step(tmp_path, 40, attempt=2)
    put_step(tmp_path, 50, attempt=2, ranks=[0], world_size=2)
    put_step(tmp_path, 15, attempt=2)
    add_rejection(tmp_path, Rejection(30, 1, "loss is NaN"), Storage(), "test")
    listed = [(step.step, step.state, step.shards, step.world_size, step.reason) for step in list_steps(tmp_path)]
    assert listed == [
        (10, "complete", 1, 1, ""),
        (15, "complete", 1, 1, ""),
        (20, "abandoned", 1, 1, ""),
        (30, "rejected", 1, 1, "loss is NaN"),
        (40, "complete", 1, 1, ""),
        (50, "incomplete", 1, 2, ""),
    ]


def test_a_step_is_shown_with_its_tensors(tmp_path: Path) -> None:
    put_step(tmp_path, 10, ranks=[0, 1], world_size=2)
    shards = inspect_step(tmp_path, 10)
    assert [shard.rank for shard in shards] == [0, 1]
    (tensor,) = shards[0].tensors
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes) == ("bytes", "uint8", (7,), 7)
    with pytest.raises(CheckpointNotFound, match="complete there: 10"):
        inspect_step(tmp_path, 11)


def test_verifying_names_the_shard_that_is_not_whole(tmp_path: Path) -> None:
    put_step(tmp_path, 10, ranks=[0, 1], world_size=2)
    put_step(tmp_path, 20)
    assert [verdict.whole for verdict in verify_steps(tmp_path)] == [True, True, True]
    path = step_folder(tmp_path, 10) / shard_name(1, 1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 128
    path.write_bytes(raw)
    (step_folder(tmp_path, 20) / MANIFEST).write_text("{")
    bad = [(verdict.step, verdict.rank) for verdict in verify_steps(tmp_path) if not verdict.whole]
    assert bad == [(10, 1), (20, -1)]
    assert [verdict.whole for verdict in verify_steps(tmp_path, 10)] == [True, False]
    with pytest.raises(CheckpointNotFound):
        list(verify_steps(tmp_path, 11))
    path.write_bytes(raw[:-1])
    assert f"has {len(raw) - 1} bytes, its record says {len(raw)}" in list(verify_steps(tmp_path, 10))[1].reason


def test_a_shard_header_is_part_of_the_checksum(tmp_path: Path) -> None:
    put_step(tmp_path, 10)
    path = step_folder(tmp_path, 10) / shard_name(0, 1)
    path.write_bytes(path.read_bytes().replace(b'{\\"$dict\\":', b'{\\"$dicu\\":'))
    (verdict,) = verify_steps(tmp_path)
    assert "header" in verdict.reason
