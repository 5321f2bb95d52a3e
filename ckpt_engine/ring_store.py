"""The shards of other nodes that this engine keeps in memory: two slots for each, under a cap of their own.

One slot is filled while the other keeps the newest whole shard; what breaks off on the way leaves the older
one as it was. Nothing is overwritten while it is being read (a lease).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from . import checksum
from .memfd import Segment, create_segment
from .rejection import Rejection, is_rejected
from .ring_transfer import cut
from .ring_wire import PeerRefused
from .segment import SlotHeader

SLOTS = 2
SHARDS_MAX = 4096


@dataclass(slots=True, eq=False)
class PeerSlot:
    """One buffer. `header` is set exactly while it holds a whole shard that was compared with its checksums."""

    segment: Segment | None = None
    header: SlotHeader | None = None
    home: str = ""  # the node whose engine sealed it
    chunk_bytes: int = 0
    crcs: tuple[int, ...] = ()
    payload_crc32: int = 0
    writing: bool = False
    leases: int = 0

    def clear(self) -> None:
        self.header, self.home, self.crcs, self.payload_crc32 = None, "", (), 0


@dataclass(slots=True, eq=False)
class _PeerShard:
    slots: tuple[PeerSlot, ...] = field(default_factory=lambda: tuple(PeerSlot() for _ in range(SLOTS)))


class PeerStore:
    """Every method may be called from any thread. The rank in the header is the shard's id; where it ran does not
    matter."""

    def __init__(self, memory_bytes_max: int, rejections: Callable[[], Sequence[Rejection]]) -> None:
        self.memory_bytes_max = memory_bytes_max
        self._rejections = rejections
        self._shards: dict[int, _PeerShard] = {}
        self._memory_bytes = 0
        self._lock = threading.RLock()

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def begin(self, header: SlotHeader, segment_bytes: int, home: str, payload_crc32: int | None) -> PeerSlot | None:
        """A slot to receive `header` into, the caller's until `commit` or `abandon`; None where it is here already.

        Raises PeerRefused, with the reason, where it has no place.
        """
        rejections = self._rejections()
        with self._lock:
            if header.rank not in self._shards and len(self._shards) >= SHARDS_MAX:
                raise PeerRefused(f"this engine keeps the shards of {SHARDS_MAX} ranks already")
            slots = self._shards.setdefault(header.rank, _PeerShard()).slots
            for slot in slots:
                if slot.header != header:
                    continue
                if payload_crc32 in (None, slot.payload_crc32):
                    return None
                slot.clear()  # one of the two is not what was saved, and the home has just read its own
            good = [slot for slot in slots if slot.header and not _rejected(rejections, slot.header)]
            newest = max((slot for slot in good if slot.header), key=_newness, default=None)
            if newest is not None and newest.header is not None and newest.header.newness > header.newness:
                raise PeerRefused(f"step {newest.header.step} of rank {header.rank}, which is newer, is here already")
            others = [slot for slot in slots if slot is not newest]
            slot = min(others, key=lambda slot: (slot.writing or slot.leases > 0, slot.header is not None))
            if slot.writing or slot.leases:
                raise PeerRefused(f"the other slot of rank {header.rank} is still in use")
            slot.clear()
            slot.writing = True
        try:
            self._fit(slot, segment_bytes)
        except BaseException:
            slot.writing = False
            raise
        slot.home = home
        return slot

    def commit(self, slot: PeerSlot, header: SlotHeader, chunk_bytes: int, crcs: tuple[int, ...], crc32: int) -> None:
        """What was received is whole."""
        with self._lock:
            slot.header, slot.chunk_bytes, slot.crcs, slot.payload_crc32 = header, chunk_bytes, crcs, crc32
            slot.writing = False

    def abandon(self, slot: PeerSlot) -> None:
        """What was received counts for nothing; the memory stays for the next try."""
        with self._lock:
            slot.clear()
            slot.writing = False

    def whole(self) -> list[tuple[PeerSlot, SlotHeader]]:
        """Every shard that could be handed out: whole and not rejected; newest first."""
        rejections = self._rejections()
        with self._lock:
            found = [
                (slot, slot.header)
                for slot in self._slots()
                if slot.header is not None and not _rejected(rejections, slot.header)
            ]
        return sorted(found, key=lambda entry: entry[1].newness, reverse=True)

    def lease(self, slot: PeerSlot, header: SlotHeader) -> Segment | None:
        """Keep the slot as it is until `release`; None where it no longer holds `header`."""
        with self._lock:
            if slot.header != header or slot.segment is None:
                return None
            slot.leases += 1
            return slot.segment

    def release(self, slot: PeerSlot) -> None:
        with self._lock:
            assert slot.leases > 0
            slot.leases -= 1

    def damage(self, slot: PeerSlot, header: SlotHeader, view: memoryview) -> str:
        """Compare the shard, or a copy of it in `view`, with the checksums that it came with: what is wrong, or empty.
        Needs a lease."""
        for piece, crc in zip(cut(header, slot.chunk_bytes).pieces, slot.crcs, strict=True):
            if checksum.crc32(view[piece.start : piece.stop]) != crc:
                which = f"step {header.step} of rank {header.rank}, kept for {slot.home},"
                return f"{which} has changed in memory between bytes {piece.start} and {piece.stop}"
        return ""

    def void(self, slot: PeerSlot, header: SlotHeader) -> None:
        """Its bytes are no longer what came: never hand them out again."""
        with self._lock:
            if slot.header == header:
                slot.clear()

    def _slots(self) -> Iterator[PeerSlot]:
        for shard in self._shards.values():
            yield from shard.slots

    def _fit(self, slot: PeerSlot, segment_bytes: int) -> None:
        """Give a slot that we are writing a segment of exactly this size; its pages are made outside the lock."""
        with self._lock:
            if slot.segment is not None:
                if slot.segment.size_bytes == segment_bytes:
                    return
                self._drop(slot)
            if self._memory_bytes + segment_bytes > self.memory_bytes_max:
                self._evict(segment_bytes)
            if self._memory_bytes + segment_bytes > self.memory_bytes_max:
                raise PeerRefused(
                    f"{segment_bytes} bytes for a peer's shard do not fit: {self._memory_bytes} of at most "
                    f"{self.memory_bytes_max} bytes are in use; raise peer_memory_bytes_max"
                )
            self._memory_bytes += segment_bytes
        try:
            slot.segment = create_segment(segment_bytes)
        except OSError as error:
            with self._lock:
                self._memory_bytes -= segment_bytes
            raise PeerRefused(f"the host has no {segment_bytes} bytes left for a peer's shard") from error

    def _evict(self, need_bytes: int) -> None:
        """Let go of empty slots and of what has a newer one beside it; never of the only whole copy of a shard of the
        newest attempt."""
        newest_attempt = max((slot.header.attempt for slot in self._slots() if slot.header), default=0)
        worth: list[tuple[int, int, PeerSlot]] = []
        for shard in self._shards.values():
            best = max((slot for slot in shard.slots if slot.header), key=_newness, default=None)
            for slot in shard.slots:
                if slot.segment is None or slot.writing or slot.leases:
                    continue
                if slot.header is None:
                    worth.append((0, 0, slot))
                elif slot is not best or slot.header.attempt < newest_attempt:
                    worth.append((1, slot.header.attempt, slot))
        for _, _, slot in sorted(worth, key=lambda entry: entry[:2]):
            if self._memory_bytes + need_bytes <= self.memory_bytes_max:
                return
            self._drop(slot)

    def _drop(self, slot: PeerSlot) -> None:
        slot.clear()
        if slot.segment is not None:
            self._memory_bytes -= slot.segment.size_bytes
            slot.segment.discard()
            slot.segment = None


def _newness(slot: PeerSlot) -> tuple[int, int]:
    return slot.header.newness if slot.header is not None else (-1, -1)


def _rejected(rejections: Sequence[Rejection], header: SlotHeader) -> bool:
    return is_rejected(rejections, header.step, header.attempt)
