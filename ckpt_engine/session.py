"""One connection to the engine: a rank that saves and loads, or a tool that asks and commands."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import wire
from .clock import Clock
from .errors import CheckpointError, EngineRefused
from .event import WHOLE_STEP, EngineEvent, EventState, Tier
from .manifest import attempts_on_disk, complete_steps, step_numbers
from .persist import Persister
from .rejection import REASON_CHARACTERS_MAX, Rejection, add_rejection, read_or_reject_all
from .segment import SlotHeader
from .selection import Choice, choose_for_load
from .shardfile import Identity
from .slots import Slot, SlotBusy, SlotTable
from .storage import Storage
from .wire import Fields

WAIT_SECONDS_MAX = 3600.0
Reply = tuple[Fields, list[int]]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What every session of an engine works with."""

    job: str
    node: str
    directory: Path
    writer: str
    table: SlotTable
    persister: Persister
    storage: Storage
    emit: Callable[[EngineEvent], None]
    clock: Clock


class Session:
    """Answers requests one after another; when the peer hangs up, lets go of all it held."""

    def __init__(self, number: int, connection: socket.socket, parts: EngineParts) -> None:
        self.number = number
        self._connection = connection
        self._parts = parts
        self._identity: Identity | None = None
        self._reading: tuple[Slot, SlotHeader] | None = None
        self._operations: dict[str, Callable[[Fields, list[int]], Reply]] = {
            "register": self._register,
            "acquire": self._acquire,
            "seal": self._seal,
            "load": self._load,
            "loaded": self._loaded,
            "damaged": self._damaged,
            "return": self._return,
            "wait": self._wait,
            "status": self._status,
            "reject": self._reject,
            "persist": self._persist_now,
        }

    def close(self) -> None:
        """Make `serve` return; called from other threads."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        try:
            with self._connection:
                while True:
                    fields, received = wire.receive(self._connection)
                    try:
                        reply, descriptors = self._answer(fields, received)
                    finally:
                        wire.close_all(received)
                    try:
                        wire.send(self._connection, reply, descriptors)
                    finally:
                        wire.close_all(descriptors)
        except (wire.WireError, OSError):
            pass  # gone, or not talking to us: either way the connection is over
        finally:
            self._hang_up()

    def _answer(self, fields: Fields, descriptors: list[int]) -> Reply:
        operation = self._operations.get(wire.text(fields, "op"))
        if operation is None:
            return {"error": f"operation {fields['op']!r:.40} is not known to this engine"}, []
        try:
            return operation(fields, descriptors)
        except SlotBusy as busy:
            return {"busy": str(busy)}, []
        except CheckpointError as error:
            return {"error": str(error)}, []
        except OSError as error:
            return {"error": f"the engine could not do it: {error}"}, []

    def _own(self) -> Identity:
        if self._identity is None:
            raise EngineRefused("this connection has not registered as a rank")
        return self._identity

    def _register(self, fields: Fields, descriptors: list[int]) -> Reply:
        if wire.whole(fields, "protocol") != wire.PROTOCOL:
            raise EngineRefused(f"the engine speaks protocol {wire.PROTOCOL}; start it anew from the same version")
        identity = Identity(
            wire.text(fields, "job"),
            wire.whole(fields, "attempt"),
            wire.whole(fields, "rank"),
            wire.whole(fields, "world_size"),
            -1,
        )
        if identity.job != self._parts.job:
            raise EngineRefused(f"this engine serves job {self._parts.job!r}, not {identity.job!r}")
        if identity.attempt < 0 or not 0 <= identity.rank < identity.world_size:
            raise EngineRefused(
                f"rank {identity.rank} of {identity.world_size} in attempt {identity.attempt} cannot be"
            )
        self._parts.table.register(self.number, identity)
        self._identity = identity
        slots = wire.wholes(fields, "offers")
        kept = []
        for index, descriptor in list(zip(slots, descriptors, strict=False)):
            generation = self._parts.table.offer(self.number, identity, index, descriptor) if index in (0, 1) else 0
            if generation:
                descriptors.remove(descriptor)  # the segment owns it now
            kept.append(generation)
        return {"directory": str(self._parts.directory), "node": self._parts.node, "kept": kept}, []

    def _acquire(self, fields: Fields, _: list[int]) -> Reply:
        identity = self._own()
        need_bytes = wire.whole(fields, "segment_bytes")
        if need_bytes <= 0 or need_bytes % 4096:
            raise EngineRefused(f"a segment of {need_bytes} bytes cannot be")
        grant = self._parts.table.acquire(
            self.number,
            identity,
            wire.whole(fields, "step"),
            need_bytes,
            wire.wholes(fields, "known"),
            min(wire.number(fields, "wait_seconds"), WAIT_SECONDS_MAX),
        )
        if grant.fresh:
            prepare = (identity.rank, grant.index, need_bytes)
            threading.Thread(target=self._parts.table.prepare_other, args=prepare, name="prepare", daemon=True).start()
        reply = {"slot": grant.index, "generation": grant.generation}
        return reply, [grant.descriptor] if grant.descriptor >= 0 else []

    def _seal(self, fields: Fields, _: list[int]) -> Reply:
        header = self._parts.table.seal(
            self.number, self._own(), self._slot_index(fields), wire.whole(fields, "generation")
        )
        self._tell("sealed", header, "memory", seconds=wire.number(fields, "seconds"))
        return {"step": header.step}, []

    def _load(self, fields: Fields, _: list[int]) -> Reply:
        identity = self._own()
        self._stop_reading()
        self._refresh()
        choice = choose_for_load(
            self._parts.table, self._parts.directory, identity, wire.optional_whole(fields, "step"),
            frozenset(wire.wholes(fields, "not_from_disk")),
        )  # fmt: skip
        if choice is None:
            return {"tier": ""}, []
        if choice.memory is None:
            return {"tier": "disk", "step": choice.step, "attempt": choice.attempt}, []
        return self._lend(choice)

    def _lend(self, choice: Choice) -> Reply:
        assert choice.memory is not None
        slot, header = choice.memory
        segment = self._parts.table.lease(slot, header)
        if segment is None:
            raise EngineRefused(f"step {choice.step} has just been overwritten in memory; ask again")
        self._reading = (slot, header)
        crc = self._parts.table.checksum(slot, header, segment)
        reply = {
            "tier": "memory",
            "step": header.step,
            "attempt": header.attempt,
            "slot": slot.index,
            "crc32": crc,
        }
        return reply, [segment.duplicate()]

    def _loaded(self, fields: Fields, _: list[int]) -> Reply:
        identity = self._own()
        self._stop_reading()
        step, attempt = wire.whole(fields, "step"), wire.whole(fields, "attempt")
        tier: Tier = "memory" if wire.text(fields, "tier") == "memory" else "disk"
        self._parts.table.resumed(self.number, identity, step)
        self._parts.emit(
            EngineEvent(
                "loaded", step, identity.attempt, identity.rank, tier, self._parts.clock.now(),
                size_bytes=wire.whole(fields, "size_bytes"), seconds=wire.number(fields, "seconds"),
                reason=f"saved by attempt {attempt}",
            )
        )  # fmt: skip
        return {}, []

    def _damaged(self, fields: Fields, _: list[int]) -> Reply:
        """The rank found that what it was given is not what was saved."""
        identity = self._own()
        tier: Tier = "memory" if wire.text(fields, "tier") == "memory" else "disk"
        if tier == "memory" and self._reading is not None:
            self._parts.table.void(*self._reading)
        self._stop_reading()
        self._parts.emit(
            EngineEvent(
                "failed", wire.whole(fields, "step"), wire.whole(fields, "attempt"), identity.rank, tier,
                self._parts.clock.now(), reason=wire.text(fields, "reason")[:REASON_CHARACTERS_MAX],
            )
        )  # fmt: skip
        return {}, []

    def _return(self, fields: Fields, _: list[int]) -> Reply:
        """The rank did not use what it was lent."""
        self._stop_reading()
        return {}, []

    def _wait(self, fields: Fields, _: list[int]) -> Reply:
        key = (wire.whole(fields, "rank"), wire.whole(fields, "attempt"), wire.whole(fields, "step"))
        timeout = min(max(wire.number(fields, "timeout_seconds"), 0.0), WAIT_SECONDS_MAX)
        with self._parts.table.changed:
            self._parts.table.changed.wait_for(
                lambda: self._parts.table.closed or self._parts.persister.outcome(key) is not None, timeout
            )
            outcome = self._parts.persister.outcome(key)
        return {"settled": outcome is not None, "reason": outcome or ""}, []

    def _status(self, fields: Fields, _: list[int]) -> Reply:
        self._refresh()
        table = self._parts.table
        shards = [
            [header.rank, header.step, header.attempt, header.world_size, header.payload_bytes,
             slot.checksum is not None, slot.durable]
            for _, slot, header in table.sealed()
        ]  # fmt: skip
        return {
            "job": self._parts.job,
            "node": self._parts.node,
            "attempt": table.attempt,
            "shards": shards,
            "durable_steps": [record.step for record in complete_steps(self._parts.directory)][-1000:],
            "memory_bytes": table.memory_bytes,
            "memory_bytes_max": table.memory_bytes_max,
            "persist_error": self._parts.persister.error,
        }, []

    def _reject(self, fields: Fields, _: list[int]) -> Reply:
        step, reason = wire.whole(fields, "step"), wire.text(fields, "reason")[:REASON_CHARACTERS_MAX]
        up_to = wire.optional_whole(fields, "up_to_attempt")
        if up_to is None:
            up_to = self._newest_attempt()
        directory = self._parts.directory
        added = add_rejection(directory, Rejection(step, up_to, reason), self._parts.storage, self._parts.writer)
        self._refresh()
        if added:
            at = self._parts.clock.now()
            self._parts.emit(EngineEvent("rejected", step, up_to, WHOLE_STEP, "disk", at, reason=reason))
        return {"up_to_attempt": up_to, "added": added}, []

    def _persist_now(self, fields: Fields, _: list[int]) -> Reply:
        timeout = min(max(wire.number(fields, "timeout_seconds"), 0.0), WAIT_SECONDS_MAX)
        self._parts.persister.hurry()
        with self._parts.table.changed:
            self._parts.table.changed.wait_for(
                lambda: self._parts.table.closed or self._parts.persister.idle(), timeout
            )
            done = self._parts.persister.idle()
        return {"done": done, "reason": self._parts.persister.error}, []

    def _newest_attempt(self) -> int:
        """The newest that ran: as the ranks said, or, after a restart of the engine, as the folder shows."""
        directory = self._parts.directory
        on_disk = {attempt for step in step_numbers(directory) for attempt in attempts_on_disk(directory, step)}
        in_memory = {header.attempt for _, _, header in self._parts.table.sealed()}
        return max({self._parts.table.attempt, *on_disk, *in_memory})

    def _refresh(self) -> None:
        self._parts.table.set_rejections(read_or_reject_all(self._parts.directory))

    def _slot_index(self, fields: Fields) -> int:
        index = wire.whole(fields, "slot")
        if index not in (0, 1):
            raise EngineRefused(f"there is no slot {index}")
        return index

    def _stop_reading(self) -> None:
        if self._reading is not None:
            slot, self._reading = self._reading[0], None
            self._parts.table.release(slot)

    def _hang_up(self) -> None:
        self._stop_reading()
        if self._identity is not None:
            header = self._parts.table.hang_up(self.number, self._identity)
            if header is not None:
                self._tell("sealed", header, "memory", reason="the rank ended before it could say so")

    def _tell(
        self, state: EventState, header: SlotHeader, tier: Tier, *, seconds: float = 0.0, reason: str = ""
    ) -> None:
        self._parts.emit(
            EngineEvent(
                state, header.step, header.attempt, header.rank, tier, self._parts.clock.now(),
                size_bytes=header.payload_bytes, seconds=seconds, reason=reason,
            )
        )  # fmt: skip
