"""Asks a launcher over its control socket, and tells "nothing was done" from "something may have been"."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from .protocol import REPLY_BYTES_MAX, Reply, Request, decode_reply, encode_line


class LauncherUnreachable(Exception):
    """Nobody took the request: it certainly had no effect."""


class LauncherSilent(Exception):
    """The request was handed over and no answer came: it may have had its effect."""


def ask(control_socket: Path, request: Request, *, timeout_seconds: float) -> Reply:
    """One request, one reply. Raises LauncherUnreachable or LauncherSilent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # Not settimeout: with a time-out of its own, connect does not wait for a place in a full backlog.
        send_timeout = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) + 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        try:
            connection.connect(str(control_socket))
        except OSError as error:
            raise LauncherUnreachable(f"no launcher answers at {control_socket} ({error.strerror or error})") from error
        connection.settimeout(timeout_seconds)
        try:
            connection.sendall(encode_line(request))
            return _read_reply(connection)
        except (OSError, ValueError, EOFError) as error:
            kind = "in time" if isinstance(error, TimeoutError) else f"({error})"
            raise LauncherSilent(
                f"the launcher at {control_socket} took a request and did not answer {kind}"
            ) from error


def _read_reply(connection: socket.socket) -> Reply:
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(65536)
        if not chunk:
            raise EOFError("it closed the connection")
        line += chunk
        if len(line) > REPLY_BYTES_MAX:
            raise ValueError(f"its reply has more than {REPLY_BYTES_MAX} bytes")
    return decode_reply(line)
