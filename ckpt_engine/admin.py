"""How a tool or a service asks an engine what it holds, and tells it what to reject."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import wire
from .errors import EngineRefused, EngineUnavailable
from .status import EngineStatus, ShardStatus

Relay = Callable[[str, float], str]  # one packet and how long its answer may take; raises EngineUnavailable


class EngineAdmin:
    """One engine's socket, seen from outside; each call is a connection of its own."""

    def __init__(self, socket_path: Path | str, timeout_seconds: float = 5.0, relay: Relay | None = None) -> None:
        """`relay` asks in our place where the socket is on another machine; `socket_path` is only its name then."""
        self._socket_path = Path(socket_path)
        self._timeout_seconds = timeout_seconds
        self._relay = relay

    def may_answer(self) -> bool:
        """False where there is not even a socket."""
        return self._relay is not None or self._socket_path.exists()

    def status(self) -> EngineStatus:
        """What the engine holds now. Raises EngineUnavailable."""
        fields = self._ask({"op": "status"})
        try:
            shards = tuple(_shard(row) for row in fields["shards"])
            return EngineStatus(
                wire.text(fields, "job"),
                wire.text(fields, "node"),
                wire.whole(fields, "attempt"),
                shards,
                tuple(wire.wholes(fields, "durable_steps")),
                wire.whole(fields, "memory_bytes"),
                wire.whole(fields, "memory_bytes_max"),
                wire.text(fields, "persist_error"),
                wire.text(fields, "ring"),
                fields["ring_on"] is True,
                tuple(_peer_shard(row) for row in fields["peer_shards"]),
                wire.whole(fields, "peer_memory_bytes"),
                wire.whole(fields, "peer_memory_bytes_max"),
                wire.whole(fields["keeper"], "pid"),
                wire.text(fields["keeper"], "error"),
            )
        except (wire.WireError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineUnavailable(f"{self._socket_path} does not answer like a checkpoint engine: {error}") from error

    def metrics(self) -> str:
        """What the engine has done and holds, in Prometheus' text format. Raises EngineUnavailable."""
        return wire.text(self._ask({"op": "metrics"}), "text")

    def reject_from(self, step: int, up_to_attempt: int | None = None, reason: str = "") -> int:
        """Reject `step` and later of attempts up to `up_to_attempt` (None: the newest the engine knows);
        that attempt.

        Idempotent. It stands in `rejected.json` before this returns, so all engines of the job obey it.
        """
        fields = self._ask({"op": "reject", "step": step, "up_to_attempt": up_to_attempt, "reason": reason})
        return wire.whole(fields, "up_to_attempt")

    def mark_verified(self, step: int, attempt: int, reason: str = "") -> bool:
        """Say that training has proved `step` of `attempt` good; False where it stands so already, or is rejected.

        It stands in `verified.json` before this returns: `policy="verified"` loads it, retention keeps it.
        """
        return self._ask({"op": "verify", "step": step, "attempt": attempt, "reason": reason}).get("added") is True

    def persist_now(self, timeout_seconds: float = 30.0) -> bool:
        """Bring to disk what memory holds, without waiting out a back-off; True when nothing is left to
        write."""
        fields = self._ask({"op": "persist", "timeout_seconds": timeout_seconds}, timeout_seconds)
        return fields.get("done") is True

    def _ask(self, request: Mapping[str, Any], extra_seconds: float = 0.0) -> wire.Fields:
        if self._relay is not None:
            packet = json.dumps(request, separators=(",", ":"))
            return _allowed(wire.decode(self._relay(packet, self._timeout_seconds + extra_seconds).encode()))
        try:
            with contextlib.closing(wire.connect(self._socket_path, self._timeout_seconds + extra_seconds)) as sock:
                wire.send(sock, request)
                fields, descriptors = wire.receive(sock)
        except (OSError, wire.WireError) as error:
            raise EngineUnavailable(f"the checkpoint engine at {self._socket_path} does not answer: {error}") from error
        wire.close_all(descriptors)
        return _allowed(fields)


def _allowed(fields: wire.Fields) -> wire.Fields:
    if "error" in fields:
        raise EngineRefused(str(fields["error"]))
    return fields


def _shard(row: list[Any]) -> ShardStatus:
    rank, step, attempt, world_size, size_bytes, verified, durable = row
    return ShardStatus(rank, step, attempt, world_size, "sealed", size_bytes, bool(verified), bool(durable))


def _peer_shard(row: list[Any]) -> ShardStatus:
    rank, step, attempt, world_size, size_bytes, home = row
    return ShardStatus(rank, step, attempt, world_size, f"kept for {home}", size_bytes, True, False)
