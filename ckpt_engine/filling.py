"""The bytes of a shard to where they belong, by several threads: memory that is there already is filled in place.

Each piece is mapped right before it is moved, in one call for all of its pages: a fault for each of them would take
as long as the move, and to read them from the slot's descriptor takes longer still. Nothing holds the interpreter's
lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .memfd import madvise
from .segment import PAGE_BYTES

_MADV_POPULATE_READ = 22  # Linux 5.14
PIECE_BYTES_MAX = 16 << 20
TOGETHER_BYTES_MIN = 4 << 20  # less is there before another thread has woken up


@dataclass(frozen=True, slots=True)
class Region:
    """`size_bytes` bytes that stand at `offset` in the source and belong to `address` in this process."""

    offset: int
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbours in the source, wherever they are in memory: (address, size) of each."""

    offset: int
    parts: tuple[tuple[int, int], ...]


class Source:
    """Memory of this process. `mapped` says whether its pages are in our page table already."""

    def __init__(self, memory: mmap.mmap, *, mapped: bool) -> None:
        self._view = memoryview(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mapped = mapped

    def read(self, piece: Piece) -> None:
        """Move all of `piece`."""
        at = self._address + piece.offset
        end = piece.offset + sum(size for _, size in piece.parts)
        if not self._mapped:
            with contextlib.suppress(OSError):  # an older kernel takes the faults one by one
                madvise(self._view[piece.offset // PAGE_BYTES * PAGE_BYTES : end], _MADV_POPULATE_READ)
        for address, size in piece.parts:
            ctypes.memmove(address, at, size)
            at += size


def overlap(regions: Iterable[Region]) -> bool:
    """Whether two of them share memory: the order in which they are written would matter."""
    end = 0
    for region in sorted(regions, key=lambda region: region.address):
        if region.address < end:
            return True
        end = region.address + region.size_bytes
    return False


def fill(source: Source, regions: Sequence[Region], threads: int) -> None:
    """Fill all `regions`, which lie within the source. The caller keeps the memory alive, and nobody else writes to it
    meanwhile."""
    pieces = deque(_pieces(regions))

    def work() -> None:
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            source.read(piece)

    helpers = min(threads, len(pieces)) - 1
    if helpers < 1 or sum(region.size_bytes for region in regions) < TOGETHER_BYTES_MIN:
        work()
        return
    with ThreadPoolExecutor(helpers, "fill") as pool:
        others = [pool.submit(work) for _ in range(helpers)]
        work()
        for other in others:
            other.result()


def _pieces(regions: Sequence[Region]) -> Iterator[Piece]:
    offset = end = -1
    parts: list[tuple[int, int]] = []
    for region in sorted(regions, key=lambda region: region.offset):
        for done in range(0, region.size_bytes, PIECE_BYTES_MAX):
            at, size = region.offset + done, min(PIECE_BYTES_MAX, region.size_bytes - done)
            if parts and (at != end or end - offset + size > PIECE_BYTES_MAX):
                yield Piece(offset, tuple(parts))
                parts = []
            if not parts:
                offset = at
            parts.append((region.address + done, size))
            end = at + size
    if parts:
        yield Piece(offset, tuple(parts))
