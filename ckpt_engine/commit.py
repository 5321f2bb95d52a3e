"""How a shard, and then a step, gets onto disk so that a power cut at any moment leaves the old or the new,
never half.

A shard: temporary file, fsync, rename; its record the same way; fsync of the folder. A step: when the
records of all ranks of one attempt are there, whichever engine sees it writes the manifest, again by fsync
and rename. Only the manifest makes a step complete, and removal takes the manifest first.
"""

from __future__ import annotations

import contextlib
import fnmatch
import zlib
from collections.abc import Callable
from pathlib import Path

from .errors import CheckpointDamaged, StepTaken
from .layout import decode_layout
from .manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    StepRecord,
    attempts_on_disk,
    complete_manifests,
    encode_manifest,
    encode_record,
    on_line,
    read_manifest,
    read_record,
    read_records,
    record_name,
    shard_name,
    step_folder,
    step_numbers,
)
from .rejection import is_rejected, read_rejections
from .segment import SlotHeader, layout_region, payload_region, values_region
from .shardfile import ShardChecks, encode_header, identity_of
from .storage import Storage

WRITE_PIECE_BYTES = 8 << 20


def commit_shard(
    storage: Storage,
    directory: Path,
    header: SlotHeader,
    segment: memoryview,
    *,
    writer: str,
    on_read: Callable[[int], None] = lambda crc: None,
) -> ShardRecord:
    """Write the shard in `segment` durably. `on_read(crc)` is called with the payload's CRC-32 when the segment is
    no longer needed; it raises CheckpointDamaged where that is not what the payload should be.

    Raises OSError from the disk, and StepTaken where the same attempt has written other bytes for this step: a
    manifest may name those.
    """
    folder = step_folder(directory, header.step)
    standing = read_record(directory, header.step, header.rank, header.attempt)
    if standing is not None:
        crc = zlib.crc32(payload_region(segment, header))
        on_read(crc)
        if (standing.checks.payload_crc32, standing.layout_hash) != (crc, header.layout_hash.hex()):
            raise StepTaken(
                f"attempt {header.attempt} has already saved other bytes as step {header.step} of rank "
                f"{header.rank}; a run that trains a step again needs a new attempt number"
            )
        return standing
    _make_step_folder(storage, directory, folder)
    target = folder / shard_name(header.rank, header.attempt)
    temporary = folder / f".{target.name}.{writer}.tmp"
    layout_raw = bytes(layout_region(segment, header))
    values = bytes(values_region(segment, header))
    prefix = encode_header(identity_of(header), layout_raw, decode_layout(layout_raw, header.payload_bytes), values)
    try:
        with storage.create(temporary) as file:
            file.write(prefix)
            crc = 0
            payload = payload_region(segment, header)
            for start in range(0, len(payload), WRITE_PIECE_BYTES):
                piece = payload[start : start + WRITE_PIECE_BYTES]
                crc = zlib.crc32(piece, crc)
                file.write(piece)
            on_read(crc)
            file.sync()
        storage.rename(temporary, target)
    except (OSError, CheckpointDamaged):
        with contextlib.suppress(OSError):  # the error that brought us here says more
            storage.remove(temporary)  # a full disk needs its space back
        raise
    checks = ShardChecks(len(prefix) + header.payload_bytes, zlib.crc32(prefix), crc)
    record = ShardRecord(
        header.job,
        header.attempt,
        header.rank,
        header.world_size,
        header.step,
        header.layout_hash.hex(),
        checks,
    )
    storage.write_whole(folder / record_name(header.rank, header.attempt), encode_record(record), writer=writer)
    storage.sync_folder(folder)
    return record


def finish_step(storage: Storage, directory: Path, step: int, attempt: int, *, writer: str) -> Manifest | None:
    """Write the manifest if all shards of (step, attempt) are there; None where they are not, or it was
    there."""
    records = read_records(directory, step, attempt)
    if not records or [record.rank for record in records] != list(range(records[0].world_size)):
        return None
    if len({(record.job, record.world_size) for record in records}) > 1:
        return None
    manifest = Manifest(records[0].job, attempt, records[0].world_size, step, tuple(records))
    folder = step_folder(directory, step)
    with storage.locked(directory):  # an older attempt's engine may be at it, too, and must not have the last word
        try:
            standing = read_manifest(directory, step)
        except CheckpointDamaged:
            standing = None  # a damaged manifest completes nothing; ours replaces it
        if standing is not None and standing.attempt >= attempt:
            return None
        storage.write_whole(folder / MANIFEST, encode_manifest(manifest), writer=writer)
        storage.sync_folder(folder)
    return manifest


