"""Which copy a rank gets when it asks for a step: memory before disk, the newer attempt before the older."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .manifest import StepRecord, complete_steps
from .segment import SlotHeader
from .shardfile import Identity
from .slots import Shard, Slot, SlotTable

Sealed = tuple[Shard, Slot, SlotHeader]


@dataclass(frozen=True, slots=True)
class Choice:
    """A copy of one shard; `memory` is None where it is on disk."""

    step: int
    attempt: int
    memory: tuple[Slot, SlotHeader] | None = None


def choose_for_load(
    table: SlotTable, directory: Path, identity: Identity, step: int | None, not_from_disk: frozenset[int]
) -> Choice | None:
    """The copy of `step` (None: of the newest step) that `identity` may load; None where no tier has one."""
    disk = loadable_steps(directory, identity.world_size, not_from_disk)
    sealed = [entry for entry in table.sealed() if entry[2].world_size == identity.world_size]
    if step is None:
        newest = _newest_for_all(sealed, disk, identity.world_size)
        if newest is None:
            return None
        attempt, step = newest
        sealed = [entry for entry in sealed if entry[2].attempt == attempt]
    own = [entry for entry in sealed if (entry[2].rank, entry[2].step) == (identity.rank, step)]
    record = disk.get(step)
    if own and (record is None or record.attempt <= own[0][2].attempt):  # `sealed` is newest first
        _, slot, header = own[0]
        return Choice(step, header.attempt, (slot, header))
    return Choice(step, record.attempt) if record is not None else None


def loadable_steps(directory: Path, world_size: int, without: frozenset[int]) -> dict[int, StepRecord]:
    """The complete steps on disk that this many ranks saved, by step."""
    return {
        record.step: record
        for record in complete_steps(directory)
        if record.world_size == world_size and record.step not in without
    }


def _newest_for_all(sealed: Sequence[Sealed], disk: dict[int, StepRecord], world_size: int) -> tuple[int, int] | None:
    """(attempt, step) of the newest step that every rank is known to have, so that ranks which ask alike get
    the same."""
    holders: dict[tuple[int, int], set[int]] = {}
    for _, _, header in sealed:
        holders.setdefault(header.newness, set()).add(header.rank)
    in_memory = [newness for newness, ranks in holders.items() if len(ranks) == world_size]
    on_disk = [(record.attempt, record.step) for record in disk.values()]
    return max(in_memory + on_disk, default=None)
