"""The engine's memory: two slots for each rank, who may write which, and what each of them holds.

One writer at a time: a slot is granted to one connection, is the engine's again once sealed, and is never
granted while something reads it (a lease) or while it holds the newest shard the rank could go back to.
There are no locks in shared memory that a dead rank could hold; a slot its writer died in is simply void.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .clock import Clock
from .errors import CheckpointDamaged, EngineRefused
from .memfd import Segment, adopt_segment, create_segment
from .rejection import Rejection, is_rejected
from .segment import SlotHeader, begin_writing, payload_region, read_checksum, read_sealed, write_checksum
from .shardfile import Identity

SLOTS = 2


@dataclass(slots=True, eq=False)
class Slot:
    """One buffer of a rank. `header` is set exactly while the slot is sealed and trusted."""

    index: int
    segment: Segment | None = None
    generation: int = 0  # changes with the segment, so that a rank knows when its mapping is out of date
    header: SlotHeader | None = None
    checksum: int | None = None
    durable: bool = False
    given_up: str = ""  # why it will not become durable
    writer: int = 0  # the session it is granted to
    leases: int = 0  # readers, and the thread that prepares it

    def clear(self) -> None:
        self.header, self.checksum, self.durable, self.given_up = None, None, False, ""


@dataclass(slots=True, eq=False)
class Shard:
    """What this node remembers of one rank."""

    rank: int
    world_size: int
    attempt: int
    session: int = 0  # the connection of the living rank
    resumed_step: int | None = None  # what the present attempt loaded
    slots: tuple[Slot, ...] = field(default_factory=lambda: tuple(Slot(index) for index in range(SLOTS)))


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot to write into. `descriptor` is the receiver's to close; -1 where the rank has the segment
    mapped."""

    index: int
    generation: int
    descriptor: int
    fresh: bool  # the segment was made for this grant


class SlotBusy(Exception):
    """Both slots are needed; the save has to be skipped."""


