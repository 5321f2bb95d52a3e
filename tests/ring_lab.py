"""Rings of checkpoint engines to try: engines in threads that find each other, and channels to be meddled with."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckpt_engine.clock import HostClock
from ckpt_engine.ring import Ring
from ckpt_engine.ring_config import RingConfig
from ckpt_engine.ring_wire import Channel
from tests.ckpt_lab import Lab, engine_in_thread, eventually

TOKEN = b"a token of the tests, long enough"
IO_SECONDS = 10.0
QUICK: dict[str, Any] = {
    "beat_seconds": 0.05, "dead_seconds": 0.5, "dial_seconds_max": 2.0, "io_seconds_max": IO_SECONDS,
    "retry_seconds_min": 0.05, "retry_seconds_max": 0.2, "chunk_bytes": 64 << 10,
}  # fmt: skip


def ring_config(*nodes: str, **options: Any) -> RingConfig:
    return RingConfig(**{"token": TOKEN, "nodes": nodes, **QUICK, **options})


def ring_of(lab: Lab) -> Ring:
    assert lab.engine.ring is not None
    return lab.engine.ring


@contextmanager
def ring_engine(
    folder: Path, node: str, *nodes: str, engine: dict[str, Any] | None = None, **ring: Any
) -> Iterator[Lab]:
    """One engine of a ring of `nodes`; all of a test share `folder`."""
    with engine_in_thread(folder, node=node, ring=ring_config(*nodes, **ring), **(engine or {})) as lab:
        yield lab


@contextmanager
def ring_engines(folder: Path, *nodes: str, **ring: Any) -> Iterator[list[Lab]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ring_engine(folder, node, *nodes, **ring)) for node in nodes]


def backed_up(lab: Lab, rank: int, attempt: int, step: int) -> str:
    """Wait until it is settled whether neighbours have the shard; empty where they do."""

    def settled() -> tuple[str] | None:
        outcome = ring_of(lab).outcome(rank, attempt, step)
        return None if outcome is None else (outcome,)

    return eventually(settled, f"an end of copying step {step}")[0]


def kept(lab: Lab) -> list[tuple[str, int, int]]:
    """(home, rank, step) of what an engine keeps for others, newest first."""
    return [(slot.home, header.rank, header.step) for slot, header in ring_of(lab).store.whole()]


def channels(wrap: Callable[[socket.socket], Any] = lambda sock: sock) -> tuple[Channel, Channel]:
    """Two ends of one connection; `wrap` puts something around the socket of the first."""
    left, right = socket.socketpair()
    return Channel(wrap(left), HostClock(), IO_SECONDS), Channel(right, HostClock(), IO_SECONDS)


class Recorder:
    """A socket that remembers what was sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sent = b""
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, piece: Any) -> None:
        self.sent += bytes(piece)
        self._sock.sendall(piece)

    def sendmsg(self, pieces: list[Any]) -> int:
        whole = b"".join(bytes(piece) for piece in pieces)
        self.sendall(whole)
        return len(whole)


class Meddler(Recorder):
    """A socket that turns one bit of the raw bytes of those frames that `chosen` names by their number."""

    def __init__(self, sock: socket.socket, chosen: Callable[[int], bool], *, in_object: bool = False) -> None:
        super().__init__(sock)
        self._chosen = chosen
        self._in_object = in_object
        self._number = 0

    def sendmsg(self, pieces: list[Any]) -> int:
        head, raw = (bytearray(bytes(piece)) for piece in pieces)
        if self._chosen(self._number):
            target = head if self._in_object else raw
            target[len(target) // 2] ^= 0x10
        self._number += 1
        return super().sendmsg([head, raw])
