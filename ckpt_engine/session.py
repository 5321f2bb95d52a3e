"""One connection to the engine: a rank that saves and loads, or a tool that asks and commands."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import wire
from .clock import Clock
from .downloading import Downloader
from .errors import CheckpointError, EngineRefused
from .event import WHOLE_STEP, EngineEvent, EventState, Tier
from .lending import Lending
from .live_copy import LiveMemories
from .manifest import attempts_on_disk, complete_steps, rejection_of, step_numbers
from .outline import Outlines
from .persist import Persister
from .process_watch import ProcessWatch
from .rejection import REASON_CHARACTERS_MAX, Rejection, add_rejection, is_rejected, read_or_reject_all
from .ring import Ring, ring_is_off
from .segment import SlotHeader
from .shardfile import Identity
from .slots import SlotBusy, SlotTable
from .storage import Storage
from .verification import Verification, add_verification, read_verifications
from .wire import Fields

WAIT_SECONDS_MAX = 3600.0
LOOK_SECONDS = 1.0  # at a peer whose end the kernel cannot tell by itself
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
    downloader: Downloader | None = None
    metrics: Callable[[], str] = lambda: ""
    keeper_state: Callable[[], Fields] = dict
    ring: Ring | None = None
    ring_off: str = ""
    outlines: Outlines = field(default_factory=Outlines)


class Session:
    """Answers requests one after another; when the peer hangs up, lets go of all it held."""

    def __init__(self, number: int, connection: socket.socket, parts: EngineParts) -> None:
        self.number = number
        self._connection = connection
        self._parts = parts
        self._identity: Identity | None = None
        self._lending = Lending(parts, number)
        self._live = LiveMemories()
        self._operations: dict[str, Callable[[Fields, list[int]], Reply]] = {
            "register": self._register,
            "prepare": self._prepare,
            "acquire": self._acquire,
            "seal": self._seal,
            "copy_live": self._copy_live,
            "load": self._lent(self._lending.load),
            "candidates": self._lent(self._lending.candidates),
            "outline": self._lent(self._lending.gathering.outline),
            "shard": self._lent(self._lending.gathering.shard),
            "hold": self._lent(self._lending.hold),
            "await_proof": self._lent(self._lending.await_proof),
            "loaded": self._lent(self._lending.loaded),
            "damaged": self._lent(self._lending.damaged),
            "return": self._lent(self._lending.return_unused),
            "wait": self._wait,
            "status": self._status,
            "metrics": lambda fields, _: ({"text": self._parts.metrics()}, []),
            "reject": self._reject,
            "verify": self._verify,
            "persist": self._persist_now,
        }

    def close(self) -> None:
        """Make `serve` return; called from other threads."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        try:
            with self._connection, ProcessWatch(wire.peer_pid(self._connection)) as peer:
                while True:
                    self._await_request(peer)
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

    def _await_request(self, peer: ProcessWatch) -> None:
        """A rank's children may hold its connection open; that it is gone the kernel tells all the same."""
        own, other = self._connection.fileno(), peer.fileno()
        while own not in wire.readable((own,) if other < 0 else (own, other), LOOK_SECONDS if other < 0 else None):
            if peer.ended():
                raise wire.Disconnected("the peer's process has ended")

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
        for index, descriptor in zip(slots, descriptors, strict=False):
            kept.append(self._parts.table.offer(self.number, identity, index, descriptor) if index in (0, 1) else 0)
        self._lending.hold(identity, fields)  # before any slot is granted
        self._refresh()
        story = f"{sum(map(bool, kept))} of {len(kept)} slots that it had are still there"
        at = self._parts.clock.now()
        self._parts.emit(EngineEvent("registered", -1, identity.attempt, identity.rank, "memory", at, reason=story))
        return {"directory": str(self._parts.directory), "node": self._parts.node, "kept": kept}, []

    def _prepare(self, fields: Fields, _: list[int]) -> Reply:
        """A slot before its first save: what the rank has to map, which is nothing where it could not be made."""
        identity, index, need_bytes = self._own(), self._slot_index(fields), self._segment_bytes(fields)
        slot = self._parts.table.prepare(identity.rank, index, need_bytes)
        with self._parts.table.changed:
            if slot.segment is None or slot.generation in wire.wholes(fields, "known"):
                return {"generation": 0}, []
            return {"generation": slot.generation}, [slot.segment.duplicate()]

    def _acquire(self, fields: Fields, _: list[int]) -> Reply:
        identity, need_bytes = self._own(), self._segment_bytes(fields)
        grant = self._parts.table.acquire(
            self.number,
            identity,
            wire.whole(fields, "step"),
            need_bytes,
            wire.wholes(fields, "known"),
            min(wire.number(fields, "wait_seconds"), WAIT_SECONDS_MAX),
        )
        if grant.fresh:
            prepare = (identity.rank, 1 - grant.index, need_bytes)
            threading.Thread(target=self._parts.table.prepare, args=prepare, name="prepare", daemon=True).start()
        reply = {"slot": grant.index, "generation": grant.generation}
        return reply, [grant.descriptor] if grant.descriptor >= 0 else []

    def _seal(self, fields: Fields, _: list[int]) -> Reply:
        header = self._parts.table.seal(
            self.number, self._own(), self._slot_index(fields), wire.whole(fields, "generation")
        )
        self._tell("sealed", header, "memory", seconds=wire.number(fields, "seconds"))
        return {"step": header.step}, []

    def _copy_live(self, fields: Fields, descriptors: list[int]) -> Reply:
        """A fenced save: grant a slot and copy into it the image in the rank's own memory. The rank seals it."""
        if len(descriptors) != 1:
            raise EngineRefused("a fenced save comes with one descriptor, of the memory that the state lives in")
        reply, granted = self._acquire(fields, [])
        try:
            slot = self._parts.table.granted(self.number, self._own(), reply["slot"], reply["generation"])
            assert slot.segment is not None
            memory = self._live.of(descriptors[0], wire.whole(fields, "segment_bytes"))
            memory.copy(descriptors[0], slot.segment.view)
        except BaseException:
            wire.close_all(granted)
            raise
        return reply, granted

    def _lent(self, operation: Callable[[Identity, Fields], Reply]) -> Callable[[Fields, list[int]], Reply]:
        return lambda fields, _: operation(self._own(), fields)

    def _wait(self, fields: Fields, _: list[int]) -> Reply:
        key = (wire.whole(fields, "rank"), wire.whole(fields, "attempt"), wire.whole(fields, "step"))
        timeout = min(max(wire.number(fields, "timeout_seconds"), 0.0), WAIT_SECONDS_MAX)
        outcome_of = self._backed_up if fields.get("what") == "peer" else self._parts.persister.outcome
        table = self._parts.table
        with table.changed:
            table.changed.wait_for(lambda: table.closed or outcome_of(key) is not None, timeout)
            outcome = outcome_of(key)
        return {"settled": outcome is not None, "reason": outcome or ""}, []

    def _backed_up(self, key: tuple[int, int, int]) -> str | None:
        ring = self._parts.ring
        return self._parts.ring_off if ring is None else ring.outcome(*key)

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
            "keeper": self._parts.keeper_state(),
            **(ring_is_off(self._parts.ring_off) if self._parts.ring is None else self._parts.ring.status()),
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

    def _verify(self, fields: Fields, _: list[int]) -> Reply:
        """Training has proved a step good; a rejected one stays rejected."""
        step, attempt = wire.whole(fields, "step"), wire.whole(fields, "attempt")
        reason = wire.text(fields, "reason")[:REASON_CHARACTERS_MAX]
        parts = self._parts
        if rejection_of(parts.directory, step, attempt) is not None:
            return {"added": False}, []
        added = add_verification(parts.directory, Verification(step, attempt, reason), parts.storage, parts.writer)
        if added:
            at = parts.clock.now()
            parts.emit(EngineEvent("verified", step, attempt, WHOLE_STEP, "disk", at, reason=reason))
        return {"added": added}, []

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
        rejections = read_or_reject_all(self._parts.directory)
        self._parts.table.set_rejections(rejections)
        with contextlib.suppress(CheckpointError, OSError):  # what was trusted before stays so
            verified = read_verifications(self._parts.directory)
            good = [(v.attempt, v.step) for v in verified if not is_rejected(rejections, v.step, v.attempt)]
            self._parts.table.set_trusted(max(good, default=None))

    def _segment_bytes(self, fields: Fields) -> int:
        need_bytes = wire.whole(fields, "segment_bytes")
        if need_bytes <= 0 or need_bytes % 4096:
            raise EngineRefused(f"a segment of {need_bytes} bytes cannot be")
        return need_bytes

    def _slot_index(self, fields: Fields) -> int:
        index = wire.whole(fields, "slot")
        if index not in (0, 1):
            raise EngineRefused(f"there is no slot {index}")
        return index

    def _hang_up(self) -> None:
        self._lending.hang_up()
        self._live.close()
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
