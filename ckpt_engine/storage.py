"""The few operations on a file system that a commit is made of; tests replace them to fail at a chosen
one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from .directio import ALIGNMENT_BYTES, REFUSALS, takes_direct

DIRECT_BYTES_MIN = 1 << 20  # below, the page cache is no burden
BOUNCE_BYTES = 1 << 20


class OutputFile:
    """A file being written from its start; `sync` returns when its bytes would survive a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._written_bytes = 0
        self._direct = False
        self._bounce: mmap.mmap | None = None  # an aligned copy of memory that is not

    def bypass_cache(self) -> bool:
        """Write whole pages past the page cache from here on; False where the kernel takes no such file."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
        self._direct = True
        return True

    def write(self, piece: bytes | memoryview) -> None:
        """All of `piece`, however short each write is."""
        rest = memoryview(piece)
        while self._direct and len(rest) >= ALIGNMENT_BYTES and self._written_bytes % ALIGNMENT_BYTES == 0:
            rest = rest[self._write_past_cache(rest[: len(rest) // ALIGNMENT_BYTES * ALIGNMENT_BYTES]) :]
        if len(rest) and self._direct:
            self._use_cache()  # the tail of a file, or the rest of a short write
        while len(rest):
            rest = rest[self._counted(os.write(self._descriptor, rest)) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def forget(self) -> None:
        """Leave the page cache to training; after `sync`, or there is nothing that may go."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_past_cache(self, pages: memoryview) -> int:
        """How much of `pages` is written; 0 where this file goes through the cache from now on."""
        try:
            return self._counted(os.write(self._descriptor, pages))
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
        # Either this memory is not aligned, or the file system does not take it after all: a copy that is tells which.
        piece = pages[:BOUNCE_BYTES]
        if self._bounce is None:
            self._bounce = mmap.mmap(-1, BOUNCE_BYTES)
        self._bounce[: len(piece)] = bytes(piece)
        try:
            with memoryview(self._bounce) as copy, copy[: len(piece)] as aligned:
                return self._counted(os.write(self._descriptor, aligned))
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
        self._use_cache()
        return 0

    def _use_cache(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def _counted(self, written: int) -> int:
        if written <= 0:  # or we would ask for ever
            raise OSError(errno.EIO, "the file system takes no bytes", str(self.path))
        self._written_bytes += written
        return written


class Storage:
    """A local (or shared) file system."""

    direct_io = True  # where the file system takes it

    def make_folder(self, path: Path) -> None:
        """`path` and what is missing above it, for this user alone (mkdir gives its mode to the last one only)."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)

    def create(self, path: Path) -> OutputFile:
        return OutputFile(path)

    def create_large(self, path: Path, size_bytes: int, directory: Path) -> OutputFile:
        """A file of about `size_bytes`, written past the page cache where `directory` (above it) takes that."""
        direct = self.direct_io and size_bytes >= DIRECT_BYTES_MIN and takes_direct(directory)
        file = self.create(path)
        if direct:
            file.bypass_cache()
        return file

    def claim(self, path: Path, content: bytes) -> bool:
        """Make `path` unless somebody was faster; not durable, it need not be."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        return True

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Gone afterwards, whoever removed it."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Gone afterwards if it is empty; another engine may be writing into it."""
        with contextlib.suppress(OSError):
            path.rmdir()

    @contextlib.contextmanager
    def locked(self, directory: Path) -> Iterator[None]:
        """One process at a time reads, decides and replaces a file in `directory`."""
        self.make_folder(directory)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def write_whole(self, path: Path, content: bytes, *, writer: str) -> None:
        """Replace `path` atomically; durable once `sync_folder` of its folder has returned."""
        temporary = path.with_name(f".{path.name}.{writer}.tmp")
        try:
            with self.create(temporary) as file:
                file.write(content)
                file.sync()
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):  # the error that brought us here says more
                self.remove(temporary)
            raise
