"""The threads that bring this engine's sealed shards to the next nodes: the newest first, never in a save's way.

Courier 0 serves the first of the living successors, courier 1 the second, and so on. What a neighbour has
acknowledged is remembered for its present start (epoch) only: a node that was replaced, or whose engine fell,
is given everything again, and so the ring is repaired.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .clock import Clock
from .event import EngineEvent, EventState, Tier
from .pace import TokenBucket
from .priority import give_way
from .ring_link import Caller, PeerLink, dial
from .ring_members import Member, Members
from .ring_placement import successors
from .ring_transfer import Source, SourceDamaged, SourceGone
from .ring_wire import PeerRefused
from .segment import SlotHeader
from .slots import Slot, SlotTable
from .wire import WireError

OUTCOMES_MAX = 1024  # of past shards, for those who wait for one
LOOK_AHEAD_MAX = 64  # living nodes after this one, among which other fault groups are looked for
EPOCHS_MAX = 4096  # of neighbours, whose acknowledgements are remembered

ShardKey = tuple[int, int, int]  # rank, attempt, step
Newness = tuple[int, int]
Owed = tuple[Slot, SlotHeader]


@dataclass(frozen=True, slots=True)
class CourierConfig:
    """The bounds of copying to neighbours. Retries double their distance between the two."""

    node: str
    replication: int
    groups: Mapping[str, str]
    chunk_bytes: int
    bytes_per_second_max: int  # 0: as fast as it goes
    dead_seconds: float
    look_seconds: float  # between two looks at who is there
    retry_seconds_min: float
    retry_seconds_max: float


@dataclass(slots=True)
class _Trouble:
    """A neighbour that cannot be given anything now."""

    since: float
    retry_at: float
    backoff_seconds: float
    reason: str


class Couriers:
    """Copies to the successors. `start` and `stop` are called once."""

    def __init__(
        self,
        config: CourierConfig,
        caller: Caller,
        members: Members,
        table: SlotTable,
        emit: Callable[[EngineEvent], None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._caller = caller
        self._members = members
        self._table = table
        self._emit = emit
        self._clock = clock
        self._bucket = TokenBucket(config.bytes_per_second_max, clock) if config.bytes_per_second_max else None
        self._bucket_lock = threading.Lock()
        self._stopped = threading.Event()
        self._acked: OrderedDict[tuple[str, str], dict[int, Newness]] = OrderedDict()  # by node and epoch
        self._copies: OrderedDict[ShardKey, set[str]] = OrderedDict()  # which nodes have had it
        self._given_up: OrderedDict[ShardKey, str] = OrderedDict()
        self._trouble: dict[str, _Trouble] = {}
        self._others = 0  # nodes of the ring, living or not
        self._threads = [
            threading.Thread(target=self._run, args=(place,), name=f"ring-courier-{place}", daemon=True)
            for place in range(config.replication)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, deadline_seconds: float) -> None:
        """What is half sent counts for nothing at the other end."""
        self._stopped.set()
        with self._table.changed:
            self._table.changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # else we never began
                thread.join(deadline_seconds)

    def targets(self) -> tuple[str, ...]:
        """The nodes that are to hold copies now: the successors among those that live and answer."""
        config, now = self._config, self._clock.monotonic()
        order = self._members.order()
        self._others = sum(node != config.node for node in order)
        at = order.index(config.node) if config.node in order else 0
        usable = [config.node]
        for node in order[at:] + order[:at]:
            trouble = self._trouble.get(node)
            left_alone = trouble is not None and now < trouble.retry_at and now - trouble.since > config.dead_seconds
            if node != config.node and not left_alone and self._members.living(node) is not None:
                usable.append(node)
            if len(usable) > LOOK_AHEAD_MAX:
                break
        return successors(usable, config.node, config.replication, config.groups)

    def outcome(self, key: ShardKey) -> str | None:
        """ "" once as many neighbours have it as are wanted, the reason where they never will, None while that is open.
        Nobody is asked for it."""
        with self._table.changed:
            if len(self._copies.get(key, ())) >= max(1, min(self._config.replication, self._others)):
                return ""
            if key in self._given_up:
                return self._given_up[key]
            rank, attempt, step = key
            held = [header for shard, _, header in self._table.sealed() if shard.rank == rank]
            if any(header.newness > (attempt, step) for header in held):
                newest = max(header.step for header in held)
                return f"overtaken by step {newest} before a peer had it"
            if not any((header.attempt, header.step) == (attempt, step) for header in held):
                return "no longer in memory, and no peer has it"
            return None

    def sentence(self) -> str:
        """Where copies go and whether they are there, for a person."""
        targets = self.targets()
        troubles = [trouble.reason for _, trouble in sorted(list(self._trouble.items()))]
        behind = [node for node in targets if self._owed_to_any_epoch(node)]
        words = "no other node of the ring answers; copies wait for one"
        if targets:
            words = f"copies go to {', '.join(targets)}"
            words += f"; {', '.join(behind)} not up to date yet" if behind else "; all are up to date"
        return "; ".join([words, *troubles])

    def _run(self, place: int) -> None:
        give_way("none")
        link: PeerLink | None = None
        try:
            while not self._stopped.is_set():
                member = self._target(place)
                if link is not None and (member is None or link.peer.node != member.node):
                    link.close()
                    link = None
                if member is None or not self._worth_a_call(member, link):
                    self._pause()
                    continue
                link = self._call(member, link)
        finally:
            if link is not None:
                link.close()

    def _target(self, place: int) -> Member | None:
        """Whom this courier serves now; None where there is nobody, or he is left alone for a while."""
        targets = self.targets()
        if place >= len(targets):
            return None
        trouble = self._trouble.get(targets[place])
        if trouble is not None and self._clock.monotonic() < trouble.retry_at:
            return None
        return self._members.living(targets[place])

    def _worth_a_call(self, member: Member, link: PeerLink | None) -> bool:
        if link is not None:
            return self._owed(member.node, link.peer.epoch) is not None or link.peer.epoch != (
                member.epoch or link.peer.epoch
            )
        return self._owed(member.node, member.epoch) is not None

    def _call(self, member: Member, link: PeerLink | None) -> PeerLink | None:
        """Bring one neighbour all that it is owed; the connection, where it can be used again."""
        reused = link is not None
        try:
            if link is not None and link.peer.epoch != (member.epoch or link.peer.epoch):
                link.close()
                link, reused = None, False
            if link is None:
                link = dial(member, self._caller)
            while not self._stopped.is_set():
                owed = self._owed(member.node, link.peer.epoch)
                if owed is None or self.targets().count(member.node) == 0:
                    break
                self._deliver(link, *owed)
            return link
        except PeerRefused as error:
            self._in_trouble(member.node, error)
            return link
        except WireError as error:
            if link is not None:
                link.close()
            if not reused:  # else it may only have been idle for too long: a new connection decides
                self._in_trouble(member.node, error)
            return None

    def _deliver(self, link: PeerLink, slot: Slot, header: SlotHeader) -> None:
        node, started = link.peer.node, self._clock.monotonic()
        source = own_source(self._table, slot, header, self._config.chunk_bytes)
        if source is None:
            return
        key = (header.rank, header.attempt, header.step)
        try:
            sent = link.store(source, self._pace)
        except SourceGone as error:
            reason = f"{error}; the way to {node} is slower than two saves"
            self._settle(key, None, reason)
            self._tell("failed", "peer", header, reason=reason)
            return
        except SourceDamaged as error:
            self._table.void(slot, header)
            self._settle(key, None, str(error))
            self._tell("damaged", "memory", header, reason=str(error))
            return
        self._trouble.pop(node, None)
        seconds = self._clock.monotonic() - started
        if sent:
            self._tell("backed_up", "peer", header, seconds=seconds, reason=f"on {node}")
        with self._table.changed:
            epoch = self._acked.setdefault((node, link.peer.epoch), {})
            epoch[header.rank] = max(header.newness, epoch.get(header.rank, (-1, -1)))
            while len(self._acked) > EPOCHS_MAX:
                self._acked.popitem(last=False)
        self._settle(key, node, "")

    def _owed(self, node: str, epoch: str) -> Owed | None:
        """The newest shard that this start of a neighbour has not got; only the newest of each rank counts."""
        with self._table.changed:
            acked = self._acked.get((node, epoch), {})
            newest: dict[int, Owed] = {}
            for shard, slot, header in self._table.sealed():  # newest first
                gone = shard.session == 0 and shard.attempt < self._table.attempt
                key = (header.rank, header.attempt, header.step)
                if not gone and header.rank not in newest and key not in self._given_up:
                    newest[header.rank] = (slot, header)
            for slot, header in newest.values():
                if header.newness > acked.get(header.rank, (-1, -1)):
                    return slot, header
        return None

    def _owed_to_any_epoch(self, node: str) -> bool:
        with self._table.changed:
            epochs = [epoch for name, epoch in self._acked if name == node]
        return self._owed(node, epochs[-1] if epochs else "") is not None

    def _pace(self, size_bytes: int) -> None:
        if self._bucket is None:
            return
        with self._bucket_lock:
            wait_seconds = self._bucket.take(size_bytes)
        self._stopped.wait(wait_seconds)

    def _pause(self) -> None:
        """Until something was sealed, or it is time to look at who is there."""
        with self._table.changed:
            if not self._stopped.is_set():
                self._table.changed.wait(self._config.look_seconds)

    def _in_trouble(self, node: str, error: WireError) -> None:
        """Leave a neighbour alone for a while; the first time of a row is told."""
        reason = str(error) if node in str(error) else f"{node}: {error}"
        config, now = self._config, self._clock.monotonic()
        trouble = self._trouble.get(node)
        backoff = config.retry_seconds_min
        if trouble is not None:
            backoff = min(max(trouble.backoff_seconds * 2, config.retry_seconds_min), config.retry_seconds_max)
        since = now if trouble is None else trouble.since
        self._trouble[node] = _Trouble(since, now + backoff, backoff, reason)
        if trouble is None:
            header = next((header for _, _, header in self._table.sealed()), None)
            if header is not None:
                self._tell("failed", "peer", header, reason=f"{reason}; memory keeps it, next try in {backoff:g} s")

    def _settle(self, key: ShardKey, node: str | None, why: str) -> None:
        with self._table.changed:
            if node is not None:
                self._copies.setdefault(key, set()).add(node)
            if why:
                self._given_up[key] = why
            for past in (self._copies, self._given_up):
                while len(past) > OUTCOMES_MAX:
                    past.popitem(last=False)
            self._table.changed.notify_all()

    def _tell(
        self, state: EventState, tier: Tier, header: SlotHeader, *, seconds: float = 0.0, reason: str = ""
    ) -> None:
        size = header.payload_bytes
        self._emit(
            EngineEvent(state, header.step, header.attempt, header.rank, tier, self._clock.now(), size, seconds, reason)
        )


def own_source(table: SlotTable, slot: Slot, header: SlotHeader, chunk_bytes: int) -> Source | None:
    """A slot of ours to be sent; None where it no longer holds `header`. It is not leased: see
    `ring_transfer`."""
    with table.changed:
        segment, known = slot.segment, slot.checksum
        if slot.header != header or segment is None:
            return None

    def unchanged() -> bool:
        return slot.header == header and slot.segment is segment

    return Source(header, segment.view, segment.size_bytes, chunk_bytes, unchanged, payload_crc32=known)
