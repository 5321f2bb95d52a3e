"""What a rank and its launcher say to each other, in packets on a Unix socket, and the rank's end.

A packet is a type, a newline and JSON, at most `PACKET_BYTES_MAX` bytes. The rank opens with `hello.v1`
(again after every reconnect, and when it knows its GPU better or is given a role), then sends `metrics.v1`,
`logs.v1` and `fault_injected.v1`; the launcher may send `inject.v1`, and `flight_wanted.v1`, which a rank that has
torch's flight recorder answers with `flight.v1`. Both ends ignore a type they do not know.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec

from .clock import Clock

PACKET_BYTES_MAX = 64 * 1024
QUEUE_PACKETS_MAX = 1_000
QUEUE_BYTES_MAX = 8 * 1024 * 1024
RECONNECT_SECONDS = 1.0
RECEIVED_PACKETS_MAX = 16  # in one look; the rest waits for the next

HELLO = "hello.v1"
METRICS = "metrics.v1"
LOGS = "logs.v1"
FAULT_INJECTED = "fault_injected.v1"
INJECT = "inject.v1"
FLIGHT = "flight.v1"
FLIGHT_WANTED = "flight_wanted.v1"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet of a connection: who is calling, and with which attempt's token."""

    job: str
    attempt: int
    rank: int
    token: str
    pid: int
    gpu_uuid: str | None = None
    pci_address: str | None = None
    scheduler_ids: dict[str, str] = {}
    role: str = ""


class Inject(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher asks the rank to break itself. `at_step` -1 is the next step; each fault reads what it needs."""

    fault: str
    at_step: int = -1
    factor: float = 3.0
    seconds: float = 8.0
    delay_seconds: float = 0.05
    megabytes_per_second: float = 20.0
    megabytes_max: float = 500.0


def pack(packet_type: str, body: bytes) -> bytes:
    """One packet. Raises ValueError where it would be larger than `PACKET_BYTES_MAX`."""
    packet = packet_type.encode() + b"\n" + body
    if len(packet) > PACKET_BYTES_MAX:
        raise ValueError(f"a {packet_type} packet of {len(packet)} bytes is over the limit of {PACKET_BYTES_MAX}")
    return packet


def unpack(packet: bytes) -> tuple[str, bytes]:
    """Type and JSON of a packet. Raises ValueError where there is no newline or the type is not ASCII."""
    packet_type, newline, body = packet.partition(b"\n")
    if not newline or not packet_type.isascii():
        raise ValueError("a packet is a type, a newline and JSON; this one is not")
    return packet_type.decode("ascii"), body


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much a rank keeps for a launcher that does not take it, before the oldest is dropped."""

    packets_max: int = QUEUE_PACKETS_MAX
    bytes_max: int = QUEUE_BYTES_MAX


class RankLink(Protocol):
    """What the reporter needs of the way to whoever listens: a launcher's socket, or the bus itself."""

    dropped: int

    @property
    def connected(self) -> bool: ...

    def put(self, packet: bytes) -> None: ...

    def introduce(self, hello: Hello) -> None: ...

    def pump(self) -> None: ...

    def drain(self, seconds: float) -> None: ...

    def receive(self) -> list[bytes]: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class RankSocket:
    """The rank's end: a bounded queue, a connection that comes back. Never blocks or raises.

    Used by one thread only, the reporter's.
    """

    def __init__(self, path: str, hello: Hello, clock: Clock, limits: QueueLimits | None = None) -> None:
        self._path = path
        self._hello = hello
        self._clock = clock
        self._limits = limits or QueueLimits()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._socket: socket.socket | None = None
        self._retry_at = clock.monotonic()
        self.dropped = 0

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def pending(self) -> int:
        """Packets that the launcher has not taken yet."""
        return len(self._queue)

    def put(self, packet: bytes) -> None:
        """Queue a packet behind the others, dropping the oldest where the queue is full."""
        self._queue.append(packet)
        self._queued_bytes += len(packet)
        while len(self._queue) > self._limits.packets_max or self._queued_bytes > self._limits.bytes_max:
            self._queued_bytes -= len(self._queue.popleft())
            self.dropped += 1

    def introduce(self, hello: Hello) -> None:
        """Say hello again with more knowledge, now and after every reconnect."""
        self._hello = hello
        if self._socket is not None:
            self.put(pack(HELLO, msgspec.json.encode(hello)))

    def pump(self) -> None:
        """Connect where that is due, and hand over what the launcher takes now."""
        if self._socket is None and not self._connect():
            return
        while self._queue and self._socket is not None:
            if not self._try_send(self._queue[0]):
                return
            self._queued_bytes -= len(self._queue.popleft())

    def drain(self, seconds: float) -> None:
        """Pump until nothing is pending, for at most `seconds`: the last words of a rank."""
        deadline = self._clock.monotonic() + seconds
        while True:
            self.pump()
            left = deadline - self._clock.monotonic()
            if not self._queue or left <= 0 or self._socket is None:
                return
            ready = select.poll()  # select() itself takes no descriptor beyond 1,023, and ranks have many
            ready.register(self._socket, select.POLLOUT)
            ready.poll(1_000 * min(left, 0.05))

    def receive(self) -> list[bytes]:
        """Packets from the launcher that are here now."""
        received: list[bytes] = []
        while self._socket is not None and len(received) < RECEIVED_PACKETS_MAX:
            try:
                packet = self._socket.recv(PACKET_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._disconnect()
                break
            if not packet:
                self._disconnect()
                break
            received.append(packet)
        return received

    def close(self) -> None:
        """Let go of the connection. May be called twice."""
        self._disconnect()

    def abandon(self) -> None:
        """This is a forked child: the connection is the parent's, which keeps its own descriptor."""
        self._disconnect()

    def _connect(self) -> bool:
        if self._clock.monotonic() < self._retry_at:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
            connection.send(pack(HELLO, msgspec.json.encode(self._hello)))
        except (OSError, ValueError):  # ValueError: ids so long that the hello is no packet
            connection.close()
            self._retry_at = self._clock.monotonic() + RECONNECT_SECONDS
            return False
        self._socket = connection
        return True

    def _try_send(self, packet: bytes) -> bool:
        """Whether the packet is off our hands: sent, or found to be one that no socket takes."""
        assert self._socket is not None
        try:
            self._socket.send(packet)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return False
            if error.errno == errno.EMSGSIZE:
                self.dropped += 1
                return True
            self._disconnect()
            return False
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._retry_at = self._clock.monotonic() + RECONNECT_SECONDS
