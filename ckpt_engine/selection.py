"""Which copy a rank gets when it asks for a step: the newer attempt before the older, memory before what is slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .agreement import Candidate
from .event import TIERS, Tier
from .manifest import StepRecord, complete_steps
from .segment import SlotHeader
from .shardfile import Identity
from .slots import Shard, Slot, SlotTable
from .verification import read_verifications

Sealed = tuple[Shard, Slot, SlotHeader]
TIER_ORDER = tuple(TIERS.values())  # the quickest first


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank asks for: `step` (None: the newest), of `attempt` (None: the newest that has it).

    `without`: copies that it has found damaged, as (tier, attempt, step). `verified_only`: steps that training
    has proved good. `any_world_size`: what another number of ranks saved, too; the rank cuts its own part.
    """

    identity: Identity
    step: int | None = None
    attempt: int | None = None
    without: frozenset[tuple[str, int, int]] = frozenset()
    verified_only: bool = False
    any_world_size: bool = False

    def takes(self, tier: Tier, attempt: int, step: int) -> bool:
        return (
            self.step in (None, step) and self.attempt in (None, attempt) and (tier, attempt, step) not in self.without
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """A copy of one rank's shard; `memory` is where it is in our own. `world_size`: of how many ranks all shards are
    there, where this rank's has to be cut from them; 0: it is this rank's."""

    tier: Tier
    attempt: int
    step: int
    memory: tuple[Slot, SlotHeader] | None = None
    world_size: int = 0

    @property
    def newness(self) -> tuple[int, int]:
        return (self.attempt, self.step)


def offers_for(
    table: SlotTable | None,
    directory: Path,
    wanted: Wanted,
    elsewhere: Sequence[Offer] = (),
    *,
    common_only: bool = False,
) -> list[Offer]:
    """All copies that are as wanted, the best first; `elsewhere` is what peers and object stores have.

    `common_only`: of the newest step alone that all ranks are known to have, by what this node and the disk know.
    Raises CheckpointDamaged where the marks of verified steps are asked for and not readable.
    """
    world_size, rank = wanted.identity.world_size, wanted.identity.rank
    trusted = _trusted(directory, wanted)
    sealed = [
        entry
        for entry in (table.sealed() if table is not None else ())
        if entry[2].world_size == world_size and _is_wanted(wanted, trusted, "memory", *entry[2].newness)
    ]
    disk = loadable_steps(directory, wanted)
    offers = [Offer("memory", *header.newness, (slot, header)) for _, slot, header in sealed if header.rank == rank]
    offers += [Offer("disk", record.attempt, record.step) for record in disk.values()]
    offers += [offer for offer in elsewhere if _is_wanted(wanted, trusted, offer.tier, *offer.newness)]
    if common_only:
        newest = _newest_for_all(sealed, disk, world_size)
        offers = [offer for offer in offers if offer.newness == newest]
    return sorted(offers, key=lambda offer: (offer.newness, -TIER_ORDER.index(offer.tier)), reverse=True)


def candidates_of(offers: Sequence[Offer]) -> list[Candidate]:
    """The steps among them, newest first."""
    return sorted({Candidate(offer.attempt, offer.step) for offer in offers}, reverse=True)


def loadable_steps(directory: Path, wanted: Wanted) -> dict[int, StepRecord]:
    """The complete steps on disk that are as wanted, by step."""
    trusted = _trusted(directory, wanted)
    return {
        record.step: record
        for record in complete_steps(directory)
        if (wanted.any_world_size or record.world_size == wanted.identity.world_size)
        and _is_wanted(wanted, trusted, "disk", record.attempt, record.step)
    }


def _is_wanted(wanted: Wanted, trusted: set[tuple[int, int]] | None, tier: Tier, attempt: int, step: int) -> bool:
    return wanted.takes(tier, attempt, step) and (trusted is None or (attempt, step) in trusted)


def _trusted(directory: Path, wanted: Wanted) -> set[tuple[int, int]] | None:
    """(attempt, step) of those that are marked as verified; None where that is not asked for."""
    if not wanted.verified_only:
        return None
    return {(mark.attempt, mark.step) for mark in read_verifications(directory)}


def _newest_for_all(sealed: Sequence[Sealed], disk: dict[int, StepRecord], world_size: int) -> tuple[int, int] | None:
    """(attempt, step) of the newest step that every rank is known to have, so that ranks which ask alike get
    the same."""
    holders: dict[tuple[int, int], set[int]] = {}
    for _, _, header in sealed:
        holders.setdefault(header.newness, set()).add(header.rank)
    in_memory = [newness for newness, ranks in holders.items() if len(ranks) == world_size]
    on_disk = [(record.attempt, record.step) for record in disk.values()]
    return max(in_memory + on_disk, default=None)
