"""Bytes moved straight to where they belong: every one of them, and none beside."""

from __future__ import annotations

import ctypes
import mmap
import os
import random

import pytest

from ckpt_engine import filling
from ckpt_engine.filling import Piece, Region, Source, fill, overlap


def memory_of(content: bytes, *, shared: bool = True) -> mmap.mmap:
    """A private mapping of a memfd, or memory of this process."""
    if not shared:
        memory = mmap.mmap(-1, len(content))
        memory[:] = content
        return memory
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        return mmap.mmap(descriptor, len(content), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def buffers(sizes: list[int]) -> list[ctypes.Array[ctypes.c_char]]:
    return [(ctypes.c_char * size)(*(b"?" * size)) for size in sizes]


def regions_of(targets: list[ctypes.Array[ctypes.c_char]], offsets: list[int]) -> list[Region]:
    return [
        Region(offset, ctypes.addressof(target), len(target)) for target, offset in zip(targets, offsets, strict=True)
    ]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["slot", "own memory"])
@pytest.mark.parametrize("piece", [100, 5000])
def test_every_region_gets_its_bytes(shared: bool, threads: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours, gaps, the same bytes twice, across pages, larger than one piece; in any order."""
    monkeypatch.setattr(filling, "PIECE_BYTES_MAX", piece)
    monkeypatch.setattr(filling, "TOGETHER_BYTES_MIN", 0)
    dice = random.Random(threads)
    content = dice.randbytes(30_000)
    sizes = [7, 1, 90, 11, 350, 2, 2, 2, 2, 2, 18_000, 5, 0]
    offsets = [sum(sizes[:at]) + (50 if at > 6 else 0) for at in range(len(sizes))]
    sizes, offsets = [*sizes, 33, 8], [*offsets, 4, len(content) - 8]
    targets = buffers(sizes)
    regions = regions_of(targets, offsets)
    dice.shuffle(regions)
    fill(Source(memory_of(content, shared=shared), mapped=not shared), regions, threads)
    for target, offset in zip(targets, offsets, strict=True):
        assert target.raw == content[offset : offset + len(target)]


def test_a_kernel_that_cannot_map_ahead_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(filling, "madvise", refuse)
    targets = buffers([10])
    fill(Source(memory_of(b"0123456789"), mapped=False), regions_of(targets, [0]), 1)
    assert targets[0].raw == b"0123456789"


def test_what_one_thread_meets_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES_MAX", 10)
    monkeypatch.setattr(filling, "TOGETHER_BYTES_MIN", 0)

    class Broken(Source):
        def read(self, piece: Piece) -> None:
            raise OSError(5, "Input/output error")

    targets = buffers([100])
    with pytest.raises(OSError, match="Input/output"):
        fill(Broken(memory_of(bytes(100)), mapped=True), regions_of(targets, [0]), 3)


def test_nothing_is_nothing() -> None:
    fill(Source(memory_of(b"x"), mapped=True), [], 2)


def test_regions_that_share_memory_are_seen() -> None:
    assert not overlap([Region(0, 100, 10), Region(10, 110, 5), Region(20, 90, 10)])
    assert overlap([Region(0, 100, 10), Region(10, 109, 5)])
    assert overlap([Region(0, 100, 10), Region(10, 100, 10)])
