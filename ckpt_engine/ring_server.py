"""The side of an engine that other engines call: keeps shards for them, lists what there is, hands it out."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import checksum
from .clock import Clock
from .errors import CheckpointDamaged, EngineRefused
from .outline import Outlines
from .priority import give_way
from .ring_handshake import Dice, Peer, answer
from .ring_link import HOLDINGS_MAX, Holding, prepare_socket
from .ring_store import PeerStore
from .ring_transfer import (
    REASON_CHARACTERS_MAX,
    Source,
    SourceDamaged,
    SourceGone,
    allocation_seconds,
    checked_outline,
    cut,
    describe,
    header_of,
    receive_shard,
    seal_received,
    send_shard,
)
from .ring_wire import RAW_BYTES_MAX, Channel, PeerRefused
from .shardfile import identity_of
from .wire import Fields, WireError, optional_whole, text, whole

IDLE_SECONDS_MAX = 3600.0  # a neighbour that saves seldom keeps its connection; a dead one is noticed sooner
ACCEPT_RETRY_SECONDS = 0.05
STRANGERS_MAX = 16  # connections that have not proved the token yet


@dataclass(frozen=True, slots=True)
class Offered:
    """A shard of ours that may be handed out; `done` lets go of it, `damaged(why)` never hands it out again."""

    source: Source
    done: Callable[[], None]
    damaged: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Host:
    """What the server needs of its engine. `offer(rank, step, attempt, world_size)` finds a shard, or None."""

    token: bytes = field(repr=False)
    job: str
    me: Peer
    store: PeerStore
    holdings: Callable[[], Sequence[Holding]]
    offer: Callable[[int, int, int, int], Offered | None]
    clock: Clock
    dice: Dice
    io_seconds_max: float
    connections_max: int
    tls: ssl.SSLContext | None = None
    outlines: Outlines = field(default_factory=Outlines)  # of what is here


class RingServer:
    """Listens from construction on, answers from `start` on."""

    def __init__(self, host: Host, listen_host: str, listen_port: int) -> None:
        self._host = host
        self._open: dict[int, socket.socket] = {}
        self._strangers = 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.refused = 0  # connections that could not prove the token, or did not speak the protocol
        try:
            family = socket.AF_INET6 if ":" in listen_host else socket.AF_INET
            self._listener = socket.create_server((listen_host, listen_port), family=family, backlog=64)
        except OSError as error:
            raise EngineRefused(
                f"the ring cannot listen on {listen_host}:{listen_port} ({os.strerror(error.errno or 0)}); choose "
                "another address or port"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="ring-listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Break off every connection; what is half received is void."""
        with self._lock:
            self._stopping.set()
            sockets = [self._listener, *self._open.values()]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread.ident is not None:
            self._thread.join(self._host.io_seconds_max)

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopping.wait(ACCEPT_RETRY_SECONDS):
                    return
                continue  # the peer has gone, or we are out of descriptors: the next may succeed
            number += 1
            with self._lock:
                full = len(self._open) >= self._host.connections_max or self._strangers >= STRANGERS_MAX
                if self._stopping.is_set() or full:
                    sock.close()
                    continue
                self._open[number] = sock
                self._strangers += 1
            threading.Thread(target=self._serve, args=(number, sock), name=f"ring-{number}", daemon=True).start()

    def _serve(self, number: int, sock: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel, node = self._greet(number, sock)
            while True:
                fields = channel.receive(wait_seconds=IDLE_SECONDS_MAX)
                self._answer(channel, node, fields)
        except (WireError, OSError):
            if channel is None:
                self.refused += 1
        finally:
            with self._lock:
                self._open.pop(number, None)
            with contextlib.suppress(OSError):
                sock.close()
            if channel is not None:
                channel.close()

    def _greet(self, number: int, sock: socket.socket) -> tuple[Channel, str]:
        """Everything a stranger can do has to be done within the time of a few answers."""
        host = self._host
        try:
            prepare_socket(sock, host.io_seconds_max)
            if host.tls is not None:
                sock.settimeout(host.io_seconds_max)
                sock = host.tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open[number] = sock  # the one before is only a shell now
            channel = Channel(sock, host.clock, host.io_seconds_max)
            return channel, answer(channel, host.token, host.job, host.me, host.dice)
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise
        finally:
            with self._lock:
                self._strangers -= 1

    def _answer(self, channel: Channel, node: str, fields: Fields) -> None:
        operation = text(fields, "op")
        try:
            if operation == "store":
                self._keep(channel, node, fields)
            elif operation == "list":
                channel.send({"shards": [_row(holding) for holding in self._host.holdings()[:HOLDINGS_MAX]]})
            elif operation == "fetch":
                self._hand_out(channel, fields)
            elif operation == "outline":
                self._describe(channel, fields)
            else:
                channel.send({"refused": f"operation {operation!r:.40} is not known to this engine"})
        except PeerRefused as refusal:
            channel.send({"refused": str(refusal)[:REASON_CHARACTERS_MAX]})

    def _keep(self, channel: Channel, node: str, fields: Fields) -> None:
        """Receive a shard; whatever ends it early leaves the older copy as it is."""
        host = self._host
        segment_bytes, chunk_bytes = whole(fields, "segment_bytes"), whole(fields, "chunk_bytes")
        header = header_of(fields.get("header"), segment_bytes, chunk_bytes)
        if header.job != host.job:
            raise PeerRefused(f"this engine keeps shards of job {host.job!r} only")
        if segment_bytes > host.store.memory_bytes_max:
            raise PeerRefused(f"{segment_bytes} bytes are more than all of peer_memory_bytes_max")
        give_way("none")  # keeping copies is work in the background; a rank that loads has a connection of its own
        slot = host.store.begin(header, segment_bytes, node, optional_whole(fields, "crc32"))
        if slot is None:
            channel.send({"have": True})
            return
        segment = slot.segment
        assert segment is not None
        kept = False
        try:
            channel.send({"go": True})
            crcs = receive_shard(channel, header, chunk_bytes, segment.view)
            payload_crc32 = cut(header, chunk_bytes).payload_crc32(crcs)
            seal_received(segment.view, header, payload_crc32)
            host.store.commit(slot, header, chunk_bytes, crcs, payload_crc32)
            kept = True
        except CheckpointDamaged as error:
            channel.send({"void": str(error)[:REASON_CHARACTERS_MAX]})
            return
        except PeerRefused:
            return  # the sender has called it void, and awaits no answer
        finally:
            if not kept:
                host.store.abandon(slot)
        channel.send({"stored": True})

    def _describe(self, channel: Channel, fields: Fields) -> None:
        """What a shard says of itself, once its bytes have been compared with their checksum."""
        offered = self._offered(fields)
        source = offered.source
        try:
            raw = self._host.outlines.of(identity_of(source.header), lambda: checked_outline(source).encoded())
        except CheckpointDamaged as error:
            if not source.unchanged():
                raise PeerRefused(f"{error}; a newer save has taken its place") from error
            offered.damaged(str(error))
            raise PeerRefused(str(error)) from error
        finally:
            offered.done()
        if len(raw) > RAW_BYTES_MAX:
            raise PeerRefused(f"names and values of {len(raw)} bytes are more than a message takes")
        channel.send({"crc32": checksum.crc32(raw)}, raw)

    def _offered(self, fields: Fields) -> Offered:
        """The shard that is asked for. Raises PeerRefused."""
        wanted = [whole(fields, name) for name in ("rank", "step", "attempt", "world_size")]
        offered = self._host.offer(*wanted)
        if offered is None:
            raise PeerRefused(f"step {wanted[1]} of rank {wanted[0]} is not here any more")
        return offered

    def _hand_out(self, channel: Channel, fields: Fields) -> None:
        offered = self._offered(fields)
        source = offered.source
        try:
            channel.send(
                {
                    "header": describe(source.header),
                    "segment_bytes": source.segment_bytes,
                    "chunk_bytes": source.chunk_bytes,
                }
            )
            if channel.receive(wait_seconds=allocation_seconds(source.segment_bytes)).get("go") is True:
                _send(channel, source)
        except SourceDamaged as error:
            offered.damaged(str(error))
        finally:
            offered.done()


def _send(channel: Channel, source: Source) -> None:
    """Send without a limit, because a rank waits; a receiver that gives up has been told, or has told us."""
    with contextlib.suppress(SourceGone, PeerRefused):
        send_shard(channel, source, lambda _: None)


def _row(holding: Holding) -> Fields:
    return {
        "home": holding.home, "rank": holding.rank, "step": holding.step, "attempt": holding.attempt,
        "world_size": holding.world_size, "payload_bytes": holding.payload_bytes,
    }  # fmt: skip
