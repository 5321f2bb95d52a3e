"""One sealed, pre-faulted memfd: memory that the engine and a rank share, and that neither can shrink under
the other."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from .errors import CheckpointDamaged
from .segment import PAGE_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # without them a peer's ftruncate is a SIGBUS in ours


class Segment:
    """The descriptor and this process's mapping of it. The memory goes when every process has let go."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self._memory)

    def duplicate(self) -> int:
        """A descriptor of its own for another process; the receiver's to close."""
        return fcntl.fcntl(self.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        """Let go of the descriptor; the mapping follows when nobody reads it any more."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            with contextlib.suppress(OSError):
                os.close(descriptor)


def create_segment(size_bytes: int) -> Segment:
    """A segment whose pages are all there, so that no copy into it ever takes a fault. Raises OSError."""
    descriptor = os.memfd_create("transom-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # a sparse file would end in SIGBUS where memory is short
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return Segment(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def adopt_segment(descriptor: int) -> Segment:
    """A segment that a rank kept over our restart. Raises CheckpointDamaged where it cannot be one of ours.

    The descriptor is the segment's from here on; it stays the caller's where this raises.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size_bytes = os.fstat(descriptor).st_size
    except OSError as error:
        raise CheckpointDamaged(f"the offered descriptor is not a memfd: {error.strerror}") from error
    if seals & _SEALS != _SEALS or size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
        raise CheckpointDamaged("the offered memfd is not a sealed segment of whole pages")
    return Segment(descriptor, size_bytes)
