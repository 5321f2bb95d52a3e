"""One question to the node's checkpoint engine for somebody on another machine, without holding up the loop."""

from __future__ import annotations

import json
import socket

from ingest.clock import Clock

PACKET_BYTES_MAX = 64 << 10
OPERATIONS = ("status", "metrics", "reject", "verify", "persist")  # what a tool or a service asks, and no rank's


class EngineSilent(Exception):
    """The engine cannot be asked, or does not answer; the text says why."""


class EngineQuestion:
    """A packet to the engine's socket and its answer; `look` never waits."""

    def __init__(self, path: str, packet: str, timeout_seconds: float, clock: Clock) -> None:
        """Raises EngineSilent."""
        self._path = path
        self._clock = clock
        self._deadline = clock.monotonic() + timeout_seconds
        if not path:
            raise EngineSilent("this node has no checkpoint engine")
        if _operation(packet) not in OPERATIONS:
            raise EngineSilent(f"an engine is asked one of {', '.join(OPERATIONS)} from other machines")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
            self._socket.send(packet.encode("utf-8", "replace"))
        except OSError as error:
            self._socket.close()
            raise EngineSilent(f"the checkpoint engine at {path} does not answer ({error.strerror})") from error

    def look(self) -> str | None:
        """The answer; None: not yet. Raises EngineSilent. Nothing is asked of it after an answer or an error."""
        try:
            packet = self._socket.recv(PACKET_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            if self._clock.monotonic() < self._deadline:
                return None
            self._socket.close()
            raise EngineSilent(f"the checkpoint engine at {self._path} does not answer in time") from None
        except OSError as error:
            self._socket.close()
            raise EngineSilent(f"the checkpoint engine at {self._path} has gone ({error.strerror})") from error
        self._socket.close()
        if not packet:
            raise EngineSilent(f"the checkpoint engine at {self._path} closed the connection")
        return packet.decode("utf-8", "replace")


def _operation(packet: str) -> object:
    if len(packet.encode("utf-8", "replace")) > PACKET_BYTES_MAX:
        return None
    try:
        fields = json.loads(packet)
    except (ValueError, RecursionError):
        return None
    return fields.get("op") if isinstance(fields, dict) else None