def retain(storage: Storage, directory: Path, retention_steps: int, *, busy: frozenset[int] = frozenset()) -> list[int]:
    """Remove what is no longer kept; the steps whose checkpoint is gone.

    Kept: the newest `retention_steps` steps that a job may resume from, whatever is newer than they are (it
    is being written), and `busy` steps. Rejected and abandoned steps go only when that many good ones stand,
    so the last complete step is never removed.
    """
    rejections = read_rejections(directory)
    manifests = {manifest.step: manifest for manifest in complete_manifests(directory)}
    good = on_line(
        [
            StepRecord(manifest.step, manifest.attempt, manifest.world_size, ())
            for manifest in manifests.values()
            if not is_rejected(rejections, manifest.step, manifest.attempt)
        ]
    )
    keep = good[-max(retention_steps, 1) :]
    if len(good) < retention_steps:
        return []
    newest, oldest = max(record.attempt for record in keep), keep[0].step
    kept_steps = {record.step for record in keep}
    removed = []
    for step in step_numbers(directory):
        if step in busy or step in kept_steps:
            continue
        there = attempts_on_disk(directory, step) | _attempts_in_flight(directory, step)
        in_flight = step > oldest and (
            any(attempt >= newest and not is_rejected(rejections, step, attempt) for attempt in there)
            or _names_in(step_folder(directory, step)) == []  # another engine has just made it, and writes into it next
        )
        if not in_flight:
            remove_step(storage, directory, step)
            if step in manifests:
                removed.append(step)
    for record in keep:
        _remove_older_attempts(storage, step_folder(directory, record.step), record.attempt)
    return removed


def is_passed_by(directory: Path, step: int, retention_steps: int) -> bool:
    """Enough newer steps are complete: whoever retains removes this one, be it half written by somebody slower."""
    newer = [manifest.step for manifest in complete_manifests(directory) if manifest.step > step]
    return len(newer) >= max(retention_steps, 1)


def remove_step(storage: Storage, directory: Path, step: int) -> None:
    """Remove a step's folder. Half removed it is not complete: its manifest is gone, or a file that it names is."""
    folder = step_folder(directory, step)
    with contextlib.suppress(FileNotFoundError):  # another engine of the job removes it too
        storage.remove(folder / MANIFEST)
        for path in sorted(folder.iterdir()):
            storage.remove(path)
        storage.remove_folder(folder)


def remove_temporaries(storage: Storage, directory: Path, *, writer: str) -> None:
    """Remove what an earlier engine of the same name left half written."""
    for step in step_numbers(directory):
        folder = step_folder(directory, step)
        for name in fnmatch.filter(_names_in(folder) or (), f".*.{writer}.tmp"):
            storage.remove(folder / name)


def _make_step_folder(storage: Storage, directory: Path, folder: Path) -> None:
    if folder.is_dir():
        return
    storage.make_folder(folder)
    storage.sync_folder(directory)


def _remove_older_attempts(storage: Storage, folder: Path, attempt: int) -> None:
    """The shards that a manifest of a later attempt has replaced."""
    for name in fnmatch.filter(_names_in(folder) or (), "*shard-*-a*.*"):
        written_by = name.rpartition("-a")[2].partition(".")[0]
        if written_by.isdigit() and int(written_by) < attempt:
            storage.remove(folder / name)


def _names_in(folder: Path) -> list[str] | None:
    """What is in a folder; None where another engine has removed it. (`Path.glob` raises if that happens meanwhile.)"""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return None


def _attempts_in_flight(directory: Path, step: int) -> set[int]:
    names = fnmatch.filter(_names_in(step_folder(directory, step)) or (), ".shard-*.tmp")
    return {int(name.rpartition("-a")[2].partition(".")[0]) for name in names if "-a" in name}
