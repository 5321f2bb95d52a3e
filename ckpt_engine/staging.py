"""A slot as the rank sees it: mapped once, ready to have the next state copied into it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .capture import Taken
from .copying import CopyThreads, Target
from .layout import Layout, layout_hash
from .memfd import madvise
from .segment import (
    PAGE_BYTES,
    SlotHeader,
    SlotState,
    begin_writing,
    publish_state,
    segment_bytes,
    write_header,
)
from .shardfile import Identity
from .tensors import TensorDoor

if TYPE_CHECKING:
    from torch import Tensor

VALUES_BYTES_MIN = 4096
_POPULATE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where layout, values and payload of one kind of state stand in a segment."""

    layout: Layout
    layout_raw: bytes
    layout_hash: bytes
    values_bytes: int  # of the first save with this geometry

    @property
    def values_offset(self) -> int:
        return PAGE_BYTES + len(self.layout_raw)

    @property
    def values_capacity(self) -> int:
        """Numbers grow longer as training goes on; a new segment should not be needed for that."""
        return max(2 * self.values_bytes, VALUES_BYTES_MIN)

    @property
    def payload_offset(self) -> int:
        return segment_bytes(self.values_offset, self.values_capacity)

    @property
    def segment_bytes(self) -> int:
        return segment_bytes(self.payload_offset, self.layout.payload_bytes)

    @classmethod
    def of(cls, layout: Layout, values_bytes: int) -> Geometry:
        raw = layout.encoded()
        return cls(layout, raw, layout_hash(raw), values_bytes)


class StagedSlot:
    """One mapped segment. The mapping is never closed: a tensor over closed memory is a crash, so it goes
    with them."""

    def __init__(self, index: int, generation: int, descriptor: int, memory: mmap.mmap) -> None:
        self.index = index
        self.generation = generation
        self.descriptor = descriptor
        self.size_bytes = len(memory)
        self.view = memoryview(memory)
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._geometry: Geometry | None = None
        self._odd: dict[int, Tensor] = {}  # places that torch fills, as tensors
        self._pinned: Any = None

    def write(
        self, door: TensorDoor, threads: CopyThreads, geometry: Geometry, taken: Taken, identity: Identity
    ) -> SlotHeader:
        """Copy a state in and seal it: what is readable before the last line is a slot that says WRITING."""
        begin_writing(self.view)
        if self._geometry is not geometry:
            self._odd = {}
            self.view[PAGE_BYTES : geometry.values_offset] = geometry.layout_raw
            self._geometry = geometry
        self._copy_odd(door, geometry, taken)
        start = geometry.payload_offset
        taken.plan.copies.copy(Target(self._address + start, self.descriptor, start), threads)
        if self._pinned is not None:
            self._pinned.wait()  # the devices' copies ran beside ours
        values = taken.values
        self.view[geometry.values_offset : geometry.values_offset + len(values)] = values
        header = SlotHeader(
            identity.job, identity.attempt, identity.rank, identity.world_size, identity.step,
            geometry.layout_hash, len(geometry.layout_raw), geometry.values_offset, len(values),
            geometry.payload_offset, geometry.layout.payload_bytes,
        )  # fmt: skip
        write_header(self.view, header)
        publish_state(self.view, SlotState.SEALED)
        return header

    def populate(self) -> None:
        """Fill the page tables, so that no copy takes a fault; without the interpreter's lock."""
        with contextlib.suppress(OSError):  # an older kernel: the first copy takes the faults
            for start in range(0, self.size_bytes, _POPULATE_BYTES):
                madvise(self.view[start : start + _POPULATE_BYTES], _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Let go of the descriptor and the tensors; the mapping goes with the last of them."""
        self._odd = {}
        self._geometry = None
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1

    def _copy_odd(self, door: TensorDoor, geometry: Geometry, taken: Taken) -> None:
        """What does not lie in this host's memory row by row goes through torch."""
        for number in taken.plan.odd:
            target = self._odd.get(number)
            if target is None:
                place = geometry.layout.places[number]
                target = self._odd[number] = door.at_place(self._memory, geometry.payload_offset, place)
            source = taken.plan.source(number, taken.tensors)
            if source.device.type == "cuda":
                self._from_cuda(door, target, source)
            else:
                door.copy([target], [source])

    def _from_cuda(self, door: TensorDoor, target: Tensor, source: Tensor) -> None:
        if self._pinned is None:
            from .cuda_copy import PinnedMapping  # only where there is a GPU

            self._pinned = PinnedMapping(door.torch, self._address, self.size_bytes)
        self._pinned.enqueue(target, source)


def map_slot(index: int, generation: int, descriptor: int, *, populate: bool = True) -> StagedSlot:
    """Map a segment of the engine, page tables included unless the caller does that. The descriptor is the slot's
    from here on.

    Forked children inherit the mapping: MADV_DONTFORK would leave a hole there that a later munmap of ours
    could hit.
    """
    try:
        size_bytes = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
    except BaseException:
        os.close(descriptor)
        raise
    return StagedSlot(index, generation, descriptor, memory)


def local_slot(size_bytes: int) -> StagedSlot:
    """Memory of the same shape that nobody else sees, for saves without an engine."""
    descriptor = os.memfd_create("transom-save", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return map_slot(0, 0, descriptor)
