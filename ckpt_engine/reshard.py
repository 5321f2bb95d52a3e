"""Which bytes of which saved shards make up what a rank wants: on another number of ranks, or another mesh.

The plan is made from layouts alone. Shards are then read whole, because their checksums are of the whole, one
after the other, so that a rank never holds more than its own state and one saved shard.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from .blocks import Block, runs
from .errors import StateMismatch
from .layout import ELEMENT_TYPES, Layout, StoredTensor, TensorPlace, plan_layout
from .sharding import Sharding


class ShardReader(Protocol):
    """Where saved shards are read from: the disk, memory, a peer."""

    def payload(self, rank: int) -> AbstractContextManager[memoryview]:
        """All tensors of one saved rank, compared with their checksum. Raises CheckpointDamaged."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What a rank wants of a tensor. `sharding` is that of the living tensor; None: a plain one, the whole."""

    shape: tuple[int, ...]
    sharding: Sharding | None

    @property
    def block(self) -> Block | None:
        """None where it is not one block of the global tensor."""
        if self.sharding is None:
            return Block((0,) * len(self.shape), self.shape)
        return None if self.sharding.offset is None else Block(self.sharding.offset, self.shape)


@dataclass(frozen=True, slots=True)
class Copy:
    """A part that stands in `source` of a saved shard, and belongs into `target` of the new one. `from_byte` and
    `to_byte` are where those two blocks begin in their payloads."""

    rank: int
    part: Block
    source: Block
    from_byte: int
    target: Block
    to_byte: int
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.part.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The layout that this rank will have, and what has to be copied for it, by saved rank."""

    layout: Layout
    copies: tuple[Copy, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The saved ranks that are read."""
        return tuple(sorted({copy.rank for copy in self.copies}))


def plan_reshard(
    saved: Sequence[Layout],
    base: int,
    targets: Mapping[str, Target],
    near: Sequence[int] = (),
    wants: Callable[[str], bool] = lambda name: True,
) -> ReshardPlan:
    """How to make the shard of a new rank from those of all saved ranks.

    `base`: the saved rank whose tree of values is taken, and whose tensors that are not spread over ranks.
    `targets`: what is wanted of each tensor, by its name; others are spread as tensors that were spread alike.
    `near`: ranks to prefer where several have the same. `wants`: of which tensors anything is wanted at all; others are
    left empty, and nothing is read for them. Raises StateMismatch where a part is in no saved shard.
    """
    order = sorted(range(len(saved)), key=lambda rank: (rank not in near, rank))
    by_name = [{place.name: place for place in layout.places} for layout in saved]
    alike = _alike(saved[base], targets)
    viewed = {view.place for view in saved[base].views}
    wanted = [
        _wanted(saved[base], place, targets.get(place.name, alike.get(place.sharding)))
        if wants(place.name) or index in viewed
        else _nothing(place)
        for index, place in enumerate(saved[base].places)
    ]
    layout = replace(plan_layout([tensor for tensor, _ in wanted]), views=saved[base].views)
    copies: list[Copy] = []
    for place, kept, (_, block) in zip(layout.places, saved[base].places, wanted, strict=True):
        if kept.sharding is None:
            sources = [(base, kept)]
        else:
            sources = [(rank, by_name[rank][kept.name]) for rank in order if kept.name in by_name[rank]]
        copies += _cover(place, block, sources)
    return ReshardPlan(layout, tuple(sorted(copies, key=lambda copy: (copy.rank, copy.from_byte))))


