"""A file on disk that is not what was saved is set aside, beside where it stood, and never offered again.

Its name is changed, so its step is no longer complete for anybody, while a person can still look at its bytes.
Retention removes it with its step.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from .errors import CheckpointDamaged
from .manifest import MANIFEST, ShardRecord, read_manifest, read_record, record_name, step_folder
from .shardfile import opened_shard, read_payload
from .storage import Storage

PREFIX = "damaged-"


def set_aside(storage: Storage, directory: Path, step: int, rank: int) -> str:
    """Read again what `rank` would load of `step` and set aside what is still not right; why, or empty where all is
    right by now (then it was our own reading that failed) or nothing is there any more. Raises OSError."""
    folder = step_folder(directory, step)
    try:
        manifest = read_manifest(directory, step)
    except CheckpointDamaged as error:
        _rename(storage, folder, MANIFEST)
        return str(error)
    if manifest is None or not 0 <= rank < manifest.world_size:
        return ""
    own = manifest.shards[rank]
    source = own if own.stored_by is None else manifest.shards[own.stored_by]
    for record in dict.fromkeys((own, source)):
        standing = read_record(directory, step, record.rank, record.attempt)
        if standing is not None and standing != record and not _damage(folder, standing):
            # The file is what its own record says; what contradicts it is the manifest.
            _rename(storage, folder, MANIFEST)
            storage.sync_folder(folder)
            return f"the manifest of step {step} contradicts the record of rank {record.rank}, which is right"
        reason = _damage(folder, record)
        if reason:
            # The record goes with its file: it says that these bytes are on disk, and nobody would write them again.
            _rename(storage, folder, record_name(record.rank, record.attempt))
            _rename(storage, folder, record.file)
            storage.sync_folder(folder)
            return reason
    return ""


def _damage(folder: Path, record: ShardRecord) -> str:
    """Why a file is not what its record says; empty where it is, or is gone."""
    path = folder / record.file
    if not path.exists():
        return ""
    try:
        with opened_shard(path, record.checks) as (descriptor, raw):
            if record.stored_by is not None:
                return ""  # a header alone, and that has been compared
            memory, crc = read_payload(descriptor, len(raw), record.checks.size_bytes - len(raw))
            memory.close()
    except CheckpointDamaged as error:
        return str(error)
    return "" if crc == record.checks.payload_crc32 else f"the tensors of shard {path} do not match their checksum"


def _rename(storage: Storage, folder: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another engine has done it
        storage.rename(folder / name, folder / f"{PREFIX}{name}")
