"""Bytes that were handed over before they were compared with their checksum, until that is done."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

from . import wire
from .errors import CheckpointDamaged, EngineRefused, EngineUnavailable
from .fetching import check_memory
from .link import EngineLink
from .shardfile import Identity

VERIFY_SECONDS_MAX = 600.0


def verdict_on(
    wanted: Identity,
    descriptor: int,
    crc32: int | None,
    link: EngineLink | None,
    threads: int,
    timeout_seconds: float,
) -> str:
    """Why the slot that was lent last is not what was saved, empty where it is: the engine's word, which compares it.

    Raises EngineUnavailable where it has none within the time.
    """
    reply = _ask(link, timeout_seconds)
    if reply is not None:
        if reply.get("settled") is not True:
            raise EngineUnavailable(f"step {wanted.step} is not verified after {timeout_seconds:g} s; wait longer")
        return wire.text(reply, "reason")
    # That engine is gone. The slot outlives it while we hold it, and nobody but this rank would write there.
    if crc32 is None:
        return "the engine ended before it had a checksum of it"
    try:
        check_memory(descriptor, wanted, crc32, threads)
    except CheckpointDamaged as error:
        return str(error)
    return ""


def _ask(link: EngineLink | None, timeout_seconds: float) -> wire.Fields | None:
    """The engine's word; None where that engine is gone, or another answers."""
    if link is None:
        return None
    with contextlib.suppress(EngineUnavailable, EngineRefused):
        reply, descriptors = link.ask({"op": "await_proof", "timeout_seconds": timeout_seconds}, timeout_seconds)
        wire.close_all(descriptors)
        return reply
    return None


class Unverified:
    """What one deferred load has handed over. `descriptor` is that of the slot it came from, ours to close."""

    def __init__(
        self, wanted: Identity, descriptor: int, crc32: int | None, link: EngineLink | None, threads: int
    ) -> None:
        self.told = False  # that it is damaged
        self._wanted = wanted
        self._descriptor = descriptor
        self._crc32 = crc32
        self._link = link
        self._threads = threads
        self._reason: str | None = None  # why it is damaged, empty where it is not

    def settle(self, timeout_seconds: float) -> None:
        """Wait for the comparison. Raises CheckpointDamaged where it is not what was saved, each time; and
        EngineUnavailable where that is not known within the time."""
        if self._reason is None:
            self._reason = verdict_on(
                self._wanted, self._descriptor, self._crc32, self._link, self._threads, timeout_seconds
            )
            os.close(self._descriptor)
        if self._reason:
            self.told = True
            raise CheckpointDamaged(
                f"step {self._wanted.step}, which has been loaded, is not what was saved: {self._reason}; start again, "
                "the next load takes another copy"
            )


class Verifying:
    """The one load that may be unverified, and the optimizers that do not step before it is verified."""

    def __init__(self) -> None:
        self._pending: Unverified | None = None
        self._guarded: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, unverified: Unverified) -> None:
        self._pending = unverified

    def settle(self, timeout_seconds: float = VERIFY_SECONDS_MAX) -> None:
        """As `Unverified.settle`, of what was loaded last; at once where all is verified."""
        if self._pending is not None:
            self._pending.settle(timeout_seconds)
            self._pending = None

    def before_next_load(self) -> None:
        """What is damaged is said once; who then loads again replaces it. Raises as `settle`."""
        if self._pending is not None and self._pending.told:
            self._pending = None
        self.settle()

    def guard(self, optimizer: Any) -> None:
        """Let it call `settle` before each of its steps."""
        if optimizer not in self._guarded:
            self._guarded.add(optimizer)
            optimizer.register_step_pre_hook(lambda *_: self.settle())
