"""Gives slots their segments and takes them back, within the budget, and tells the keeper of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .budget import MemoryBudget
from .errors import EngineRefused
from .event import EventState
from .keeping import Keeping, NoKeeper
from .memfd import MemfdIdentity, Segment, create_segment
from .segment import SlotHeader
from .shards import Loan, Slot

Tell = Callable[[EventState, SlotHeader, str], None]  # what happened to a shard in memory, and why; must not wait


class SlotMemory:
    """Its user holds the slot table's lock, but for `make`, which takes long."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.keeper: Keeping = NoKeeper()
        self._generations = 0
        self._lent: set[Segment] = set()  # in no slot any more, but a rank works with views of it

    def make(self, size_bytes: int, *, prefault: bool) -> Segment:
        """A segment whose bytes the budget has counted already. Raises EngineRefused."""
        try:
            return create_segment(size_bytes, prefault=prefault)
        except OSError as error:
            raise EngineRefused(f"the host has no {size_bytes} bytes left for a slot: {error.strerror}") from error

    def install(self, slot: Slot, segment: Segment) -> None:
        """The slot has this segment from here on, under a generation that no slot had before."""
        self._generations += 1
        slot.segment, slot.generation = segment, self._generations
        self.keeper.keep(slot.shard, slot.index, segment.descriptor)

    def discard(self, slot: Slot) -> None:
        """Empty the slot and free its memory at once, whoever else maps it; but not under a loan."""
        slot.clear()
        segment, slot.segment = slot.segment, None
        if segment is None:
            return
        self.keeper.drop(slot.shard, slot.index)
        if segment.loans:
            self._lent.add(segment)
        else:
            self._free(segment)

    def make_room(self, need_bytes: int, candidates: Sequence[Slot], tell: Tell) -> None:
        """Discard slots of `candidates`, in their order, until so many bytes more would fit."""
        for slot in candidates:
            if self.budget.fits(need_bytes):
                return
            if slot.header is not None:
                tell("evicted", slot.header, "its rank runs on another node now and the memory was needed")
            self.discard(slot)

    def lend(self, segment: Segment) -> Loan:
        """The segment stays as it is until the loan is given back; the slot gets another when it needs one."""
        segment.loans += 1
        return Loan(segment)

    def lent(self, memfd: MemfdIdentity) -> Segment | None:
        """A segment that is in no slot any more, but still lent."""
        return next((segment for segment in self._lent if segment.identity == memfd), None)

    def give_back(self, loan: Loan) -> None:
        segment = loan.segment
        assert segment.loans > 0
        segment.loans -= 1
        if segment.loans == 0 and segment in self._lent:
            self._lent.remove(segment)
            self.budget.give_back(segment.size_bytes)
            segment.close()  # not discarded: where only the connection has ended, views of it may be in use still

    def _free(self, segment: Segment) -> None:
        self.budget.give_back(segment.size_bytes)
        segment.discard()
