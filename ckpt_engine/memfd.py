"""One sealed memfd: memory that the engine and a rank share, and that neither can shrink under the other.

It is not a file of /dev/shm: only the memory cgroup of who touches a page first, and the host, bound it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from .errors import CheckpointDamaged
from .segment import PAGE_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # without them a peer's ftruncate is a SIGBUS in ours
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True)

Advise = Callable[[memoryview, int], None]  # raises OSError; EINVAL where the kernel does not know the advice
MemfdIdentity = tuple[int, int]  # device and inode: the same for every descriptor of one memfd, in any process


class Segment:
    """The descriptor and this process's mapping of it. The memory goes when every process has let go."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.identity = memfd_identity(descriptor)
        self.loans = 0  # views of it that ranks work with
        self.memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self.memory)

    def duplicate(self) -> int:
        """A descriptor of its own for another process; the receiver's to close."""
        return fcntl.fcntl(self.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        """Let go of the descriptor; the mapping follows when nobody reads it any more."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def discard(self) -> None:
        """Give the memory back now, whoever still maps it or holds a descriptor: it reads as zeros from here on."""
        with contextlib.suppress(OSError):
            madvise(self.view, _MADV_REMOVE)
        self.close()


def memfd_identity(descriptor: int) -> MemfdIdentity:
    """What tells whether two descriptors are of one memfd. Raises OSError."""
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


def madvise(view: memoryview, advice: int) -> None:
    """madvise(2) over all of a writable view, without the interpreter's lock. Raises OSError."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), ctypes.c_int(advice)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def create_segment(size_bytes: int, *, prefault: bool = False, advise: Advise = madvise) -> Segment:
    """A segment whose pages are all there, so that no store into it ever fails. Raises OSError.

    `prefault` also clears and maps them, for a copy that should not pay for it; `advise` is the system call.
    """
    descriptor = os.memfd_create("transom-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # a sparse file would end in SIGBUS where memory is short
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        segment = Segment(descriptor, size_bytes)
        if prefault:
            _prefault(segment.view, advise)
        return segment
    except BaseException:
        os.close(descriptor)
        raise


def adopt_segment(descriptor: int) -> Segment:
    """A segment that somebody kept over our restart. Raises CheckpointDamaged where it cannot be one of ours.

    The descriptor is the segment's from here on; it stays the caller's where this raises.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        stat = os.fstat(descriptor)
    except OSError as error:
        raise CheckpointDamaged(f"the offered descriptor is not a memfd: {error.strerror}") from error
    size_bytes = stat.st_size
    if seals & _SEALS != _SEALS or size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
        raise CheckpointDamaged("the offered memfd is not a sealed segment of whole pages")
    if stat.st_blocks * 512 < size_bytes:
        raise CheckpointDamaged("the offered memfd has been given back: its pages are not there")
    try:
        return Segment(descriptor, size_bytes)
    except OSError as error:
        raise CheckpointDamaged(f"the offered memfd cannot be mapped: {error.strerror}") from error


def adopt_duplicate(descriptor: int) -> Segment:
    """The same from a descriptor that stays the caller's in any case. Raises CheckpointDamaged and OSError."""
    duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
    try:
        return adopt_segment(duplicate)
    except BaseException:
        os.close(duplicate)
        raise


def _prefault(view: memoryview, advise: Advise) -> None:
    try:
        advise(view, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for at in range(0, len(view), PAGE_BYTES):  # a kernel before 5.14: one store a page does the same, slower
            view[at] = 0
