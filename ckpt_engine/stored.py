"""Where on disk a rank's shard of a complete step is: its own file, or its header and another rank's file."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import CheckpointDamaged
from .manifest import Manifest, ShardRecord, step_folder
from .shardfile import ShardHeader, checked_payload, decode_header, opened_shard


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One rank's shard. `header` is the rank's own (its offset is that of the tensors in `path`)."""

    header: ShardHeader
    path: Path
    payload_offset: int
    payload_bytes: int
    payload_crc32: int


@contextlib.contextmanager
def opened_stored(directory: Path, manifest: Manifest, rank: int) -> Iterator[tuple[int, StoredShard]]:
    """The open file with the tensors of `rank`; headers are compared with their checksums, tensors not read.

    Raises CheckpointDamaged, for what the disk refuses within the block too.
    """
    folder = step_folder(directory, manifest.step)
    record = manifest.shards[rank]
    source = record if record.stored_by is None else manifest.shards[record.stored_by]
    path = folder / source.file
    with opened_shard(path, source.checks) as (descriptor, raw):
        header = decode_header(raw, source.checks.size_bytes)
        payload_bytes = header.layout.payload_bytes
        if source is not record:
            header = _own_header(folder, record, header)
        if header.layout_hash.hex() != record.layout_hash:
            raise CheckpointDamaged(f"shard {folder / record.file} has another layout than its record says")
        yield descriptor, StoredShard(header, path, len(raw), payload_bytes, source.checks.payload_crc32)


def open_stored(directory: Path, manifest: Manifest, rank: int) -> tuple[ShardHeader, mmap.mmap]:
    """Header and tensors of `rank`, every byte compared with its checksums. Raises CheckpointDamaged."""
    with opened_stored(directory, manifest, rank) as (descriptor, shard):
        memory = checked_payload(descriptor, shard.path, shard.header, shard.payload_crc32)
    return shard.header, memory


def locate_stored(directory: Path, manifest: Manifest, rank: int) -> StoredShard:
    """Where the tensors of `rank` are. Raises CheckpointDamaged."""
    with opened_stored(directory, manifest, rank) as (_, shard):
        return shard


def check_stored(directory: Path, manifest: Manifest, rank: int) -> None:
    """Read all that `rank` would load. Raises CheckpointDamaged."""
    open_stored(directory, manifest, rank)


def _own_header(folder: Path, record: ShardRecord, source: ShardHeader) -> ShardHeader:
    """The header of a rank whose tensors stand in another file, moved to where they stand there."""
    with opened_shard(folder / record.file, record.checks) as (_, raw):
        own = decode_header(raw, len(raw) + source.layout.payload_bytes)
    if own.layout_hash != source.layout_hash:
        raise CheckpointDamaged(f"the header of shard {folder / record.file} has another layout than its tensors")
    return replace(own, payload_offset=source.payload_offset)
