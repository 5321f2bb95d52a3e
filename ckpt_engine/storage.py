"""The few operations on a file system that a commit is made of; tests replace them to fail at a chosen
one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType


class OutputFile:
    """A file being written from its start; `sync` returns when its bytes would survive a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, piece: bytes | memoryview) -> None:
        """All of `piece`, however short each write is."""
        rest = memoryview(piece)
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

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


class Storage:
    """A local (or shared) file system."""

    def make_folder(self, path: Path) -> None:
        """`path` and what is missing above it, for this user alone (mkdir gives its mode to the last one only)."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)

    def create(self, path: Path) -> OutputFile:
        return OutputFile(path)

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
        with self.create(temporary) as file:
            file.write(content)
            file.sync()
        self.rename(temporary, path)
