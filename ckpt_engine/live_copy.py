"""The engine's side of a fenced save: the image of a shard in a rank's own memory is copied into a slot, while the
rank goes on computing with the tensors in that very memory.

It is mapped once, and copied by one call: from some 100 MB on the library of C copies past the processor's caches, for
half of what reading the descriptor costs, and training has the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from .errors import CheckpointDamaged
from .memfd import MemfdIdentity, madvise, memfd_identity
from .segment import FIELDS_END, PAGE_BYTES, SlotHeader, read_header, write_header

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_READ = 22  # Linux 5.14
_BLOCK_BYTES = 512  # as fstat counts


class LiveMemory:
    """A rank's own memory as its engine sees it. What we map is private: we could not write to theirs."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """The descriptor stays the caller's. Raises CheckpointDamaged where it is not a sealed memfd of that size."""
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError as error:
            raise CheckpointDamaged(f"the rank's memory is not a memfd: {error.strerror}") from error
        if not sealed or os.fstat(descriptor).st_size != size_bytes or size_bytes < PAGE_BYTES:
            raise CheckpointDamaged(f"the rank's memory is not a sealed memfd of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.identity: MemfdIdentity = memfd_identity(descriptor)
        self._memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError), memoryview(self._memory) as view:  # an older kernel: the copy takes faults
            madvise(view, _MADV_POPULATE_READ)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def copy(self, descriptor: int, slot: memoryview) -> SlotHeader:
        """Copy the image into `slot`: all but the state word and the checksum, so the slot stays WRITING.

        `descriptor` is of the same memory. Raises CheckpointDamaged where it is not, holds no image of a shard, or
        does not fit.
        """
        if self.size_bytes > len(slot):
            raise CheckpointDamaged(f"an image of {self.size_bytes} bytes does not fit a slot of {len(slot)}")
        stat = os.fstat(descriptor)
        if stat.st_blocks * _BLOCK_BYTES < self.size_bytes:  # to read a hole could need memory that there is not
            raise CheckpointDamaged("the rank has given pages of its memory back")
        _copy(slot, self._address, 0, FIELDS_END)
        _copy(slot, self._address, PAGE_BYTES, self.size_bytes)
        header = read_header(slot[: self.size_bytes])
        write_header(slot, header)  # the same once more for the slot, which may be longer
        return header

    def close(self) -> None:
        """Let go of the memory."""
        with contextlib.suppress(BufferError):  # it goes with the last who looks at it
            self._memory.close()


class LiveMemories:
    """The memory that one rank saves from; another when its layout has changed."""

    def __init__(self) -> None:
        self._memory: LiveMemory | None = None

    def of(self, descriptor: int, size_bytes: int) -> LiveMemory:
        """That of `descriptor`, mapped. Raises CheckpointDamaged, OSError."""
        memory = self._memory
        if memory is None or (memory.identity, memory.size_bytes) != (memfd_identity(descriptor), size_bytes):
            self.close()
            self._memory = memory = LiveMemory(descriptor, size_bytes)
        return memory

    def close(self) -> None:
        """Let go of it: the rank is gone."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _copy(slot: memoryview, source: int, start: int, stop: int) -> None:
    """Without the interpreter's lock: other ranks are served meanwhile."""
    target = ctypes.addressof(ctypes.c_char.from_buffer(slot))
    ctypes.memmove(target + start, source + start, stop - start)
