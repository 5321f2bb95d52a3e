"""A slot of a rank that its engine fills itself, with what comes from a peer."""

from __future__ import annotations

from .budget import MemoryBudget
from .errors import CheckpointDamaged, EngineRefused
from .memfd import Segment, adopt_segment, create_segment
from .ring_stock import Stock
from .segment import SlotHeader, read_sealed
from .shardfile import Identity
from .shards import SLOTS, shard_id
from .slots import Grant, SlotBusy, SlotTable
from .wire import close_all

SLOT_SECONDS_MAX = 2.0  # for a slot of the rank that is still being read


class Place:
    """`open`, fill, `seal`, and `close` in any case: what is not sealed then counts for nothing.

    Where the rank has a slot without memory, as on a node that is new to it, a segment of the stock is filled, and then
    becomes that slot. Else it is the slot that the next save would be granted.
    """

    def __init__(self, table: SlotTable, budget: MemoryBudget, stock: Stock, session: int, identity: Identity) -> None:
        self._table = table
        self._budget = budget
        self._stock = stock
        self._session = session
        self._identity = identity
        self._segment: Segment | None = None
        self._grant: Grant | None = None  # None: the segment is in no slot yet

    def open(self, header: SlotHeader, size_bytes: int) -> Segment:
        """The memory. Raises EngineRefused where there is none to be had."""
        self._segment = self._made(size_bytes) if self._empty() else self._granted(header, size_bytes)
        return self._segment

    def seal(self) -> None:
        """All of it is there. Raises EngineRefused where it is not what it says it is, or its place is taken."""
        assert self._segment is not None
        if self._grant is not None:
            self._table.seal(self._session, self._identity, self._grant.index, self._grant.generation)
            return
        try:
            header = read_sealed(self._segment.view)
        except CheckpointDamaged as error:
            raise EngineRefused(f"what came cannot be kept: {error}") from error
        with self._table.changed:
            self._budget.give_back(self._segment.size_bytes)  # the table counts it itself
            for index in self._empty():
                if self._table.adopt(self._identity.rank, index, self._segment, header) is not None:
                    self._segment = None
                    return
            self._budget.count(self._segment.size_bytes)  # `close` gives it back
        raise EngineRefused(f"both slots of rank {self._identity.rank} are in use")

    def close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        if self._grant is not None:
            segment.close()  # our own view of the slot's memory
            return
        with self._table.changed:
            self._budget.give_back(segment.size_bytes)
        segment.discard()

    def _empty(self) -> list[int]:
        """The rank's slots without memory."""
        shard = shard_id(self._identity.rank)
        with self._table.changed:
            used = {index for name, index, _ in self._table.held() if name == shard}
        return [index for index in range(SLOTS) if index not in used]

    def _made(self, size_bytes: int) -> Segment:
        ready = self._stock.take(size_bytes)
        if ready is not None:
            return ready
        with self._table.changed:
            self._budget.take(size_bytes)
        try:
            return create_segment(size_bytes, prefault=True)
        except OSError as error:
            with self._table.changed:
                self._budget.give_back(size_bytes)
            raise EngineRefused(f"the host has no {size_bytes} bytes left for a slot: {error.strerror}") from error

    def _granted(self, header: SlotHeader, size_bytes: int) -> Segment:
        try:
            self._grant = self._table.acquire(
                self._session, self._identity, header.step, size_bytes, (), SLOT_SECONDS_MAX
            )
        except SlotBusy as busy:
            raise EngineRefused(str(busy)) from busy
        try:
            return adopt_segment(self._grant.descriptor)
        except CheckpointDamaged as error:
            close_all([self._grant.descriptor])
            raise EngineRefused(str(error)) from error
