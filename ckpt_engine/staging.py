"""A slot as the rank sees it: mapped once, with a tensor over each place that the next save will be copied
to."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layout import Layout
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
        self._geometry: Geometry | None = None
        self._views: list[Tensor] = []

    def write(
        self,
        door: TensorDoor,
        geometry: Geometry,
        tensors: Sequence[Tensor],
        values: bytes,
        identity: Identity,
    ) -> SlotHeader:
        """Copy a state in and seal it: what is readable before the last line is a slot that says WRITING."""
        begin_writing(self.view)
        if self._geometry is not geometry:
            self._views = door.views(self._memory, geometry.payload_offset, geometry.layout)
            self.view[PAGE_BYTES : geometry.values_offset] = geometry.layout_raw
            self._geometry = geometry
        door.copy(self._views, tensors)
        self.view[geometry.values_offset : geometry.values_offset + len(values)] = values
        header = SlotHeader(
            identity.job, identity.attempt, identity.rank, identity.world_size, identity.step,
            geometry.layout_hash, len(geometry.layout_raw), geometry.values_offset, len(values),
            geometry.payload_offset, geometry.layout.payload_bytes,
        )  # fmt: skip
        write_header(self.view, header)
        publish_state(self.view, SlotState.SEALED)
        return header

    def close(self) -> None:
        """Let go of the descriptor and the tensors; the mapping goes with the last of them."""
        self._views = []
        self._geometry = None
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1


def map_slot(index: int, generation: int, descriptor: int) -> StagedSlot:
    """Map a segment of the engine, page tables included. The descriptor is the slot's from here on.

    Forked children inherit the mapping: MADV_DONTFORK would leave a hole there that a later munmap of ours
    could hit.
    """
    try:
        size_bytes = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except BaseException:
        os.close(descriptor)
        raise
    return StagedSlot(index, generation, descriptor, memory)


def local_slot(size_bytes: int) -> StagedSlot:
    """Private memory of the same shape, for saves without an engine."""
    return StagedSlot(0, 0, -1, mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
