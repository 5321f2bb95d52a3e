"""The control sockets: one line of JSON asks, one line answers, maybe later; no asker holds up the loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ingest.clock import Clock

from .proof import GREETING_BYTES_MAX, PROOF_BYTES, LauncherEnd, NotProved
from .protocol import REQUEST_BYTES_MAX, Reply, Request, decode_request, encode_line
from .telemetry import listen, peer_of

CONNECTIONS_MAX = 32
IDLE_SECONDS_MAX = 30.0
GREETING_SECONDS_MAX = 5.0  # for a caller from another machine to prove itself

Respond = Callable[[Reply], None]
Answer = Callable[[Request, Respond], None]


class CannotListen(Exception):
    """The address for other machines cannot be listened on; the text is one sentence."""


@dataclass(slots=True, eq=False)
class Asker:
    """One connection: a request that grows, or a reply that leaves."""

    socket: socket.socket
    heard_at: float
    proof: LauncherEnd | None = None  # of a caller from another machine
    incoming: bytes = b""
    outgoing: bytes = b""
    waiting: bool = False  # for our answer
    serving: bool = False  # lines of it are being taken up now
    leaving: bool = False  # it is turned away once it has been told why

    @property
    def trusted(self) -> bool:
        return self.proof is None or self.proof.proved

    @property
    def line_bytes_max(self) -> int:
        if self.proof is None:
            return REQUEST_BYTES_MAX
        return REQUEST_BYTES_MAX + PROOF_BYTES if self.proof.proved else GREETING_BYTES_MAX


def listen_unix(path: Path) -> socket.socket:
    """Our own user's way in."""
    return listen(path, socket.SOCK_STREAM, CONNECTIONS_MAX)


def listen_tcp(host: str, port: int) -> socket.socket:
    """The way in for other machines; `host` empty: every address of this one, port 0: any free one.

    Raises CannotListen.
    """
    try:
        if host:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", port), family=family, backlog=CONNECTIONS_MAX, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # the latter for a name that can be no host's
        where = f"{host or 'any address'}, port {port}"
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CannotListen(f"a launcher cannot listen on {where} ({why})") from error
    listener.setblocking(False)
    return listener


class Control:
    """Reads requests and writes replies as the loop says that sockets are ready.

    `prove` makes the launcher's end of a greeting, for a listener whose callers must know the job's token;
    without it, callers must be processes of our own user.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Answer,
        clock: Clock,
        *,
        watch: Callable[..., None],
        prove: Callable[[], LauncherEnd] | None = None,
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._watch = watch
        self._prove = prove
        self._askers: set[Asker] = set()
        self.turned_away = 0  # callers that could not prove that they know the token
        self.listener = listener
        watch(self.listener, self.accept)

    def accept(self) -> None:
        """Take callers in: of our own user, or those that will prove themselves."""
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                peer, _ = self.listener.accept()
                peer.setblocking(False)
                self._make_room()
                if len(self._askers) >= CONNECTIONS_MAX or not self._admits(peer):
                    peer.close()
                    continue
                asker = Asker(peer, self._clock.monotonic(), self._prove() if self._prove else None)
                self._askers.add(asker)
                if asker.proof is None:
                    self._watch_reading(asker)
                else:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    asker.outgoing = asker.proof.challenge()
                    self._write(asker)

    def drop_idle(self) -> None:
        """Close connections that say nothing, and those that do not take their answer."""
        now = self._clock.monotonic()
        for asker in list(self._askers):
            seconds_max = IDLE_SECONDS_MAX if asker.trusted else GREETING_SECONDS_MAX
            if not asker.waiting and now - asker.heard_at > seconds_max:
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

    def _admits(self, peer: socket.socket) -> bool:
        return self._prove is not None or peer_of(peer)[1] in (os.geteuid(), 0)

    def _make_room(self) -> None:
        """Where all places are taken, a stranger goes, else whoever has been idle for longest."""
        idle = [asker for asker in self._askers if not asker.waiting]
        if len(self._askers) >= CONNECTIONS_MAX and idle:
            self._close(min(idle, key=lambda asker: (asker.trusted, asker.heard_at)))

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
        if asker.trusted:  # a stranger's time runs from when it came
            asker.heard_at = self._clock.monotonic()
        asker.incoming += chunk
        self._serve(asker)

    def _serve(self, asker: Asker) -> None:
        """Take up what has come whole, line after line, until there is something to wait for."""
        if asker.serving:
            return
        asker.serving = True
        while asker in self._askers and not asker.waiting and not asker.outgoing and self._next_line(asker):
            pass
        asker.serving = False
        if asker.waiting and len(asker.incoming) > asker.line_bytes_max:
            self._close(asker)

    def _next_line(self, asker: Asker) -> bool:
        """Take up one line; False where none has come whole."""
        line, newline, rest = asker.incoming.partition(b"\n")
        if not newline or len(line) > asker.line_bytes_max:
            if len(line) > asker.line_bytes_max:
                self._refuse(asker, f"a request has at most {REQUEST_BYTES_MAX} bytes")
            return False
        asker.incoming = rest
        if asker.proof is not None:
            try:
                if not asker.proof.proved:
                    asker.outgoing += asker.proof.welcome(line)
                    asker.heard_at = self._clock.monotonic()
                    self._write(asker)
                    return True
                line = asker.proof.open(line)
            except NotProved as error:
                self._refuse(asker, str(error))
                return False
        try:
            request = decode_request(line)
        except (ValueError, RecursionError) as error:
            self._refuse(asker, f"not a request: {error}")
            return False
        asker.waiting = True
        self._answer(request, lambda reply: self._respond(asker, reply))
        return True

    def _refuse(self, asker: Asker, text: str) -> None:
        """Say why; whoever has not proved itself, or whose line was not proved, goes."""
        asker.incoming = b""
        if asker.proof is None:
            self._respond(asker, Reply(refusal="undecodable", text=text))
            return
        self.turned_away += not asker.proof.proved
        asker.leaving = True
        if asker.proof.proved:
            self._respond(asker, Reply(refusal="undecodable", text=text))
        else:
            asker.outgoing += asker.proof.refusal(text)
            self._write(asker)

    def _respond(self, asker: Asker, reply: Reply) -> None:
        if asker not in self._askers:
            return
        asker.waiting = False
        asker.heard_at = self._clock.monotonic()
        line = encode_line(reply)
        asker.outgoing += line if asker.proof is None else asker.proof.seal(line)
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
        elif asker.leaving:
            self._close(asker)
        else:
            self._watch_reading(asker)
            self._serve(asker)

    def _close(self, asker: Asker) -> None:
        self._watch(asker.socket, None)
        asker.socket.close()
        self._askers.discard(asker)
