"""`Checkpointer`, what a training script holds: save in one copy, load from memory or from disk.

ckpt = Checkpointer(socket, directory, job="gpt", attempt=2, rank=0, world_size=4, node="n0")
state = {"model": model, "optimizer": optimizer, "step": 0}
report = ckpt.load(into=state, step=resume_step)
ticket = ckpt.save(state, step=120)
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .clock import Clock, HostClock
from .commit import commit_shard, finish_step, retain
from .errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    EngineRefused,
    EngineUnavailable,
)
from .event import Tier
from .fetching import LoadedShard, read_from_disk, read_from_memory
from .layout import Layout, layout_hash, plan_layout
from .link import EngineLink
from .manifest import complete_manifests, complete_steps, rejection_of
from .restore import Restorer
from .selection import loadable_steps
from .shardfile import Identity
from .staging import Geometry, StagedSlot, local_slot, map_slot
from .storage import Storage
from .tensors import Collector, Spec, TensorDoor
from .ticket import Mark, Ticket
from .tree import dump_tree, encode_state, load_tree

_log = logging.getLogger(__name__)

LOAD_TRIES_MAX = 16
DURABLE_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded. `verified`: its checksum was compared before a byte was handed over."""

    step: int
    tier: Tier
    seconds: float
    verified: bool
    attempt: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A copy that may be loaded; `descriptor` is ours to close, -1 on disk."""

    tier: Tier
    step: int
    attempt: int
    descriptor: int = -1
    crc32: int = 0


class Checkpointer:
    """One rank's checkpoints. `socket`: the node's engine; without one, saves go straight to `directory` and
    wait for it.

    While the other slot is still being read, a save waits `busy_wait_seconds` for it and is then skipped.
    """

    def __init__(
        self,
        socket: str | None,
        directory: str | None,
        *,
        job: str,
        attempt: int,
        rank: int,
        world_size: int,
        node: str,
        clock: Clock | None = None,
        busy_wait_seconds: float = 2.0,
        copy_threads: int = 1,
        retention_steps: int = 3,
    ) -> None:
        try:
            import torch  # here, because a rank that saves nothing should not pay for it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "transom.Checkpointer needs PyTorch, which is not installed; run: pip install 'transom[ckpt]'",
                name=error.name,
            ) from None

        if not socket and not directory:
            raise ValueError("a Checkpointer needs the engine's socket or a directory; it has neither")
        self._identity = Identity(job, attempt, rank, world_size, -1)
        self._node = node
        self._clock: Clock = clock or HostClock()
        self._busy_wait_seconds = busy_wait_seconds
        self._retention_steps = retention_steps
        self._door = TensorDoor(torch, copy_threads)
        self._directory = Path(directory) if directory else None
        self._lock = threading.RLock()
        self._slots: dict[int, StagedSlot] = {}
        self._specs: list[Spec] | None = None
        self._geometry: Geometry | None = None
        self._last: Ticket | None = None
        self._link = EngineLink(socket, self._identity, self._clock, self._offers, self._kept) if socket else None
        if self._link is None:
            _log.warning("there is no checkpoint engine: every save waits for the disk at %s", directory)

    def save(self, state: dict[str, Any], step: int) -> Ticket:
        """Keep `state` as it is now. Raises TypeError where it holds something that cannot be saved; else
        never."""
        with self._lock:
            if self._last is not None and self._last.step == step and not self._last.failed:
                return self._last
            collector = Collector(self._door)
            values = dump_tree(encode_state(state, collector))
            geometry = self._plan(collector.specs, values)
            try:
                if self._link is not None:
                    ticket = self._save_to_engine(self._link, geometry, collector, values, step)
                else:
                    ticket = self._save_to_disk(geometry, collector, values, step)
            except (CheckpointError, OSError) as error:
                ticket = Ticket.refused(step, str(error))
            if ticket.failed:
                _log.warning("step %d was not saved: %s", step, ticket.failed)
            self._last = ticket
            return ticket

    def load(self, into: dict[str, Any], step: int | None = None) -> LoadReport | None:
        """Make `into` what it was at `step`, or at the newest step there is; None where there is none at all.

        Ranks of one job should be told the same step: asked for the newest, each says what it knows to be
        whole everywhere. Raises CheckpointNotFound, CheckpointDamaged (no tier has good bytes) or
        StateMismatch.
        """
        with self._lock:
            started = self._clock.monotonic()
            damaged: CheckpointDamaged | None = None
            not_from_disk: set[int] = set()
            for _ in range(LOAD_TRIES_MAX):
                source = self._find(step, not_from_disk)
                if source is None:
                    break
                try:
                    shard = self._fetch(source)
                    tree = load_tree(shard.values, len(shard.layout.places))
                except CheckpointDamaged as error:
                    damaged = error
                    self._tell_damaged(source, error)
                    if source.tier == "disk":
                        not_from_disk.add(source.step)
                        if step is None and self._identity.world_size > 1:
                            raise  # an older step of our own choice would not be the other ranks' choice
                    continue
                try:
                    views = self._door.views(shard.memory, shard.payload_offset, shard.layout)
                    Restorer(self._door, shard.layout, views).restore(tree, into)
                except BaseException:
                    self._tell({"op": "return"})  # or no save would ever get the slot that we were lent
                    raise
                return self._report(source, shard, started)
            if damaged is not None:
                raise damaged
            if step is None:
                return None
            raise CheckpointNotFound(self._not_found(step))

    def close(self) -> None:
        """Let go of the engine; what is saved stays."""
        with self._lock:
            if self._link is not None:
                self._link.close()
            for slot in self._slots.values():
                slot.close()
            self._slots.clear()

    def _plan(self, specs: list[Spec], values: bytes) -> Geometry:
        """Where things stand in a slot; the same as last time while names, dtypes and shapes are."""
        geometry = self._geometry
        if geometry is not None and specs == self._specs and len(values) <= geometry.values_capacity:
            return geometry
        layout: Layout = plan_layout(specs)
        raw = layout.encoded()
        self._specs, self._geometry = specs, Geometry(layout, raw, layout_hash(raw), len(values))
        return self._geometry

    def _save_to_engine(
        self, link: EngineLink, geometry: Geometry, collector: Collector, values: bytes, step: int
    ) -> Ticket:
        request = {
            "op": "acquire",
            "step": step,
            "segment_bytes": geometry.segment_bytes,
            "known": [slot.generation for slot in self._slots.values()],
            "wait_seconds": self._busy_wait_seconds,
        }
        reply, descriptors = link.ask(request, self._busy_wait_seconds)
        if "busy" in reply:
            return Ticket.refused(step, f"skipped, {reply['busy']}")
        started = self._clock.monotonic()
        slot = self._granted(wire.whole(reply, "slot"), wire.whole(reply, "generation"), descriptors)
        # Should the copy fail, the slot still says WRITING: it is void, and the next save gets it again.
        slot.write(self._door, geometry, collector.tensors, values, self._stamped(step))
        seconds = self._clock.monotonic() - started
        link.ask({"op": "seal", "slot": slot.index, "generation": slot.generation, "seconds": seconds})
        return Ticket(step, Mark(outcome=""), Mark(ask=lambda timeout: self._await_durable(link, step, timeout)))

    def _granted(self, index: int, generation: int, descriptors: list[int]) -> StagedSlot:
        slot = self._slots.get(index)
        if descriptors:
            if slot is not None:
                slot.close()
            slot = self._slots[index] = map_slot(index, generation, descriptors[0])
            wire.close_all(descriptors[1:])
        if slot is None or slot.generation != generation:
            raise EngineRefused(f"the engine granted slot {index}, which this rank has not mapped")
        return slot

    def _save_to_disk(self, geometry: Geometry, collector: Collector, values: bytes, step: int) -> Ticket:
        assert self._directory is not None
        slot = self._slots.get(0)
        if slot is None or slot.size_bytes < geometry.segment_bytes:
            slot = self._slots[0] = local_slot(geometry.segment_bytes)
        header = slot.write(self._door, geometry, collector.tensors, values, self._stamped(step))
        storage, writer = Storage(), f"rank-{self._identity.rank}"
        commit_shard(storage, self._directory, header, slot.view, writer=writer)
        if finish_step(storage, self._directory, step, self._identity.attempt, writer=writer) is not None:
            retain(storage, self._directory, self._retention_steps)
        return Ticket(step, Mark(outcome="there is no engine"), Mark(outcome=""))

    def _await_durable(self, link: EngineLink, step: int, timeout_seconds: float | None) -> str | None:
        deadline = None if timeout_seconds is None else self._clock.monotonic() + timeout_seconds
        request = {"op": "wait", "rank": self._identity.rank, "attempt": self._identity.attempt, "step": step}
        while True:
            left = DURABLE_WAIT_SECONDS if deadline is None else deadline - self._clock.monotonic()
            wait = min(max(left, 0.0), DURABLE_WAIT_SECONDS)
            try:
                fields = link.ask_aside({**request, "timeout_seconds": wait}, wait)
            except EngineUnavailable as error:
                return str(error)
            if fields.get("settled") is True:
                return wire.text(fields, "reason")
            if deadline is not None and self._clock.monotonic() >= deadline:
                return None

    def _find(self, step: int | None, not_from_disk: set[int]) -> _Source | None:
        if self._link is not None:
            with contextlib.suppress(EngineUnavailable):
                request = {"op": "load", "step": step, "not_from_disk": sorted(not_from_disk)}
                reply, descriptors = self._link.ask(request)
                if not wire.text(reply, "tier"):
                    return None
                found = wire.whole(reply, "step"), wire.whole(reply, "attempt")
                if descriptors:
                    return _Source("memory", *found, descriptors[0], wire.whole(reply, "crc32"))
                return _Source("disk", *found)
        directory = self._folder()
        if directory is None:
            return None
        records = loadable_steps(directory, self._identity.world_size, frozenset(not_from_disk))
        record = records.get(max(records, default=-1) if step is None else step)
        return None if record is None else _Source("disk", record.step, record.attempt)

    def _fetch(self, source: _Source) -> LoadedShard:
        wanted = self._stamped(source.step, source.attempt)
        if source.tier == "memory":
            return read_from_memory(source.descriptor, wanted, source.crc32)
        directory = self._folder()
        assert directory is not None
        return read_from_disk(directory, wanted)

    def _report(self, source: _Source, shard: LoadedShard, started: float) -> LoadReport:
        seconds, size_bytes = self._clock.monotonic() - started, shard.layout.payload_bytes
        self._tell(
            {
                "op": "loaded", "tier": source.tier, "step": source.step, "attempt": source.attempt,
                "seconds": seconds, "size_bytes": size_bytes,
            }
        )  # fmt: skip
        return LoadReport(source.step, source.tier, seconds, True, source.attempt, size_bytes)

    def _tell_damaged(self, source: _Source, error: CheckpointDamaged) -> None:
        _log.warning("step %d in %s cannot be used: %s", source.step, source.tier, error)
        self._tell(
            {
                "op": "damaged", "tier": source.tier, "step": source.step, "attempt": source.attempt,
                "reason": str(error),
            }
        )  # fmt: skip

    def _tell(self, fields: dict[str, Any]) -> None:
        if self._link is not None:
            with contextlib.suppress(EngineUnavailable):  # the load itself is done; the story lacks a line
                self._link.ask(fields)

    def _not_found(self, step: int) -> str:
        directory = self._folder()
        if directory is None:
            return f"step {step} is not in memory, and no checkpoint folder is known; give one"
        for manifest in complete_manifests(directory):
            if manifest.step != step:
                continue
            rejection = rejection_of(directory, step, manifest.attempt)
            if rejection is not None:
                return f"step {step} was rejected: {rejection.reason}"
            if manifest.world_size != self._identity.world_size:
                saved, now = manifest.world_size, self._identity.world_size
                return f"step {step} was saved by {saved} ranks, now there are {now}"
        there = ", ".join(str(record.step) for record in complete_steps(directory)) or "none"
        return f"step {step} is neither in memory nor complete under {directory}; complete there: {there}"

    def _folder(self) -> Path | None:
        if self._directory is None and self._link is not None and self._link.directory is not None:
            self._directory = Path(self._link.directory)
        return self._directory

    def _stamped(self, step: int, attempt: int | None = None) -> Identity:
        own = self._identity
        return Identity(own.job, own.attempt if attempt is None else attempt, own.rank, own.world_size, step)

    def _offers(self) -> list[tuple[int, int]]:
        return [(slot.index, slot.descriptor) for slot in self._slots.values() if slot.descriptor >= 0]

    def _kept(self, indices: Any, generations: Any) -> None:
        for index, generation in zip(indices, generations, strict=True):
            if generation:
                self._slots[index].generation = generation
            else:
                self._slots.pop(index).close()
