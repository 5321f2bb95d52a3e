"""Fenced saves: a save is one message, and the engine copies while forward and backward run.

What only an optimizer's step changes lives in memory that the engine can read (live.py). `save` copies what else the
state holds, asks for a slot, and returns; the engine copies the whole image into the slot. `fence`, before the
optimizer's step, waits for that if it must, looks whether anything was written meanwhile, and only then seals the
slot. So a copy that a write may have torn is never sealed: the slot stays void, the ticket says why, and the save
before it stands. Without the fence no save is ever sealed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from . import wire
from .capture import Taken
from .clock import Clock
from .copying import CopyThreads
from .errors import CheckpointError, EngineRefused
from .link import EngineLink, Posted
from .live import LiveImage, owned_tensors
from .segment import PAGE_BYTES, SlotState, publish_state
from .shardfile import Identity
from .staging import Geometry
from .tensors import TensorDoor
from .ticket import Mark, Ticket

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

NAMED_MAX = 3  # tensors that a message names
_VERSION: Callable[[Any], int] = attrgetter("_version")  # how often it was written, as torch counts

Take = Callable[[dict[str, Any]], tuple[Geometry, Taken]]
Durable = Callable[[int, float | None], str | None]


class HeldSlot:
    """A slot of the engine of which the rank maps the header page only: it seals it, the engine fills it."""

    def __init__(self, index: int, generation: int, descriptor: int) -> None:
        self.index = index
        self.generation = generation
        self.descriptor = descriptor
        try:
            self._header = memoryview(mmap.mmap(descriptor, PAGE_BYTES, mmap.MAP_SHARED))
        except BaseException:
            os.close(descriptor)
            raise

    def seal(self) -> None:
        publish_state(self._header, SlotState.SEALED)

    def close(self) -> None:
        """Let go of the descriptor; the page goes with the last view of it."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True, eq=False)
class FencedSave:
    """One save. `outcome`: "" once sealed, the reason where it never will be, None while that is open."""

    step: int
    posted: Posted
    watched: list[Tensor]
    versions: list[int]
    names: list[str]
    thread: int
    stall_seconds: float
    fenced: threading.Event = field(default_factory=threading.Event)
    sealing: Posted | None = None
    outcome: str | None = None
    ticket: Ticket | None = None

    def end(self, outcome: str) -> None:
        """It is known how it ended."""
        self.outcome = outcome
        self.fenced.set()
        if outcome:
            _log.warning("step %d was not saved: %s", self.step, outcome)
        if self.ticket is not None:
            self.ticket.sealed.settle(outcome)
            if outcome:
                self.ticket.durable.settle(outcome)
                self.ticket.backed_up.settle(outcome)

    def written(self) -> str:
        """The first tensor that was written since the save; empty where none was."""
        now = list(map(_VERSION, self.watched))
        if now == self.versions:
            return ""
        return next(
            name for name, *counts in zip(self.names, now, self.versions, strict=True) if counts[0] != counts[1]
        )