def run_reshard(plan: ReshardPlan, reader: ShardReader) -> mmap.mmap:
    """The new payload, in private memory. Raises what `reader` raises."""
    memory = mmap.mmap(-1, max(plan.layout.payload_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(memory) as new:
        for rank in plan.ranks:
            with reader.payload(rank) as old:
                for copy in plan.copies:
                    if copy.rank == rank:
                        _run(copy, old, new)
    return memory


def nearest_rank(rank: int, world_size: int, saved_world_size: int) -> int:
    """The saved rank whose values (random states, positions in the data) a new rank goes on from."""
    return rank if rank < saved_world_size else rank * saved_world_size // world_size


def _alike(base: Layout, targets: Mapping[str, Target]) -> dict[Sharding | None, Target]:
    """What is wanted of tensors that the state does not have yet, by how they were spread: an optimizer that has not
    stepped gets its moments spread like the parameters that they belong to."""
    known = [(place.sharding, targets[place.name]) for place in base.places if place.name in targets]
    return {sharding: target for sharding, target in known if sharding is not None and target.sharding is not None}


def _wanted(base: Layout, place: TensorPlace, target: Target | None) -> tuple[StoredTensor, Block]:
    if place.sharding is None:
        block = Block((0,) * len(place.shape), place.shape)
        if target is not None and target.sharding is not None:
            if target.sharding.global_shape != place.shape:
                raise _wrong_shape(place.name, target.sharding.global_shape, place.shape)
            block = _block_of(place.name, target)
            _refuse_views(base, place)
            return StoredTensor(place.name, place.dtype, block.shape, None, target.sharding), block
        return StoredTensor(place.name, place.dtype, place.shape, place.strides, None), block
    shape = place.sharding.global_shape
    sharding = None if target is None else target.sharding
    if target is not None and (target.shape if sharding is None else sharding.global_shape) != shape:
        raise _wrong_shape(place.name, target.shape if sharding is None else sharding.global_shape, shape)
    block = Block((0,) * len(shape), shape) if target is None else _block_of(place.name, target)
    if block.shape != place.shape:
        _refuse_views(base, place)
    return StoredTensor(place.name, place.dtype, block.shape, None, sharding), block


def _nothing(place: TensorPlace) -> tuple[StoredTensor, Block]:
    """Its place in the order of all tensors, without a byte."""
    return StoredTensor(place.name, place.dtype, (0,)), Block((0,), (0,))


def _block_of(name: str, target: Target) -> Block:
    block = target.block
    if block is None:
        raise StateMismatch(
            f"{name} is here a shard that is not one block of its tensor, which cannot be put together from other "
            "shards; load with the mesh that it was saved with"
        )
    return block


def _wrong_shape(name: str, here: tuple[int, ...], saved: tuple[int, ...]) -> StateMismatch:
    return StateMismatch(f"{name} is {list(here)} here as a whole, but {list(saved)} in the checkpoint")


def _refuse_views(base: Layout, place: TensorPlace) -> None:
    index = base.places.index(place)
    if any(view.place == index for view in base.views):
        raise StateMismatch(
            f"{place.name} shares its memory with other tensors, so it cannot be cut anew; load with the number of "
            "ranks that it was saved with"
        )


def _cover(place: TensorPlace, wanted: Block, sources: Sequence[tuple[int, TensorPlace]]) -> list[Copy]:
    element = ELEMENT_TYPES[place.dtype].size_bytes
    missing = [wanted] if wanted.elements else []
    copies = []
    for rank, source in sources:
        block = _stored_block(source)
        if not missing:
            break
        if block is None or source.dtype != place.dtype:
            continue
        left = []
        for want in missing:
            part = want.common(block)
            if part is None:
                left.append(want)
                continue
            copies.append(Copy(rank, part, block, source.offset, wanted, place.offset, element))
            left += want.without(part)
        missing = left
    if missing:
        raise StateMismatch(
            f"of {place.name} the block at {list(missing[0].offset)} of shape {list(missing[0].shape)} is in no saved "
            "shard; its placements cannot be undone (a partial sum, or a shard that is not one block)"
        )
    return copies


def _stored_block(place: TensorPlace) -> Block | None:
    """The block of the global tensor that a saved shard holds; None where it is none that can be cut."""
    if place.sharding is None:
        return Block((0,) * len(place.shape), place.shape)
    if place.sharding.offset is None or any(kind[0] == "partial" for kind in place.sharding.placements):
        return None
    return Block(place.sharding.offset, place.shape)


def _run(copy: Copy, old: memoryview, new: memoryview) -> None:
    for source, target, size_bytes in runs(copy.part, copy.source, copy.target, copy.element_bytes):
        start, end = copy.from_byte + source, copy.to_byte + target
        new[end : end + size_bytes] = old[start : start + size_bytes]
