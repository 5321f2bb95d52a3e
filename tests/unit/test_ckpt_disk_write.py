"""How bytes get to the disk: past the page cache where it goes, however short the writes, slowly where asked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import threading
import zlib
from pathlib import Path

import pytest

from ckpt_engine import directio, storage
from ckpt_engine.commit import WRITE_PIECE_BYTES, commit_shard
from ckpt_engine.directio import takes_direct
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.manifest import shard_name, step_folder
from ckpt_engine.pace import TokenBucket
from ckpt_engine.priority import NICENESS, give_way
from ckpt_engine.shardfile import Identity, check_shard
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import RawRank, engine_in_thread, raw_segment

PAGE = 4096
IDENTITY = Identity("job", 1, 0, 1, -1)


class HandClock:
    """Time goes on when it is told to."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


@pytest.fixture(autouse=True)
def _ask_each_folder_anew() -> None:
    takes_direct.cache_clear()


def is_direct(file: OutputFile) -> bool:
    return bool(fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def aligned(size: int) -> memoryview:
    memory = mmap.mmap(-1, size)
    memory[:] = os.urandom(size)
    return memoryview(memory)


def commit(directory: Path, payload: bytes, store: Storage | None = None) -> Path:
    header, view = raw_segment(7, payload, IDENTITY)
    record = commit_shard(store or Storage(), directory, header, view, writer="n0")
    path = step_folder(directory, 7) / shard_name(0, 1)
    check_shard(path, record.checks)
    return path


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 5, (2 << 20) + 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_written_past_the_cache_is_what_was_given(tmp_path: Path, size: int, shift: int) -> None:
    """From memory that is aligned and from memory that is not, whole pages or not."""
    memory = aligned((size // PAGE + 2) * PAGE)
    piece = memory[shift : shift + size]
    with OutputFile(tmp_path / "file") as file:
        file.bypass_cache()
        file.write(piece)
        file.sync()
        file.forget()
    assert (tmp_path / "file").read_bytes() == bytes(piece)


def test_pieces_of_any_length_follow_each_other(tmp_path: Path) -> None:
    memory = aligned(64 * PAGE)
    with OutputFile(tmp_path / "file") as file:
        file.bypass_cache()
        at = 0
        for size in (PAGE, 2 * PAGE, 10, PAGE, 7, 5 * PAGE):
            file.write(memory[at : at + size])
            at += size
    assert (tmp_path / "file").read_bytes() == bytes(memory[:at])


def test_a_file_system_that_refuses_after_all_gets_it_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def refuse(descriptor: int, piece: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return write(descriptor, piece)

    memory = aligned(3 * PAGE)
    with OutputFile(tmp_path / "file") as file:
        assert file.bypass_cache()
        monkeypatch.setattr(os, "write", refuse)
        file.write(memory)
        assert not is_direct(file)
    assert (tmp_path / "file").read_bytes() == bytes(memory)


@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    write = os.write
    lengths = [PAGE, 100, 1, 3 * PAGE]

    def short(descriptor: int, piece: memoryview) -> int:
        return write(descriptor, piece[: lengths.pop(0)] if lengths else piece)

    memory = aligned(20 * PAGE)
    with OutputFile(tmp_path / "file") as file:
        if direct:
            file.bypass_cache()
        monkeypatch.setattr(os, "write", short)
        file.write(memory)
    assert (tmp_path / "file").read_bytes() == bytes(memory)


def test_a_file_that_takes_no_bytes_is_an_error_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OutputFile(tmp_path / "file") as file:
        monkeypatch.setattr(os, "write", lambda descriptor, piece: 0)
        with pytest.raises(OSError, match="takes no bytes"):
            file.write(b"some")


def test_a_folder_is_asked_by_writing_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(descriptor: int, piece: mmap.mmap) -> int:
        writes.append(len(piece))
        return write(descriptor, piece)

    monkeypatch.setattr(os, "write", counted)
    first = takes_direct(tmp_path)
    assert takes_direct(tmp_path) == first
    assert writes in ([PAGE], [])
    assert list(tmp_path.iterdir()) == [], "nothing is left of the question"


@pytest.mark.parametrize("where", ["open", "write", "fsync", "close"])
def test_a_refusal_at_any_moment_means_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real = getattr(os, where)

    def refuse(*arguments: object) -> object:
        if where == "close":
            real(*arguments)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(directio.os, where, refuse)
    answer = takes_direct(tmp_path)
    monkeypatch.undo()
    assert answer is False
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_answer_and_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, piece: mmap.mmap) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directio.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        takes_direct(tmp_path)
    monkeypatch.undo()
    assert takes_direct(tmp_path) in (True, False)


class Watching(Storage):
    """Remembers whether shards went past the cache."""

    def __init__(self) -> None:
        self.direct: list[bool] = []

    def create_large(self, path: Path, size_bytes: int, directory: Path) -> OutputFile:
        file = super().create_large(path, size_bytes, directory)
        self.direct.append(is_direct(file))
        return file


def test_a_large_shard_goes_past_the_cache_where_the_folder_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Watching()
    payload = os.urandom(WRITE_PIECE_BYTES + 12_345)
    path = commit(tmp_path, payload, store)
    assert store.direct == [takes_direct(tmp_path)]
    assert path.read_bytes().endswith(payload)
    monkeypatch.setattr(storage, "takes_direct", lambda folder: False)
    commit(tmp_path / "other", payload, store)
    commit(tmp_path / "small", b"few bytes", store)
    store.direct_io = False
    commit(tmp_path / "off", payload, store)
    assert store.direct[1:] == [False, False, False]


def test_the_payload_of_a_file_starts_on_a_page(tmp_path: Path) -> None:
    """And the header is still one that every reader of the format takes: JSON that begins with a brace, then blanks."""
    raw = commit(tmp_path, b"payload").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % PAGE == 0
    assert raw[8:9] == b"{"
    assert json.loads(raw[8 : 8 + length].rstrip(b" "))["bytes"]["data_offsets"] == [0, 7]
    assert raw[8 + length :] == b"payload"


def test_the_checksum_is_that_of_all_pieces(tmp_path: Path) -> None:
    payload = os.urandom(2 * WRITE_PIECE_BYTES + 77)
    header, view = raw_segment(7, payload, IDENTITY)
    seen: list[int] = []
    record = commit_shard(Storage(), tmp_path, header, view, writer="n0", on_read=seen.append)
    assert seen == [record.checks.payload_crc32] == [zlib.crc32(payload)]


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.commit.HEADER_BYTES_MAX", 100)
    header, view = raw_segment(7, b"x", IDENTITY)
    with pytest.raises(CheckpointDamaged, match="save large lists as tensors"):
        commit_shard(Storage(), tmp_path, header, view, writer="n0")


def test_a_bucket_lets_through_what_its_rate_allows() -> None:
    clock = HandClock()
    bucket = TokenBucket(1000.0, clock)
    waits = []
    for _ in range(5):
        wait = bucket.take(500)
        waits.append(wait)
        clock.at += wait
    assert waits == [0.0, 0.5, 0.5, 0.5, 0.5]
    clock.at += 3600.0
    assert [bucket.take(500), bucket.take(500)] == [0.0, 0.0], "an hour's rest is made up for by half a second's worth"
    assert bucket.take(500) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(0.0, clock)


def test_writing_is_paced_by_pieces_and_stopping_does_not_wait_for_that(tmp_path: Path) -> None:
    """At a byte a second, the shard would take days; the engine that is told to go writes it at once."""
    with engine_in_thread(tmp_path, persist_bytes_per_second_max=1.0) as lab:
        rank = RawRank(lab.socket)
        rank.save(1, bytes(WRITE_PIECE_BYTES))
        assert rank.durable(1) == "", "the first piece is free"
        rank.save(2, bytes(WRITE_PIECE_BYTES))
        assert rank.durable(2, 0.1) is None
        rank.close()
    assert lab.told("durable", 2)


def io_priority_of(thread: int) -> int:
    number = {"x86_64": 252, "aarch64": 31, "riscv64": 31, "ppc64le": 274, "s390x": 283}[os.uname().machine]
    return int(ctypes.CDLL(None).syscall(number, 1, thread))


@pytest.mark.parametrize(("io_class", "expected"), [("none", None), ("best-effort", 2 << 13 | 7), ("idle", 3 << 13)])
def test_a_thread_gives_way_alone(io_class: str, expected: int | None) -> None:
    told: list[tuple[int, int]] = []
    before = io_priority_of(0)

    def work() -> None:
        give_way(io_class)  # type: ignore[arg-type]
        told.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), io_priority_of(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    niceness, priority = told[0]
    assert niceness == max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    assert expected is None or priority == expected
    assert io_priority_of(0) == before


def test_a_kernel_that_knows_no_such_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.priority._IOPRIO_SET", {})
    thread = threading.Thread(target=give_way, args=("idle",))
    thread.start()
    thread.join()
