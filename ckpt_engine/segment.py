"""The self-describing header of a memory slot: whose checkpoint it is can be told from the slot's own bytes.

A segment is laid out as

    0      the fixed fields and their CRC-32, which covers the layout and values regions too
    1024   the state word: EMPTY, WRITING or SEALED; 8 aligned bytes, stored last
    1088   the payload's checksum, written by the engine after the slot was sealed; up to 4096 room for a table
    4096   layout (JSON, see layout.py) · values (JSON, see tree.py) · payload (the tensors' bytes)

so a restarted engine, or one that has never seen the slot, needs no table beside it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import Enum

from .checksum import crc32
from .errors import CheckpointDamaged

PAGE_BYTES = 4096
MAGIC = b"TRNSMCK1"
VERSION = 2
JOB_BYTES_MAX = 128
SHARD_ID_BYTES_MAX = 64

_FIELDS = struct.Struct("<8sII128s64s32sqqqqQQQQQQ")
_CRC = struct.Struct("<I")
_STATE_AT = FIELDS_END = 1024
_CHECKSUM_AT = 1088
_SHARD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]{0,63}\Z")  # can be part of a file's name
_CHECKSUM_KNOWN = int.from_bytes(b"CRC32SET", "little")


class SlotState(Enum):
    """The words differ in many bits, so that a flipped bit makes none of them."""

    EMPTY = 0
    WRITING = int.from_bytes(b"WRITING!", "little")
    SEALED = int.from_bytes(b"SEALED..", "little")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Identity and geometry of one shard in a segment. Offsets count from the start of the segment.

    `shard` is the logical id of the part of the state that this is, wherever it runs; the rank where none is given.
    """

    job: str
    attempt: int
    rank: int
    world_size: int
    step: int
    layout_hash: bytes
    layout_bytes: int
    values_offset: int
    values_bytes: int
    payload_offset: int
    payload_bytes: int
    shard: str = ""

    def __post_init__(self) -> None:
        if not self.shard:
            object.__setattr__(self, "shard", str(self.rank))

    @property
    def newness(self) -> tuple[int, int]:
        """What makes one shard newer than another: a later attempt trained this step again."""
        return (self.attempt, self.step)


