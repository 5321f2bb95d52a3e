"""This engine's connection to another one: ask what it holds, fetch a shard from it, give it one to keep."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from . import checksum
from .clock import Clock
from .errors import CheckpointDamaged, EngineRefused
from .memfd import Segment
from .outline import Outline, decode_outline
from .ring_handshake import Dice, Peer, prove
from .ring_members import Member, is_node_name
from .ring_transfer import (
    REASON_CHARACTERS_MAX,
    Source,
    allocation_seconds,
    cut,
    describe,
    header_of,
    receive_shard,
    seal_received,
    send_shard,
)
from .ring_wire import RAW_BYTES_MAX, Channel, PeerError, PeerRefused
from .segment import SlotHeader
from .wire import Fields, WireError, text, whole

HOLDINGS_MAX = 1024
READS = 2  # of a shard that a peer compares with its checksum, and then digests
KEEPALIVE_SECONDS = (10, 5, 3)  # idle, between probes, and how many of them

Allocate = Callable[[SlotHeader, int], Segment]  # of so many bytes, for this shard


@dataclass(frozen=True, slots=True)
class Holding:
    """A shard that `node` could hand out. `home`: whose engine sealed it."""

    node: str
    home: str
    rank: int
    step: int
    attempt: int
    world_size: int
    payload_bytes: int

    @property
    def newness(self) -> tuple[int, int]:
        return (self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A shard that has come whole, and is sealed."""

    header: SlotHeader
    chunk_bytes: int
    crcs: tuple[int, ...]
    payload_crc32: int


@dataclass(frozen=True, slots=True)
class Caller:
    """What every connection that this engine makes needs."""

    token: bytes = field(repr=False)
    job: str
    node: str
    clock: Clock
    dice: Dice
    dial_seconds_max: float
    io_seconds_max: float
    tls: ssl.SSLContext | None = None


