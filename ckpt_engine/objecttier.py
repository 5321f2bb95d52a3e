"""Checkpoints in an object store: the same files as on disk, under the same names, the manifest last.

    <url>/rejected.json, <url>/verified.json
    <url>/step-00000120/shard-00003-a0005.safetensors
    <url>/step-00000120/manifest.json         written when every object of the step is there with its size

An object store has no rename and no folder to lock, so nothing is trusted but a manifest that can be read; what it
names is compared with its checksums by whoever fetches it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from urllib.parse import quote

from .checksum import crc32
from .commit import make_step_folder
from .errors import CheckpointDamaged, CheckpointNotFound
from .manifest import (
    FETCHED,
    MANIFEST,
    RECORD_BYTES_MAX,
    Manifest,
    ShardRecord,
    StepRecord,
    decode_manifest,
    encode_manifest,
    encode_record,
    is_present,
    on_line,
    read_record,
    record_name,
    step_folder,
    step_number,
    step_record,
)
from .objectstore import READ_BYTES, FsspecStore, ObjectStore
from .rejection import (
    REJECTED,
    Rejection,
    add_rejection,
    decode_rejections,
    encode_rejections,
    is_rejected,
    read_rejections,
)
from .shardfile import HEADER_BYTES_MAX
from .storage import Storage
from .verification import (
    VERIFIED,
    Verification,
    add_verification,
    decode_verifications,
    encode_verifications,
    read_verifications,
)

STEPS_READ_MAX = 64  # the newest; each costs a request

Pace = Callable[[int], None]


def no_pace(size_bytes: int) -> None:
    """As fast as it goes."""


class ObjectTier:
    """One job's checkpoints in an object store. Everything raises ObjectStoreError where the store does not obey."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    def missing(self, manifest: Manifest) -> list[ShardRecord]:
        """The shards of a step that are not in the store, or not whole."""
        there = self._store.sizes(_folder(manifest.step))
        return [shard for shard in manifest.shards if there.get(shard.file) != shard.checks.size_bytes]

    def is_complete(self, manifest: Manifest) -> bool:
        """Whether this very step is in the store already."""
        return self.manifest(manifest.step) == manifest and not self.missing(manifest)

    def put_shard(self, directory: Path, record: ShardRecord, pace: Pace = no_pace) -> None:
        """Copy one file from the disk, comparing it with its checksums. Raises CheckpointDamaged where it is not
        what its record says (what was uploaded of it is removed then), and FileNotFoundError."""
        name = f"{_folder(record.step)}/{record.file}"
        with (step_folder(directory, record.step) / record.file).open("rb", buffering=0) as file:
            try:
                self._store.put(name, _checked(_pieces(file), record, pace))
            except CheckpointDamaged:
                self._store.remove(name)
                raise
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the page cache is training's

    def finish(self, manifest: Manifest) -> bool:
        """Write the manifest, and read it back, if all shards are there; whether the step is complete in the store."""
        if self.missing(manifest):
            return False
        name, raw = f"{_folder(manifest.step)}/{MANIFEST}", encode_manifest(manifest)
        standing = self.manifest(manifest.step)
        if standing is not None and standing.attempt > manifest.attempt:
            return True  # a later attempt has trained this step again, and its checkpoint is the better one
        if standing != manifest:
            self._store.put(name, [raw])
        if self._store.read(name, RECORD_BYTES_MAX) != raw:
            raise CheckpointDamaged(f"{name} in {self.url} is not what was written there")
        return True

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of a step; None where there is none that can be read, which both mean: not complete."""
        raw = self._store.read(f"{_folder(step)}/{MANIFEST}", RECORD_BYTES_MAX)
        if raw is None:
            return None
        try:
            return decode_manifest(raw, step)
        except CheckpointDamaged:
            return None

    def steps(self) -> list[int]:
        """Steps that have objects, ascending by number; complete or not."""
        numbers = [step_number(name) for name in self._store.folders()]
        return sorted(number for number in numbers if number is not None)

    def complete_steps(self) -> list[StepRecord]:
        """The steps that a job may resume from, ascending, as `manifest.complete_steps` has them, by the rejections
        that the store knows. Raises CheckpointDamaged where those are not readable."""
        every = self.rejections()
        found = [self.manifest(step) for step in self.steps()[-STEPS_READ_MAX:]]
        return on_line(
            [
                step_record(item)
                for item in found
                if item is not None and not is_rejected(every, item.step, item.attempt)
            ]
        )

    def rejections(self) -> tuple[Rejection, ...]:
        """What stands in the store. Raises CheckpointDamaged where it is not readable."""
        raw = self._store.read(REJECTED, RECORD_BYTES_MAX)
        return () if raw is None else decode_rejections(raw, f"{REJECTED} in {self.url}")

    def verifications(self) -> tuple[Verification, ...]:
        """As `rejections`."""
        raw = self._store.read(VERIFIED, RECORD_BYTES_MAX)
        return () if raw is None else decode_verifications(raw, f"{VERIFIED} in {self.url}")

    def put_marks(self, directory: Path) -> None:
        """Let the store know all that the disk knows of good and bad steps; it never forgets one."""
        rejected, verified = self.rejections(), self.verifications()
        more_rejected = [entry for entry in read_rejections(directory) if entry not in rejected]
        more_verified = [entry for entry in read_verifications(directory) if entry not in verified]
        if more_rejected:
            self._store.put(REJECTED, [encode_rejections((*rejected, *more_rejected))])
        if more_verified:
            self._store.put(VERIFIED, [encode_verifications((*verified, *more_verified))])

    def fetch_marks(self, storage: Storage, directory: Path, *, writer: str) -> None:
        """Let the disk know all that the store knows of good and bad steps. Raises CheckpointDamaged, OSError."""
        for rejection in self.rejections():
            add_rejection(directory, rejection, storage, writer)
        for verification in self.verifications():
            add_verification(directory, verification, storage, writer)

    def fetch(self, storage: Storage, directory: Path, manifest: Manifest, rank: int, *, writer: str) -> None:
        """Bring the files that `rank` needs to the disk, committed like shards of our own, with the manifest beside
        them. Raises CheckpointDamaged, CheckpointNotFound, and OSError from the disk."""
        folder = make_step_folder(storage, directory, manifest.step)
        own = manifest.shards[rank]
        records = [own] if own.stored_by is None else [manifest.shards[own.stored_by], own]
        for record in records:
            if read_record(directory, record.step, record.rank, record.attempt) != record or not is_present(
                directory, record
            ):
                self._fetch_file(storage, directory, folder, record, writer)
        storage.write_whole(folder / FETCHED, encode_manifest(manifest), writer=writer)
        storage.sync_folder(folder)

    def retain(self, keep: frozenset[int], newest: StepRecord) -> list[int]:
        """Remove the steps that are not in `keep`, manifests first; those that are gone. What is newer than `newest`
        stays: it is being uploaded, unless it is of an older attempt."""
        removed = []
        for step in self.steps():
            if step in keep or (step > newest.step and not self._is_left_behind(step, newest.attempt)):
                continue
            folder = _folder(step)
            self._store.remove(f"{folder}/{MANIFEST}")
            for name in self._store.sizes(folder):
                self._store.remove(f"{folder}/{name}")
            removed.append(step)
        return removed

    def _is_left_behind(self, step: int, attempt: int) -> bool:
        manifest = self.manifest(step)
        return manifest is not None and manifest.attempt < attempt

    def _fetch_file(self, storage: Storage, directory: Path, folder: Path, record: ShardRecord, writer: str) -> None:
        name = f"{_folder(record.step)}/{record.file}"
        if self._store.sizes(_folder(record.step)).get(record.file) != record.checks.size_bytes:
            raise CheckpointNotFound(f"{name} is not in {self.url}, or not whole")
        temporary = folder / f".{record.file}.{writer}.tmp"
        try:
            with storage.create_large(temporary, record.checks.size_bytes, directory) as file:
                for piece in _checked(self._store.stream(name), record, no_pace):
                    file.write(piece)
                file.sync()
            storage.rename(temporary, folder / record.file)
        except BaseException:
            storage.remove(temporary)
            raise
        storage.write_whole(folder / record_name(record.rank, record.attempt), encode_record(record), writer=writer)


class _Sums:
    """The checksums of a shard file from its bytes as they come."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.header_crc32 = 0
        self.payload_crc32 = 0
        self._start = b""  # until it tells how long the header is
        self._header_bytes = -1

    def add(self, piece: bytes) -> None:
        if self._header_bytes < 0:
            self._start += piece
            if len(self._start) < 8:
                return
            self._header_bytes = 8 + min(int.from_bytes(self._start[:8], "little"), HEADER_BYTES_MAX)
            piece, self._start = self._start, b""
        header = max(0, min(len(piece), self._header_bytes - self.size_bytes))
        view = memoryview(piece)
        self.header_crc32 = crc32(view[:header], self.header_crc32)
        self.payload_crc32 = crc32(view[header:], self.payload_crc32)
        self.size_bytes += len(piece)

    def fit(self, record: ShardRecord) -> bool:
        checks = record.checks
        payload_fits = record.stored_by is not None or self.payload_crc32 == checks.payload_crc32
        return (self.size_bytes, self.header_crc32) == (checks.size_bytes, checks.header_crc32) and payload_fits


def _checked(pieces: Iterator[bytes], record: ShardRecord, pace: Pace) -> Iterator[bytes]:
    """The pieces as they come. Raises CheckpointDamaged behind the last one where they are not what `record` says."""
    sums = _Sums()
    for piece in pieces:
        pace(len(piece))
        sums.add(piece)
        yield piece
    if not sums.fit(record):
        raise CheckpointDamaged(f"{record.file} of step {record.step} does not match its checksums")


def _pieces(file: FileIO) -> Iterator[bytes]:
    while piece := file.read(READ_BYTES):
        yield piece


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def open_objects(url: str, job: str) -> Callable[[], ObjectTier]:
    """How to open the checkpoints of `job` below `url`: later, because fsspec is heavy and the store may be away."""
    place = f"{url.rstrip('/')}/{quote(job, safe='')}"
    return lambda: ObjectTier(FsspecStore(place))
