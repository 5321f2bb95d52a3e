"""What one rank is lent of other ranks' shards, so that it can cut its own from them: for another number of ranks.

A step counts where this node's memory and that of its peers have it of every rank that saved it. The rank asks for the
outlines of all shards, and then for the shards that it needs, one after the other; each is compared with its checksum
before it is handed over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import wire
from .errors import EngineRefused
from .event import Tier
from .outline import outline_of
from .rejection import is_rejected, read_or_reject_all
from .ring_gather import Borrowed
from .selection import Offer, Wanted
from .shardfile import Identity
from .wire import Fields

if TYPE_CHECKING:
    from .session import EngineParts, Reply

WORLD_SIZE_MAX = 1 << 20
Borrow = Callable[[Identity], Borrowed | None]  # from this engine's own slots, compared with its checksum

Step = tuple[int, int, int]  # attempt, step, world size


@dataclass(slots=True)
class _Holders:
    """Which ranks of a step are in memory, and where."""

    here: set[int]
    anywhere: set[int]


class Gathering:
    """One connection's part. Its requests come one after another, and it has one shard at a time."""

    def __init__(self, parts: EngineParts, borrow: Borrow) -> None:
        self._parts = parts
        self._borrow = borrow
        self._given: Borrowed | None = None

    def offers(self, wanted: Wanted) -> list[Offer]:
        """Steps that another number of ranks saved, whole in memory; nobody is asked where this rank's own shard is
        here, and nothing newer is known."""
        if not wanted.any_world_size:
            return []
        found = self._in_own_slots()
        ring = self._parts.ring
        if ring is not None and self._is_worth_asking(wanted, found):
            rejections = read_or_reject_all(self._parts.directory)
            for holding in (*ring.kept_here(), *ring.gatherer.everywhere()):
                if not is_rejected(rejections, holding.step, holding.attempt):
                    whole_step = (holding.attempt, holding.step, holding.world_size)
                    found.setdefault(whole_step, _Holders(set(), set())).anywhere.add(holding.rank)
        offers = []
        for (attempt, step, world_size), holders in found.items():
            if world_size == wanted.identity.world_size or not 0 < world_size <= WORLD_SIZE_MAX:
                continue
            tiers: list[Tier] = []
            if len(holders.here) == world_size:
                tiers.append("memory")
            if len(holders.anywhere) == world_size:
                tiers.append("peer")  # also where all is here: a damaged shard may be whole elsewhere
            offers += [Offer(tier, attempt, step, world_size=world_size) for tier in tiers]
        return offers

    def outline(self, identity: Identity, fields: Fields) -> Reply:
        """What another rank's shard says of itself, in a memfd of its own. Raises EngineRefused."""
        self.release()
        wanted = self._named(identity, fields)
        raw = self._parts.outlines.of(wanted, lambda: self._outline(wanted))
        descriptor = os.memfd_create("transom-outline", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(raw)
        except BaseException:
            os.close(descriptor)
            raise
        return {"size_bytes": len(raw)}, [descriptor]

    def shard(self, identity: Identity, fields: Fields) -> Reply:
        """Another rank's shard, whole, lent until the next request. Raises EngineRefused."""
        self.release()
        wanted = self._named(identity, fields)
        given = self._here(wanted)
        if given is None:
            assert self._parts.ring is not None
            given = self._parts.ring.gatherer.fetch(wanted)
        self._given = given
        return {"rank": wanted.rank}, [given.segment.duplicate()]

    def release(self) -> None:
        """The rank has done with what it was lent."""
        if self._given is not None:
            given, self._given = self._given, None
            given.done()

    def _outline(self, wanted: Identity) -> bytes:
        given = self._here(wanted)
        if given is None:
            assert self._parts.ring is not None
            return self._parts.ring.gatherer.outline(wanted).encoded()
        try:
            return outline_of(given.header, given.segment.view).encoded()
        finally:
            given.done()

    def _here(self, wanted: Identity) -> Borrowed | None:
        """From this engine's memory; None where only the ring may have it. Raises EngineRefused where there is none."""
        given = self._borrow(wanted)
        ring = self._parts.ring
        if given is None and ring is not None:
            given = ring.gatherer.kept(wanted)
        if given is None and ring is None:
            raise EngineRefused(f"step {wanted.step} of rank {wanted.rank} is not in memory any more")
        return given

    def _in_own_slots(self) -> dict[Step, _Holders]:
        found: dict[Step, _Holders] = {}
        for _, _, header in self._parts.table.sealed():
            holders = found.setdefault((header.attempt, header.step, header.world_size), _Holders(set(), set()))
            holders.here.add(header.rank)
            holders.anywhere.add(header.rank)
        return found

    def _is_worth_asking(self, wanted: Wanted, found: dict[Step, _Holders]) -> bool:
        """Whether other nodes may have what this one has not."""
        assert self._parts.ring is not None
        identity = wanted.identity
        own = [
            (attempt, step)
            for (attempt, step, world_size), holders in found.items()
            if world_size == identity.world_size and identity.rank in holders.here
            and wanted.takes("memory", attempt, step)
        ]  # fmt: skip
        if not own:
            return True
        others = [(attempt, step) for attempt, step, world_size in found if world_size != identity.world_size]
        others += [
            holding.newness for holding in self._parts.ring.kept_here() if holding.world_size != identity.world_size
        ]
        return max(others, default=(-1, -1)) > max(own)

    def _named(self, identity: Identity, fields: Fields) -> Identity:
        rank, world_size = wire.whole(fields, "rank"), wire.whole(fields, "world_size")
        if not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise EngineRefused(f"there is no rank {rank} of {world_size}")
        return Identity(identity.job, wire.whole(fields, "attempt"), rank, world_size, wire.whole(fields, "step"))