def prepare_socket(sock: socket.socket, io_seconds_max: float) -> None:
    """No waiting for more to send; a host that has gone is noticed without our asking."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, between, count = KEEPALIVE_SECONDS
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(io_seconds_max * 1000))


class PeerLink:
    """One proved connection, for the use of one thread. After a PeerError that is no PeerRefused it is over."""

    def __init__(self, channel: Channel, peer: Peer, job: str) -> None:
        self.peer = peer
        self._channel = channel
        self._job = job

    def close(self) -> None:
        self._channel.close()

    def end_by(self, deadline: float) -> None:
        """Give up at `deadline` on the clock, however well it goes."""
        self._channel.until = deadline

    def store(self, source: Source, pace: Callable[[int], None]) -> bool:
        """Give it a shard; False where it had it already. Raises what `send_shard` does."""
        request = {
            "op": "store", "header": describe(source.header), "segment_bytes": source.segment_bytes,
            "chunk_bytes": source.chunk_bytes, "crc32": source.payload_crc32,
        }  # fmt: skip
        if self._ask(request, allocation_seconds(source.segment_bytes)).get("have") is True:
            return False
        send_shard(self._channel, source, pace)
        return True

    def holdings(self) -> list[Holding]:
        """All that it could hand out."""
        rows = self._ask({"op": "list"}).get("shards")
        if not isinstance(rows, list) or len(rows) > HOLDINGS_MAX:
            raise PeerError(f"{self.peer.node} sent a list of shards that is none")
        return [self._holding(row) for row in rows]

    def fetch(self, wanted: Holding, allocate: Allocate) -> Fetched:
        """Take a copy. `allocate` gives the memory, or raises EngineRefused or PeerRefused (and then this the latter).

        Raises CheckpointDamaged where what it has is no longer whole.
        """
        request = {
            "op": "fetch", "rank": wanted.rank, "step": wanted.step, "attempt": wanted.attempt,
            "world_size": wanted.world_size,
        }  # fmt: skip
        reply = self._ask(request)
        segment_bytes, chunk_bytes = whole(reply, "segment_bytes"), whole(reply, "chunk_bytes")
        header = header_of(reply.get("header"), segment_bytes, chunk_bytes)
        found = (header.job, header.rank, header.step, header.attempt, header.world_size)
        if found != (self._job, wanted.rank, wanted.step, wanted.attempt, wanted.world_size):
            raise PeerError(f"{self.peer.node} offers another shard than it was asked for")
        try:
            segment = allocate(header, segment_bytes)
        except (EngineRefused, PeerRefused) as error:
            self._channel.send({"void": str(error)[:REASON_CHARACTERS_MAX]})
            raise PeerRefused(str(error)) from error
        self._channel.send({"go": True})
        try:
            crcs = receive_shard(self._channel, header, chunk_bytes, segment.view)
            payload_crc32 = cut(header, chunk_bytes).payload_crc32(crcs)
            seal_received(segment.view, header, payload_crc32)
        except CheckpointDamaged as error:
            self._channel.send({"void": str(error)[:REASON_CHARACTERS_MAX]})
            raise
        self._channel.send({"stored": True})
        return Fetched(header, chunk_bytes, crcs, payload_crc32)

    def outline(self, wanted: Holding) -> Outline:
        """What a shard says of itself; the peer compares it with its checksum before. Raises CheckpointDamaged."""
        request = {
            "op": "outline", "rank": wanted.rank, "step": wanted.step, "attempt": wanted.attempt,
            "world_size": wanted.world_size,
        }  # fmt: skip
        reply = self._ask(request, READS * allocation_seconds(wanted.payload_bytes), RAW_BYTES_MAX)
        raw = bytearray(self._channel.raw_bytes)
        self._channel.receive_raw(memoryview(raw))
        if checksum.crc32(raw) != whole(reply, "crc32"):
            raise CheckpointDamaged(f"what {self.peer.node} says of a shard has changed on its way")
        return decode_outline(bytes(raw))

    def _ask(self, request: Fields, wait_seconds: float = 0.0, raw_bytes_max: int = 0) -> Fields:
        self._channel.send(request)
        reply = self._channel.receive(raw_bytes_max, wait_seconds)
        if "refused" in reply:
            raise PeerRefused(f"{self.peer.node} refused: {text(reply, 'refused')[:REASON_CHARACTERS_MAX]}")
        return reply

    def _holding(self, row: object) -> Holding:
        if not isinstance(row, dict) or not is_node_name(text(row, "home")):
            raise PeerError(f"{self.peer.node} sent a list of shards that is none")
        numbers = [whole(row, name) for name in ("rank", "step", "attempt", "world_size", "payload_bytes")]
        if min(numbers) < 0:
            raise PeerError(f"{self.peer.node} lists an impossible shard")
        return Holding(self.peer.node, text(row, "home"), *numbers)


def dial(member: Member, caller: Caller) -> PeerLink:
    """A proved connection to `member`. Raises PeerError; PeerRefused where it is there but will not have us."""
    try:
        sock = socket.create_connection((member.host, member.port), caller.dial_seconds_max)
    except OSError as error:
        raise PeerError(f"{member.node} cannot be reached at {member.host}:{member.port}: {error}") from error
    try:
        prepare_socket(sock, caller.io_seconds_max)
        if caller.tls is not None:
            sock = caller.tls.wrap_socket(sock)
        channel = Channel(sock, caller.clock, caller.io_seconds_max)
        peer = prove(channel, caller.token, caller.job, caller.node, caller.dice)
        if peer.node != member.node:
            raise PeerRefused(f"{peer.node} answers at {member.host}:{member.port}, where {member.node} should be")
    except OSError as error:
        sock.close()
        raise PeerError(f"{member.node} broke the connection off: {error}") from error
    except WireError:
        sock.close()
        raise
    return PeerLink(channel, peer, caller.job)
