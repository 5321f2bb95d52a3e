"""One shard as a safetensors file: an 8-byte length, a JSON header, and the payload exactly as memory has it.

Any safetensors reader finds the tensors by name; our own metadata in the header adds what the format has no
words for: identity, true dtypes, tied tensors, and the values that are not tensors.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checksum import crc32
from .errors import CheckpointDamaged
from .layout import ELEMENT_TYPES, Layout, TensorPlace, decode_layout, layout_hash
from .segment import SlotHeader

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
READ_PIECE_BYTES = 8 << 20
PAYLOAD_ALIGNMENT_BYTES = 4096  # so that the payload can go past the page cache
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose shard it is."""

    job: str
    attempt: int
    rank: int
    world_size: int
    step: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard file says of itself before its payload."""

    identity: Identity
    layout: Layout
    layout_hash: bytes
    values: bytes
    payload_offset: int


@dataclass(frozen=True, slots=True)
class ShardChecks:
    """Sizes and checksums that a shard file must have, as its record and the manifest name them."""

    size_bytes: int
    header_crc32: int
    payload_crc32: int


def identity_of(header: SlotHeader) -> Identity:
    return Identity(header.job, header.attempt, header.rank, header.world_size, header.step)


def encode_header(identity: Identity, layout_raw: bytes, layout: Layout, values: bytes) -> bytes:
    """Length and header, padded with spaces (as the format allows) so that the payload starts on a page."""
    metadata = {
        "transom.identity": json.dumps(
            {
                "job": identity.job,
                "attempt": identity.attempt,
                "rank": identity.rank,
                "world_size": identity.world_size,
                "step": identity.step,
            }
        ),
        "transom.layout": layout_raw.decode(),
        "transom.values": values.decode(),
    }
    document: dict[str, Any] = {"__metadata__": metadata}
    for place in sorted(layout.places, key=lambda place: (place.offset, place.size_bytes)):
        document[place.name] = _entry(place)
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % PAYLOAD_ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(descriptor: int, size_bytes: int) -> ShardHeader:
    """The header of an open shard file of `size_bytes`. Raises CheckpointDamaged and, for the disk,
    OSError."""
    return decode_header(read_header_bytes(descriptor), size_bytes)


def read_header_bytes(descriptor: int) -> bytes:
    """Length and header as they stand in the file."""
    prefix = os.pread(descriptor, _LENGTH_BYTES, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or length > HEADER_BYTES_MAX:
        raise CheckpointDamaged("the shard file does not start with a safetensors header")
    text = os.pread(descriptor, length, _LENGTH_BYTES)
    if len(text) < length:
        raise CheckpointDamaged("the shard file ends inside its header")
    return prefix + text


def decode_header(raw: bytes, size_bytes: int) -> ShardHeader:
    """The header in `raw` (with its length). Raises CheckpointDamaged and nothing else, whatever the bytes
    are."""
    payload_bytes = size_bytes - len(raw)
    try:
        metadata = json.loads(raw[_LENGTH_BYTES:])["__metadata__"]
        identity = _identity(json.loads(metadata["transom.identity"]))
        layout_raw = metadata["transom.layout"].encode()
        values = metadata["transom.values"].encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"the shard's header is not one of ours: {error!r:.200}") from error
    if payload_bytes < 0:
        raise CheckpointDamaged("the shard file ends inside its header")
    return ShardHeader(identity, decode_layout(layout_raw, payload_bytes), layout_hash(layout_raw), values, len(raw))


def read_payload(descriptor: int, offset: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    """The payload in private memory, and its CRC-32: read once, so later changes of the file cannot reach
    it."""
    memory = mmap.mmap(-1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    crc, done = 0, 0
    while done < size_bytes:
        piece = view[done : min(done + READ_PIECE_BYTES, size_bytes)]
        got = os.preadv(descriptor, [piece], offset + done)
        if got == 0:
            raise CheckpointDamaged(f"the shard file ends {size_bytes - done} bytes too early")
        crc = crc32(piece[:got], crc)
        done += got
    view.release()
    return memory, crc


def check_shard(path: Path, checks: ShardChecks) -> ShardHeader:
    """Read the whole file and compare it with `checks`. Raises CheckpointDamaged."""
    return open_shard(path, checks)[0]


def open_shard(path: Path, checks: ShardChecks) -> tuple[ShardHeader, mmap.mmap]:
    """Header and payload of a shard whose size and checksums are right. Raises CheckpointDamaged."""
    with opened_shard(path, checks) as (descriptor, raw):
        header = decode_header(raw, checks.size_bytes)
        memory = checked_payload(descriptor, path, header, checks.payload_crc32)
    return header, memory


@contextlib.contextmanager
def opened_shard(path: Path, checks: ShardChecks) -> Iterator[tuple[int, bytes]]:
    """The descriptor and the header's bytes of a file whose size and header are right; the payload is not read.

    Raises CheckpointDamaged, for what the disk refuses within the block too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointDamaged(f"shard {path} cannot be opened: {error.strerror}") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != checks.size_bytes:
            raise CheckpointDamaged(f"shard {path} has {size} bytes, its record says {checks.size_bytes}")
        raw = read_header_bytes(descriptor)
        if crc32(raw) != checks.header_crc32:
            raise CheckpointDamaged(f"the header of shard {path} does not match its checksum")
        yield descriptor, raw
    except OSError as error:
        raise CheckpointDamaged(f"shard {path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def checked_payload(descriptor: int, path: Path, header: ShardHeader, wanted_crc32: int) -> mmap.mmap:
    """The payload in private memory. Raises CheckpointDamaged where it is not what its checksum says."""
    memory, crc = read_payload(descriptor, header.payload_offset, header.layout.payload_bytes)
    if crc != wanted_crc32:
        raise CheckpointDamaged(f"the tensors of shard {path} do not match their checksum")
    return memory


def _entry(place: TensorPlace) -> dict[str, Any]:
    element = ELEMENT_TYPES[place.dtype]
    shape = [*place.shape, element.parts] if element.parts > 1 else list(place.shape)
    return {
        "dtype": element.safetensors,
        "shape": shape,
        "data_offsets": [place.offset, place.offset + place.size_bytes],
    }


def _identity(fields: dict[str, Any]) -> Identity:
    numbers = [fields[name] for name in ("attempt", "rank", "world_size", "step")]
    if type(fields["job"]) is not str or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("the identity's fields have the wrong types")
    return Identity(fields["job"], *numbers)
