"""The CRC-32 of every tier (that of zlib and gzip), by what computes it quickest here, and by several threads at once.

Whether a host has one of the quick libraries changes no byte of any format: all of them compute the same number.
"""

from __future__ import annotations

import functools
import importlib
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

THREADS_MAX = 4  # more only wait for the same memory
PART_BYTES_MIN = 4 << 20  # below that a thread costs more than it saves
_LIBRARIES = ("isal.isal_zlib", "zlib_ng.zlib_ng")  # with the processor's carry-less multiplication
_KNOWN = (b"123456789", 0xCBF43926)  # the check value by which a CRC is told from others
_POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x**0
_ONE = 1 << 31
_X = 1 << 30


def _quickest() -> Callable[..., int]:
    for name in _LIBRARIES:
        try:
            candidate: Callable[..., int] = importlib.import_module(name).crc32
        except (ImportError, AttributeError):
            continue
        if candidate(_KNOWN[0]) == _KNOWN[1]:
            return candidate
    return zlib.crc32


crc32 = _quickest()  # of a buffer, going on from another's; without the interpreter's lock for all but small ones


def threads_here() -> int:
    """How many threads a checksum or a copy that somebody waits for may take on this host."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0))))


def crc32_of(buffer: memoryview, threads: int = 1) -> int:
    """The CRC-32 of all of `buffer`, its parts computed side by side and then joined.

    Each thread takes the next part when it has done one, so that a thread which is late, or has a busy core, does
    less of it.
    """
    workers = max(1, min(threads, len(buffer) // PART_BYTES_MIN))
    if workers == 1:
        return crc32(buffer)
    pieces = [buffer[start : start + PART_BYTES_MIN] for start in range(0, len(buffer), PART_BYTES_MIN)]
    left = iter(range(len(pieces)))  # one step of it is one instruction of the interpreter: no two get the same
    crcs = [0] * len(pieces)

    def work() -> None:
        for index in left:
            crcs[index] = crc32(pieces[index])

    with ThreadPoolExecutor(workers - 1, "checksum") as pool:
        others = [pool.submit(work) for _ in range(workers - 1)]
        work()
        for other in others:
            other.result()
    whole = crcs[0]
    for piece, crc in zip(pieces[1:], crcs[1:], strict=True):
        whole = joined(whole, crc, len(piece))
    return whole


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one behind the other, from theirs: the first one is moved up by the
    second's length, which is a product of polynomials over two elements."""
    return _times(first, _power(8 * second_bytes)) ^ second


@functools.lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    """x**exponent modulo the CRC's polynomial."""
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


def _times(left: int, right: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
