"""Brings here what other ranks have saved, wherever it is in the ring, for a state that is cut anew.

What it brings is for one reader and for a moment: no slot is given up for it, and nothing of it is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .budget import MemoryBudget
from .clock import Clock
from .errors import CheckpointDamaged, EngineRefused
from .memfd import Segment, create_segment
from .outline import Outline
from .rejection import Rejection, is_rejected
from .ring_asking import ASKED_AT_ONCE, Asking
from .ring_link import Holding, PeerLink
from .ring_store import PeerSlot, PeerStore
from .segment import SlotHeader
from .shardfile import Identity
from .slots import SlotTable
from .wire import WireError

Taken = TypeVar("Taken")

LISTING_SECONDS_MAX = 3.0  # for so long what all others hold is believed: the ranks of a node ask one after another
REASONS_MAX = 8


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A whole shard in memory that nobody writes to before `done` is called."""

    header: SlotHeader
    segment: Segment
    done: Callable[[], None]


class Gatherer:
    """Every method may be called from any thread; each may take up to `pull_seconds_max`."""

    def __init__(
        self,
        asking: Asking,
        store: PeerStore,
        table: SlotTable,
        budget: MemoryBudget,
        rejections: Callable[[], Sequence[Rejection]],
        damaged: Callable[[SlotHeader, str], None],
        clock: Clock,
        pull_seconds_max: float,
    ) -> None:
        self._asking = asking
        self._store = store
        self._table = table
        self._budget = budget
        self._rejections = rejections
        self._damaged = damaged
        self._clock = clock
        self._pull_seconds_max = pull_seconds_max
        self._listed: list[Holding] = []
        self._listed_at = float("-inf")
        self._lock = threading.Lock()

    def everywhere(self) -> list[Holding]:
        """What all other engines could hand out, but what is rejected."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._listed_at > LISTING_SECONDS_MAX:
                self._listed = self._ask_all(now + self._pull_seconds_max)
                self._listed_at = self._clock.monotonic()
            listed = self._listed
        rejections = self._rejections()
        return [holding for holding in listed if not is_rejected(rejections, holding.step, holding.attempt)]

    def kept(self, wanted: Identity) -> Borrowed | None:
        """What we keep of it for another engine, compared with its checksums; None where that is nothing."""
        for slot, header in self._store.whole():
            if not _is(wanted, header.rank, header.step, header.attempt, header.world_size):
                continue
            segment = self._store.lease(slot, header)
            if segment is None:
                continue
            reason = self._store.damage(slot, header, segment.view)
            if not reason:
                return Borrowed(header, segment, lambda slot=slot: self._store.release(slot))  # type: ignore[misc]
            self._give_up(slot, header, reason)
        return None

    def outline(self, wanted: Identity) -> Outline:
        """What a shard says of itself, from whoever has it. Raises EngineRefused where nobody hands it out."""
        return self._from_anybody(wanted, lambda link, holding: link.outline(holding))

    def fetch(self, wanted: Identity) -> Borrowed:
        """A copy of its own, which is gone with `done`. Raises EngineRefused where there is none, or no room for it."""
        return self._from_anybody(wanted, self._fetch)

    def _from_anybody(self, wanted: Identity, take: Callable[[PeerLink, Holding], Taken]) -> Taken:
        deadline = self._clock.monotonic() + self._pull_seconds_max
        reasons = []
        for holding in self.everywhere():
            if not _is(wanted, holding.rank, holding.step, holding.attempt, holding.world_size):
                continue
            member = self._asking.living(holding.node)
            if member is None:
                reasons.append(f"{holding.node} is gone")
                continue
            try:
                link = self._asking.dial(member, deadline)
                try:
                    return take(link, holding)
                finally:
                    link.close()
            except (WireError, CheckpointDamaged, EngineRefused) as error:
                reasons.append(f"{holding.node}: {error}")
        with self._lock:
            self._listed_at = float("-inf")  # somebody was wrong about what there is
        why = "; ".join(reasons[:REASONS_MAX]) or "no engine of the ring has it"
        raise EngineRefused(f"step {wanted.step} of rank {wanted.rank} cannot be had: {why}")

    def _fetch(self, link: PeerLink, holding: Holding) -> Borrowed:
        made: list[Segment] = []

        def allocate(header: SlotHeader, size_bytes: int) -> Segment:
            with self._table.changed:
                self._budget.take(size_bytes)
            try:
                made.append(create_segment(size_bytes))
            except OSError as error:
                with self._table.changed:
                    self._budget.give_back(size_bytes)
                raise EngineRefused(f"the host has no {size_bytes} bytes left for a shard: {error.strerror}") from error
            return made[0]

        try:
            fetched = link.fetch(holding, allocate)
        except BaseException:
            for segment in made:
                self._discard(segment)
            raise
        return Borrowed(fetched.header, made[0], lambda: self._discard(made[0]))

    def _discard(self, segment: Segment) -> None:
        with self._table.changed:
            self._budget.give_back(segment.size_bytes)
        segment.discard()

    def _give_up(self, slot: PeerSlot, header: SlotHeader, reason: str) -> None:
        self._store.void(slot, header)
        self._store.release(slot)
        self._damaged(header, reason)

    def _ask_all(self, deadline: float) -> list[Holding]:
        found: list[Holding] = []
        others = self._asking.others()
        for start in range(0, len(others), ASKED_AT_ONCE):
            if self._clock.monotonic() >= deadline:
                break
            found += self._asking.ask_some(others[start : start + ASKED_AT_ONCE], deadline)
        return found


def _is(wanted: Identity, rank: int, step: int, attempt: int, world_size: int) -> bool:
    return (wanted.rank, wanted.step, wanted.attempt, wanted.world_size) == (rank, step, attempt, world_size)
