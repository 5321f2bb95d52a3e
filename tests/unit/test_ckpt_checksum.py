"""One checksum, whoever computes it and in however many parts."""

from __future__ import annotations

import random
import threading
import types
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import checksum
from ckpt_engine.checksum import crc32, crc32_of, joined, threads_here


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_runs_joined_are_the_whole(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_second_run_is_joined_too() -> None:
    first, second = b"x" * 12345, bytes(7_654_321)
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_the_quick_one_computes_what_zlib_does(first: bytes, second: bytes) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 4096, checksum.PART_BYTES_MIN, 3 * checksum.PART_BYTES_MIN + 4097])
def test_parts_make_no_difference(threads: int, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert crc32_of(memoryview(content), threads) == zlib.crc32(content)


def test_a_late_thread_does_not_decide_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(5).randbytes(4 * checksum.PART_BYTES_MIN)
    late: list[int] = []

    def slow(buffer: memoryview, value: int = 0) -> int:
        if not late:
            late.append(threading.get_ident())
        if threading.get_ident() == late[0]:
            done.wait(60.0)
        else:
            taken.append(len(buffer))
            if len(taken) == 3:
                done.set()
        return zlib.crc32(buffer, value)

    done, taken = threading.Event(), list[int]()
    monkeypatch.setattr(checksum, "crc32", slow)
    assert crc32_of(memoryview(content), 2) == zlib.crc32(content)
    assert len(taken) == 3


def test_a_library_that_is_missing_or_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.SimpleNamespace(crc32=lambda buffer, value=0: 7)

    def load(name: str) -> object:
        if name == "zlib_ng.zlib_ng":
            return wrong
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(checksum.importlib, "import_module", load)
    assert checksum._quickest() is zlib.crc32


def test_a_library_that_computes_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = types.SimpleNamespace(crc32=lambda buffer, value=0: zlib.crc32(buffer, value))
    monkeypatch.setattr(checksum.importlib, "import_module", lambda name: right)
    assert checksum._quickest() is right.crc32


def test_threads_are_bounded() -> None:
    assert 1 <= threads_here() <= checksum.THREADS_MAX
