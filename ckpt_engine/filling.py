"""The bytes of a shard to where they belong, by several threads: memory that is there already is filled in place.

From an engine's slot the kernel reads them straight there, without a page table of ours between; from private
memory they are moved. Neither holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from .errors import CheckpointDamaged

BUFFERS_MAX = 1000  # of one read; Linux takes 1024
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


class Source(Protocol):
    """Where the bytes come from."""

    def read(self, piece: Piece) -> None:
        """All of `piece`. Raises CheckpointDamaged where the source ends too early, and OSError."""
        ...


class FileSource:
    """A slot's memfd, or a file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, piece: Piece) -> None:
        offset = piece.offset
        buffers = [memoryview((ctypes.c_char * size).from_address(address)) for address, size in piece.parts]
        while buffers:
            got = os.preadv(self._descriptor, buffers, offset)
            if got == 0:
                raise CheckpointDamaged(f"the slot ends at byte {offset}, before the last of its tensors")
            offset += got
            while buffers and got >= len(buffers[0]):
                got -= len(buffers.pop(0))
            if got:
                buffers[0] = buffers[0][got:]


class MemorySource:
    """Memory of this process that begins at `address`."""

    def __init__(self, address: int) -> None:
        self._address = address

    def read(self, piece: Piece) -> None:
        start = self._address + piece.offset
        for address, size in piece.parts:
            ctypes.memmove(address, start, size)
            start += size


def overlap(regions: Iterable[Region]) -> bool:
    """Whether two of them share memory: the order in which they are written would matter."""
    end = 0
    for region in sorted(regions, key=lambda region: region.address):
        if region.address < end:
            return True
        end = region.address + region.size_bytes
    return False


def fill(source: Source, regions: Sequence[Region], threads: int) -> None:
    """Read all `regions`. The caller keeps the memory alive, and nobody else writes to it meanwhile.

    Raises CheckpointDamaged and OSError.
    """
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
            if parts and (at != end or end - offset + size > PIECE_BYTES_MAX or len(parts) == BUFFERS_MAX):
                yield Piece(offset, tuple(parts))
                parts = []
            if not parts:
                offset = at
            parts.append((region.address + done, size))
            end = at + size
    if parts:
        yield Piece(offset, tuple(parts))
