"""A checkpoint that another number of ranks saved, read from disk and cut for this rank.

Tensors that say which block of a whole they are (DTensor, `transom.Shard`) are put together anew. Any other tensor
must be the same on all ranks that saved: whether an unnamed difference is a shard, or a state of its own for each
rank, nobody can tell, and so nobody guesses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StateMismatch
from .fetching import LoadedShard
from .layout import TensorPlace
from .manifest import Manifest
from .reshard import ShardReader, Target, nearest_rank, plan_reshard, run_reshard
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


class DiskShards:
    """`ShardReader` over a complete step; every shard is read whole and compared with its checksums."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest

    @contextlib.contextmanager
    def payload(self, rank: int) -> Iterator[memoryview]:
        _, memory = open_stored(self._directory, self._manifest, rank)
        with memoryview(memory) as view:
            yield view


def targets_of(door: TensorDoor, into: dict[str, Any]) -> Targets:
    """What a state wants of each of its tensors. Raises TypeError where it holds what no checkpoint can."""
    collector = Collector(door)
    encode_asked(ask_state(into), collector)
    leaves = zip(collector.paths, collector.leaves, strict=True)
    tensors = {path: Target(tuple(leaf.tensor.shape), leaf.sharding) for path, leaf in leaves}
    return Targets(frozenset(into), tensors)


def read_resharded(
    directory: Path, manifest: Manifest, rank: int, world_size: int, targets: Targets, reader: ShardReader | None = None
) -> LoadedShard:
    """The shard of `rank`, one of another number of ranks than saved `manifest`. Raises CheckpointDamaged, and
    StateMismatch where the saved shards do not make up what this rank wants."""
    saved = [locate_stored(directory, manifest, number) for number in range(manifest.world_size)]
    base = nearest_rank(rank, world_size, manifest.world_size)
    plan = plan_reshard([shard.header.layout for shard in saved], base, targets.tensors)
    memory = run_reshard(plan, reader or DiskShards(directory, manifest))
    _require_replicas(directory, manifest, base, targets)
    return LoadedShard(plan.layout, saved[base].header.values, memory, 0)


def _require_replicas(directory: Path, manifest: Manifest, base: int, targets: Targets) -> None:
    """Compare each tensor that is wanted, and names no block, with that of the same name on the other ranks."""
    own_file = _file_of(manifest, base)
    with opened_stored(directory, manifest, base) as (descriptor, shard):
        plain = {
            place.name: place
            for place in shard.header.layout.places
            if place.sharding is None and targets.wants(place.name)
        }
        for number in range(manifest.world_size) if plain else ():
            if _file_of(manifest, number) == own_file:
                continue
            with opened_stored(directory, manifest, number) as (other_descriptor, other):
                for place in other.header.layout.places:
                    mine = plain.get(place.name)
                    if mine is None or _same(
                        (descriptor, shard.payload_offset, mine), (other_descriptor, other.payload_offset, place)
                    ):
                        continue
                    raise StateMismatch(
                        f"{place.name} is not the same on ranks {base} and {number} of the {manifest.world_size} that "
                        f"saved step {manifest.step}, and does not say which part of a whole it is: leave it out of "
                        "what is to be loaded, or save it as a DTensor or a transom.Shard"
                    )


def _file_of(manifest: Manifest, rank: int) -> int:
    """The rank whose file holds the tensors of `rank`."""
    stored_by = manifest.shards[rank].stored_by
    return rank if stored_by is None else stored_by


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
