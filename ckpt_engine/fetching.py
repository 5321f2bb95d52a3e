"""One shard, read and verified, before any of it reaches the state that is to be loaded."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointDamaged
from .layout import Layout, decode_layout, layout_hash
from .manifest import read_manifest, step_folder
from .segment import layout_region, payload_region, read_sealed, values_region
from .shardfile import Identity, identity_of, open_shard

_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """Verified bytes in memory that is private to this process."""

    layout: Layout
    values: bytes
    memory: mmap.mmap
    payload_offset: int


def read_from_memory(descriptor: int, wanted: Identity, crc32: int) -> LoadedShard:
    """The shard in an engine's slot, lent to us. Closes `descriptor`. Raises CheckpointDamaged."""
    try:
        size_bytes = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise CheckpointDamaged(f"the engine's slot cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # an older kernel takes the faults one by one
        memory.madvise(_MADV_POPULATE_READ)
    view = memoryview(memory)
    header = read_sealed(view)
    if identity_of(header) != wanted:
        raise CheckpointDamaged(f"the slot holds {identity_of(header)}, not {wanted}")
    layout_raw = bytes(layout_region(view, header))
    if layout_hash(layout_raw) != header.layout_hash:
        raise CheckpointDamaged("the slot's layout does not match its hash")
    if zlib.crc32(payload_region(view, header)) != crc32:
        raise CheckpointDamaged(f"the tensors of step {wanted.step} in memory do not match their checksum")
    layout = decode_layout(layout_raw, header.payload_bytes)
    return LoadedShard(layout, bytes(values_region(view, header)), memory, header.payload_offset)


def read_from_disk(directory: Path, wanted: Identity) -> LoadedShard:
    """The shard that the step's manifest names for this rank. Raises CheckpointDamaged."""
    manifest = read_manifest(directory, wanted.step)
    if manifest is None or manifest.attempt != wanted.attempt or manifest.world_size != wanted.world_size:
        raise CheckpointDamaged(f"step {wanted.step} on disk is no longer the one of attempt {wanted.attempt}")
    record = manifest.shards[wanted.rank]
    header, memory = open_shard(step_folder(directory, wanted.step) / record.file, record.checks)
    if header.identity != wanted:
        raise CheckpointDamaged(f"shard {record.file} holds {header.identity}, not {wanted}")
    return LoadedShard(header.layout, header.values, memory, 0)
