"""The telemetry socket: a rank that stops or sends garbage holds up nobody else."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ingest.clock import Clock
from ingest.codec import Codec, Undecodable
from ingest.events import FaultInjected, Logs, Message, Metrics
from ingest.flight_recorder import Flight
from ingest.rank_socket import (
    FAULT_INJECTED,
    FLIGHT,
    FLIGHT_WANTED,
    HELLO,
    INJECT,
    LOGS,
    METRICS,
    PACKET_BYTES_MAX,
    Hello,
    Inject,
    pack,
    unpack,
)

from .procfs import stat_of

CONNECTIONS_PER_SLOT_MAX = 8
HELLO_SECONDS_MAX = 10.0
PACKETS_PER_LOOK_MAX = 64
DEAD_LETTERS_PER_CONNECTION_MAX = 20

_HELLO = msgspec.json.Decoder(Hello)
_FLIGHT = msgspec.json.Decoder(Flight)


class Audience(Protocol):
    """Who is told what ranks say, and knows whether a hello may be believed."""

    def is_too_early(self, session: int) -> bool:
        """Whether a caller of this session should be heard later, when it is known who it is."""
        ...

    def refuses(self, hello: Hello, session: int) -> str:
        """Why this hello is not from a rank of ours; empty where it is."""
        ...

    def said_hello(self, hello: Hello) -> None: ...

    def said(self, message: Metrics | Logs | FaultInjected) -> None: ...

    def said_flight(self, rank: int, flight: Flight) -> None: ...

    def garbage(self, packet_type: str, body: bytes, reason: str, rank: int | None) -> None:
        """A packet for the dead letters."""
        ...


@dataclass(slots=True, eq=False)
class Connection:
    """One peer. `rank` is known after a good hello."""

    socket: socket.socket
    peer_pid: int
    accepted_at: float
    hello: Hello | None = None
    dead_letters: int = 0

    @property
    def rank(self) -> int | None:
        return self.hello.rank if self.hello else None


def listen(path: Path, kind: int, backlog: int) -> socket.socket:
    """A Unix socket that only its owner may use; what a dead launcher left at that path is taken away."""
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # the socket must never exist with wider permissions
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user id at the other end."""
    pid, uid, _ = struct.unpack(
        "iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    )
    return pid, uid


def session_of(pid: int) -> int:
    """The session of a caller; one that is gone already is taken for a rank itself, which leads its session."""
    stat = stat_of(pid)
    return stat.session if stat else pid


class Telemetry:
    """Accepts, reads without blocking, checks stamps; the loop calls back when sockets are ready."""

    def __init__(
        self, path: Path, audience: Audience, clock: Clock, *, slots: int, watch: Callable[[Any, Any], None]
    ) -> None:
        self._path = path
        self._audience = audience
        self._clock = clock
        self._connections_max = CONNECTIONS_PER_SLOT_MAX * slots + CONNECTIONS_PER_SLOT_MAX
        self._watch = watch  # (socket, callback) to watch, (socket, None) to stop
        self._codec = Codec()
        self._connections: set[Connection] = set()
        self._early: set[Connection] = set()
        self.malformed = 0
        self.listener = listen(path, socket.SOCK_SEQPACKET, self._connections_max)
        watch(self.listener, self.accept)

    def accept(self) -> None:
        """Take callers in; more than the bound are turned away."""
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                peer, _ = self.listener.accept()
                peer.setblocking(False)
                pid, uid = peer_of(peer)
                if len(self._connections) >= self._connections_max or uid not in (os.geteuid(), 0):
                    peer.close()
                    continue
                connection = Connection(peer, pid, self._clock.monotonic())
                self._connections.add(connection)
                self._watch(peer, partial(self.read, connection))

    def read(self, connection: Connection) -> bool:
        """Take in at most `PACKETS_PER_LOOK_MAX` packets; whether there may be more."""
        if connection.hello is None and self._audience.is_too_early(session_of(connection.peer_pid)):
            self._watch(connection.socket, None)
            self._early.add(connection)
            return False
        for _ in range(PACKETS_PER_LOOK_MAX):
            try:
                packet, _, flags, _ = connection.socket.recvmsg(PACKET_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                packet, flags = b"", 0
            if not packet:
                self._close(connection)
                return False
            if flags & socket.MSG_TRUNC:
                self._garbage(connection, "", packet[:1024], f"the packet has more than {PACKET_BYTES_MAX} bytes")
            else:
                self._take(connection, packet)
            if connection not in self._connections:
                return False
        return True

    def resume(self) -> None:
        """Hear those that came before it was known who they are."""
        for connection in list(self._early):
            self._early.discard(connection)
            self._watch(connection.socket, partial(self.read, connection))
            self.read(connection)

    def sweep(self, rank: int | None = None, looks_max: int = 50) -> None:
        """Take in everything that has been sent before now, by all or by one rank."""
        self.accept()
        for connection in list(self._connections):
            if rank not in (None, connection.rank) and connection.hello is not None:
                continue
            for _ in range(looks_max):
                if not self.read(connection):
                    break

    def drop_silent(self) -> None:
        """Close connections that never said hello."""
        now = self._clock.monotonic()
        for connection in list(self._connections):
            if connection.hello is None and now - connection.accepted_at > HELLO_SECONDS_MAX:
                self._close(connection)

    def hang_up(self, rank: int) -> None:
        """Close what a dead rank's connections are: its children must not speak for it."""
        for connection in self._of(rank):
            self._close(connection)

    def send_inject(self, rank: int, order: Inject) -> bool:
        """Whether a connection of this rank has taken the order."""
        return self._send(rank, pack(INJECT, msgspec.json.encode(order)))

    def ask_flight(self, rank: int) -> bool:
        """Whether a connection of this rank was asked how far its collectives got."""
        return self._send(rank, pack(FLIGHT_WANTED, b"{}"))

    def _send(self, rank: int, packet: bytes) -> bool:
        for connection in self._of(rank):
            if connection.hello is None:
                continue
            try:
                connection.socket.send(packet)
            except OSError:
                continue
            return True
        return False

    def close(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
        self._watch(self.listener, None)
        self.listener.close()
        self._path.unlink(missing_ok=True)

    def _of(self, rank: int | None) -> Iterator[Connection]:
        return (connection for connection in list(self._connections) if rank is None or connection.rank == rank)

    def _take(self, connection: Connection, packet: bytes) -> None:
        try:
            packet_type, body = unpack(packet)
        except ValueError as error:
            self._garbage(connection, "", packet, str(error))
            return
        if packet_type == HELLO:
            self._greet(connection, body)
        elif connection.hello is None:
            self._garbage(connection, packet_type, body, "the first packet of a connection is hello.v1")
            self._close(connection)
        elif packet_type in (METRICS, LOGS, FAULT_INJECTED):
            self._decode(connection, connection.hello, packet_type, body)
        elif packet_type == FLIGHT:
            self._hear_flight(connection, connection.hello, body)

    def _hear_flight(self, connection: Connection, hello: Hello, body: bytes) -> None:
        try:
            flight = _FLIGHT.decode(body)
        except (ValueError, RecursionError) as error:
            self._garbage(connection, FLIGHT, body, f"not a {FLIGHT}: {error}")
            return
        self._audience.said_flight(hello.rank, flight)

    def _greet(self, connection: Connection, body: bytes) -> None:
        try:
            hello = _HELLO.decode(body)
        except (ValueError, RecursionError) as error:
            self._garbage(connection, HELLO, body, f"not a hello.v1: {error}")
            return
        reason = self._audience.refuses(hello, session_of(connection.peer_pid))
        if reason:
            self._garbage(connection, HELLO, b"", reason)  # without the body: the token is a secret
            self._close(connection)
            return
        connection.hello = hello
        self._audience.said_hello(hello)

    def _decode(self, connection: Connection, hello: Hello, packet_type: str, body: bytes) -> None:
        try:
            message: Message = self._codec.decode((("ce_type", packet_type.encode()),), body)
        except Undecodable as error:
            self._garbage(connection, packet_type, body, error.reason)
            return
        if (message.job, message.attempt, message.rank) != (hello.job, hello.attempt, hello.rank):
            self._garbage(connection, packet_type, body, "the stamp is not that of the rank that sent it")
            return
        assert isinstance(message, Metrics | Logs | FaultInjected)
        self._audience.said(message)

    def _garbage(self, connection: Connection, packet_type: str, body: bytes, reason: str) -> None:
        self.malformed += 1
        connection.dead_letters += 1
        if connection.dead_letters <= DEAD_LETTERS_PER_CONNECTION_MAX:
            self._audience.garbage(packet_type, body, reason, connection.rank)

    def _close(self, connection: Connection) -> None:
        self._watch(connection.socket, None)
        connection.socket.close()
        self._connections.discard(connection)
        self._early.discard(connection)