class SlotTable:
    """All shards of a node. Every method may be called from any thread."""

    def __init__(
        self,
        memory_bytes_max: int,
        clock: Clock,
        evicted: Callable[[SlotHeader], None] = lambda header: None,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.memory_bytes_max = memory_bytes_max
        self.attempt = 0  # the newest that any rank has registered with
        self._clock = clock
        self._rejections: tuple[Rejection, ...] = ()
        self._evicted = evicted
        self._shards: dict[int, Shard] = {}
        self._memory_bytes = 0
        self._generations = 0
        self.closed = False  # nobody waits any more

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def close(self) -> None:
        """Wake everybody who waits for a slot or an outcome; the engine is going."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def register(self, session: int, identity: Identity) -> None:
        """Make `session` the one writer of its rank. Older attempts are refused."""
        with self.changed:
            shard = self._shards.get(identity.rank)
            if identity.attempt < self.attempt:
                raise EngineRefused(f"attempt {identity.attempt} is over; attempt {self.attempt} runs")
            self.attempt = identity.attempt
            if shard is None:
                shard = self._shards[identity.rank] = Shard(identity.rank, identity.world_size, identity.attempt)
            superseded, shard.session = shard.session, session
            if superseded not in (0, session):
                self._orphan(shard, superseded)
            if shard.attempt != identity.attempt:
                shard.attempt, shard.resumed_step = identity.attempt, None
            shard.world_size = identity.world_size
            self.changed.notify_all()

    def offer(self, session: int, identity: Identity, index: int, descriptor: int) -> int:
        """Take back a segment that the rank kept while no engine ran; its new generation, 0 where it is not
        wanted."""
        with self.changed:
            slot = self._own(session, identity).slots[index]
            if slot.segment is not None:
                return 0
            try:
                segment = adopt_segment(descriptor)
            except CheckpointDamaged:
                return 0
            if self._memory_bytes + segment.size_bytes > self.memory_bytes_max:
                return 0  # the caller still owns the descriptor
            self._install(slot, segment)
            self._memory_bytes += segment.size_bytes
            self._adopt_content(slot, identity)
            self.changed.notify_all()
            return slot.generation

    def acquire(
        self,
        session: int,
        identity: Identity,
        step: int,
        need_bytes: int,
        known: Sequence[int],
        wait_seconds: float,
    ) -> Grant:
        """A slot for `step`. Raises SlotBusy after `wait_seconds`, EngineRefused where it can never be."""
        deadline = self._clock.monotonic() + wait_seconds
        with self.changed:
            while True:
                shard = self._own(session, identity)
                self._require_growth(shard, identity, step)
                slot = self._expendable(shard)
                if slot.leases == 0:
                    break
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0 or self.closed:
                    raise SlotBusy(f"the other slot was still being read after {wait_seconds:g} s")
                self.changed.wait(remaining)
            slot.clear()
            slot.writer = session
            if slot.segment is not None and need_bytes <= slot.segment.size_bytes <= 2 * need_bytes + (1 << 20):
                begin_writing(slot.segment.view)
                mapped = slot.generation in known
                return Grant(slot.index, slot.generation, -1 if mapped else slot.segment.duplicate(), False)
            self._discard(slot)
            slot.leases += 1
        self._fill(slot, need_bytes)
        with self.changed:
            if slot.writer != session or slot.segment is None:  # superseded while we allocated
                raise EngineRefused("a newer attempt has taken over this rank")
            begin_writing(slot.segment.view)
            return Grant(slot.index, slot.generation, slot.segment.duplicate(), True)

    def prepare_other(self, rank: int, index: int, need_bytes: int) -> None:
        """Fault in the pages of the slot that is not `index`, before the second save asks for it."""
        with self.changed:
            slot = self._shards[rank].slots[1 - index]
            if slot.segment is not None or slot.leases or slot.writer:
                return
            slot.leases += 1
        with contextlib.suppress(EngineRefused):  # the save that needs it will say so
            self._fill(slot, need_bytes)

    def seal(self, session: int, identity: Identity, index: int, generation: int) -> SlotHeader:
        """Believe the rank that its slot is whole, after reading it in the slot's own words."""
        with self.changed:
            slot = self._own(session, identity).slots[index]
            if slot.writer != session or slot.generation != generation or slot.segment is None:
                raise EngineRefused(f"slot {index} of rank {identity.rank} is not granted to this connection")
            slot.writer = 0
            self._adopt_content(slot, identity)
            self.changed.notify_all()
            if slot.header is None:
                raise EngineRefused(f"slot {index} of rank {identity.rank} was sealed but is not whole")
            return slot.header

    def hang_up(self, session: int, identity: Identity) -> SlotHeader | None:
        """The rank is gone. What it was writing is void, unless it had published it and only not said so."""
        adopted = None
        with self.changed:
            shard = self._shards.get(identity.rank)
            if shard is None or shard.session != session:
                return None
            shard.session = 0
            for slot in shard.slots:
                if slot.writer == session:
                    slot.writer = 0
                    self._adopt_content(slot, identity)
                    adopted = slot.header
            self.changed.notify_all()
        return adopted

    def set_rejections(self, rejections: tuple[Rejection, ...]) -> None:
        """What the job's folder says may not be used; read by the caller, who must not hold the lock
        meanwhile."""
        with self.changed:
            self._rejections = rejections

    def sealed(self) -> list[tuple[Shard, Slot, SlotHeader]]:
        """Every slot that could be loaded: sealed and not rejected; newest first."""
        with self.changed:
            rejections = self._rejections
            found = [
                (shard, slot, slot.header)
                for shard, slot in self._slots()
                if slot.header is not None and not is_rejected(rejections, slot.header.step, slot.header.attempt)
            ]
        return sorted(found, key=lambda entry: entry[2].newness, reverse=True)

    def lease(self, slot: Slot, header: SlotHeader) -> Segment | None:
        """Keep the slot from being overwritten; None where it no longer holds `header`."""
        with self.changed:
            if slot.header != header or slot.segment is None:
                return None
            slot.leases += 1
            return slot.segment

    def release(self, slot: Slot) -> None:
        with self.changed:
            assert slot.leases > 0
            slot.leases -= 1
            self.changed.notify_all()

    def mark(self, slot: Slot, header: SlotHeader, *, durable: bool = False, why: str = "") -> None:
        """Note what became of a shard, if the slot still holds it."""
        with self.changed:
            if slot.header == header:
                slot.durable = slot.durable or durable
                slot.given_up = why or slot.given_up
            self.changed.notify_all()

    def confirm_checksum(self, slot: Slot, header: SlotHeader, crc32: int) -> None:
        """Note the payload's CRC-32. Raises CheckpointDamaged where another is known: the memory has changed."""
        with self.changed:
            if slot.header != header or slot.segment is None:
                return
            if slot.checksum is None:
                slot.checksum = crc32
                write_checksum(slot.segment.view, crc32)
            if slot.checksum != crc32:
                raise CheckpointDamaged(f"memory of rank {header.rank} changed after step {header.step} was sealed")

    def void(self, slot: Slot, header: SlotHeader) -> None:
        """The slot's bytes are not what was saved: never hand them out again."""
        with self.changed:
            if slot.header == header:
                slot.clear()
            self.changed.notify_all()

    def checksum(self, slot: Slot, header: SlotHeader, segment: Segment) -> int:
        """The payload's CRC-32 as it was at the seal, or as it is now where nobody has looked yet. Needs a
        lease."""
        with self.changed:
            known = slot.checksum if slot.header == header else None
        if known is None:
            known = zlib.crc32(payload_region(segment.view, header))
            self.confirm_checksum(slot, header, known)
        return known

    def resumed(self, session: int, identity: Identity, step: int) -> None:
        """The rank goes on from `step`: what older attempts saved after it is no longer worth protecting."""
        with self.changed:
            self._own(session, identity).resumed_step = step

    def _slots(self) -> Iterator[tuple[Shard, Slot]]:
        for shard in self._shards.values():
            for slot in shard.slots:
                yield shard, slot

    def _own(self, session: int, identity: Identity) -> Shard:
        shard = self._shards.get(identity.rank)
        if shard is None or shard.session != session:
            raise EngineRefused(f"rank {identity.rank} is written by another connection now")
        return shard

    def _require_growth(self, shard: Shard, identity: Identity, step: int) -> None:
        for slot in shard.slots:
            if slot.header and slot.header.attempt == identity.attempt and slot.header.step >= step:
                raise EngineRefused(
                    f"attempt {identity.attempt} has already saved step {slot.header.step}; steps only "
                    "grow within an attempt, a run that trains a step again needs a new attempt number"
                )

    def _expendable(self, shard: Shard) -> Slot:
        """The slot that does not hold the newest shard on the line of the present attempt."""
        rejections = self._rejections

        def worth(slot: Slot) -> tuple[bool, bool, tuple[int, int], int]:
            header = slot.header
            if header is None or is_rejected(rejections, header.step, header.attempt):
                return (False, False, (0, 0), slot.leases)
            resumed = shard.resumed_step
            on_line = header.attempt == shard.attempt or (resumed is not None and header.step <= resumed)
            return (True, on_line and header.world_size == shard.world_size, header.newness, 0)

        return min(shard.slots, key=worth)

    def _orphan(self, shard: Shard, session: int) -> None:
        """A superseded rank may still be copying: what it writes must not be anybody's slot any more."""
        for slot in shard.slots:
            if slot.writer == session:
                slot.writer = 0
                slot.clear()
                self._discard(slot)

    def _adopt_content(self, slot: Slot, identity: Identity) -> None:
        slot.clear()
        assert slot.segment is not None
        try:
            header = read_sealed(slot.segment.view)
            checksum = read_checksum(slot.segment.view)
        except CheckpointDamaged:
            return
        if (header.job, header.rank) == (identity.job, identity.rank) and header.attempt <= identity.attempt:
            slot.header, slot.checksum = header, checksum

    def _install(self, slot: Slot, segment: Segment) -> None:
        self._generations += 1
        slot.segment, slot.generation = segment, self._generations

    def _discard(self, slot: Slot) -> None:
        slot.clear()
        if slot.segment is not None:
            self._memory_bytes -= slot.segment.size_bytes
            slot.segment.close()
            slot.segment = None

    def _fill(self, slot: Slot, need_bytes: int) -> None:
        """Give a leased, empty slot a segment and end the lease; the pages are made outside the lock."""
        segment = None
        try:
            segment = self._allocate(need_bytes)
        finally:
            with self.changed:
                if segment is None:
                    slot.writer = 0
                else:
                    self._install(slot, segment)
                self.release(slot)

    def _evict(self) -> None:
        """Let go of durable shards of ranks that no longer run here."""
        for shard, slot in self._slots():
            gone = shard.session == 0 and shard.attempt < self.attempt
            if gone and slot.durable and slot.leases == 0 and slot.header is not None:
                self._evicted(slot.header)
                self._discard(slot)

    def _allocate(self, need_bytes: int) -> Segment:
        with self.changed:
            if self._memory_bytes + need_bytes > self.memory_bytes_max:
                self._evict()
            if self._memory_bytes + need_bytes > self.memory_bytes_max:
                raise EngineRefused(
                    f"a slot of {need_bytes} bytes does not fit: {self._memory_bytes} of at most "
                    f"{self.memory_bytes_max} bytes are in use; raise memory_bytes_max"
                )
            self._memory_bytes += need_bytes
        try:
            return create_segment(need_bytes)
        except OSError as error:
            with self.changed:
                self._memory_bytes -= need_bytes
            raise EngineRefused(f"the host has no {need_bytes} bytes left for a slot: {error.strerror}") from error