def segment_bytes(payload_offset: int, payload_bytes: int) -> int:
    """Size of a segment in whole pages."""
    return -(-(payload_offset + payload_bytes) // PAGE_BYTES) * PAGE_BYTES


def write_header(buffer: memoryview, header: SlotHeader) -> None:
    """Store `header`; layout and values must stand at their places already. The state word is not touched."""
    job = header.job.encode()
    if len(job) > JOB_BYTES_MAX:
        raise ValueError(f"the job's name has {len(job)} bytes, at most {JOB_BYTES_MAX} fit; choose a shorter one")
    if not _SHARD_ID.match(header.shard):
        raise ValueError(f"the shard id {header.shard!r} is not 1 to {SHARD_ID_BYTES_MAX} letters, digits and _.=-")
    fields = _FIELDS.pack(
        MAGIC, VERSION, PAGE_BYTES, job, header.shard.encode(), header.layout_hash,
        header.attempt, header.rank, header.world_size, header.step,
        header.layout_bytes, header.values_offset, header.values_bytes,
        header.payload_offset, header.payload_bytes, len(buffer),
    )  # fmt: skip
    buffer[: _FIELDS.size] = fields
    crc = _header_crc(buffer, header)
    buffer[_FIELDS.size : _FIELDS.size + _CRC.size] = _CRC.pack(crc)


def read_header(buffer: memoryview) -> SlotHeader:
    """The header in `buffer`. Raises CheckpointDamaged and nothing else, whatever the bytes are."""
    if len(buffer) < PAGE_BYTES:
        raise CheckpointDamaged(f"the segment has {len(buffer)} bytes, a header alone needs {PAGE_BYTES}")
    (
        magic, version, page, job, shard, layout_hash, attempt, rank, world_size, step,
        layout_bytes, values_offset, values_bytes, payload_offset, payload_bytes, total,
    ) = _FIELDS.unpack_from(buffer)  # fmt: skip
    if magic != MAGIC or version != VERSION or page != PAGE_BYTES:
        raise CheckpointDamaged("the segment does not start with a slot header of this version")
    if total != len(buffer):
        raise CheckpointDamaged(f"the header speaks of {total} bytes, the segment has {len(buffer)}")
    in_order = PAGE_BYTES + layout_bytes <= values_offset and values_offset + values_bytes <= payload_offset
    if not in_order or payload_offset + payload_bytes > total:
        raise CheckpointDamaged("the regions of the slot overlap or reach beyond its end")
    try:
        name, shard_id = job.rstrip(b"\0").decode(), shard.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise CheckpointDamaged("a name in the slot header is not UTF-8") from error
    header = SlotHeader(
        name, attempt, rank, world_size, step, layout_hash,
        layout_bytes, values_offset, values_bytes, payload_offset, payload_bytes, shard_id,
    )  # fmt: skip
    if _CRC.unpack_from(buffer, _FIELDS.size)[0] != _header_crc(buffer, header):
        raise CheckpointDamaged("the slot header's checksum does not match its bytes")
    if attempt < 0 or step < 0 or not 0 <= rank < world_size or not _SHARD_ID.match(shard_id):
        raise CheckpointDamaged("the slot header names an impossible rank, shard, step or attempt")
    return header


def read_sealed(buffer: memoryview) -> SlotHeader:
    """The header of a slot that is whole. Raises CheckpointDamaged where it is not."""
    state = read_state(buffer)
    if state is not SlotState.SEALED:
        raise CheckpointDamaged(f"the slot is {state.name}, not SEALED")
    return read_header(buffer)


def read_state(buffer: memoryview) -> SlotState:
    """The state word. Raises CheckpointDamaged where it is none of ours."""
    if len(buffer) < PAGE_BYTES:
        raise CheckpointDamaged(f"the segment has {len(buffer)} bytes, a header alone needs {PAGE_BYTES}")
    word = int.from_bytes(buffer[_STATE_AT : _STATE_AT + 8], "little")
    try:
        return SlotState(word)
    except ValueError as error:
        raise CheckpointDamaged(f"the slot's state word {word:#x} is none of EMPTY, WRITING, SEALED") from error


def publish_state(buffer: memoryview, state: SlotState) -> None:
    """One aligned 8-byte store, so that no reader sees half of it (struct.pack_into would go byte by
    byte)."""
    buffer[_STATE_AT : _STATE_AT + 8].cast("Q")[0] = state.value


def begin_writing(buffer: memoryview) -> None:
    """Take back what the slot held before the first byte of the next shard is written."""
    publish_state(buffer, SlotState.WRITING)
    write_checksum(buffer, None)


def write_checksum(buffer: memoryview, crc32: int | None) -> None:
    """The payload's CRC-32, or None while it is not known. The number is stored before its marker."""
    words = buffer[_CHECKSUM_AT : _CHECKSUM_AT + 16].cast("Q")
    words[0] = 0
    words[1] = 0 if crc32 is None else crc32
    words[0] = 0 if crc32 is None else _CHECKSUM_KNOWN


def read_checksum(buffer: memoryview) -> int | None:
    """The payload's CRC-32 where the engine has computed it. Raises CheckpointDamaged where the field is
    neither."""
    marker, value = buffer[_CHECKSUM_AT : _CHECKSUM_AT + 16].cast("Q")
    if marker == 0 and value == 0:
        return None
    if marker != _CHECKSUM_KNOWN or value > 0xFFFFFFFF:
        raise CheckpointDamaged("the slot's checksum field is damaged")
    return value


def layout_region(buffer: memoryview, header: SlotHeader) -> memoryview:
    return buffer[PAGE_BYTES : PAGE_BYTES + header.layout_bytes]


def values_region(buffer: memoryview, header: SlotHeader) -> memoryview:
    return buffer[header.values_offset : header.values_offset + header.values_bytes]


def payload_region(buffer: memoryview, header: SlotHeader) -> memoryview:
    return buffer[header.payload_offset : header.payload_offset + header.payload_bytes]


def _header_crc(buffer: memoryview, header: SlotHeader) -> int:
    crc = crc32(buffer[: _FIELDS.size])
    crc = crc32(layout_region(buffer, header), crc)
    return crc32(values_region(buffer, header), crc)
