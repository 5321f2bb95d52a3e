"""Keepers to try: what one holds, a rank that offers what it maps, memory as an engine that died has left it."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_engine.errors import EngineUnavailable
from ckpt_engine.keeping import KeeperConfig, KeeperLink, keeper_path, keeper_status
from ckpt_engine.memfd import Segment, create_segment
from ckpt_engine.segment import SlotState, publish_state, segment_bytes, write_checksum
from ckpt_engine.shardfile import Identity
from ckpt_engine.wire import Fields
from tests.ckpt_lab import RawRank, eventually, fill_segment, raw_header


def status_of(engine_socket: Path) -> Fields:
    """What the keeper says; empty where there is none."""
    with suppress(EngineUnavailable):
        return keeper_status(engine_socket)
    return {}


def settled_keeper(engine_socket: Path, slots: int, but: int = 0) -> int:
    """The process of a keeper that has all of its engine's slots."""

    def pid() -> int:
        status = status_of(engine_socket)
        whole = status.get("settled") and status["kept"] == slots and status["engine"] and status["pid"] != but
        return int(status["pid"]) if whole else 0

    return int(eventually(pid, f"a keeper with {slots} slots"))


def is_gone(pid: int) -> bool:
    """Ended, if perhaps not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


class OfferingRank(RawRank):
    """A rank that offers the next engine what it maps, as `Checkpointer` does."""

    def __init__(self, socket: Path, **identity: int) -> None:
        super().__init__(socket, **identity)  # type: ignore[arg-type]
        self.offered: dict[int, int] = {}
        self.generations: list[int] = []
        self.link._offers = lambda: list(self.offered.items())
        self.link._kept = self._kept

    def acquire(self, step: int, payload_bytes: int, wait_seconds: float = 5.0) -> tuple[int, int, memoryview]:
        index, generation, view = super().acquire(step, payload_bytes, wait_seconds)
        if index not in self.offered:
            self.offered[index] = descriptor_of(self.segments[index][1])
        return index, generation, view

    def _kept(self, indices: Sequence[int], generations: Sequence[int]) -> None:
        self.generations = list(generations)
        for index, generation in zip(indices, generations, strict=True):
            if generation:
                self.segments[index] = (generation, self.segments[index][1])
            else:
                os.close(self.offered.pop(index))
                del self.segments[index]

    def close(self) -> None:
        super().close()
        while self.offered:
            os.close(self.offered.popitem()[1])


def descriptor_of(memory: mmap.mmap) -> int:
    """A descriptor of a mapped memfd, found among our own mappings."""
    with memoryview(memory) as view:
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.startswith(f"{address:x}-") or line.startswith(f"{address:08x}-"):
            return os.open(f"/proc/self/map_files/{line.split()[0]}", os.O_RDWR | os.O_CLOEXEC)
    raise AssertionError("that mapping is not there")


def sealed_memory(step: int, payload: bytes, *, rank: int = 0, attempt: int = 1, job: str = "job") -> Segment:
    """A segment as a rank leaves it after a save."""
    identity = Identity(job, attempt, rank, max(rank + 1, 1), -1)
    header, layout = raw_header(step, len(payload), identity)
    segment = create_segment(segment_bytes(header.payload_offset, len(payload)))
    fill_segment(segment.view, header, layout, payload)
    return segment


def with_checksum(segment: Segment, crc32: int) -> Segment:
    write_checksum(segment.view, crc32)
    return segment


def half_written(segment: Segment) -> Segment:
    publish_state(segment.view, SlotState.WRITING)
    return segment


@contextmanager
def left_behind(folder: Path, slots: dict[tuple[str, int], Segment], *, job: str = "job") -> Iterator[int]:
    """A keeper that holds these segments for the engine `n0` of `folder`, and no engine; its process."""
    socket = folder / "n0.sock"
    link = KeeperLink(KeeperConfig(keeper_path(socket), job, 60.0), threading.RLock())
    assert link.open() == []
    link.watch(lambda: [(shard, index, segment.descriptor) for (shard, index), segment in slots.items()])
    pid = settled_keeper(socket, len(slots))
    link.leave()
    for segment in slots.values():
        segment.close()
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
