"""One rank's memory as its engine sees it: two slots, what each holds, which may be written, which may go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import CheckpointDamaged, EngineRefused
from .memfd import Segment
from .rejection import Rejection, is_rejected
from .segment import SlotHeader, SlotState, publish_state, read_checksum, read_sealed, read_state
from .shardfile import Identity

SLOTS = 2


@dataclass(slots=True, eq=False)
class Slot:
    """One buffer of a rank. `header` is set exactly while the slot is sealed and trusted."""

    index: int
    shard: str = ""  # the logical id of what it is a buffer of
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
    slots: tuple[Slot, ...] = ()

    def __post_init__(self) -> None:
        self.slots = tuple(Slot(index, shard_id(self.rank)) for index in range(SLOTS))


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot to write into. `descriptor` is the receiver's to close; -1 where the rank has the segment
    mapped."""

    index: int
    generation: int
    descriptor: int
    fresh: bool  # the segment was made for this grant


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Views of a segment that a rank works with; it stays as it is until the loan is given back."""

    segment: Segment


class SlotBusy(Exception):
    """Both slots are needed; the save has to be skipped."""


def shard_id(rank: int) -> str:
    """The logical id of a rank's part of the state: what it is, not where it runs."""
    return str(rank)


def content_of(segment: Segment, job: str, rank: int, attempt: int | None = None) -> SlotHeader | None:
    """What a segment holds, if it is whole, this rank's, and not of a later attempt than `attempt`."""
    try:
        header = read_sealed(segment.view)
        read_checksum(segment.view)
    except CheckpointDamaged:
        return None
    ours = (header.job, header.rank) == (job, rank)
    return header if ours and (attempt is None or header.attempt <= attempt) else None


def adopt_content(slot: Slot, job: str, rank: int, attempt: int | None = None) -> None:
    """Believe what the slot says of itself; what is sealed and cannot be believed is void for good."""
    slot.clear()
    assert slot.segment is not None
    slot.header = content_of(slot.segment, job, rank, attempt)
    with contextlib.suppress(CheckpointDamaged):
        if slot.header is not None:
            slot.checksum = read_checksum(slot.segment.view)
        elif read_state(slot.segment.view) is SlotState.SEALED:
            publish_state(slot.segment.view, SlotState.EMPTY)


def is_better(header: SlotHeader | None, slot: Slot) -> bool:
    """Whether what a rank has of a slot takes the place of what we have: the keeper's may be older."""
    if slot.leases or slot.writer:
        return False
    if slot.segment is None:
        return True
    newer = header is not None and (slot.header is None or header.newness > slot.header.newness)
    return newer and not slot.segment.loans


def require_growth(shard: Shard, identity: Identity, step: int) -> None:
    """Raise EngineRefused where this attempt has saved `step` or a later one."""
    for slot in shard.slots:
        if slot.header and slot.header.attempt == identity.attempt and slot.header.step >= step:
            raise EngineRefused(
                f"attempt {identity.attempt} has already saved step {slot.header.step}; steps only "
                "grow within an attempt, a run that trains a step again needs a new attempt number"
            )


def expendable(shard: Shard, rejections: Sequence[Rejection]) -> Slot:
    """The slot that does not hold the newest shard on the line of the present attempt."""

    def worth(slot: Slot) -> tuple[bool, bool, tuple[int, int], int]:
        header = slot.header
        if header is None or is_rejected(rejections, header.step, header.attempt):
            return (False, False, (0, 0), slot.leases)
        resumed = shard.resumed_step
        on_line = header.attempt == shard.attempt or (resumed is not None and header.step <= resumed)
        return (True, on_line and header.world_size == shard.world_size, header.newness, 0)

    return min(shard.slots, key=worth)


def slots_cost(shard: Shard, slot: Slot, need_bytes: int) -> tuple[int, int]:
    """(bytes of the rank's two slots once `slot` has `need_bytes` and the other follows, bytes that it has now)."""
    other = shard.slots[1 - slot.index].segment
    mine = slot.segment.size_bytes if slot.segment and not slot.segment.loans else 0  # what is lent stays beside it
    others = other.size_bytes if other else 0
    return need_bytes + max(need_bytes, others), mine + others


def evictable(shards: Iterable[Shard], attempt: int, trusted: tuple[int, int] | None) -> list[Slot]:
    """Slots of ranks that no longer run here, empty ones first, then the oldest.

    Never what is not on disk or in use, nor the newest step that training has proved good.
    """
    gone = [slot for shard in shards if shard.session == 0 and shard.attempt < attempt for slot in shard.slots]
    free = [slot for slot in gone if slot.segment is not None and not slot.leases and not slot.segment.loans]
    may_go = [slot for slot in free if slot.header is None or (slot.durable and slot.header.newness != trusted)]
    return sorted(may_go, key=lambda slot: slot.header.newness if slot.header else (-1, -1))
