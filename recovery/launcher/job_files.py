"""The files of one job under jobs/<job>/, each written whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from recovery.backend import Conflict, Unavailable

from .protocol import Excluded, JobEnd, JobSpec, NodeFile, Placement

FileContent = TypeVar("FileContent", bound=msgspec.Struct)


class BrokenJobFile(Exception):
    """A file of a job is not what it should be; the text says which and why."""


class JobFiles:
    """Reads and writes what outlives a process: `JobRecords` where all who need them share a folder."""

    def __init__(self, jobs_folder: Path, job: str) -> None:
        if not job or job in (".", "..") or "/" in job or "\0" in job:
            raise ValueError(f"{job!r} cannot be a job's name: it names a folder")
        self.folder = jobs_folder / job
        self.nodes_folder = self.folder / "nodes"

    @property
    def token_file(self) -> Path:
        """What proves to launchers on other machines who asks; 0600."""
        return self.folder / "token"

    def node_file(self, node: str) -> Path:
        return self.nodes_folder / f"{node}.json"

    def nodes(self) -> dict[str, NodeFile]:
        """Every launcher that is, or was killed, by name in order."""
        try:
            paths = sorted(self.nodes_folder.glob("*.json"))
        except OSError:
            return {}
        found = (read_file(path, NodeFile) for path in paths)
        return {node.node: node for node in found if node is not None}

    def spec(self) -> JobSpec | None:
        return read_file(self.folder / "job.json", JobSpec)

    def write_spec(self, spec: JobSpec) -> None:
        write_file(self.folder / "job.json", spec)

    def placement(self) -> Placement | None:
        return read_file(self.folder / "placement.json", Placement)

    def write_placement(self, placement: Placement) -> None:
        """Raises Conflict where a newer attempt, or this one under another token, stands there."""
        with self._alone():
            last = self.placement()
            again = last is not None and (last.attempt, last.token) == (placement.attempt, placement.token)
            if last is not None and not again and last.attempt >= placement.attempt:
                raise Conflict(f"attempt {last.attempt} stands in {self.folder}; {placement.attempt} is not newer")
            write_file(self.folder / "placement.json", placement)

    def excluded(self) -> frozenset[str]:
        content = read_file(self.folder / "excluded.json", Excluded)
        return frozenset(content.nodes) if content else frozenset()

    def write_excluded(self, nodes: frozenset[str]) -> None:
        write_file(self.folder / "excluded.json", Excluded(nodes=tuple(sorted(nodes))))

    def end(self) -> JobEnd | None:
        return read_file(self.folder / "outcome.json", JobEnd)

    def write_end(self, end: JobEnd) -> None:
        """The first end stays."""
        with self._alone():
            if self.end() is None:
                write_file(self.folder / "outcome.json", end)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One writer at a time, also from other machines where the file system has locks; ends with the process."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"{self.folder} cannot be written ({error.strerror}); make room or mount it") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise Unavailable(f"{self.folder} cannot be locked ({error.strerror}); mount it with locks") from error
            yield
        finally:
            os.close(lock)


def read_file(path: Path, type_: type[FileContent]) -> FileContent | None:
    """The content of a file, None where there is none. Raises BrokenJobFile."""
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BrokenJobFile(f"{path} cannot be read ({error.strerror})") from error
    try:
        return msgspec.json.decode(raw, type=type_)
    except (ValueError, RecursionError) as error:
        raise BrokenJobFile(f"{path} is not what it should be ({error}); take it away if no job runs") from error


def write_file(path: Path, content: msgspec.Struct, *, durable: bool = True) -> None:
    """Written aside and renamed; where `durable`, it also survives a power cut."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
        stream.flush()
        if durable:
            os.fsync(stream.fileno())
    aside.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
