"""Which ranks of a step hold the same tensors, so that they are stored once: data-parallel replicas do.

Ranks are not asked, and engines do not talk to each other about it. The first engine that meets a content
claims it by a file in the step's folder, writes it, and leaves a record; who meets the same content later
compares every byte with what is stored and then writes only its header. The claim's name comes from a sample
of the bytes: a sample that is equal where the rest is not costs one comparison, never a wrong byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .checksum import crc32
from .clock import Clock
from .errors import CheckpointDamaged
from .manifest import ShardRecord, read_record, step_folder
from .segment import PAGE_BYTES, SlotHeader
from .shardfile import opened_shard
from .storage import Storage

REPLICA_BYTES_MIN = 256 << 10  # of a shard that is worth looking for its like
SAMPLE_PAGES_MAX = 64
COMPARE_BYTES = 1 << 20
CLAIM_BYTES_MAX = 4096
PATIENCE_SECONDS_MIN = 5.0  # for another engine to write what it claimed, and then as long as a slow disk takes:
PATIENCE_BYTES_PER_SECOND = 200e6
CLAIMS_MAX = 4096  # that this engine remembers waiting for

Verdict = Literal["own", "wait"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes a content."""

    writer: str
    rank: int


def sample_of(header: SlotHeader, payload: memoryview) -> str:
    """16 hex digits that equal shards share, and others seldom."""
    digest = hashlib.blake2b(header.layout_hash, digest_size=8)
    stride = max(len(payload) // SAMPLE_PAGES_MAX // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
    for start in range(0, len(payload), stride):
        digest.update(payload[start : start + PAGE_BYTES])
    return digest.hexdigest()


def claim_name(sample: str, attempt: int) -> str:
    return f".claim-{sample}-a{attempt:04d}"


class Replicas:
    """One engine's view of who stores which content; for the use of one thread."""

    def __init__(self, storage: Storage, directory: Path, writer: str, clock: Clock) -> None:
        self._storage = storage
        self._directory = directory
        self._writer = writer
        self._clock = clock
        self._met: OrderedDict[tuple[int, str], float] = OrderedDict()  # (step, claim) -> since when we wait

    def source(self, header: SlotHeader, payload: memoryview, *, patient: bool) -> ShardRecord | Verdict:
        """The record of a rank that may hold the same; "own": write it; "wait": ask again, somebody writes it.

        The step's folder must be there. Raises OSError from the disk.
        """
        if header.world_size == 1 or header.payload_bytes < REPLICA_BYTES_MIN:
            return "own"
        name = claim_name(sample_of(header, payload), header.attempt)
        path = step_folder(self._directory, header.step) / name
        mine = json.dumps({"writer": self._writer, "rank": header.rank}).encode()
        if self._storage.claim(path, mine):
            return "own"
        claim = read_claim(path)
        if claim is not None and claim.rank == header.rank:
            return "own"
        key = (header.step, name)
        since = self._met.setdefault(key, self._clock.monotonic())
        while len(self._met) > CLAIMS_MAX:
            self._met.popitem(last=False)
        if claim is not None:
            record = read_record(self._directory, header.step, claim.rank, header.attempt)
            if record is not None:
                return record if record.stored_by is None else "own"
            if claim.writer == self._writer:
                return "own"  # our own try has failed, or an engine before us made it
        patience_seconds = PATIENCE_SECONDS_MIN + header.payload_bytes / PATIENCE_BYTES_PER_SECOND
        waited_seconds = self._clock.monotonic() - since
        return "wait" if patient and waited_seconds < patience_seconds else "own"


def read_claim(path: Path) -> Claim | None:
    """None while it is empty, and where it is not one of ours."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(CLAIM_BYTES_MAX))
        writer, rank = fields["writer"], fields["rank"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return Claim(writer, rank) if type(writer) is str and type(rank) is int and rank >= 0 else None


def same_as_stored(payload: memoryview, folder: Path, source: ShardRecord) -> int | None:
    """The CRC-32 of `payload` where the file of `source` holds the same bytes; None where it does not, or cannot be
    read."""
    with contextlib.suppress(CheckpointDamaged), opened_shard(folder / source.file, source.checks) as (file, raw):
        if source.checks.size_bytes - len(raw) != len(payload):
            return None
        crc = _same(payload, lambda start, size: os.pread(file, size, len(raw) + start))
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # the page cache is training's
        return crc if crc == source.checks.payload_crc32 else None
    return None


def same_in_memory(payload: memoryview, other: memoryview, source: ShardRecord) -> int | None:
    """As `same_as_stored`, where `other` is the memory that `source` was written from."""
    if len(payload) != len(other):
        return None
    crc = _same(payload, lambda start, size: bytes(other[start : start + size]))
    return crc if crc == source.checks.payload_crc32 else None


def _same(payload: memoryview, read: Callable[[int, int], bytes]) -> int | None:
    crc = 0
    for start in range(0, len(payload), COMPARE_BYTES):
        piece = bytes(payload[start : start + COMPARE_BYTES])  # comparing views goes element by element
        if read(start, len(piece)) != piece:
            return None
        crc = crc32(piece, crc)
    return crc
