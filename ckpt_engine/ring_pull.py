"""The load side of the ring: finds who has a shard of a rank that lives here now, and brings it into our memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .budget import MemoryBudget
from .clock import Clock
from .errors import CheckpointDamaged, EngineRefused
from .event import EngineEvent
from .memfd import Segment
from .rejection import Rejection, is_rejected
from .ring_asking import ASKED_AT_ONCE, Asking
from .ring_link import Holding
from .ring_members import Member
from .ring_place import Place
from .ring_stock import Stock
from .ring_store import PeerSlot, PeerStore
from .ring_transfer import cut, seal_received
from .ring_wire import PeerRefused
from .segment import SlotHeader, begin_writing
from .shardfile import Identity
from .slots import SlotTable
from .wire import WireError

KNOWN_RANKS_MAX = 4096
REASONS_MAX = 8


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Who asks, and how long at most."""

    node: str
    pull_seconds_max: float


class Puller:
    """Every method may be called from any thread; each may take up to `pull_seconds_max`."""

    def __init__(
        self,
        config: PullConfig,
        asking: Asking,
        store: PeerStore,
        table: SlotTable,
        budget: MemoryBudget,
        rejections: Callable[[], Sequence[Rejection]],
        emit: Callable[[EngineEvent], None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._asking = asking
        self._store = store
        self._table = table
        self._budget = budget
        self.stock = Stock(table, budget)
        self._rejections = rejections
        self._emit = emit
        self._clock = clock
        self._known: dict[int, list[Holding]] = {}  # by rank, as they were when it asked last
        self._lock = threading.Lock()

    def copies_of(self, rank: int, world_size: int) -> list[Holding]:
        """Shards of `rank` that other engines hold, or we for them: newest first, rejected ones left out.

        The nodes after this one are asked first, and the others only where those have nothing.
        """
        deadline = self._clock.monotonic() + self._config.pull_seconds_max
        found = [holding for holding in self.kept_here() if (holding.rank, holding.world_size) == (rank, world_size)]
        others = self._asking.others()
        for start in range(0, len(others), ASKED_AT_ONCE):
            answers = self._asking.ask_some(others[start : start + ASKED_AT_ONCE], deadline)
            found += [holding for holding in answers if (holding.rank, holding.world_size) == (rank, world_size)]
            if found or self._clock.monotonic() >= deadline:
                break
        rejections = self._rejections()
        good = [holding for holding in found if not is_rejected(rejections, holding.step, holding.attempt)]
        good.sort(key=lambda holding: holding.newness, reverse=True)  # stable: of equal ones the nearest first
        with self._lock:
            while len(self._known) >= KNOWN_RANKS_MAX:
                self._known.pop(next(iter(self._known)))
            self._known[rank] = good
        return good

    def pull(self, session: int, identity: Identity, attempt: int, step: int) -> str:
        """Bring one shard of the rank into a slot of our own table; empty, or why that cannot be.

        A holder whose copy turns out damaged is passed over, and the next one asked.
        """
        deadline = self._clock.monotonic() + self._config.pull_seconds_max
        reasons = []
        try:
            if self._copy_kept(session, identity, attempt, step):
                return ""
        except (CheckpointDamaged, EngineRefused) as error:
            reasons.append(str(error))
        with self._lock:
            known = self._known.get(identity.rank)
        if known is None:
            known = self.copies_of(identity.rank, identity.world_size)
        wanted = [
            holding
            for holding in known
            if (holding.attempt, holding.step, holding.world_size) == (attempt, step, identity.world_size)
            and holding.node != self._config.node
        ]
        for holding in wanted:
            member = self._asking.living(holding.node)
            if member is None:
                reasons.append(f"{holding.node} is gone")
                continue
            try:
                self._fetch(session, identity, member, holding, deadline)
                return ""
            except (WireError, CheckpointDamaged, EngineRefused) as error:
                reasons.append(str(error))
                self._tell_failed(holding, str(error))
        with self._lock:
            self._known.pop(identity.rank, None)
        return "; ".join(reasons[:REASONS_MAX]) or "no peer has it"

    def recall(self) -> None:
        """After a start: bring back what this node had sealed before, from whoever kept it, before a rank asks.

        It goes beside what is kept for others, because the ranks may still have it all, and newer.
        """
        deadline = self._clock.monotonic() + self._config.pull_seconds_max
        newest: dict[int, Holding] = {}
        for member in self._asking.others()[:ASKED_AT_ONCE]:
            for holding in self._asking.ask(member, deadline):
                best = newest.get(holding.rank)
                if holding.home == self._config.node and (best is None or holding.newness > best.newness):
                    newest[holding.rank] = holding
        for holding in newest.values():
            member_now = self._asking.living(holding.node)
            here = [header.newness for _, _, header in self._table.sealed() if header.rank == holding.rank]
            if member_now is not None and max(here, default=(-1, -1)) < holding.newness:
                self._fetch_beside(member_now, holding, deadline)

    def make_ready(self) -> None:
        """Where no rank has anything here, make memory ready for as many shards as the fullest node of the ring has."""
        with self._table.changed:
            empty = not self._table.held()
        if not empty:
            self.stock.settle()
            return
        deadline = self._clock.monotonic() + self._config.pull_seconds_max
        by_home: dict[str, dict[int, int]] = {}
        for member in self._asking.others()[:ASKED_AT_ONCE]:
            for holding in self._asking.ask(member, deadline):
                by_home.setdefault(holding.home, {})[holding.rank] = holding.payload_bytes
        fullest = max(by_home.values(), key=lambda sizes: sum(sizes.values()), default={})
        if fullest:
            self.stock.fill(list(fullest.values()))

    def kept_here(self) -> list[Holding]:
        """What we keep for others, as they would list it."""
        return [
            Holding(
                self._config.node, slot.home, header.rank, header.step, header.attempt, header.world_size,
                header.payload_bytes,
            )
            for slot, header in self._store.whole()
        ]  # fmt: skip

    def _fetch(self, session: int, identity: Identity, member: Member, holding: Holding, deadline: float) -> None:
        """From a peer straight into a slot of ours, which the engine fills in the place of the rank."""
        place = Place(self._table, self._budget, self.stock, session, identity)
        link = self._asking.dial(member, deadline)
        try:
            link.fetch(holding, place.open)
            place.seal()
        finally:
            link.close()
            place.close()

    def _copy_kept(self, session: int, identity: Identity, attempt: int, step: int) -> bool:
        """What we keep for others, or have recalled, is copied into a slot of the rank, and compared there."""
        wanted = (identity.rank, attempt, step, identity.world_size)
        for slot, header in self._store.whole():
            if (header.rank, header.attempt, header.step, header.world_size) != wanted:
                continue
            segment = self._store.lease(slot, header)
            if segment is None:
                continue
            place = Place(self._table, self._budget, self.stock, session, identity)
            try:
                copy = place.open(header, segment.size_bytes)
                begin_writing(copy.view)
                for piece in cut(header, slot.chunk_bytes).pieces:
                    copy.view[piece.start : piece.stop] = segment.view[piece.start : piece.stop]
                reason = self._store.damage(slot, header, copy.view)
                if not reason:
                    seal_received(copy.view, header, slot.payload_crc32)
                    place.seal()
                    return True
                self._store.void(slot, header)
                self._tell(step, attempt, identity.rank, "damaged", reason)
            finally:
                self._store.release(slot)
                place.close()
        return False

    def _fetch_beside(self, member: Member, holding: Holding, deadline: float) -> None:
        slots: list[PeerSlot] = []

        def allocate(header: SlotHeader, size_bytes: int) -> Segment:
            slot = self._store.begin(header, size_bytes, self._config.node, None)
            if slot is None or slot.segment is None:
                raise PeerRefused("it is here already")
            slots.append(slot)
            return slot.segment

        try:
            link = self._asking.dial(member, deadline)
        except WireError:
            return
        try:
            fetched = link.fetch(holding, allocate)
            self._store.commit(slots.pop(), fetched.header, fetched.chunk_bytes, fetched.crcs, fetched.payload_crc32)
        except (WireError, CheckpointDamaged):
            pass  # a rank that wants it asks again, and is told then
        finally:
            link.close()
            for slot in slots:
                self._store.abandon(slot)

    def _tell_failed(self, holding: Holding, reason: str) -> None:
        self._tell(holding.step, holding.attempt, holding.rank, "failed", f"from {holding.node}: {reason}")

    def _tell(self, step: int, attempt: int, rank: int, state: str, reason: str) -> None:
        assert state in ("failed", "damaged")
        at = self._clock.now()
        self._emit(
            EngineEvent("damaged" if state == "damaged" else "failed", step, attempt, rank, "peer", at, reason=reason)
        )
