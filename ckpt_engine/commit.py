"""How a shard, and then a step, gets onto disk so that a power cut at any moment leaves the old or the new,
never half.

A shard: temporary file, fsync, rename; its record the same way; fsync of the folder. A step: when the
records of all ranks of one attempt are there, whichever engine sees it writes the manifest, again by fsync
and rename. Only the manifest makes a step complete, and removal takes the manifest first.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .checksum import crc32
from .errors import CheckpointDamaged, StepTaken
from .layout import decode_layout
from .manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    attempts_on_disk,
    complete_manifests,
    contradiction,
    encode_manifest,
    encode_record,
    header_name,
    is_present,
    on_line,
    ranks_on_disk,
    read_manifest,
    read_record,
    read_records,
    record_name,
    shard_name,
    step_folder,
    step_numbers,
    step_record,
)
from .rejection import is_rejected, read_rejections
from .segment import SlotHeader, layout_region, payload_region, read_header, values_region
from .shardfile import HEADER_BYTES_MAX, ShardChecks, encode_header, identity_of
from .storage import DIRECT_BYTES_MIN, OutputFile, Storage
from .verification import read_verifications

WRITE_PIECE_BYTES = 8 << 20
_WRITTEN_BY = re.compile(r"\.?(?:shard-\d{5,9}|claim-[0-9a-f]{16})-a(\d{4,9})(?:\.|\Z)")

OnRead = Callable[[int], None]
Pace = Callable[[int], None]


def commit_shard(
    storage: Storage,
    directory: Path,
    header: SlotHeader,
    segment: memoryview,
    *,
    writer: str,
    on_read: OnRead = lambda crc: None,
    pace: Pace = lambda size_bytes: None,
) -> ShardRecord:
    """Write the shard in `segment` durably. `on_read(crc)` is called with the payload's CRC-32 when the segment is
    no longer needed; it raises CheckpointDamaged where that is not what the payload should be. `pace(size_bytes)`
    is called before so many bytes are written, and may wait.

    Raises OSError from the disk, and StepTaken where the same attempt has written other bytes for this step: a
    manifest may name those.
    """
    standing = _standing_record(storage, directory, header, segment, on_read)
    if standing is not None:
        return standing
    folder = make_step_folder(storage, directory, header.step)
    target = folder / shard_name(header.rank, header.attempt)
    temporary = folder / f".{target.name}.{writer}.tmp"
    prefix = _encoded_header(header, segment)
    size_bytes = len(prefix) + header.payload_bytes
    try:
        with storage.create_large(temporary, size_bytes, directory) as file:
            file.write(prefix)
            crc = _write_payload(file, payload_region(segment, header), pace)
            on_read(crc)
            file.sync()
            if size_bytes >= DIRECT_BYTES_MIN:
                file.forget()
        storage.rename(temporary, target)
    except (OSError, CheckpointDamaged):
        with contextlib.suppress(OSError):  # the error that brought us here says more
            storage.remove(temporary)  # a full disk needs its space back
        raise
    return _commit_record(storage, folder, header, ShardChecks(size_bytes, crc32(prefix), crc), None, writer)


def commit_replica(
    storage: Storage,
    directory: Path,
    header: SlotHeader,
    segment: memoryview,
    source: ShardRecord,
    compare: Callable[[memoryview], int | None],
    *,
    writer: str,
    on_read: OnRead = lambda crc: None,
) -> ShardRecord | None:
    """Record that the tensors of this shard are those in the file of `source`; None where they are not.

    `compare(payload)` looks at every byte: the CRC-32 where all are the same, else None. Raises as `commit_shard`.
    """
    standing = _standing_record(storage, directory, header, segment, on_read)
    if standing is not None:
        return standing
    if source.layout_hash != header.layout_hash.hex() or source.stored_by is not None:
        return None
    crc = compare(payload_region(segment, header))
    if crc is None:
        return None
    prefix = _encoded_header(header, segment)
    on_read(crc)
    folder = step_folder(directory, header.step)
    storage.write_whole(folder / header_name(header.rank, header.attempt), prefix, writer=writer)
    checks = ShardChecks(len(prefix), crc32(prefix), crc)
    return _commit_record(storage, folder, header, checks, source.rank, writer)


def make_step_folder(storage: Storage, directory: Path, step: int) -> Path:
    """The folder of a step, its name durable."""
    folder = step_folder(directory, step)
    if not folder.is_dir():
        storage.make_folder(folder)
        storage.sync_folder(directory)
    return folder


def _standing_record(
    storage: Storage, directory: Path, header: SlotHeader, segment: memoryview, on_read: OnRead
) -> ShardRecord | None:
    """What this attempt has written for this step and rank already; raises StepTaken where those are other bytes."""
    standing = read_record(directory, header.step, header.rank, header.attempt)
    if standing is None or not is_present(directory, standing):
        return None
    crc = crc32(payload_region(segment, header))
    on_read(crc)
    if (standing.checks.payload_crc32, standing.layout_hash) != (crc, header.layout_hash.hex()):
        raise StepTaken(
            f"attempt {header.attempt} has already saved other bytes as step {header.step} of rank "
            f"{header.rank}; a run that trains a step again needs a new attempt number"
        )
    storage.sync_folder(step_folder(directory, header.step))  # it may stand there because this failed the last time
    return standing


def _encoded_header(header: SlotHeader, segment: memoryview) -> bytes:
    layout_raw = bytes(layout_region(segment, header))
    values = bytes(values_region(segment, header))
    if read_header(segment) != header:  # its checksum is of layout and values too; the file gets one of its own
        raise CheckpointDamaged(f"the slot of step {header.step} of rank {header.rank} is another one's by its header")
    layout = decode_layout(layout_raw, header.payload_bytes)
    encoded = encode_header(identity_of(header), layout_raw, layout, values)
    if len(encoded) > HEADER_BYTES_MAX:  # no reader of the format would take such a file
        raise CheckpointDamaged(
            f"the names and values of rank {header.rank} need {len(encoded)} bytes, a shard file holds "
            f"{HEADER_BYTES_MAX}; save large lists as tensors"
        )
    return encoded


def _write_payload(file: OutputFile, payload: memoryview, pace: Pace) -> int:
    """Its CRC-32, computed beside the writes: zlib and the kernel both let go of the interpreter meanwhile."""
    crc = 0

    def add(piece: memoryview) -> None:
        nonlocal crc
        crc = crc32(piece, crc)

    pending = None
    with ThreadPoolExecutor(1, "checksum") as pool:  # one thread takes the pieces in their order
        for start in range(0, len(payload), WRITE_PIECE_BYTES):
            piece = payload[start : start + WRITE_PIECE_BYTES]
            pace(len(piece))
            if len(piece) == len(payload):
                add(piece)  # a thread would cost more than it saves
            else:
                pending = pool.submit(add, piece)
            file.write(piece)
        if pending is not None:
            pending.result()
    return crc


def _commit_record(
    storage: Storage, folder: Path, header: SlotHeader, checks: ShardChecks, stored_by: int | None, writer: str
) -> ShardRecord:
    record = ShardRecord(
        header.job, header.attempt, header.rank, header.world_size, header.step, header.layout_hash.hex(),
        checks, stored_by,
    )  # fmt: skip
    storage.write_whole(folder / record_name(header.rank, header.attempt), encode_record(record), writer=writer)
    storage.sync_folder(folder)
    return record


def finish_step(storage: Storage, directory: Path, step: int, attempt: int, *, writer: str) -> Manifest | None:
    """Write the manifest if all shards of (step, attempt) are there; None where they are not, or it was
    there. Raises CheckpointDamaged where the records contradict each other."""
    ranks = ranks_on_disk(directory, step, attempt)
    first = read_record(directory, step, ranks[0], attempt) if ranks else None
    if first is None or len(ranks) < first.world_size:  # most calls end here, without reading a thousand records
        return None
    records = read_records(directory, step, attempt)
    if [record.rank for record in records] != list(range(first.world_size)):
        return None
    if len({(record.job, record.world_size) for record in records}) > 1:
        return None
    problem = contradiction(records)
    if problem:
        raise CheckpointDamaged(f"step {step} of attempt {attempt} cannot be completed: {problem}")
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
    _remove_claims(storage, folder, attempt)
    return manifest


def retain(
    storage: Storage,
    directory: Path,
    retention_steps: int,
    *,
    keep_every_steps: int = 0,
    busy: frozenset[int] = frozenset(),
) -> list[int]:
    """Remove what is no longer kept; the steps whose checkpoint is gone.

    Kept: the newest `retention_steps` steps that a job may resume from, whatever is newer than they are (it
    is being written), the newest verified one, those whose number `keep_every_steps` divides (0: none), and
    `busy` steps. Rejected and abandoned steps go only when that many good ones stand, so the last complete
    step is never removed.
    """
    rejections = read_rejections(directory)
    verified = {(entry.step, entry.attempt) for entry in read_verifications(directory)}
    manifests = {manifest.step: manifest for manifest in complete_manifests(directory)}
    good = on_line(
        [
            step_record(manifest)
            for manifest in manifests.values()
            if not is_rejected(rejections, manifest.step, manifest.attempt)
        ]
    )
    keep = good[-max(retention_steps, 1) :]
    if len(good) < retention_steps:
        return []
    newest, oldest = max(record.attempt for record in keep), keep[0].step
    keep += [record for record in good if keep_every_steps and record.step % keep_every_steps == 0]
    keep += [record for record in good if (record.step, record.attempt) in verified][-1:]
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
    for name in fnmatch.filter(_names_in(directory) or (), f".*.{writer}.tmp"):
        storage.remove(directory / name)
    for step in step_numbers(directory):
        folder = step_folder(directory, step)
        for name in fnmatch.filter(_names_in(folder) or (), f".*.{writer}.tmp"):
            storage.remove(folder / name)


def _remove_older_attempts(storage: Storage, folder: Path, attempt: int) -> None:
    """The shards that a manifest of a later attempt has replaced."""
    for name in _names_in(folder) or ():
        written_by = _written_by(name)
        if written_by is not None and written_by < attempt:
            storage.remove(folder / name)


def _written_by(name: str) -> int | None:
    """The attempt in the name of a shard's file, record or claim, half written or whole."""
    match = _WRITTEN_BY.match(name)
    return int(match[1]) if match else None


def _names_in(folder: Path) -> list[str] | None:
    """What is in a folder; None where another engine has removed it. (`Path.glob` raises if that happens meanwhile.)"""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return None


def _attempts_in_flight(directory: Path, step: int) -> set[int]:
    """Those that are writing a shard of the step now, or have said that they will."""
    names = _names_in(step_folder(directory, step)) or []
    begun = [_written_by(name) for name in names if name.startswith(".")]
    return {attempt for attempt in begun if attempt is not None}


def _remove_claims(storage: Storage, folder: Path, attempt: int) -> None:
    """Every rank of the attempt has its record, so nobody asks any more who writes what."""
    for name in fnmatch.filter(_names_in(folder) or (), f".claim-*-a{attempt:04d}"):
        with contextlib.suppress(OSError):  # the step is complete; the claim goes with it at the latest
            storage.remove(folder / name)
