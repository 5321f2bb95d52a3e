"""What a person wants to know of a checkpoint folder: which steps it has, what is in them, whether they are whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import CheckpointDamaged, CheckpointNotFound
from .manifest import (
    Manifest,
    attempts_on_disk,
    complete_manifests,
    complete_steps,
    read_manifest,
    read_records,
    step_numbers,
)
from .rejection import read_rejections
from .stored import check_stored, locate_stored
from .tree import load_tree
from .verification import read_verifications

StepState = Literal["complete", "incomplete", "rejected", "abandoned"]


@dataclass(frozen=True, slots=True)
class StepListing:
    """One step. `abandoned`: a later attempt has trained past it; `shards` of `world_size` are there. `verified`:
    training has proved it good."""

    step: int
    attempt: int
    world_size: int
    state: StepState
    shards: int
    size_bytes: int
    reason: str = ""
    verified: bool = False


@dataclass(frozen=True, slots=True)
class TensorListing:
    """One stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ShardListing:
    """One shard and what is in it; `values` is everything that is not a tensor, as text. `stored_by`: the rank whose
    file holds the tensors, None where its own does."""

    rank: int
    attempt: int
    file: str
    size_bytes: int
    tensors: tuple[TensorListing, ...]
    values: str
    stored_by: int | None = None


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """Whether one shard is what its manifest says; `reason` is empty where it is."""

    step: int
    attempt: int
    rank: int
    file: str
    size_bytes: int
    reason: str

    @property
    def whole(self) -> bool:
        return not self.reason


def list_steps(directory: Path) -> list[StepListing]:
    """Every step that has a folder, ascending. Raises CheckpointDamaged where rejected.json is not readable."""
    usable = {(record.step, record.attempt) for record in complete_steps(directory)}
    manifests = {manifest.step: manifest for manifest in complete_manifests(directory)}
    return [
        _complete(directory, manifests[step], usable) if step in manifests else _incomplete(directory, step)
        for step in step_numbers(directory)
    ]


def inspect_step(directory: Path, step: int) -> list[ShardListing]:
    """The shards of a complete step, by rank; headers are read, tensors are not."""
    manifest = _manifest(directory, step)
    return [_listing(directory, manifest, rank) for rank in range(manifest.world_size)]


def verify_steps(directory: Path, step: int | None = None) -> Iterator[ShardVerdict]:
    """Read every byte of `step`, or of all steps that have a manifest, and compare it with its checksums."""
    for number in step_numbers(directory) if step is None else [step]:
        try:
            manifest = read_manifest(directory, number) if step is None else _manifest(directory, number)
        except CheckpointDamaged as error:
            yield ShardVerdict(number, -1, -1, "manifest.json", 0, str(error))
            continue
        if manifest is not None:
            yield from _verdicts(directory, manifest)


def _verdicts(directory: Path, manifest: Manifest) -> Iterator[ShardVerdict]:
    """By rank. Tensors that several ranks share are read once."""
    reasons: dict[int, str] = {}

    def reason_of(rank: int) -> str:
        shard = manifest.shards[rank]
        if rank not in reasons:
            try:
                if shard.stored_by is None:
                    check_stored(directory, manifest, rank)
                else:
                    locate_stored(directory, manifest, rank)
                reasons[rank] = "" if shard.stored_by is None else reason_of(shard.stored_by)
            except CheckpointDamaged as error:
                reasons[rank] = str(error)
        return reasons[rank]

    for shard in manifest.shards:
        reason = reason_of(shard.rank)
        yield ShardVerdict(manifest.step, shard.attempt, shard.rank, shard.file, shard.checks.size_bytes, reason)


def _complete(directory: Path, manifest: Manifest, usable: set[tuple[int, int]]) -> StepListing:
    rejections = [entry for entry in read_rejections(directory) if entry.covers(manifest.step, manifest.attempt)]
    verified = {(entry.step, entry.attempt) for entry in read_verifications(directory)}
    state: StepState = "complete" if (manifest.step, manifest.attempt) in usable else "abandoned"
    if rejections:
        state = "rejected"
    return StepListing(
        manifest.step, manifest.attempt, manifest.world_size, state, len(manifest.shards), manifest.size_bytes,
        rejections[0].reason if rejections else "", (manifest.step, manifest.attempt) in verified,
    )  # fmt: skip


def _incomplete(directory: Path, step: int) -> StepListing:
    attempt = max(attempts_on_disk(directory, step), default=0)
    records = read_records(directory, step, attempt)
    world_size = records[0].world_size if records else 0
    size_bytes = sum(record.checks.size_bytes for record in records)
    return StepListing(step, attempt, world_size, "incomplete", len(records), size_bytes)


def _manifest(directory: Path, step: int) -> Manifest:
    manifest = read_manifest(directory, step)
    if manifest is None:
        there = ", ".join(str(record.step) for record in complete_steps(directory)) or "none"
        raise CheckpointNotFound(f"step {step} is not complete under {directory}; complete there: {there}")
    return manifest


def _listing(directory: Path, manifest: Manifest, rank: int) -> ShardListing:
    record, header = manifest.shards[rank], locate_stored(directory, manifest, rank).header
    places = header.layout.places
    tensors = tuple(TensorListing(place.name, place.dtype, place.shape, place.size_bytes) for place in places)
    values = load_tree(header.values, len(header.layout.tensors))
    return ShardListing(
        rank, record.attempt, record.file, record.checks.size_bytes, tensors, repr(values), record.stored_by
    )
