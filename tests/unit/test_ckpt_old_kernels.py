"""What kernels before 5.3 and 5.14 lack is done another way, with the same outcome."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.memfd import Advise, create_segment, madvise
from ckpt_engine.process_watch import PIDFD_OPEN, OpenPidfd, ProcessWatch, start_time_of
from tests.ckpt_lab import eventually

PAGES = 64


def no_system_call(pid: int) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


def no_advice(view: memoryview, advice: int) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def pages_mapped(view: memoryview) -> int:
    """Pages of a view that this process would reach without a fault, as /proc/self/smaps counts them."""
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-") or line.startswith(f"{address:08x}-"):
            found = True
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024 // mmap.PAGESIZE
    raise AssertionError("that mapping is not there")


@pytest.mark.parametrize("advise", [madvise, no_advice])
def test_a_prefaulted_segment_takes_no_fault_with_or_without_the_advice(advise: Advise) -> None:
    segment = create_segment(PAGES * mmap.PAGESIZE, prefault=True, advise=advise)
    assert pages_mapped(segment.view) == PAGES
    assert bytes(segment.view) == bytes(PAGES * mmap.PAGESIZE)
    segment.close()


def test_a_host_that_runs_out_of_memory_while_it_faults_is_not_an_old_kernel() -> None:
    def no_memory(view: memoryview, advice: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError, match="Cannot allocate memory"):
        create_segment(PAGES * mmap.PAGESIZE, prefault=True, advise=no_memory)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("open_pidfd", [PIDFD_OPEN, None, no_system_call], ids=["pidfd", "old Python", "old kernel"])
def test_the_end_of_a_process_is_seen_with_and_without_a_pidfd(open_pidfd: OpenPidfd | None) -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    with child, ProcessWatch(child.pid, open_pidfd=open_pidfd) as watch:
        assert (watch.fileno() >= 0) == (open_pidfd is PIDFD_OPEN)
        assert not watch.ended()
        child.kill()
        eventually(watch.ended, "the end")  # before anybody has waited for it: a zombie has ended
        child.wait()
        assert watch.ended()


@pytest.mark.parametrize("open_pidfd", [PIDFD_OPEN, None], ids=["pidfd", "old"])
def test_another_process_with_the_same_number_is_not_the_one_that_was_meant(open_pidfd: OpenPidfd | None) -> None:
    started = start_time_of(os.getpid())
    assert started is not None
    with ProcessWatch(os.getpid(), started, open_pidfd) as same, ProcessWatch(os.getpid(), 1, open_pidfd) as other:
        assert (same.ended(), other.ended()) == (False, True)


def test_a_process_that_cannot_be_seen_from_here_is_taken_to_live() -> None:
    """A peer in another PID namespace has the number 0: only its connection tells of it."""
    with ProcessWatch(0) as watch:
        assert (watch.ended(), watch.fileno()) == (False, -1)


def test_one_that_never_was_has_ended() -> None:
    with ProcessWatch(2**22 + 1) as watch:
        assert watch.ended()


def test_a_name_with_parentheses_does_not_hide_the_start_time(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(b"7 (a) Z 1 (b) S" + b" 3" * 18 + b" 4711 5\n")
    assert start_time_of(7, tmp_path) == 4711
    for text in (b"", b"7 (a) S 1", b"7 (a) Z" + b" 3" * 18 + b" 4711", b"7 (a) S" + b" 3" * 18 + b" x"):
        (tmp_path / "7" / "stat").write_bytes(text)
        assert start_time_of(7, tmp_path) is None
