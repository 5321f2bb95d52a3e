"""The saving half of a `Checkpointer`: the state is captured, a slot granted, one copy made, and the slot sealed."""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .capture import Capture, Taken
from .clock import Clock
from .commit import commit_shard, finish_step, retain
from .copying import CopyThreads
from .errors import CheckpointError, EngineRefused, EngineUnavailable
from .forecast import expected_bytes, is_quiet
from .link import EngineLink
from .shardfile import Identity
from .staging import Geometry, StagedSlot, local_slot, map_slot
from .storage import Storage
from .tensors import TensorDoor
from .ticket import Mark, Ticket

_log = logging.getLogger(__name__)

DURABLE_WAIT_SECONDS = 60.0
NO_ENGINE = "there is no checkpoint engine"


@dataclass(frozen=True, slots=True)
class SavePlace:
    """Where one rank's saves go: to the engine behind `link`, without one to `directory`."""

    link: EngineLink | None
    directory: Path | None
    busy_wait_seconds: float
    retention_steps: int


class Saver:
    """Saves of one rank, one at a time. Not for two threads at once."""

    def __init__(
        self, door: TensorDoor, threads: CopyThreads, identity: Identity, clock: Clock, place: SavePlace
    ) -> None:
        self._door = door
        self._threads = threads
        self._identity = identity
        self._clock = clock
        self._place = place
        self._capture = Capture(door)
        self._geometry: Geometry | None = None
        self._slots: dict[int, StagedSlot] = {}
        self._slots_lock = threading.RLock()
        self._planning = threading.RLock()  # `prepare` plans beside training
        self._prepared = threading.Event()
        self._prepared.set()
        self._pid = os.getpid()
        self._closed = False
        self.forbidden: Callable[[int], bool] = lambda descriptor: False  # slots that views of ours look at

    def save(self, state: dict[str, Any], step: int) -> Ticket:
        """Keep `state` as it is now. Raises TypeError where it holds something that cannot be saved; else
        never."""
        geometry, taken = self.take(state)
        try:
            if self._place.link is None:
                return self._save_to_disk(geometry, taken, step)
            return self._save_to_engine(self._place.link, geometry, taken, step)
        except (CheckpointError, OSError) as error:
            return Ticket.refused(step, str(error))

    def take(self, state: dict[str, Any]) -> tuple[Geometry, Taken]:
        """`state` as it is now, and where it would stand in a slot: the same Geometry while its layout is the same.
        Raises TypeError."""
        with self._planning, _no_collection():
            taken = self._capture.take(state)
            geometry, layout = self._geometry, taken.plan.layout
            if geometry is not None and len(taken.values) <= geometry.values_capacity:
                if layout is geometry.layout:
                    return geometry, taken
                if layout == geometry.layout:
                    taken.plan.layout = geometry.layout
                    return geometry, taken
            self._geometry = Geometry.of(layout, len(taken.values))
            return self._geometry, taken

    def forget(self) -> None:
        """Take the next state as if it were the first."""
        with self._planning:
            self._capture.forget()

    def prepare(self, state: dict[str, Any]) -> None:
        """Have the engine make slots for states like this one, and map them, while training goes on; and plan the save,
        if that asks nobody who might mind. Never raises, and does not wait for any of it."""
        link = self._place.link
        if link is None or self._geometry is not None or not self.prepared(0.0):
            return  # nothing to make ready, or a save was first
        self._prepared.clear()
        # Thread.start would wait until it runs, and whoever has just loaded wants to go on. The state goes in a list
        # that is emptied: what runs keeps its arguments, and with them the state, until it ends.
        _thread.start_new_thread(self._prepare, (link, [state]))

    def prepared(self, timeout_seconds: float | None = None) -> bool:
        """Wait until a `prepare` is over; whether it is. In a forked child it does not go on."""
        return os.getpid() != self._pid or self._prepared.wait(timeout_seconds)

    def offers(self) -> list[tuple[int, int]]:
        """(slot, descriptor) of what this rank has mapped, for an engine that was started again."""
        with self._slots_lock:
            return [(slot.index, slot.descriptor) for slot in self._slots.values() if slot.descriptor >= 0]

    def kept(self, indices: Sequence[int], generations: Sequence[int]) -> None:
        """What became of the offers: their new generations, 0 where they were not wanted."""
        with self._slots_lock:
            for index, generation in zip(indices, generations, strict=True):
                if generation:
                    self._slots[index].generation = generation
                else:
                    self._slots.pop(index).close()

    def close(self) -> None:
        """Let go of all slots; what is saved stays."""
        self._closed = True
        self.prepared()
        with self._slots_lock:
            for slot in self._slots.values():
                slot.close()
            self._slots.clear()
        self._threads.close()

    def _save_to_engine(self, link: EngineLink, geometry: Geometry, taken: Taken, step: int) -> Ticket:
        wait_seconds = self._place.busy_wait_seconds
        request = {
            "op": "acquire",
            "step": step,
            "segment_bytes": geometry.segment_bytes,
            "known": self._known(),
            "wait_seconds": wait_seconds,
        }
        reply, descriptors = link.ask(request, wait_seconds)
        if "busy" in reply:
            return Ticket.refused(step, f"skipped, {reply['busy']}")
        started = self._clock.monotonic()
        slot = self._granted(wire.whole(reply, "slot"), wire.whole(reply, "generation"), descriptors)
        if self.forbidden(slot.descriptor):  # an engine that was restarted knows of no views
            raise EngineRefused("skipped, views of the only free slot are in use; drop them, or save again")
        # Should the copy fail, the slot still says WRITING: it is void, and the next save gets it again.
        slot.write(self._door, self._threads, geometry, taken, self.stamped(step))
        seconds = self._clock.monotonic() - started
        link.ask({"op": "seal", "slot": slot.index, "generation": slot.generation, "seconds": seconds})
        durable = Mark(ask=lambda timeout: self.await_durable(link, step, timeout))
        backed_up = Mark(ask=lambda timeout: self.await_backed_up(link, step, timeout))
        return Ticket(step, Mark(outcome=""), durable, backed_up)

    def _save_to_disk(self, geometry: Geometry, taken: Taken, step: int) -> Ticket:
        directory = self._place.directory
        assert directory is not None
        slot = self._slots.get(0)
        if slot is None or slot.size_bytes < geometry.segment_bytes:
            if slot is not None:
                slot.close()
            slot = self._slots[0] = local_slot(geometry.segment_bytes)
        header = slot.write(self._door, self._threads, geometry, taken, self.stamped(step))
        storage, writer = Storage(), f"rank-{self._identity.rank}"
        commit_shard(storage, directory, header, slot.view, writer=writer)
        if finish_step(storage, directory, step, self._identity.attempt, writer=writer) is not None:
            retain(storage, directory, self._place.retention_steps)
        return Ticket(step, Mark(outcome=NO_ENGINE), Mark(outcome=""))

    def _prepare(self, link: EngineLink, states: list[dict[str, Any]]) -> None:
        try:
            need_bytes = self._plan_ahead(states.pop())
            if need_bytes:
                self._make_ready(link, need_bytes)
        finally:
            self._prepared.set()

    def _plan_ahead(self, state: dict[str, Any]) -> int:
        """Bytes of a segment for `state`; 0 where that cannot be told. Training may be writing to it meanwhile."""
        need_bytes = 0
        try:
            need_bytes = expected_bytes(self._door, state)
            if not is_quiet(self._door, state):
                return need_bytes
            with self._planning:
                if self._geometry is None:
                    geometry, taken = self.take(state)
                    need_bytes = max(need_bytes, geometry.segment_bytes)
                    taken.plan.watch(taken.tensors)
                    self._capture.doubt()
        except Exception as error:  # noqa: BLE001 - a state that changes under us raises whatever it likes; the save takes it anew
            _log.debug("the first save could not be planned ahead: %s", error)
            self.forget()
        return need_bytes

    def _make_ready(self, link: EngineLink, need_bytes: int) -> None:
        """The engine's part and ours: both take the time of a page fault for each page, none of it in a save."""
        for index in range(2):
            if self._closed:
                return
            request = {"op": "prepare", "slot": index, "segment_bytes": need_bytes, "known": self._known()}
            try:
                reply, descriptors = link.ask(request)
                if descriptors:
                    self._granted(index, wire.whole(reply, "generation"), descriptors, replace=False)
            except (CheckpointError, OSError) as error:
                _log.info("slots could not be made ready before the first save: %s", error)
                return
        with self._slots_lock:
            slots = list(self._slots.values())
        for slot in slots:
            if not self._closed:
                slot.populate()

    def _known(self) -> list[int]:
        with self._slots_lock:
            return [slot.generation for slot in self._slots.values()]

    def _granted(self, index: int, generation: int, descriptors: Sequence[int], *, replace: bool = True) -> StagedSlot:
        with self._slots_lock:
            slot = self._slots.get(index)
            if descriptors and slot is not None and (slot.generation == generation or not replace):
                wire.close_all(descriptors)  # the other thread was first, and may be writing there
            elif descriptors:
                if slot is not None:
                    slot.close()
                wire.close_all(descriptors[1:])
                slot = self._slots[index] = map_slot(index, generation, descriptors[0], populate=replace)
            if slot is None or slot.generation != generation:
                raise EngineRefused(f"the engine granted slot {index}, which this rank has not mapped")
            return slot

    def await_durable(self, link: EngineLink, step: int, timeout_seconds: float | None) -> str | None:
        """ "" once `step` is on disk, why it never will be, None where neither is known in time."""
        return self._await(link, step, "disk", timeout_seconds)

    def await_backed_up(self, link: EngineLink, step: int, timeout_seconds: float | None) -> str | None:
        """The same of its copies on other nodes."""
        return self._await(link, step, "peer", timeout_seconds)

    def _await(self, link: EngineLink, step: int, what: str, timeout_seconds: float | None) -> str | None:
        deadline = None if timeout_seconds is None else self._clock.monotonic() + timeout_seconds
        identity = self._identity
        request = {"op": "wait", "what": what, "rank": identity.rank, "attempt": identity.attempt, "step": step}
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

    def stamped(self, step: int) -> Identity:
        """Whose shard a save of `step` is."""
        own = self._identity
        return Identity(own.job, own.attempt, own.rank, own.world_size, step)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of short-lived objects are no reason to search the whole heap of a training process for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
