"""The engine's memory: two slots for each rank, who may write which, and what each of them holds.

One writer at a time: a slot is granted to one connection, is the engine's again once sealed, and is never
granted while something reads it (a lease) or while it holds the newest shard the rank could go back to.
There are no locks in shared memory that a dead rank could hold; a slot its writer died in is simply void.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from .budget import MemoryBudget
from .clock import Clock
from .errors import CheckpointDamaged, EngineRefused
from .keeping import Keeping
from .memfd import MemfdIdentity, Segment, adopt_duplicate, memfd_identity
from .rejection import Rejection, is_rejected
from .segment import SlotHeader, SlotState, begin_writing, publish_state, read_state, write_checksum
from .shardfile import Identity
from .shards import (
    Grant,
    Loan,
    Shard,
    Slot,
    SlotBusy,
    adopt_content,
    content_of,
    evictable,
    expendable,
    is_better,
    require_growth,
    shard_id,
    slots_cost,
)
from .slot_memory import SlotMemory, Tell

__all__ = ["Grant", "Loan", "Shard", "Slot", "SlotBusy", "SlotTable"]


class SlotTable:
    """All shards of a node. Every method may be called from any thread."""

    def __init__(
        self,
        job: str,
        budget: MemoryBudget,
        clock: Clock,
        tell: Tell = lambda state, header, reason: None,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.attempt = 0  # the newest that any rank has registered with
        self.closed = False  # nobody waits any more
        self._job = job
        self._budget = budget
        self._memory = SlotMemory(budget)
        self._clock = clock
        self._tell = tell
        self._rejections: tuple[Rejection, ...] = ()
        self._trusted: tuple[int, int] | None = None
        self._shards: dict[int, Shard] = {}

    @property
    def memory_bytes(self) -> int:
        return self._budget.used_bytes

    @property
    def memory_bytes_max(self) -> int:
        return self._budget.bytes_max

    def set_keeper(self, keeper: Keeping) -> None:
        """Who is told of every segment from here on."""
        with self.changed:
            self._memory.keeper = keeper

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
            for slot in shard.slots:
                self._look_again(shard, slot)
            self.changed.notify_all()

    def offer(self, session: int, identity: Identity, index: int, descriptor: int) -> int:
        """What the rank still maps from before our restart: the generation it has now, 0 where it is not wanted.

        The descriptor stays the caller's. A segment that the keeper has brought already is the same memfd.
        """
        with self.changed:
            shard = self._own(session, identity)
            slot = shard.slots[index]
            try:
                holder = self._holder(memfd_identity(descriptor))
                if holder is not None:
                    self._look_again(shard, slot)
                    return slot.generation if holder is slot else 0
                segment = adopt_duplicate(descriptor)
            except (OSError, CheckpointDamaged):
                return 0
            header = content_of(segment, self._job, identity.rank, identity.attempt)
            more_bytes = segment.size_bytes - (slot.segment.size_bytes if slot.segment else 0)
            if not is_better(header, slot) or not self._budget.fits(more_bytes):
                segment.close()
                return 0
            self._memory.discard(slot)
            self._budget.count(segment.size_bytes)
            self._memory.install(slot, segment)
            adopt_content(slot, self._job, identity.rank, identity.attempt)
            self.changed.notify_all()
            return slot.generation

    def adopt(self, rank: int, index: int, segment: Segment, header: SlotHeader | None) -> Slot | None:
        """Take in a segment that nobody of us has seen written: the keeper's, or a peer's; None where there is no
        place. The segment stays the caller's then."""
        with self.changed:
            shard = self._shards.get(rank)
            world_size, attempt = (header.world_size, header.attempt) if header else (rank + 1, 0)
            if shard is None:
                shard = self._shards[rank] = Shard(rank, world_size, attempt)
            slot = shard.slots[index]
            if slot.segment is not None or slot.leases or self._holder(segment.identity) is not None:
                return None
            if not self._budget.count(segment.size_bytes):
                return None
            self._memory.install(slot, segment)
            if header is not None:
                shard.attempt, shard.world_size = max((shard.attempt, shard.world_size), (attempt, world_size))
                self.attempt = max(self.attempt, attempt)
                adopt_content(slot, self._job, rank)
            self.changed.notify_all()
            return slot

    def acquire(
        self,
        session: int,
        identity: Identity,
        step: int,
        need_bytes: int,
        known: Sequence[int],
        wait_seconds: float,
    ) -> Grant:
        """A slot for `step`. Raises SlotBusy after `wait_seconds`, EngineRefused where it can never be; then what
        is in the slots stays."""
        deadline = self._clock.monotonic() + wait_seconds
        with self.changed:
            while True:
                shard = self._own(session, identity)
                require_growth(shard, identity, step)
                slot = expendable(shard, self._rejections)
                if slot.leases == 0:
                    break
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0 or self.closed:
                    raise SlotBusy(f"the other slot was still being read after {wait_seconds:g} s")
                self.changed.wait(remaining)
            segment = slot.segment
            fits = segment is not None and need_bytes <= segment.size_bytes <= 2 * need_bytes + (1 << 20)
            if segment is not None and fits and not segment.loans:
                slot.clear()
                slot.writer = session
                begin_writing(segment.view)
                mapped = slot.generation in known
                return Grant(slot.index, slot.generation, -1 if mapped else segment.duplicate(), False)
            self._preflight(shard, slot, need_bytes)
            self._memory.discard(slot)
            slot.writer = session
            slot.leases += 1
        self._fill(slot, need_bytes)
        with self.changed:
            if slot.writer != session or slot.segment is None:  # superseded while we allocated
                raise EngineRefused("a newer attempt has taken over this rank")
            begin_writing(slot.segment.view)
            return Grant(slot.index, slot.generation, slot.segment.duplicate(), True)

    def prepare(self, rank: int, index: int, need_bytes: int) -> Slot:
        """Give slot `index` a segment with all its pages before a save asks for it; nothing is evicted for that."""
        with self.changed:
            slot = self._shards[rank].slots[index]
            if slot.segment is not None or slot.leases or slot.writer or not self._budget.fits(need_bytes):
                return slot
            slot.leases += 1
        with contextlib.suppress(EngineRefused):  # the save that needs it will say so
            self._fill(slot, need_bytes, prefault=True)
        return slot

    def granted(self, session: int, identity: Identity, index: int, generation: int) -> Slot:
        """A slot that `session` may write, and that is not sealed yet; it has a segment."""
        with self.changed:
            slot = self._own(session, identity).slots[index]
            if slot.writer != session or slot.generation != generation or slot.segment is None:
                raise EngineRefused(f"slot {index} of rank {identity.rank} is not granted to this connection")
            return slot

    def seal(self, session: int, identity: Identity, index: int, generation: int) -> SlotHeader:
        """Believe the rank that its slot is whole, after reading it in the slot's own words."""
        with self.changed:
            slot = self.granted(session, identity, index, generation)
            slot.writer = 0
            adopt_content(slot, self._job, identity.rank, identity.attempt)
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
                    adopt_content(slot, self._job, identity.rank, identity.attempt)
                    adopted = slot.header
            self.changed.notify_all()
        return adopted

    def set_rejections(self, rejections: tuple[Rejection, ...]) -> None:
        """What the job's folder says may not be used; read by the caller, who must not hold the lock
        meanwhile."""
        with self.changed:
            self._rejections = rejections

    def set_trusted(self, newness: tuple[int, int] | None) -> None:
        """(attempt, step) of the newest step that training has proved good: it is never evicted."""
        with self.changed:
            self._trusted = newness

    def sealed(self) -> list[tuple[Shard, Slot, SlotHeader]]:
        """Every slot that could be loaded: sealed and not rejected; newest first."""
        with self.changed:
            rejections = self._rejections
            for shard, slot in self._slots():
                if slot.header is None and shard.session == 0:
                    self._look_again(shard, slot)
            found = [
                (shard, slot, slot.header)
                for shard, slot in self._slots()
                if slot.header is not None and not is_rejected(rejections, slot.header.step, slot.header.attempt)
            ]
        return sorted(found, key=lambda entry: entry[2].newness, reverse=True)

    def held(self) -> list[tuple[str, int, int]]:
        """Shard id, slot index and descriptor of every segment, for the keeper. Called with the lock held."""
        slots = [slot for _, slot in self._slots()]
        return [(slot.shard, slot.index, slot.segment.descriptor) for slot in slots if slot.segment is not None]

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

    def lend(self, rank: int, memfd: MemfdIdentity) -> Loan | None:
        """Keep a segment of the rank as it is for as long as it works with views of it; its slot gets another when it
        needs one. None where this engine has no such segment."""
        with self.changed:
            slot = self._holder(memfd)
            mine = slot.segment if slot is not None and slot.shard == shard_id(rank) else None
            segment = mine or self._memory.lent(memfd)
            return None if segment is None else self._memory.lend(segment)

    def give_back(self, loan: Loan) -> None:
        with self.changed:
            self._memory.give_back(loan)
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
        """The slot's bytes are not what was saved: never hand them out again, nor adopt them after a restart."""
        with self.changed:
            if slot.header == header:
                slot.clear()
                if slot.segment is not None:
                    publish_state(slot.segment.view, SlotState.EMPTY)
            self.changed.notify_all()

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

    def _holder(self, identity: MemfdIdentity) -> Slot | None:
        """The slot that has this memfd."""
        for _, slot in self._slots():
            if slot.segment is not None and slot.segment.identity == identity:
                return slot
        return None

    def _orphan(self, shard: Shard, session: int) -> None:
        """A superseded rank may still be copying: what it has not finished must not be anybody's slot any more."""
        for slot in shard.slots:
            if slot.writer == session:
                slot.writer = 0
                if slot.segment is not None:
                    adopt_content(slot, self._job, shard.rank, shard.attempt)
                if slot.header is None:
                    self._memory.discard(slot)

    def _look_again(self, shard: Shard, slot: Slot) -> None:
        """A rank may have published a slot while no engine was there that it could tell."""
        if slot.header is not None or slot.segment is None or slot.writer:
            return
        with contextlib.suppress(CheckpointDamaged):
            if read_state(slot.segment.view) is SlotState.SEALED:
                adopt_content(slot, self._job, shard.rank)
        if slot.header is not None:
            self.attempt = max(self.attempt, slot.header.attempt)
            self._tell("sealed", slot.header, "saved while no engine was there to be told")

    def _preflight(self, shard: Shard, slot: Slot, need_bytes: int) -> None:
        """Both slots of the rank must fit before one is given up for a larger one, or its saves would fail by turns."""
        two_slots_bytes, own_bytes = slots_cost(shard, slot, need_bytes)
        if not self._budget.fits(two_slots_bytes - own_bytes):
            self._evict(two_slots_bytes - own_bytes)
        self._budget.require(shard.rank, need_bytes, two_slots_bytes, own_bytes)

    def _fill(self, slot: Slot, need_bytes: int, *, prefault: bool = False) -> None:
        """Give a leased, empty slot a segment and end the lease; the pages are made outside the lock."""
        segment, taken = None, False
        try:
            with self.changed:
                if not self._budget.fits(need_bytes):
                    self._evict(need_bytes)
                self._budget.take(need_bytes)
                taken = True
            segment = self._memory.make(need_bytes, prefault=prefault)
        finally:
            with self.changed:
                if segment is not None:
                    self._memory.install(slot, segment)
                else:
                    slot.writer = 0
                    if taken:
                        self._budget.give_back(need_bytes)
                self.release(slot)

    def _evict(self, need_bytes: int) -> None:
        candidates = evictable(self._shards.values(), self.attempt, self._trusted)
        self._memory.make_room(need_bytes, candidates, self._tell)
