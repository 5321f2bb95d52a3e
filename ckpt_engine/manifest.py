"""What is on disk: shard records, the manifest that makes a step complete, and the steps a job may resume
from.

    <directory>/rejected.json
    <directory>/step-00000120/shard-00003-a0005.safetensors     the shard that attempt 5 wrote
    <directory>/step-00000120/shard-00003-a0005.json            its record: size and checksums
    <directory>/step-00000120/shard-00004-a0005.header          rank 4 has the same tensors: identity and values alone
    <directory>/step-00000120/manifest.json                     there when all shards of one attempt are

The attempt is in the file names because a job that was rolled back trains the same step again: its shards
then stand beside the older ones, and replacing the manifest, one rename, changes over from the old to the
new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointDamaged
from .rejection import Rejection, is_rejected, read_rejections
from .shardfile import ShardChecks

MANIFEST = "manifest.json"
FETCHED = "fetched.json"  # the same, beside shards that came from an object store, while not all of them are here
FORMAT = "transom-checkpoint/1"
_STEP_NAME = re.compile(r"step-(\d{8,18})\Z")
_RECORD_NAME = re.compile(r"shard-(\d{5,9})-a(\d{4,9})\.json\Z")
RECORD_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard on disk. `stored_by`: the rank whose file holds the tensors, None where its own does."""

    job: str
    attempt: int
    rank: int
    world_size: int
    step: int
    layout_hash: str
    checks: ShardChecks
    stored_by: int | None = None

    @property
    def file(self) -> str:
        """Its own file: the whole shard, or the header alone where another rank's file holds the same tensors."""
        name = shard_name if self.stored_by is None else header_name
        return name(self.rank, self.attempt)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All shards of a step, of one attempt."""

    job: str
    attempt: int
    world_size: int
    step: int
    shards: tuple[ShardRecord, ...]

    @property
    def size_bytes(self) -> int:
        return sum(shard.checks.size_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that is complete on disk."""

    step: int
    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    size_bytes: int = 0


def step_record(manifest: Manifest) -> StepRecord:
    """What a manifest says of its step as a whole."""
    ranks = tuple(shard.rank for shard in manifest.shards)
    return StepRecord(manifest.step, manifest.attempt, manifest.world_size, ranks, manifest.size_bytes)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The step in the name of its folder; None where it is none."""
    match = _STEP_NAME.match(name)
    return int(match[1]) if match else None


def shard_name(rank: int, attempt: int) -> str:
    return f"shard-{rank:05d}-a{attempt:04d}.safetensors"


def header_name(rank: int, attempt: int) -> str:
    """The file of a rank whose tensors are bit for bit those of another rank: identity and values, no payload."""
    return f"shard-{rank:05d}-a{attempt:04d}.header"


def record_name(rank: int, attempt: int) -> str:
    return f"shard-{rank:05d}-a{attempt:04d}.json"


def step_numbers(directory: Path) -> list[int]:
    """Steps that have a folder, ascending by number; complete or not."""
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = [step_number(name) for name in names]
    return sorted(number for number in numbers if number is not None)


def encode_record(record: ShardRecord) -> bytes:
    return json.dumps({"format": FORMAT, **_record_fields(record)}, sort_keys=True).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """The same bytes whichever engine writes it."""
    shards = [_record_fields(shard) for shard in sorted(manifest.shards, key=lambda shard: shard.rank)]
    document = {
        "format": FORMAT,
        "job": manifest.job,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "step": manifest.step,
        "shards": shards,
    }
    return json.dumps(document, sort_keys=True, indent=1).encode()


def ranks_on_disk(directory: Path, step: int, attempt: int) -> list[int]:
    """The ranks of which `attempt` left a record in a step's folder, ascending; the records are not read."""
    return sorted(rank for rank, written_by in _record_files(step_folder(directory, step)) if written_by == attempt)


def read_records(directory: Path, step: int, attempt: int) -> list[ShardRecord]:
    """The readable records that `attempt` left in a step's folder, by rank."""
    ranks = ranks_on_disk(directory, step, attempt)
    records = [read_record(directory, step, rank, attempt) for rank in ranks]
    return [record for record in records if record is not None]


def read_record(directory: Path, step: int, rank: int, attempt: int) -> ShardRecord | None:
    """The record of one shard; None where it is missing or damaged, which both mean that the shard is not
    there."""
    path = step_folder(directory, step) / record_name(rank, attempt)
    if not path.exists():
        return None
    try:
        record = _decode_record(_read(path))
    except CheckpointDamaged:
        return None
    return record if (record.step, record.attempt, record.rank) == (step, attempt, rank) else None


def attempts_on_disk(directory: Path, step: int) -> set[int]:
    """The attempts that have at least one record in a step's folder."""
    return {attempt for _, attempt in _record_files(step_folder(directory, step))}


def read_manifest(directory: Path, step: int, name: str = MANIFEST) -> Manifest | None:
    """The manifest of a step, None where there is none. Raises CheckpointDamaged where it is not readable."""
    path = step_folder(directory, step) / name
    if not path.exists():
        return None
    return decode_manifest(_read(path), step)


