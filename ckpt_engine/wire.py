"""The engine's protocol: one JSON object per packet on a Unix socket, file descriptors beside it, no pickle.

SOCK_SEQPACKET keeps the packets apart; large things (layouts, values, tensors) travel in shared memory only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import EngineUnavailable

PROTOCOL = 1
PACKET_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 4
SOCKET_PATH_BYTES_MAX = 107  # sun_path, less its terminating zero

Fields = dict[str, Any]


class WireError(EngineUnavailable):
    """The peer is gone, or does not speak this protocol."""


class Disconnected(WireError):
    """The peer closed the connection."""


def send(sock: socket.socket, fields: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """One packet. Raises OSError where the peer is gone."""
    packet = json.dumps(fields, separators=(",", ":")).encode()
    if len(packet) > PACKET_BYTES_MAX:
        raise WireError(f"a packet of {len(packet)} bytes is over the limit of {PACKET_BYTES_MAX}")
    if descriptors:
        socket.send_fds(sock, [packet], list(descriptors))
    else:
        sock.sendall(packet)


def receive(sock: socket.socket) -> tuple[Fields, list[int]]:
    """One packet and the descriptors that came with it, which are the caller's to close."""
    packet, descriptors, flags, _ = socket.recv_fds(
        sock, PACKET_BYTES_MAX + 1, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if not packet:
            raise Disconnected("the peer closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) > PACKET_BYTES_MAX:
            raise WireError(f"the peer sent a packet of more than {PACKET_BYTES_MAX} bytes")
        return decode(packet), descriptors
    except WireError:
        close_all(descriptors)
        raise


def decode(packet: bytes) -> Fields:
    """The object in a packet. Raises WireError and nothing else, whatever the bytes are."""
    try:
        fields = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the peer sent a packet that is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise WireError("the peer sent a packet that is not a JSON object")
    return fields


def text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if type(value) is not str:
        raise WireError(f"field {name!r} must be a text")
    return value


def whole(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise WireError(f"field {name!r} must be a whole number")
    return value


def optional_whole(fields: Fields, name: str) -> int | None:
    return None if fields.get(name) is None else whole(fields, name)


def number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise WireError(f"field {name!r} must be a number")
    return float(value)


def wholes(fields: Fields, name: str) -> list[int]:
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise WireError(f"field {name!r} must be a list of whole numbers")
    return values


def peer_uid(sock: socket.socket) -> int:
    """The user behind the other end, as the kernel knows it."""
    return _peer(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """The process behind the other end when it connected (or listened); 0 where it cannot be seen from here."""
    return _peer(sock)[0]


def readable(descriptors: Sequence[int], timeout_seconds: float | None) -> set[int]:
    """Those that can be read, or have ended, within the time (None: however long it takes)."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_seconds is None else timeout_seconds * 1000)}


def connect(path: str | Path, timeout_seconds: float) -> socket.socket:
    """A connection to the engine at `path`. Raises OSError; refuses an engine of another user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_seconds)
        sock.connect(str(path))
        if peer_uid(sock) not in (os.getuid(), 0):
            raise PermissionError(f"the socket {path} is served by another user")
    except BaseException:
        sock.close()
        raise
    return sock


def _peer(sock: socket.socket) -> tuple[int, int, int]:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", credentials)
    return pid, uid, gid


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
