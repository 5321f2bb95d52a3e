"""The engine's side of a fenced save: the image of a shard in a rank's own memory is copied into a slot, while the
rank goes on computing with the tensors in that very memory.

It is read through the descriptor, never mapped: whatever the rank does to its memory, the engine cannot fault on it.
"""

from __future__ import annotations

import fcntl
import os

from .errors import CheckpointDamaged
from .segment import FIELDS_END, PAGE_BYTES, SlotHeader, read_header, write_header

PIECE_BYTES = 16 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def copy_live(descriptor: int, live_bytes: int, slot: memoryview) -> SlotHeader:
    """Copy the image into `slot`: all but the state word and the checksum, so the slot stays WRITING.

    Raises CheckpointDamaged where the descriptor is not a sealed memfd of that size, or holds no image of a shard,
    and OSError.
    """
    if not PAGE_BYTES <= live_bytes <= len(slot):
        raise CheckpointDamaged(f"an image of {live_bytes} bytes does not fit a slot of {len(slot)}")
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError as error:
        raise CheckpointDamaged(f"the rank's memory is not a memfd: {error.strerror}") from error
    if not sealed or os.fstat(descriptor).st_size != live_bytes:
        raise CheckpointDamaged(f"the rank's memory is not a sealed memfd of {live_bytes} bytes")
    image = slot[:live_bytes]
    _read(descriptor, image[:FIELDS_END], 0)
    _read(descriptor, image[PAGE_BYTES:], PAGE_BYTES)
    header = read_header(image)
    write_header(slot, header)  # the same once more for the slot, which may be longer
    return header


def _read(descriptor: int, target: memoryview, offset: int) -> None:
    """All of `target` from `offset` on, in pieces, without the interpreter's lock."""
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done : done + PIECE_BYTES]], offset + done)
        if got == 0:
            raise CheckpointDamaged(f"the rank's memory ends at byte {offset + done}")
        done += got