def decode_manifest(raw: bytes, step: int) -> Manifest:
    """The manifest in `raw`. Raises CheckpointDamaged and nothing else, whatever the bytes are."""
    try:
        document = json.loads(raw)
        shards = tuple(_record(fields) for fields in document["shards"])
        attempt, world_size, number = (_whole(document[name]) for name in ("attempt", "world_size", "step"))
        manifest = Manifest(_text(document["job"]), attempt, world_size, number, shards)
        known = document["format"] == FORMAT
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"the manifest of step {step} is not readable: {error!r:.200}") from error
    same = all(
        (shard.job, shard.step, shard.attempt, shard.world_size)
        == (manifest.job, manifest.step, manifest.attempt, manifest.world_size)
        for shard in shards
    )
    if not known or manifest.step != step or not same:
        raise CheckpointDamaged(f"the manifest of step {step} contradicts itself")
    problem = contradiction(shards)
    if problem:
        raise CheckpointDamaged(f"the manifest of step {step} contradicts itself: {problem}")
    if [shard.rank for shard in shards] != list(range(manifest.world_size)):
        raise CheckpointDamaged(f"the manifest of step {step} does not name every rank once")
    if encode_manifest(manifest) != raw:  # else a bit could flip where nothing is compared with it
        raise CheckpointDamaged(f"the manifest of step {step} is not as it was written")
    return manifest


def contradiction(shards: Sequence[ShardRecord]) -> str:
    """Why tensors that one rank's file holds for another cannot be that rank's; empty where they can."""
    by_rank = {shard.rank: shard for shard in shards}
    for shard in shards:
        if shard.stored_by is None:
            continue
        source = by_rank.get(shard.stored_by)
        if source is None or source.stored_by is not None:
            return f"rank {shard.stored_by}, which should hold the tensors of rank {shard.rank}, stores none"
        same = (shard.layout_hash, shard.checks.payload_crc32) == (source.layout_hash, source.checks.payload_crc32)
        if not same:
            return f"the tensors of rank {shard.rank} are not those of rank {shard.stored_by}"
    return ""


def complete_manifests(directory: Path) -> Iterator[Manifest]:
    """Manifests whose files are there with the right sizes, ascending by step; rejected and abandoned ones
    too."""
    for step in step_numbers(directory):
        try:
            manifest = read_manifest(directory, step)
        except (CheckpointDamaged, OSError):
            continue
        if manifest is not None and _files_present(directory, manifest):
            yield manifest


def complete_steps(directory: Path | str) -> list[StepRecord]:
    """The steps a job may resume from, ascending: complete, not rejected, of the line that leads to the
    newest attempt.

    A step is off that line when a later attempt has completed the same or an earlier step: that attempt must
    have resumed from before it, so what it has trained since does not build on it. Checksums are read at
    load, not here.
    """
    directory = Path(directory)
    rejections = read_rejections(directory)
    usable = [
        step_record(manifest)
        for manifest in complete_manifests(directory)
        if not is_rejected(rejections, manifest.step, manifest.attempt)
    ]
    return on_line(usable)


def on_line(records: list[StepRecord]) -> list[StepRecord]:
    """Those of `records` that no later attempt has trained past, ascending."""
    kept: list[StepRecord] = []
    floor: int | None = None
    for record in sorted(records, key=lambda record: (-record.attempt, record.step)):
        if kept and record.attempt < kept[-1].attempt:
            floor = min(other.step for other in kept)
        if floor is None or record.step < floor:
            kept.append(record)
    return sorted(kept, key=lambda record: record.step)


def rejection_of(directory: Path, step: int, attempt: int) -> Rejection | None:
    """Why a step of an attempt may not be used, None where it may."""
    for rejection in read_rejections(directory):
        if rejection.covers(step, attempt):
            return rejection
    return None


def _record_files(folder: Path) -> Iterator[tuple[int, int]]:
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if match := _RECORD_NAME.match(name):
            yield int(match[1]), int(match[2])


def is_present(directory: Path, record: ShardRecord) -> bool:
    """Whether the file of a record is there with its size; its bytes are compared when it is loaded."""
    try:
        return (step_folder(directory, record.step) / record.file).stat().st_size == record.checks.size_bytes
    except OSError:
        return False


def _files_present(directory: Path, manifest: Manifest) -> bool:
    return all(is_present(directory, shard) for shard in manifest.shards)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(RECORD_BYTES_MAX + 1)
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > RECORD_BYTES_MAX:
        raise CheckpointDamaged(f"{path} has more than {RECORD_BYTES_MAX} bytes")
    return raw


def _decode_record(raw: bytes) -> ShardRecord:
    try:
        return _record(json.loads(raw))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"the record of a shard is not readable: {error!r:.200}") from error


def _record_fields(record: ShardRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "job": record.job,
        "attempt": record.attempt,
        "rank": record.rank,
        "world_size": record.world_size,
        "step": record.step,
        "file": record.file,
        "layout_hash": record.layout_hash,
        "size_bytes": record.checks.size_bytes,
        "header_crc32": record.checks.header_crc32,
        "payload_crc32": record.checks.payload_crc32,
    }
    if record.stored_by is not None:
        fields["stored_by"] = record.stored_by
    return fields


def _record(fields: Any) -> ShardRecord:
    checks = ShardChecks(*(_whole(fields[name]) for name in ("size_bytes", "header_crc32", "payload_crc32")))
    attempt, rank, world_size, step = (_whole(fields[name]) for name in ("attempt", "rank", "world_size", "step"))
    layout = _text(fields["layout_hash"])
    stored_by = None if fields.get("stored_by") is None else _whole(fields["stored_by"])
    record = ShardRecord(_text(fields["job"]), attempt, rank, world_size, step, layout, checks, stored_by)
    if fields["file"] != record.file:  # the name follows from rank and attempt, so no path can be smuggled in
        raise ValueError(f"shard of rank {record.rank} names the file {fields['file']!r:.100}")
    return record


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is not a text")
    return value
