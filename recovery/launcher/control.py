"""The control socket: one line of JSON asks, one line answers, maybe later; no asker holds up the loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ingest.clock import Clock

from .protocol import REQUEST_BYTES_MAX, Reply, Request, decode_request, encode_line
from .telemetry import listen, peer_of

CONNECTIONS_MAX = 32
IDLE_SECONDS_MAX = 30.0

Respond = Callable[[Reply], None]
Answer = Callable[[Request, Respond], None]


@dataclass(slots=True, eq=False)
class Asker:
    """One connection: a request that grows, or a reply that leaves."""

    socket: socket.socket
    heard_at: float
    incoming: bytes = b""
    outgoing: bytes = b""
    waiting: bool = False  # for our answer


class Control:
    """Reads requests and writes replies as the loop says that sockets are ready."""

    def __init__(self, path: Path, answer: Answer, clock: Clock, *, watch: Callable[..., None]) -> None:
        self._path = path
        self._answer = answer
        self._clock = clock
        self._watch = watch
        self._askers: set[Asker] = set()
        self.listener = listen(path, socket.SOCK_STREAM, CONNECTIONS_MAX)
        watch(self.listener, self.accept)

    def accept(self) -> None:
        """Take callers of our own user in."""
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                peer, _ = self.listener.accept()
                peer.setblocking(False)
                self._make_room()
                if len(self._askers) >= CONNECTIONS_MAX or peer_of(peer)[1] not in (os.geteuid(), 0):
                    peer.close()
                    continue
                asker = Asker(peer, self._clock.monotonic())
                self._askers.add(asker)
                self._watch_reading(asker)

    def drop_idle(self) -> None:
        """Close connections that say nothing, and those that do not take their answer."""
        now = self._clock.monotonic()
        for asker in list(self._askers):
            if not asker.waiting and now - asker.heard_at > IDLE_SECONDS_MAX:
                self._close(asker)

    def flush(self, seconds: float) -> None:
        """Write what is still to be written, for at most `seconds`: the last words before the socket goes."""
        for asker in list(self._askers):
            if asker.outgoing:
                asker.socket.settimeout(seconds)
                with suppress(OSError):
                    asker.socket.sendall(asker.outgoing)

    def close(self) -> None:
        for asker in list(self._askers):
            self._close(asker)
        self._watch(self.listener, None)
        self.listener.close()
        self._path.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Where all places are taken, whoever has been idle for longest goes."""
        idle = [asker for asker in self._askers if not asker.waiting]
        if len(self._askers) >= CONNECTIONS_MAX and idle:
            self._close(min(idle, key=lambda asker: asker.heard_at))

    def _watch_reading(self, asker: Asker) -> None:
        self._watch(asker.socket, lambda: self._read(asker))

    def _read(self, asker: Asker) -> None:
        try:
            chunk = asker.socket.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._close(asker)
            return
        asker.heard_at = self._clock.monotonic()
        asker.incoming += chunk
        self._next_request(asker)

    def _next_request(self, asker: Asker) -> None:
        if asker.waiting:
            if len(asker.incoming) > REQUEST_BYTES_MAX:
                self._close(asker)
            return
        line, newline, rest = asker.incoming.partition(b"\n")
        if not newline:
            if len(asker.incoming) > REQUEST_BYTES_MAX:
                self._refuse(asker, f"a request has at most {REQUEST_BYTES_MAX} bytes")
            return
        asker.incoming = rest
        try:
            request = decode_request(line)
        except (ValueError, RecursionError) as error:
            self._refuse(asker, f"not a request: {error}")
            return
        asker.waiting = True
        self._answer(request, lambda reply: self._respond(asker, reply))

    def _refuse(self, asker: Asker, text: str) -> None:
        asker.incoming = b""
        self._respond(asker, Reply(refusal="undecodable", text=text))

    def _respond(self, asker: Asker, reply: Reply) -> None:
        if asker not in self._askers:
            return
        asker.waiting = False
        asker.heard_at = self._clock.monotonic()
        asker.outgoing += encode_line(reply)
        self._write(asker)

    def _write(self, asker: Asker) -> None:
        try:
            sent = asker.socket.send(asker.outgoing)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._close(asker)
            return
        asker.outgoing = asker.outgoing[sent:]
        if asker.outgoing:
            self._watch(asker.socket, lambda: self._write(asker), writing=True)
        else:
            self._watch_reading(asker)
            self._next_request(asker)

    def _close(self, asker: Asker) -> None:
        self._watch(asker.socket, None)
        asker.socket.close()
        self._askers.discard(asker)
