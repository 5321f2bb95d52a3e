"""What a restarted engine takes back: the slots that its keeper held, believed as far as they describe themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .checksum import crc32_of
from .errors import CheckpointDamaged
from .keeping import KeptSlot
from .manifest import read_record
from .memfd import Segment, adopt_segment
from .segment import SlotHeader, payload_region
from .shards import SLOTS, Slot, content_of, shard_id
from .slots import SlotTable

RANK_DIGITS_MAX = 6


@dataclass(frozen=True, slots=True)
class Adopted:
    """`sealed`: whole by their headers, newest first. `empty`: void or half written, good for the next save.
    `refused`: why others were not kept."""

    sealed: tuple[tuple[Slot, SlotHeader], ...] = ()
    empty: int = 0
    refused: tuple[str, ...] = ()


def take_back(table: SlotTable, kept: Sequence[KeptSlot], job: str, directory: Path) -> Adopted:
    """Adopt what the keeper held; every descriptor of `kept` is the table's afterwards, or closed."""
    found: list[tuple[int, KeptSlot, Segment, SlotHeader | None]] = []
    sealed: list[tuple[Slot, SlotHeader]] = []
    refused: list[str] = []
    empty = 0
    for entry in kept:
        rank = _rank_of(entry)
        try:
            if rank is None:
                raise CheckpointDamaged("it is no rank's slot")
            segment = adopt_segment(entry.descriptor)
        except CheckpointDamaged as error:
            os.close(entry.descriptor)
            refused.append(f"slot {entry.index} of shard {entry.shard}: {error}")
        else:
            found.append((rank, entry, segment, content_of(segment, job, rank)))
    found.sort(key=lambda item: item[3].newness if item[3] else (-1, -1), reverse=True)
    for rank, entry, segment, header in found:
        slot = table.adopt(rank, entry.index, segment, header)
        if slot is None:
            segment.close()
            refused.append(f"slot {entry.index} of rank {rank}: memory_bytes_max is too small for it")
        elif header is None:
            empty += 1
        else:
            sealed.append((slot, header))
            table.mark(slot, header, durable=_is_stored(directory, header, slot.checksum))
    return Adopted(tuple(sealed), empty, tuple(refused))


def prove(
    table: SlotTable, sealed: Sequence[tuple[Slot, SlotHeader]], damaged: Callable[[SlotHeader, str], None]
) -> None:
    """Compare the newest slot of each rank with its checksum; what does not match is void and told to `damaged`.

    The slot that the next save will be written to is not held up for it: what is in there is compared when it is used.
    """
    seen: set[int] = set()
    for slot, header in sealed:
        if table.closed or header.rank in seen:
            continue
        seen.add(header.rank)
        segment = table.lease(slot, header)
        if segment is None:
            continue
        try:
            table.confirm_checksum(slot, header, crc32_of(payload_region(segment.view, header)))
        except CheckpointDamaged as error:
            table.void(slot, header)
            damaged(header, str(error))
        finally:
            table.release(slot)


def _rank_of(entry: KeptSlot) -> int | None:
    digits = entry.shard
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= RANK_DIGITS_MAX and 0 <= entry.index < SLOTS):
        return None
    return int(digits) if shard_id(int(digits)) == digits else None


def _is_stored(directory: Path, header: SlotHeader, checksum: int | None) -> bool:
    """Whether these bytes are on disk already."""
    if checksum is None:
        return False
    try:
        record = read_record(directory, header.step, header.rank, header.attempt)
    except OSError:
        return False
    return record is not None and record.checks.payload_crc32 == checksum
