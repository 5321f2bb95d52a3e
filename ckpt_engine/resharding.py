"""A checkpoint that another number of ranks saved, in whatever tier, cut for this rank.

Tensors that say which block of a whole they are (DTensor, `transom.Shard`) are put together anew. Any other tensor
must be the same on all ranks that saved: whether an unnamed difference is a shard, or a state of its own for each
rank, nobody can tell, and so nobody guesses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .errors import StateMismatch
from .fetching import LoadedShard
from .layout import Layout, TensorPlace
from .manifest import Manifest
from .reshard import Target, nearest_rank, plan_reshard, run_reshard
from .shardfile import ShardHeader
from .stored import locate_stored, open_stored, opened_stored
from .tensors import Collector, TensorDoor
from .tree import ask_state, encode_asked

COMPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Targets:
    """What a state wants: its top-level keys, and its tensors by name."""

    keys: frozenset[str]
    tensors: dict[str, Target]

    def wants(self, name: str) -> bool:
        return any(name == key or name.startswith(f"{key}.") for key in self.keys)


class SavedShards(Protocol):
    """A step as another number of ranks saved it, in one tier: on disk, or in the memory of engines."""

    @property
    def step(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def layout(self, rank: int) -> Layout:
        """What that rank saved. Raises CheckpointDamaged."""
        ...

    def values(self, rank: int) -> bytes:
        """All that is no tensor, encoded. Raises CheckpointDamaged."""
        ...

    def payload(self, rank: int) -> AbstractContextManager[memoryview]:
        """All tensors of one saved rank, compared with their checksum. Raises CheckpointDamaged."""
        ...

    def first_difference(self, base: int, wanted: Callable[[str], bool]) -> tuple[str, int] | None:
        """The first tensor that names no block, is `wanted`, and is another on a rank than on `base`; that rank. None
        where all are the same. Raises CheckpointDamaged."""
        ...


class DiskShards:
    """`SavedShards` of a complete step on disk; every shard that is needed is read whole."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.step = manifest.step
        self.world_size = manifest.world_size
        self._directory = directory
        self._manifest = manifest
        self._headers: dict[int, ShardHeader] = {}

    def layout(self, rank: int) -> Layout:
        return self._header(rank).layout

    def values(self, rank: int) -> bytes:
        return self._header(rank).values

    @contextlib.contextmanager
    def payload(self, rank: int) -> Iterator[memoryview]:
        _, memory = open_stored(self._directory, self._manifest, rank)
        with memoryview(memory) as view:
            yield view

    def first_difference(self, base: int, wanted: Callable[[str], bool]) -> tuple[str, int] | None:
        """See `SavedShards`. Ranks whose tensors stand in one file have been compared by whoever wrote it."""
        own_file = self._file_of(base)
        with opened_stored(self._directory, self._manifest, base) as (descriptor, shard):
            places = shard.header.layout.places
            plain = {place.name: place for place in places if place.sharding is None and wanted(place.name)}
            for rank in range(self.world_size) if plain else ():
                if self._file_of(rank) == own_file:
                    continue
                with opened_stored(self._directory, self._manifest, rank) as (other_descriptor, other):
                    for place in other.header.layout.places:
                        mine = plain.get(place.name)
                        if mine is not None and not _same(
                            (descriptor, shard.payload_offset, mine), (other_descriptor, other.payload_offset, place)
                        ):
                            return place.name, rank
        return None

    def _header(self, rank: int) -> ShardHeader:
        if rank not in self._headers:
            self._headers[rank] = locate_stored(self._directory, self._manifest, rank).header
        return self._headers[rank]

    def _file_of(self, rank: int) -> int:
        """The rank whose file holds the tensors of `rank`."""
        stored_by = self._manifest.shards[rank].stored_by
        return rank if stored_by is None else stored_by


def targets_of(door: TensorDoor, into: dict[str, Any]) -> Targets:
    """What a state wants of each of its tensors. Raises TypeError where it holds what no checkpoint can."""
    collector = Collector(door)
    encode_asked(ask_state(into), collector)
    leaves = zip(collector.paths, collector.leaves, strict=True)
    tensors = {path: Target(tuple(leaf.tensor.shape), leaf.sharding) for path, leaf in leaves}
    return Targets(frozenset(into), tensors)


def read_resharded(shards: SavedShards, rank: int, world_size: int, targets: Targets) -> LoadedShard:
    """The shard of `rank`, one of another number of ranks than saved `shards`. Raises CheckpointDamaged, and
    StateMismatch where the saved shards do not make up what this rank wants."""
    base = nearest_rank(rank, world_size, shards.world_size)
    saved = [shards.layout(number) for number in range(shards.world_size)]
    plan = plan_reshard(saved, base, targets.tensors, wants=targets.wants)
    difference = shards.first_difference(base, targets.wants)
    if difference is not None:
        name, other = difference
        raise StateMismatch(
            f"{name} is not the same on ranks {base} and {other} of the {shards.world_size} that saved step "
            f"{shards.step}, and does not say which part of a whole it is: leave it out of what is to be loaded, or "
            "save it as a DTensor or a transom.Shard"
        )
    return LoadedShard(plan.layout, shards.values(base), run_reshard(plan, shards), 0)


def _same(one: tuple[int, int, TensorPlace], other: tuple[int, int, TensorPlace]) -> bool:
    (descriptor, payload, place), (other_descriptor, other_payload, other_place) = one, other
    if other_place.sharding is not None or (place.dtype, place.shape) != (other_place.dtype, other_place.shape):
        return False
    for start in range(0, place.size_bytes, COMPARE_BYTES):
        size = min(COMPARE_BYTES, place.size_bytes - start)
        mine = os.pread(descriptor, size, payload + place.offset + start)
        if mine != os.pread(other_descriptor, size, other_payload + other_place.offset + start):
            return False
    return True
