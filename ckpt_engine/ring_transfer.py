"""One shard on its way between two engines: pieces with a checksum each, from one segment straight into the other.

    sender → receiver    every piece: its number, its CRC-32, its bytes
    sender → receiver    the end: the CRC-32 of the whole payload
    receiver → sender    `stored`, or the numbers of the pieces that arrived damaged, which are sent once more

Either side may say `void` instead; then nothing of it counts. The sender takes no lease on its slot: a save that
needs it gets it, and the sender, which looks before it says `end`, says `void`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import checksum
from .errors import CheckpointDamaged
from .layout import layout_hash
from .outline import Outline, outline_of
from .ring_wire import RAW_BYTES_MAX, Channel, PeerError, PeerRefused
from .segment import (
    JOB_BYTES_MAX,
    PAGE_BYTES,
    SlotHeader,
    SlotState,
    begin_writing,
    layout_region,
    payload_region,
    publish_state,
    read_sealed,
    write_checksum,
    write_header,
)
from .wire import Fields, WireError, text, whole, wholes

RESENDS_MAX = 3
ALLOCATED_BYTES_PER_SECOND_MIN = 250e6  # pages of a new segment, on a busy host
AGAIN_MAX = 1000  # damaged pieces of one round; more is no accident
PIECES_MAX = 1 << 18
HOT_BYTES = 256 << 10  # received and then read at once for its checksum, while the processor still has it in its cache
REASON_CHARACTERS_MAX = 300


class SourceDamaged(CheckpointDamaged):
    """What was to be sent is no longer what it was when its checksum was computed."""


class SourceGone(PeerError):
    """The slot was needed for a newer save; the connection goes on."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a segment, from `start` up to `stop`."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Cut:
    """How a shard is cut: layout and values first, then the payload from piece `payload_at` on."""

    pieces: tuple[Piece, ...]
    payload_at: int

    def payload_crc32(self, crcs: Sequence[int]) -> int:
        """Of the whole payload, from the checksums of all pieces."""
        whole_crc = 0
        for piece, crc in zip(self.pieces[self.payload_at :], crcs[self.payload_at :], strict=True):
            whole_crc = checksum.joined(whole_crc, crc, piece.size_bytes)
        return whole_crc


@dataclass(frozen=True, slots=True)
class Source:
    """A sealed shard to be sent. `crcs`: of its pieces, where they are known; `payload_crc32` likewise."""

    header: SlotHeader
    view: memoryview
    segment_bytes: int
    chunk_bytes: int
    unchanged: Callable[[], bool]
    crcs: tuple[int, ...] = ()
    payload_crc32: int | None = None


def allocation_seconds(segment_bytes: int) -> float:
    """What the other end may take longer to answer, because it makes a segment first."""
    return segment_bytes / ALLOCATED_BYTES_PER_SECOND_MIN


def cut(header: SlotHeader, chunk_bytes: int) -> Cut:
    """The same for sender and receiver."""
    values_end = header.values_offset + header.values_bytes
    meta = _runs(PAGE_BYTES, values_end, chunk_bytes)
    payload = _runs(header.payload_offset, header.payload_offset + header.payload_bytes, chunk_bytes)
    return Cut((*meta, *payload), len(meta))


def describe(header: SlotHeader) -> Fields:
    """A header as JSON can carry it."""
    fields = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


def header_of(fields: Any, segment_bytes: int, chunk_bytes: int) -> SlotHeader:
    """The header that `describe` made. Raises WireError and nothing else, whatever `fields` are."""
    if not isinstance(fields, dict):
        raise PeerError("the peer sent a slot header that is none")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(SlotHeader):
        if field.type == "bytes":
            try:
                values[field.name] = bytes.fromhex(text(fields, field.name))
            except ValueError as error:
                raise PeerError(f"the slot header's {field.name} is not hexadecimal") from error
        elif field.type == "str":
            values[field.name] = text(fields, field.name)
        else:
            values[field.name] = whole(fields, field.name)
            if values[field.name] < 0:
                raise PeerError(f"the slot header's {field.name} is below 0")
    header = SlotHeader(**values)
    job_bytes = len(header.job.encode("utf-8", "replace"))
    in_order = PAGE_BYTES + header.layout_bytes <= header.values_offset
    in_order = in_order and header.values_offset + header.values_bytes <= header.payload_offset
    whole_pages = segment_bytes > 0 and segment_bytes % PAGE_BYTES == 0
    if not in_order or not whole_pages or header.payload_offset + header.payload_bytes > segment_bytes:
        raise PeerError("the regions of the slot that the peer announces overlap or reach beyond its end")
    if header.rank >= header.world_size or len(header.layout_hash) != 32 or not 0 < job_bytes <= JOB_BYTES_MAX:
        raise PeerError("the slot header that the peer announces names an impossible rank, job or layout")
    if not 0 < chunk_bytes <= RAW_BYTES_MAX or segment_bytes // chunk_bytes > PIECES_MAX:
        raise PeerError(f"chunks of {chunk_bytes} bytes are none, or too many")
    return header


