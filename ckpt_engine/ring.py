"""The ring of a job's engines: each keeps copies of its neighbours' shards, so that a lost node costs no step.

couriers   bring what was sealed here to the next nodes        (ring_courier.py)
server     keeps, lists and hands out                          (ring_server.py, ring_store.py)
puller     brings here what a rank that lives here now needs   (ring_pull.py)
gatherer   and what it needs of other ranks' shards            (ring_gather.py)
members    who there is, and where                             (ring_members.py, ring_placement.py)
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .budget import MemoryBudget
from .clock import Clock
from .errors import EngineRefused
from .event import EngineEvent
from .rejection import Rejection, read_or_reject_all
from .ring_asking import Asking
from .ring_config import RingConfig, tls_context
from .ring_courier import CourierConfig, Couriers, own_source
from .ring_gather import Gatherer
from .ring_handshake import Dice, Peer
from .ring_link import Caller, Holding
from .ring_members import Member, Members, is_node_name
from .ring_pull import PullConfig, Puller
from .ring_server import Host, Offered, RingServer
from .ring_store import PeerSlot, PeerStore
from .ring_transfer import Source
from .segment import SlotHeader
from .shardfile import Identity
from .slots import Slot, SlotTable
from .wire import Fields

EPOCH_BYTES = 8
LISTED_MAX = 256  # shards of peers in a status
STOP_SECONDS_MAX = 5.0
READY_SECONDS = 15.0  # between two looks at whether memory should be made ready


class Ring:
    """One engine's part in the ring. `start` and `stop` are called once; the rest from any thread in between."""

    def __init__(
        self,
        config: RingConfig,
        job: str,
        node: str,
        directory: Path,
        table: SlotTable,
        budget: MemoryBudget,
        emit: Callable[[EngineEvent], None],
        clock: Clock,
        dice: Dice = os.urandom,
    ) -> None:
        if not is_node_name(node):
            raise EngineRefused(f"{node!r} cannot be the name of a node in the ring: letters, digits, '_', '.', '-'")
        self._config = config
        self._job = job
        self._directory = directory
        self._table = table
        self._emit = emit
        self._clock = clock
        self._dice = dice
        self._me = Peer(node, dice(EPOCH_BYTES).hex())
        self._stopped = threading.Event()
        self._server: RingServer | None = None
        self._threads: list[threading.Thread] = []
        try:
            self._server_tls = tls_context(config.tls, as_server=True)
            client_tls = tls_context(config.tls, as_server=False)
        except OSError as error:
            raise EngineRefused(f"the ring's TLS files cannot be used: {error}") from error
        self.store = PeerStore(config.memory_bytes_max, self._rejections)
        self.members = Members(
            directory, config.nodes, config.addresses, clock, config.beat_seconds, config.dead_seconds
        )
        caller = Caller(
            config.token, job, node, clock, dice, config.dial_seconds_max, config.io_seconds_max, client_tls
        )
        couriers = CourierConfig(
            node, config.replication, config.groups, config.chunk_bytes, config.bytes_per_second_max,
            config.dead_seconds, config.beat_seconds, config.retry_seconds_min, config.retry_seconds_max,
        )  # fmt: skip
        self.couriers = Couriers(couriers, caller, self.members, table, emit, clock)
        asking = Asking(node, caller, self.members)
        self._puller = Puller(
            PullConfig(node, config.pull_seconds_max), asking, self.store, table, budget, self._rejections, emit, clock,
        )  # fmt: skip
        self.gatherer = Gatherer(
            asking, self.store, table, budget, self._rejections,
            lambda header, reason: self._tell_damaged(header, "peer", reason), clock, config.pull_seconds_max,
        )  # fmt: skip

    @property
    def port(self) -> int:
        """What we listen on; 0 before `start`."""
        return self._server.port if self._server is not None else 0

    def start(self) -> None:
        """Listen, tell where, and begin. Raises EngineRefused where that cannot be."""
        config = self._config
        host = Host(
            config.token, self._job, self._me, self.store, self._holdings, self._offer, self._clock, self._dice,
            config.io_seconds_max, config.connections_max, self._server_tls,
        )  # fmt: skip
        self._server = RingServer(host, config.listen_host, config.listen_port)
        try:
            self._publish()
        except OSError as error:
            self._server.stop()
            raise EngineRefused(f"the ring cannot tell others where it listens: {error}") from error
        self._server.start()
        for name, run in (("ring-members", self._beat), ("ring-recall", self._recall)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self.couriers.start()

    def stop(self) -> None:
        """Leave the ring. What is on its way is void at the other end; what others gave us is gone."""
        self._stopped.set()
        self.members.withdraw(self._me.node)
        if self._server is not None:
            self._server.stop()
        self.couriers.stop(STOP_SECONDS_MAX)
        for thread in self._threads:
            thread.join(STOP_SECONDS_MAX)

    def outcome(self, rank: int, attempt: int, step: int) -> str | None:
        """Of the copies to neighbours: empty once they are there, the reason where they never will be, None while that
        is open. Touches neither disk nor network."""
        return self.couriers.outcome((rank, attempt, step))

    def copies_of(self, rank: int, world_size: int) -> list[Holding]:
        """What there is of a rank outside of our own slots, newest first; asks the peers."""
        return self._puller.copies_of(rank, world_size)

    def kept_here(self) -> list[Holding]:
        """What this engine keeps for others."""
        return self._puller.kept_here()

    def pull(self, session: int, identity: Identity, attempt: int, step: int) -> str:
        """Bring one of those into a slot of the rank, compared with its checksums; empty, or why that cannot be."""
        return self._puller.pull(session, identity, attempt, step)

    def status(self) -> Fields:
        """For tools: what we keep for others, and how our own copies do."""
        refused = self._server.refused if self._server is not None else 0
        sentence = f"the ring is on, port {self.port}; {self.couriers.sentence()}"
        if refused:
            sentence += f"; {refused} connections could not prove the token"
        shards = [
            [holding.rank, holding.step, holding.attempt, holding.world_size, holding.payload_bytes, holding.home]
            for holding in self._puller.kept_here()
        ]
        return {
            "ring": sentence,
            "ring_on": True,
            "peer_shards": shards[:LISTED_MAX],
            "peer_memory_bytes": self.store.memory_bytes,
            "peer_memory_bytes_max": self.store.memory_bytes_max,
        }

    def _rejections(self) -> tuple[Rejection, ...]:
        return read_or_reject_all(self._directory)

    def _publish(self) -> None:
        self.members.publish(Member(self._me.node, self._config.reached_by, self.port, self._me.epoch))

    def _recall(self) -> None:
        self._puller.recall()
        self._puller.make_ready()
        while not self._stopped.wait(READY_SECONDS):
            self._puller.make_ready()

    def _beat(self) -> None:
        while not self._stopped.wait(self._config.beat_seconds):
            with contextlib.suppress(OSError):  # the next beat may get through
                self._publish()

    def _holdings(self) -> Sequence[Holding]:
        """What we could hand out: our ranks' own shards, and what we keep for others."""
        node = self._me.node
        own = [
            Holding(node, node, header.rank, header.step, header.attempt, header.world_size, header.payload_bytes)
            for _, _, header in self._table.sealed()
        ]
        return [*own, *self._puller.kept_here()]

    def _offer(self, rank: int, step: int, attempt: int, world_size: int) -> Offered | None:
        wanted = (rank, step, attempt, world_size)
        for kept, header in self.store.whole():
            if _which(header) == wanted and (offered := self._offer_kept(kept, header)) is not None:
                return offered
        for _, slot, header in self._table.sealed():
            if _which(header) == wanted and (offered := self._offer_own(slot, header)) is not None:
                return offered
        return None

    def _offer_kept(self, slot: PeerSlot, header: SlotHeader) -> Offered | None:
        segment = self.store.lease(slot, header)
        if segment is None:
            return None
        source = Source(
            header, segment.view, segment.size_bytes, slot.chunk_bytes, lambda: True, slot.crcs, slot.payload_crc32,
        )  # fmt: skip

        def damaged(reason: str) -> None:
            self.store.void(slot, header)
            self._tell_damaged(header, "peer", reason)

        return Offered(source, lambda: self.store.release(slot), damaged)

    def _offer_own(self, slot: Slot, header: SlotHeader) -> Offered | None:
        source = own_source(self._table, slot, header, self._config.chunk_bytes)
        if source is None:
            return None

        def damaged(reason: str) -> None:
            self._table.void(slot, header)
            self._tell_damaged(header, "memory", reason)

        return Offered(source, lambda: None, damaged)

    def _tell_damaged(self, header: SlotHeader, tier: str, reason: str) -> None:
        at = self._clock.now()
        self._emit(
            EngineEvent(
                "damaged", header.step, header.attempt, header.rank, "peer" if tier == "peer" else "memory", at,
                size_bytes=header.payload_bytes, reason=reason,
            )
        )  # fmt: skip


def ring_is_off(reason: str) -> Fields:
    """What an engine without a ring says in its status."""
    return {
        "ring": reason, "ring_on": False, "peer_shards": [], "peer_memory_bytes": 0, "peer_memory_bytes_max": 0,
    }  # fmt: skip


def _which(header: SlotHeader) -> tuple[int, int, int, int]:
    return (header.rank, header.step, header.attempt, header.world_size)
