"""A rank's connection to its node's engine: lost and found again without training noticing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import wire
from .clock import Clock
from .errors import EngineRefused, EngineUnavailable
from .shardfile import Identity

BACKOFF_SECONDS_MIN = 0.2
BACKOFF_SECONDS_MAX = 5.0
REQUEST_SECONDS_MAX = 120.0  # beyond the time asked for: the pages of a new segment may have to be made first

Offers = Callable[[], Sequence[tuple[int, int]]]  # (slot, descriptor) of what this rank still maps
Kept = Callable[[Sequence[int], Sequence[int]], None]  # slots offered, their new generations (0: not wanted)

_links: weakref.WeakSet[EngineLink]


@dataclass(slots=True, eq=False)
class Posted:
    """A request whose answer nobody has awaited yet."""

    answer: tuple[wire.Fields, list[int]] | None = None
    lost: str = ""  # why there will be none


class EngineLink:
    """Requests to one engine, one at a time; after a failure the next tries wait a little longer each."""

    def __init__(self, path: str, identity: Identity, clock: Clock, offers: Offers, kept: Kept) -> None:
        self.path = path
        self.directory: str | None = None
        self.lost = ""  # why there is no connection now
        self._identity = identity
        self._clock = clock
        self._offers = offers
        self._kept = kept
        self.in_use: Callable[[], list[list[int]]] = list  # segments that views of this rank look at: (device, inode)
        self._lock = threading.RLock()
        self._sock: socket.socket | None = None
        self._posted: deque[Posted] = deque()  # answered in this order, before anything that is asked later
        self._backoff_seconds = 0.0
        self._next_try = 0.0
        _links.add(self)

    def ask(self, request: Mapping[str, Any], extra_seconds: float = 0.0) -> tuple[wire.Fields, list[int]]:
        """The engine's answer. Raises EngineUnavailable or EngineRefused. Descriptors are the caller's to
        close."""
        with self._lock:
            return self.collect(self.post(request), extra_seconds)

    def post(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Posted:
        """Send a request without awaiting the answer. Raises EngineUnavailable, or EngineRefused where this rank is
        not taken. The descriptors stay the caller's."""
        with self._lock:
            if self._sock is None:
                self._connect(request, descriptors)
            else:
                try:
                    self._sock.settimeout(REQUEST_SECONDS_MAX)
                    wire.send(self._sock, request, descriptors)
                except (OSError, wire.WireError) as error:
                    self._lose(f"the checkpoint engine at {self.path} went away: {error}")
                    raise EngineUnavailable(self.lost) from error
            posted = Posted()
            self._posted.append(posted)
            return posted

    def collect(self, posted: Posted, extra_seconds: float = 0.0) -> tuple[wire.Fields, list[int]]:
        """The answer to what was posted, awaited. Raises EngineUnavailable or EngineRefused. Descriptors are the
        caller's to close."""
        with self._lock:
            while posted.answer is None and not posted.lost:
                self._receive(extra_seconds)
        if posted.answer is None:
            raise EngineUnavailable(posted.lost)
        fields, descriptors = posted.answer
        if "error" in fields:
            wire.close_all(descriptors)
            raise EngineRefused(str(fields["error"]))
        return fields, descriptors

    def ask_aside(self, request: Mapping[str, Any], timeout_seconds: float) -> wire.Fields:
        """An answer that may take long, on a connection of its own so that saves go on meanwhile."""
        try:
            with contextlib.closing(wire.connect(self.path, timeout_seconds + 5.0)) as sock:
                wire.send(sock, request)
                fields, descriptors = wire.receive(sock)
        except (OSError, wire.WireError) as error:
            raise EngineUnavailable(f"the checkpoint engine at {self.path} does not answer: {error}") from error
        wire.close_all(descriptors)
        return fields

    def close(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
            self._give_up(self.lost or "the connection to the checkpoint engine was closed")

    def _give_up(self, why: str) -> None:
        while self._posted:
            self._posted.popleft().lost = why

    def forget_in_child(self) -> None:
        """After a fork: the child's copy of the socket would hide this rank's death from the engine."""
        self._lock = threading.RLock()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                os.close(self._sock.detach())
            self._sock = None
        self._next_try = float("inf")
        self.lost = "a forked child does not save checkpoints"
        self._give_up(self.lost)

    def _connect(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Connect and register, with the first request behind it."""
        if self._clock.monotonic() < self._next_try:
            raise EngineUnavailable(self.lost)
        try:
            sock = wire.connect(self.path, REQUEST_SECONDS_MAX)
        except OSError as error:
            self._lose(f"no checkpoint engine answers at {self.path}: {error}")
            raise EngineUnavailable(self.lost) from error
        try:
            self._register(sock, request, descriptors)
        except (OSError, wire.WireError) as error:
            sock.close()
            self._lose(f"the checkpoint engine at {self.path} did not take this rank: {error}")
            raise EngineUnavailable(self.lost) from error
        except EngineRefused as error:
            sock.close()
            self._lose(str(error))
            raise
        self._sock, self._backoff_seconds, self.lost = sock, 0.0, ""

    def _register(self, sock: socket.socket, first: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """The engine is at work on the first request already while we hear that it takes us; if it does not, it
        refuses that one too."""
        offers = list(self._offers())
        identity = self._identity
        request = {
            "op": "register",
            "protocol": wire.PROTOCOL,
            "job": identity.job,
            "attempt": identity.attempt,
            "rank": identity.rank,
            "world_size": identity.world_size,
            "offers": [slot for slot, _ in offers],
            "memfds": self.in_use(),
        }
        wire.send(sock, request, [descriptor for _, descriptor in offers])
        unsent: OSError | wire.WireError | None = None
        try:
            wire.send(sock, first, descriptors)
        except (OSError, wire.WireError) as error:
            unsent = error  # why it hung up stands in what it sent before
        fields, received = wire.receive(sock)
        wire.close_all(received)
        if "error" in fields:
            raise EngineRefused(str(fields["error"]))
        self.directory = wire.text(fields, "directory")
        self._kept([slot for slot, _ in offers], wire.wholes(fields, "kept"))
        if unsent is not None:
            raise unsent

    def _receive(self, extra_seconds: float) -> None:
        """The next answer on the connection, for the request that was posted first."""
        assert self._sock is not None, "what was posted is lost with its connection"
        try:
            self._sock.settimeout(REQUEST_SECONDS_MAX + extra_seconds)
            answer = wire.receive(self._sock)
        except (OSError, wire.WireError) as error:
            self._lose(f"the checkpoint engine at {self.path} went away: {error}")
        else:
            self._posted.popleft().answer = answer

    def _lose(self, why: str) -> None:
        self.lost = why
        self.close()
        self._backoff_seconds = min(max(self._backoff_seconds * 2, BACKOFF_SECONDS_MIN), BACKOFF_SECONDS_MAX)
        self._next_try = self._clock.monotonic() + self._backoff_seconds


def _after_fork() -> None:
    for link in list(_links):
        link.forget_in_child()


_links = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)