class FencedSaves:
    """The saves of one rank. All but what a ticket does belongs to the thread that trains.

    `take` is the state as it is now and where it would stand in a slot, `durable` waits for a step on disk,
    `backed_up` for its copies on other nodes, `looked_at` says whether views of ours look at a slot.
    """

    def __init__(
        self,
        door: TensorDoor,
        link: EngineLink,
        clock: Clock,
        threads: CopyThreads,
        take: Take,
        durable: Durable,
        backed_up: Durable,
        looked_at: Callable[[int], bool],
        busy_wait_seconds: float,
    ) -> None:
        self._door = door
        self._link = link
        self._clock = clock
        self._threads = threads
        self._take = take
        self._await_durable = durable
        self._await_backed_up = backed_up
        self._looked_at = looked_at
        self._busy_wait_seconds = busy_wait_seconds
        self._slots: dict[int, HeldSlot] = {}
        self._live: LiveImage | None = None
        self._pending: FencedSave | None = None
        self._sealing: FencedSave | None = None
        self._guarded: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that fence by themselves
        self._warned = False
        atexit.register(_close_at_exit, weakref.ref(self), os.getpid())

    def adopt(self, state: dict[str, Any]) -> int:
        """Move the parameters of the modules and the tensors of the optimizers in `state` into memory that the engine
        reads, and fence before the steps of these optimizers; the bytes that live there.

        Raises TypeError naming what cannot be moved because a tensor outside the state shares its memory.
        """
        self.fence()
        live, taken, refused = self._settled(state)
        if refused:
            raise TypeError(_refusal(refused))
        return sum(tensor.numel() * tensor.element_size() for tensor in live.watched(taken))

    def save(self, state: dict[str, Any], step: int, identity: Identity) -> Ticket:
        """Begin to save `state` as it is now. Raises TypeError where it holds something that cannot be saved; else
        never."""
        try:
            save = self._begin(state, step, identity)
        except (CheckpointError, OSError) as error:
            return Ticket.refused(step, str(error))
        sealed = Mark(ask=lambda timeout: self._wait(save, timeout))
        durable = Mark(ask=lambda timeout: self._wait_on(save, self._await_durable, timeout))
        backed_up = Mark(ask=lambda timeout: self._wait_on(save, self._await_backed_up, timeout))
        save.ticket = Ticket(step, sealed, durable, backed_up)
        return save.ticket

    def fence(self) -> float:
        """Call it before anything of the state is written: waits until the engine has copied it, and seals the copy.
        Returns the seconds that this took."""
        pending, self._pending = self._pending, None
        if pending is None:
            return 0.0
        began = self._clock.monotonic()
        try:
            self._seal(pending)
        except (CheckpointError, OSError) as error:
            pending.end(str(error))
        pending.watched.clear()
        pending.fenced.set()
        return self._clock.monotonic() - began

    def fence_before(self, optimizer: Any) -> None:
        """Fence before every step of `optimizer`, from now on."""
        if optimizer not in self._guarded:
            optimizer.register_step_pre_hook(self._before_step)
            self._guarded.add(optimizer)

    def offers(self) -> list[tuple[int, int]]:
        """(slot, descriptor) of what a restarted engine may take back."""
        return [(slot.index, slot.descriptor) for slot in self._slots.values()]

    def kept(self, indices: Sequence[int], generations: Sequence[int]) -> None:
        """What became of the offers: their new generations, 0 where they were not wanted."""
        for index, generation in zip(indices, generations, strict=True):
            if generation:
                self._slots[index].generation = generation
            else:
                self._slots.pop(index).close()

    def close(self) -> None:
        """Seal what is still open, if nothing was written since; then let go. The tensors stay where they are."""
        self.fence()
        if self._sealing is not None:
            self._collect(self._sealing)
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        if self._live is not None:
            self._live.close()
            self._live = None

    def _before_step(self, *_: object) -> None:
        self.fence()

    def _begin(self, state: dict[str, Any], step: int, identity: Identity) -> FencedSave:
        began = self._clock.monotonic()
        self._end_pending()
        live, taken, refused = self._settled(state)
        if refused and not self._warned:
            self._warned = True
            _log.warning("%s; it is copied while training waits", _refusal(refused))
        if any(self._looked_at(slot.descriptor) for slot in self._slots.values()):
            raise EngineRefused("skipped, views of a slot are in use; drop them, or save again")
        live.write(taken, identity, self._threads)
        request = {
            "op": "copy_live",
            "step": step,
            "segment_bytes": live.geometry.segment_bytes,
            "known": [slot.generation for slot in self._slots.values()],
            "wait_seconds": self._busy_wait_seconds,
        }
        posted = self._link.post(request, [live.descriptor])
        watched = live.watched(taken)
        versions = list(map(_VERSION, watched))
        stall = self._clock.monotonic() - began
        self._pending = FencedSave(step, posted, watched, versions, live.names, threading.get_ident(), stall)
        return self._pending

    def _end_pending(self) -> None:
        """The save before is over, one way or the other, before the image is written again."""
        if self._pending is not None and not self._guarded:
            # A write that goes by tensor.data leaves no trace in the versions, so nobody can say that there was none.
            pending, self._pending = self._pending, None
            with contextlib.suppress(CheckpointError):
                wire.close_all(self._link.collect(pending.posted, self._busy_wait_seconds)[1])
            pending.end(
                "the next save came without a fence between; call fence() before the optimizer's step, or "
                "fence_before(optimizer) once"
            )
        self.fence()
        if self._sealing is not None:
            self._collect(self._sealing)

    def _settled(self, state: dict[str, Any]) -> tuple[LiveImage, Taken, list[str]]:
        """The image and the state, after all that can live in the engine's sight does; and what was refused."""
        geometry, taken = self._take(state)
        live = self._live
        if live is not None and live.geometry is geometry and live.is_settled(taken):
            return live, taken, []
        for value in state.values():
            if isinstance(value, self._door.torch.optim.Optimizer):
                self.fence_before(value)
        if live is None or live.geometry is not geometry:
            previous, live = live, LiveImage(self._door, geometry)
            self._live = live
            if previous is not None:
                previous.close()
        moves = live.move_in(taken, owned_tensors(self._door.torch, state))
        taken.tensors.clear()  # or our own would look like somebody else's
        refused = live.take_back(moves)
        again, taken = self._take(state)
        if again is not geometry:
            raise EngineRefused("the state changed while it was being moved; save it from one thread only")
        live.settle(taken)
        return live, taken, refused

    def _seal(self, pending: FencedSave) -> None:
        reply, descriptors = self._link.collect(pending.posted, self._busy_wait_seconds)
        if "busy" in reply:
            wire.close_all(descriptors)
            pending.end(f"skipped, {reply['busy']}")
            return
        slot = self._granted(wire.whole(reply, "slot"), wire.whole(reply, "generation"), descriptors)
        written = pending.written()
        if written:
            pending.end(
                f"{written} was written before the fence, while it was being copied; call fence() before everything "
                "that writes to the state, or fence_before(optimizer) once"
            )
            return
        slot.seal()
        request = {
            "op": "seal", "slot": slot.index, "generation": slot.generation, "seconds": pending.stall_seconds,
        }  # fmt: skip
        pending.sealing = self._link.post(request)
        self._sealing = pending

    def _wait(self, save: FencedSave, timeout_seconds: float | None) -> str | None:
        """What became of a save, as `Mark` asks. In the thread that saved this is a fence; others wait for one."""
        if save is self._pending and threading.get_ident() == save.thread:
            self.fence()
        elif not save.fenced.wait(timeout_seconds):
            return None
        self._collect(save)
        return save.outcome

    def _wait_on(self, save: FencedSave, ask: Durable, timeout_seconds: float | None) -> str | None:
        """What became of a save after it was sealed."""
        outcome = self._wait(save, timeout_seconds)
        return ask(save.step, timeout_seconds) if outcome == "" else outcome

    def _collect(self, save: FencedSave) -> None:
        """Read what the engine said to the seal. It has said it long ago, as a rule."""
        if save.outcome is not None or save.sealing is None:
            return
        if save is self._sealing:
            self._sealing = None
        try:
            wire.close_all(self._link.collect(save.sealing)[1])
        except CheckpointError as error:
            save.end(str(error))
        else:
            save.end("")

    def _granted(self, index: int, generation: int, descriptors: Sequence[int]) -> HeldSlot:
        slot = self._slots.get(index)
        if descriptors:
            if slot is not None:
                slot.close()
            wire.close_all(descriptors[1:])
            slot = self._slots[index] = HeldSlot(index, generation, descriptors[0])
        if slot is None or slot.generation != generation:
            raise EngineRefused(f"the engine granted slot {index}, which this rank does not hold")
        return slot


def _close_at_exit(saves: weakref.ref[FencedSaves], pid: int) -> None:
    """A script that ends right after a save has saved; a forked child of it has nothing to end."""
    alive = saves()
    if alive is not None and os.getpid() == pid:
        alive.close()


def _refusal(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - NAMED_MAX} more" if len(paths) > NAMED_MAX else ""
    return (
        f"{', '.join(paths[:NAMED_MAX])}{more} cannot live in the engine's sight: a tensor outside the state, "
        "or a view in it, shares the memory and would be left behind"
    )
