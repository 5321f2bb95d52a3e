"""Asks a launcher over its control socket or TCP, and tells "nothing was done" from "something may have been"."""

from __future__ import annotations

import socket
import struct

from ingest.clock import Clock

from .address import TcpAddress, parse_address
from .proof import GREETING_BYTES_MAX, PROOF_BYTES, AskerEnd, JobKey, NotProved
from .protocol import REPLY_BYTES_MAX, Reply, Request, decode_reply, encode_line

SECONDS_MIN = 0.001  # a time-out of nothing at all would mean "do not wait", which is another thing


class LauncherUnreachable(Exception):
    """Nobody took the request: it certainly had no effect."""


class LauncherSilent(Exception):
    """The request was handed over and no answer came: it may have had its effect."""


def ask(
    address: str, request: Request, *, timeout_seconds: float, clock: Clock, key: JobKey | None = None, node: str = ""
) -> Reply:
    """One request, one reply, from the launcher at `unix:/path` or `tcp:host:port`; the latter needs the job's key.

    `node`: only this node's launcher is meant. Raises LauncherUnreachable or LauncherSilent.
    """
    deadline = clock.monotonic() + timeout_seconds
    try:
        where = parse_address(address)
    except ValueError as error:
        raise LauncherUnreachable(str(error)) from error
    if not isinstance(where, TcpAddress):
        return _ask_unix(where, request, timeout_seconds, _Lines(deadline, clock))
    if key is None:
        raise LauncherUnreachable(f"the launcher at {address} needs the job's token, and none is given")
    return _ask_tcp(where, request, key, node, _Lines(deadline, clock))


class _Lines:
    """Whole lines from a socket, until a deadline."""

    def __init__(self, deadline: float, clock: Clock) -> None:
        self._deadline = deadline
        self._clock = clock
        self._rest = b""

    def left_seconds(self) -> float:
        return max(SECONDS_MIN, self._deadline - self._clock.monotonic())

    def read(self, connection: socket.socket, bytes_max: int) -> bytes:
        """One line without its newline. Raises OSError (TimeoutError among them), EOFError or ValueError."""
        while b"\n" not in self._rest:
            connection.settimeout(self.left_seconds())
            chunk = connection.recv(65536)
            if not chunk:
                raise EOFError("it closed the connection")
            self._rest += chunk
            if len(self._rest) > bytes_max:
                raise ValueError(f"its answer has more than {bytes_max} bytes")
            if self._clock.monotonic() > self._deadline and b"\n" not in self._rest:
                raise TimeoutError("it takes too long")
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _ask_unix(path: str, request: Request, timeout_seconds: float, lines: _Lines) -> Reply:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # Not settimeout: with a time-out of its own, connect does not wait for a place in a full backlog.
        send_timeout = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) + 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        try:
            connection.connect(path)
        except OSError as error:
            raise LauncherUnreachable(f"no launcher answers at {path} ({error.strerror or error})") from error
        try:
            connection.settimeout(lines.left_seconds())
            connection.sendall(encode_line(request))
            return decode_reply(lines.read(connection, REPLY_BYTES_MAX))
        except (OSError, ValueError, EOFError) as error:
            raise _silent(path, error) from error


def _ask_tcp(where: TcpAddress, request: Request, key: JobKey, node: str, lines: _Lines) -> Reply:
    try:
        connection = socket.create_connection((where.host or "localhost", where.port), lines.left_seconds())
    except (OSError, UnicodeError) as error:  # the latter for a name that can be no host's
        raise LauncherUnreachable(f"no launcher answers at {where} ({_why(error)})") from error
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = AskerEnd(key)
        try:
            connection.sendall(end.claim(lines.read(connection, GREETING_BYTES_MAX)))
            seals = end.finish(lines.read(connection, GREETING_BYTES_MAX), node)
        except (OSError, ValueError, EOFError, NotProved) as error:
            why = "it does not greet us in time" if isinstance(error, TimeoutError) else str(error)
            raise LauncherUnreachable(f"the launcher at {where} was asked nothing: {why}") from error
        try:
            connection.settimeout(lines.left_seconds())
            connection.sendall(seals.seal(encode_line(request)))
            return decode_reply(seals.open(lines.read(connection, REPLY_BYTES_MAX + PROOF_BYTES)))
        except (OSError, ValueError, EOFError, NotProved) as error:
            raise _silent(str(where), error) from error


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _silent(where: str, error: Exception) -> LauncherSilent:
    kind = "in time" if isinstance(error, TimeoutError) else f"({error})"
    return LauncherSilent(f"the launcher at {where} took a request and did not answer {kind}")