def send_shard(channel: Channel, source: Source, pace: Callable[[int], None]) -> tuple[int, ...]:
    """Send all pieces until the receiver has them whole; their checksums. `pace(bytes)` may wait before each.

    Raises SourceGone and SourceDamaged (the receiver was told), PeerRefused where the receiver cannot keep it, and
    PeerError.
    """
    plan = cut(source.header, source.chunk_bytes)
    crcs = list(source.crcs) or [-1] * len(plan.pieces)
    wanted: Sequence[int] = range(len(plan.pieces))
    for again in range(RESENDS_MAX + 1):
        for index in wanted:
            piece = plan.pieces[index]
            part = source.view[piece.start : piece.stop]
            pace(piece.size_bytes)
            if again or not source.crcs:
                crc = checksum.crc32(part)
                if again and crc != crcs[index]:
                    _say_void(channel, source, "its memory has changed since its checksum was computed")
                crcs[index] = crc
            if not source.unchanged():
                _say_void(channel, source, "")
            channel.send({"piece": index, "crc32": crcs[index]}, part)
        payload_crc = plan.payload_crc32(crcs)
        if not source.unchanged() or source.payload_crc32 not in (None, payload_crc):
            _say_void(channel, source, "its payload does not match its checksum")
        if not _is_as_sealed(source):  # else layout and values would get a new checksum at the other end
            _say_void(channel, source, "its layout or values have changed since it was sealed")
        channel.send({"end": True, "crc32": payload_crc})
        answer = channel.receive()
        if answer.get("stored") is True:
            return tuple(crcs)
        if "void" in answer:
            raise PeerRefused(text(answer, "void")[:REASON_CHARACTERS_MAX])
        wanted = _checked_again(answer, len(plan.pieces))
    raise PeerError(f"{len(wanted)} pieces arrived damaged {RESENDS_MAX + 1} times")


def checked_outline(source: Source) -> Outline:
    """What a shard of ours says of itself, once its payload has been compared with its checksum. Raises
    CheckpointDamaged, also where a save has overwritten it meanwhile: `unchanged` tells which."""
    header = source.header
    outline = outline_of(header, source.view)
    crc = checksum.crc32_of(payload_region(source.view, header), checksum.threads_here())
    if source.payload_crc32 not in (None, crc) or not source.unchanged():
        raise CheckpointDamaged(f"step {header.step} of rank {header.rank} does not match its checksum")
    return outline


def receive_shard(channel: Channel, header: SlotHeader, chunk_bytes: int, view: memoryview) -> tuple[int, ...]:
    """Receive all pieces into `view`, which says WRITING from here on; their checksums, compared.

    The sender still waits for `stored`. Raises CheckpointDamaged where it will never be whole (say `void` then),
    PeerRefused where the sender says so, and WireError.
    """
    plan = cut(header, chunk_bytes)
    crcs = [0] * len(plan.pieces)
    wanted: Sequence[int] = range(len(plan.pieces))
    begin_writing(view)
    for left in range(RESENDS_MAX, -1, -1):
        claimed: dict[int, int] = {}
        for index in wanted:
            piece = plan.pieces[index]
            fields = _not_void(channel.receive(piece.size_bytes))
            if whole(fields, "piece") != index or channel.raw_bytes != piece.size_bytes:
                raise PeerError(f"the peer sent another piece than number {index}")
            claimed[index] = whole(fields, "crc32")
            crcs[index] = _receive_piece(channel, view, piece)
        end = _not_void(channel.receive())
        again = [index for index in wanted if crcs[index] != claimed[index]]
        if not again:
            if plan.payload_crc32(crcs) != whole(end, "crc32"):
                raise CheckpointDamaged(f"step {header.step} of rank {header.rank} came whole but is another")
            return tuple(crcs)
        if len(again) > AGAIN_MAX or not left:
            break
        channel.send({"again": again})
        wanted = again
    raise CheckpointDamaged(f"{len(again)} pieces of step {header.step} of rank {header.rank} kept arriving damaged")


def seal_received(view: memoryview, header: SlotHeader, payload_crc32: int) -> None:
    """Make a segment that holds all pieces a sealed slot. Raises CheckpointDamaged where it cannot be one."""
    if layout_hash(bytes(layout_region(view, header))) != header.layout_hash:
        raise CheckpointDamaged("the layout that came does not match its hash")
    write_header(view, header)
    write_checksum(view, payload_crc32)
    publish_state(view, SlotState.SEALED)
    if read_sealed(view) != header:
        raise CheckpointDamaged("what came is not the shard that was announced")


def _runs(start: int, stop: int, chunk_bytes: int) -> list[Piece]:
    return [Piece(at, min(at + chunk_bytes, stop)) for at in range(start, stop, chunk_bytes)]


def _receive_piece(channel: Channel, view: memoryview, piece: Piece) -> int:
    """Straight to where it belongs; its CRC-32."""
    crc = 0
    for start in range(piece.start, piece.stop, HOT_BYTES):
        part = view[start : min(start + HOT_BYTES, piece.stop)]
        channel.receive_raw(part)
        crc = checksum.crc32(part, crc)
    return crc


def _is_as_sealed(source: Source) -> bool:
    """Whether the slot's own header, whose checksum is of layout and values too, is still the one that was sealed."""
    try:
        return read_sealed(source.view) == source.header
    except CheckpointDamaged:
        return False


def _say_void(channel: Channel, source: Source, damage: str) -> None:
    """Break off, in a way that leaves the connection usable. Always raises."""
    which = f"step {source.header.step} of rank {source.header.rank}"
    if not source.unchanged():
        channel.send({"void": f"{which} was overtaken by a newer save"})
        raise SourceGone(f"{which} was overtaken by a newer save while it was being sent")
    channel.send({"void": f"{which}: {damage}"})
    raise SourceDamaged(f"{which}: {damage}")


def _not_void(fields: Fields) -> Fields:
    if "void" in fields:
        raise PeerRefused(text(fields, "void")[:REASON_CHARACTERS_MAX])
    return fields


def _checked_again(answer: Fields, pieces: int) -> list[int]:
    again = wholes(answer, "again")
    if not 0 < len(again) <= AGAIN_MAX or any(not 0 <= index < pieces for index in again):
        raise WireError("the peer asks for pieces that there are not")
    return again
