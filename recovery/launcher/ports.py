"""Ports for the ranks' rendezvous: below those that Linux gives to outgoing connections, and free when probed."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from random import Random

PORTS = (20_000, 30_000)
PORT_TRIES_MAX = 100


def port_candidates(random: Random) -> tuple[int, ...]:
    """Ports in the order in which they should be tried."""
    return tuple(random.randrange(*PORTS) for _ in range(PORT_TRIES_MAX))


def first_free_port(candidates: Iterable[int], host: str = "") -> int:
    """The first of the candidates that nobody listens on at `host` (empty: any address); 0: none."""
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except (OSError, OverflowError):
                continue
        return port
    return 0
