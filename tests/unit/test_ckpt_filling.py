"""Bytes read straight to where they belong: every one of them, and none beside."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckpt_engine import filling
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.filling import FileSource, MemorySource, Region, fill, overlap


@contextmanager
def memfd(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def buffers(sizes: list[int]) -> list[ctypes.Array[ctypes.c_char]]:
    return [(ctypes.c_char * size)(*(b"?" * size)) for size in sizes]


def regions_of(targets: list[ctypes.Array[ctypes.c_char]], offsets: list[int]) -> list[Region]:
    return [
        Region(offset, ctypes.addressof(target), len(target)) for target, offset in zip(targets, offsets, strict=True)
    ]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_every_region_gets_its_bytes(kind: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours, gaps, the same bytes twice, more than fit one read, larger than one piece; in any order."""
    monkeypatch.setattr(filling, "PIECE_BYTES_MAX", 100)
    monkeypatch.setattr(filling, "BUFFERS_MAX", 3)
    monkeypatch.setattr(filling, "TOGETHER_BYTES_MIN", 0)
    dice = random.Random(threads)
    content = dice.randbytes(3000)
    sizes = [7, 1, 90, 11, 350, 2, 2, 2, 2, 2, 800, 5, 0]
    offsets = [sum(sizes[:at]) + (50 if at > 6 else 0) for at in range(len(sizes))]
    sizes, offsets = [*sizes, 33], [*offsets, 4]
    targets = buffers(sizes)
    regions = regions_of(targets, offsets)
    dice.shuffle(regions)
    if kind == "file":
        with memfd(content) as descriptor:
            fill(FileSource(descriptor), regions, threads)
    else:
        held = ctypes.create_string_buffer(content, len(content))
        fill(MemorySource(ctypes.addressof(held)), regions, threads)
    for target, offset in zip(targets, offsets, strict=True):
        assert target.raw == content[offset : offset + len(target)]


def test_short_reads_are_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may cut a read short anywhere, also in the middle of a buffer."""
    whole, dice = os.preadv, random.Random(1)

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        length = dice.randint(1, 9)
        taken = []
        for view in views:
            taken.append(view[: length - sum(map(len, taken))])
        return whole(descriptor, [view for view in taken if len(view)], offset)

    content = bytes(range(200))
    targets = buffers([50, 1, 60, 89])
    monkeypatch.setattr(os, "preadv", short)
    with memfd(content) as descriptor:
        fill(FileSource(descriptor), regions_of(targets, [0, 50, 51, 111]), 1)
    assert b"".join(target.raw for target in targets) == content


def test_a_source_that_ends_too_early_is_damage() -> None:
    targets = buffers([20])  # held, or the bytes would go to memory that is somebody else's
    with memfd(b"only this") as descriptor, pytest.raises(CheckpointDamaged, match="ends at byte 9"):
        fill(FileSource(descriptor), regions_of(targets, [0]), 1)


def test_what_one_thread_meets_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES_MAX", 10)
    monkeypatch.setattr(filling, "TOGETHER_BYTES_MIN", 0)
    targets = buffers([100])
    with memfd(bytes(95)) as descriptor, pytest.raises(CheckpointDamaged, match="ends at byte 95"):
        fill(FileSource(descriptor), regions_of(targets, [0]), 3)


def test_nothing_is_nothing() -> None:
    fill(FileSource(-1), [], 2)


def test_regions_that_share_memory_are_seen() -> None:
    assert not overlap([Region(0, 100, 10), Region(10, 110, 5), Region(20, 90, 10)])
    assert overlap([Region(0, 100, 10), Region(10, 109, 5)])
    assert overlap([Region(0, 100, 10), Region(10, 100, 10)])
