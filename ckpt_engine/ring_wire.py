"""Frames between two engines: a length-prefixed JSON object with its proof, and raw bytes behind it; no pickle.

    0    magic, length of the object, length of the raw bytes: 12 bytes, big endian
    12   the object: JSON, UTF-8
    …    HMAC-SHA256 over number, prefix and object, as soon as both ends have proved the token
    …    the raw bytes, which the object names a checksum for

A flipped bit in an object ends the connection; one in raw bytes has that piece sent again.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import socket
import ssl
import struct
from collections.abc import Mapping
from typing import Any

from .clock import Clock
from .wire import Fields, WireError, decode

MAGIC = b"TRN1"
OBJECT_BYTES_MAX = 256 << 10
RAW_BYTES_MAX = 16 << 20
PREFIX = struct.Struct("!4sII")
PROOF_BYTES = 32
WAKE_BYTES = 256 << 10  # of raw bytes that must be there before a receiver is woken: it is for fewer system calls


class PeerError(WireError):
    """The other engine is gone, too slow, or does not speak this protocol: the connection is over."""


class PeerRefused(PeerError):
    """The other engine is there and answered no; the text is its sentence."""


def encode_frame(fields: Mapping[str, Any], raw_bytes: int) -> bytes:
    """Prefix and object of a frame that `raw_bytes` follow. Raises PeerError where it is over a limit."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) > OBJECT_BYTES_MAX or raw_bytes > RAW_BYTES_MAX:
        raise PeerError(f"a frame of {len(text)} and {raw_bytes} bytes is over the limit")
    return PREFIX.pack(MAGIC, len(text), raw_bytes) + text


def decode_prefix(prefix: bytes, raw_bytes_max: int) -> tuple[int, int]:
    """(bytes of the object, raw bytes behind it). Raises PeerError and nothing else, whatever the 12 bytes are."""
    magic, object_bytes, raw_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise PeerError("the peer does not speak the ring's protocol")
    if object_bytes > OBJECT_BYTES_MAX or raw_bytes > raw_bytes_max:
        raise PeerError(f"the peer announced a frame of {object_bytes} and {raw_bytes} bytes, which is over the limit")
    return object_bytes, raw_bytes


class Channel:
    """One TCP connection, for the use of one thread. Everything it does ends within `io_seconds_max`, or raises
    PeerError."""

    def __init__(self, sock: socket.socket, clock: Clock, io_seconds_max: float) -> None:
        self.until = math.inf  # on the clock; nothing goes on beyond it
        self.raw_bytes = 0  # that follow the object received last; read them before the next
        self._sock = sock
        self._clock = clock
        self._io_seconds_max = io_seconds_max
        self._keys: tuple[bytes, bytes] | None = None  # of what we send, of what we receive
        self._sent = self._received = 0
        self._wakes_at_bytes = 1
        self._can_wait = not isinstance(sock, ssl.SSLSocket)  # whose records end where they like

    def secure(self, session_key: bytes, *, as_server: bool) -> None:
        """From here on every object carries a proof, each direction with its own key."""
        server, client = (hmac.digest(session_key, which, "sha256") for which in (b"server", b"client"))
        self._keys = (server, client) if as_server else (client, server)
        self._sent = self._received = 0

    def send(self, fields: Mapping[str, Any], raw: bytes | memoryview = b"") -> None:
        """One frame."""
        head = encode_frame(fields, len(raw))
        if self._keys is not None:
            head += _proof(self._keys[0], self._sent, head)
        self._sent += 1
        try:
            self._sock.settimeout(self._io_seconds_max)
            if not raw or isinstance(self._sock, ssl.SSLSocket):  # which cannot gather
                self._sock.sendall(head)
                done = 0
            else:
                done = self._sock.sendmsg([head, raw]) - len(head)
                if done < 0:
                    self._sock.sendall(head[done:])
                    done = 0
            if done < len(raw):
                self._sock.sendall(memoryview(raw)[done:])
        except OSError as error:
            raise PeerError(f"the peer takes no more: {error}") from error

    def receive(self, raw_bytes_max: int = 0, wait_seconds: float = 0.0) -> Fields:
        """The object of the next frame; `wait_seconds` more may pass before its first byte."""
        if self.raw_bytes:
            raise PeerError("the peer sent raw bytes where none belong")
        prefix = bytearray(PREFIX.size)
        self._fill(memoryview(prefix)[:1], wait_seconds)
        self._fill(memoryview(prefix)[1:])
        object_bytes, raw_bytes = decode_prefix(bytes(prefix), raw_bytes_max)
        text = bytearray(object_bytes)
        self._fill(memoryview(text))
        if self._keys is not None:
            proof = bytearray(PROOF_BYTES)
            self._fill(memoryview(proof))
            if not hmac.compare_digest(_proof(self._keys[1], self._received, bytes(prefix + text)), proof):
                raise PeerError("a frame's proof does not fit its bytes")
        self._received += 1
        self.raw_bytes = raw_bytes
        return decode(bytes(text))

    def receive_raw(self, into: memoryview) -> None:
        """The next raw bytes of the frame received last, as many as `into` has room for."""
        assert len(into) <= self.raw_bytes
        self._fill(into, together=True)
        self.raw_bytes -= len(into)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _fill(self, view: memoryview, wait_seconds: float = 0.0, *, together: bool = False) -> None:
        """`together`: sleep until much of it is there, not after each packet."""
        deadline = min(self._clock.monotonic() + self._io_seconds_max + wait_seconds, self.until)
        done = 0
        try:
            while done < len(view):
                left = deadline - self._clock.monotonic()
                if left <= 0:  # trickling bytes do not put it off
                    raise PeerError(f"the peer sent nothing whole within {self._io_seconds_max:g} s")
                self._sock.settimeout(left)
                self._wake_at(min(len(view) - done, WAKE_BYTES) if together else 1)
                got = self._sock.recv_into(view[done:])
                if not got:
                    raise PeerError("the peer closed the connection")
                done += got
        except OSError as error:
            raise PeerError(f"the peer sends no more: {error}") from error

    def _wake_at(self, size_bytes: int) -> None:
        if self._can_wait and size_bytes != self._wakes_at_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._wakes_at_bytes = size_bytes


def _proof(key: bytes, number: int, head: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + head, "sha256")
