"""Blocks of a tensor that is spread over ranks: where they stand in the whole, and what two of them share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor that is one block of a larger one, for a state whose parts are spread over ranks without DTensor.

    `offset`: where the block begins in each dimension of `global_shape`. A flat shard, as FSDP1 and ZeRO cut them,
    is a block of one dimension. A checkpoint with such blocks loads on another number of ranks: give a state whose
    blocks are those of the new ranks.
    """

    tensor: Any
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(size) for size in self.global_shape))
        object.__setattr__(self, "offset", tuple(int(start) for start in self.offset))
        shape = tuple(self.tensor.shape)
        if not len(shape) == len(self.global_shape) == len(self.offset):
            raise ValueError(
                f"a shard of shape {list(shape)} needs a global shape and an offset of {len(shape)} numbers each, not "
                f"{list(self.global_shape)} and {list(self.offset)}"
            )
        parts = zip(self.offset, shape, self.global_shape, strict=True)
        if any(start < 0 or start + size > whole for start, size, whole in parts):
            raise ValueError(
                f"a shard of shape {list(shape)} at {list(self.offset)} reaches beyond its tensor of shape "
                f"{list(self.global_shape)}"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Block) -> Block | None:
        """What both hold; None where that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Block(starts, shape) if all(size > 0 for size in shape) else None

    def without(self, part: Block) -> list[Block]:
        """The rest, as blocks that do not overlap; `part` lies within."""
        rest = []
        offset, shape = list(self.offset), list(self.shape)
        for dim, (start, size) in enumerate(zip(part.offset, part.shape, strict=True)):
            before, behind = start - offset[dim], offset[dim] + shape[dim] - start - size
            if before:
                rest.append(Block(tuple(offset), (*shape[:dim], before, *shape[dim + 1 :])))
            if behind:
                rest.append(
                    Block((*offset[:dim], start + size, *offset[dim + 1 :]), (*shape[:dim], behind, *shape[dim + 1 :]))
                )
            offset[dim], shape[dim] = start, size
        return rest

    def _ends(self) -> Iterator[int]:
        return (start + size for start, size in zip(self.offset, self.shape, strict=True))


def runs(part: Block, source: Block, target: Block, element_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, size) in bytes of each run that `part` is in both blocks, which stand row by row in memory."""
    dim, size_bytes = len(part.shape), element_bytes
    while dim > 0:  # dimensions that are whole in both are one run with the next outer one
        dim -= 1
        size_bytes *= part.shape[dim]
        if not part.shape[dim] == source.shape[dim] == target.shape[dim]:
            break
    read, write = _place(part, source, element_bytes), _place(part, target, element_bytes)
    for index in itertools.product(*(range(size) for size in part.shape[:dim])):
        yield read(index), write(index), size_bytes


def _place(part: Block, whole: Block, element_bytes: int) -> _Place:
    strides, stride = [], element_bytes
    for size in reversed(whole.shape):
        strides.append(stride)
        stride *= size
    strides.reverse()
    start = sum((a - b) * step for a, b, step in zip(part.offset, whole.offset, strides, strict=True))
    return _Place(start, tuple(strides))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part begins in a block's memory, and how far its rows stand from each other."""

    start: int
    strides: tuple[int, ...]

    def __call__(self, index: tuple[int, ...]) -> int:
        return self.start + sum(at * stride for at, stride in zip(index, self.strides, strict=False))
