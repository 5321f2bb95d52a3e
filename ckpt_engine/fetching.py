"""One shard, found and identified, before any of it reaches the state that is to be loaded."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .checksum import crc32_of
from .errors import CheckpointDamaged
from .filling import Source
from .layout import Layout, decode_layout, layout_hash
from .manifest import FETCHED, MANIFEST, Manifest, read_manifest
from .segment import layout_region, payload_region, read_sealed, values_region
from .shardfile import Identity, identity_of
from .stored import open_stored
from .tensors import TensorDoor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class LoadedShard:
    """A shard as this process sees it: private memory, whose changes reach nobody.

    `descriptor` is that of the engine's slot, for as long as its bytes may be asked for; -1 where `memory` is
    our own altogether.
    """

    layout: Layout
    values: bytes
    memory: mmap.mmap
    payload_offset: int
    descriptor: int = -1

    def views(self, door: TensorDoor) -> list[Tensor]:
        """A tensor over each tensor of the layout. They keep `memory` alive."""
        return door.views(self.memory, self.payload_offset, self.layout)

    def source(self) -> Source:
        """Where its bytes can be copied from."""
        return Source(self.memory, mapped=self.descriptor < 0)  # of a slot nothing is mapped yet

    def close(self) -> None:
        """Let go of the descriptor. The memory goes with the last tensor over it: nobody may close it."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            with contextlib.suppress(OSError):
                os.close(descriptor)


def read_from_memory(descriptor: int, wanted: Identity) -> LoadedShard:
    """The shard in an engine's slot, lent to us: whose it is, its layout and values are checked, its tensors are
    the engine's to check (it has them mapped). The descriptor is the shard's from here on; closed where this
    raises CheckpointDamaged."""
    try:
        memory = _mapped(descriptor)
        view = memoryview(memory)
        header = read_sealed(view)
        if identity_of(header) != wanted:
            raise CheckpointDamaged(f"the slot holds {identity_of(header)}, not {wanted}")
        layout_raw = bytes(layout_region(view, header))
        if layout_hash(layout_raw) != header.layout_hash:
            raise CheckpointDamaged("the slot's layout does not match its hash")
        layout = decode_layout(layout_raw, header.payload_bytes)
        values = bytes(values_region(view, header))
        return LoadedShard(layout, values, memory, header.payload_offset, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def check_memory(descriptor: int, wanted: Identity, crc32: int, threads: int) -> None:
    """Compare the tensors in a slot with their checksum ourselves, where no engine does it any more. Raises
    CheckpointDamaged."""
    memory = _mapped(descriptor)
    view = memoryview(memory)
    header = read_sealed(view)
    if identity_of(header) != wanted or crc32_of(payload_region(view, header), threads) != crc32:
        raise CheckpointDamaged(f"the tensors of step {wanted.step} in memory do not match their checksum")


def read_from_disk(directory: Path, wanted: Identity) -> LoadedShard:
    """The shard that the step's manifest names for this rank, every byte compared with its checksums. Raises
    CheckpointDamaged."""
    manifest = _manifest_of(directory, wanted)
    header, memory = open_stored(directory, manifest, wanted.rank)
    if header.identity != wanted:
        raise CheckpointDamaged(f"shard {manifest.shards[wanted.rank].file} holds {header.identity}, not {wanted}")
    return LoadedShard(header.layout, header.values, memory, 0)


def _manifest_of(directory: Path, wanted: Identity) -> Manifest:
    """That of the step, or that of a step from an object store of which only some ranks' shards are here."""
    for name in (MANIFEST, FETCHED):
        manifest = read_manifest(directory, wanted.step, name)
        if manifest is not None and (manifest.attempt, manifest.world_size) == (wanted.attempt, wanted.world_size):
            return manifest
    raise CheckpointDamaged(f"step {wanted.step} on disk is no longer the one of attempt {wanted.attempt}")


def _mapped(descriptor: int) -> mmap.mmap:
    """Private, and without its pages: what is read is faulted in, what is written becomes our own."""
    try:
        size_bytes = os.fstat(descriptor).st_size
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"the engine's slot cannot be mapped: {error}") from error
