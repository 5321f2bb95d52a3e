"""The one copy of a save: many pieces of memory into a slot, by threads of our own and without a step of Python for
each small tensor.

torch's threads are the training's: their number belongs to the process, and where cores are busy they spin. Ours
take pieces from one list until it is empty, so a thread that is not scheduled costs one piece. Large tensors are
copied by memmove, thousands of middling ones by few calls of torch, hundreds of small neighbours by one pwritev into
the slot's file. All of them release the GIL, and none asks for it again within some megabytes: threads that ask often
wait for each other more than they copy.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from .layout import SMALL_TENSOR_BYTES_MAX, Layout

PIECE_BYTES = 4 << 20
BATCH_BYTES_MAX = 4 << 20
BATCH_TENSORS_MAX = 1024  # Linux takes no more in one call
LARGE_TENSOR_BYTES_MIN = 1 << 20  # a step of Python for each of them is nothing beside its copy
WORD_BYTES = 8
RUN_BYTES_MAX = 32_760 * WORD_BYTES  # of as many words as torch copies without its own threads
TOGETHER_BYTES_MIN = 2 << 20  # less is copied before another thread has woken up
THREADS_MAX = 64
TARGETS_MAX = 4  # that are remembered: two slots, and what replaces them

_libc = ctypes.CDLL(None, use_errno=True)
_pwritev = getattr(_libc, "pwritev", None)
if _pwritev is not None:
    _pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _pwritev.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Target:
    """Where a payload goes: its address in our mapping, and its place in the memfd behind that (-1: there is
    none)."""

    address: int
    descriptor: int
    file_offset: int


class _Batch:
    """Small tensors that stand side by side in the payload."""

    def __init__(self, places: list[int], offset: int, sizes: list[int]) -> None:
        self.places = places
        self._offset = offset
        self._sizes = sizes
        self._size_bytes = sum(sizes)
        vector: Any = (ctypes.c_uint64 * (2 * len(places)))()  # struct iovec: address, size
        vector[1::2] = sizes
        self._vector = vector

    def aim(self, addresses: list[int]) -> None:
        self._vector[::2] = addresses

    def copy(self, target: Target) -> None:
        if _pwritev is not None and target.descriptor >= 0:
            at = target.file_offset + self._offset
            if _pwritev(target.descriptor, self._vector, len(self.places), at) == self._size_bytes:
                return
        at = target.address + self._offset  # no file behind it, or a call cut short by a signal: once more, by hand
        for address, size in zip(self._vector[::2], self._sizes, strict=True):
            ctypes.memmove(at, address, size)
            at += size


_Piece = tuple[int, int, int]  # offset in the payload, address, size


class Words(Protocol):
    """Memory of this process as somebody else's arrays of words, for many copies in one call."""

    def at(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        """The words at each (address, bytes). They do not keep the memory alive."""
        ...

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Each source into its target, without the interpreter's lock."""
        ...


class _Group:
    """Tensors of middling size, copied by one call."""

    def __init__(self, words: Words, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """`runs`: place, offset in the place, offset in the payload, size."""
        self._words = words
        self._runs = runs
        self._addresses: Sequence[int] = ()
        self._sources: list[Any] | None = None
        self._targets: dict[int, list[Any]] = {}  # by the address of the payload

    def aim(self, addresses: Sequence[int]) -> None:
        self._addresses, self._sources = addresses, None

    def copy(self, target: Target) -> None:
        targets = self._targets.get(target.address)
        if targets is None:
            if len(self._targets) == TARGETS_MAX:
                self._targets.clear()
            targets = self._words.at([(target.address + offset, size) for _, _, offset, size in self._runs])
            self._targets[target.address] = targets
        if self._sources is None:
            self._sources = self._words.at(
                [(self._addresses[place] + behind, size) for place, behind, _, size in self._runs]
            )
        self._words.copy(targets, self._sources)


class CopyList:
    """What is copied where, for one layout; `aim` says from which addresses."""

    def __init__(self, layout: Layout, raw: Sequence[bool], words: Words | None = None) -> None:
        """`raw`: the places whose bytes are copied as they lie; the others are somebody else's. Without `words`
        middling tensors are copied like large ones."""
        self.size_bytes = 0
        self._large: list[tuple[int, int, int]] = []  # place, offset, size
        self._batches: list[_Batch] = []
        self._groups: list[_Group] = []
        self._pieces: list[_Piece] = []
        middling: list[tuple[int, int, int]] = []
        places: list[int] = []
        sizes: list[int] = []
        start = end = 0
        for number in sorted(range(len(raw)), key=lambda number: layout.places[number].offset):
            size = layout.places[number].size_bytes
            if not raw[number] or not size:
                continue
            offset = layout.places[number].offset
            self.size_bytes += size
            if size > SMALL_TENSOR_BYTES_MAX:
                grouped = words is not None and size < LARGE_TENSOR_BYTES_MIN and size % WORD_BYTES == 0
                (middling if grouped else self._large).append((number, offset, size))
                continue
            if places and (offset != end or len(places) == BATCH_TENSORS_MAX or end - start > BATCH_BYTES_MAX):
                self._batches.append(_Batch(places, start, sizes))
                places, sizes = [], []
            if not places:
                start = offset
            places.append(number)
            sizes.append(size)
            end = offset + size
        if places:
            self._batches.append(_Batch(places, start, sizes))
        if words is not None:
            self._groups = [_Group(words, runs) for runs in _grouped(middling)]

    def aim(self, addresses: Sequence[int]) -> None:
        """`addresses` has one for each place; only those of raw places are looked at."""
        for batch in self._batches:
            batch.aim([addresses[place] for place in batch.places])
        for group in self._groups:
            group.aim(addresses)
        self._pieces = [
            (offset + done, addresses[place] + done, min(PIECE_BYTES, size - done))
            for place, offset, size in self._large
            for done in range(0, size, PIECE_BYTES)
        ]

    def copy(self, target: Target, threads: CopyThreads) -> None:
        """Copy everything. Whoever owns the memory must keep it until this returns."""
        pieces = iter(self._pieces)
        gathered: Iterator[_Batch | _Group] = chain(self._batches, self._groups)
        if self.size_bytes < TOGETHER_BYTES_MIN:
            _drain(pieces, gathered, target)
        else:
            threads.run(lambda: _drain(pieces, gathered, target))


def _grouped(middling: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """What one call copies: neighbours in the payload, as long as a thread may be at it before it looks for more."""
    runs: list[tuple[int, int, int, int]] = []
    size_bytes = 0
    for place, offset, size in middling:
        for done in range(0, size, RUN_BYTES_MAX):
            runs.append((place, done, offset + done, min(RUN_BYTES_MAX, size - done)))
        size_bytes += size
        if size_bytes >= BATCH_BYTES_MAX:
            yield runs
            runs, size_bytes = [], 0
    if runs:
        yield runs


def _drain(pieces: Iterator[_Piece], gathered: Iterator[_Batch | _Group], target: Target) -> None:
    """Take work until there is none; the iterators are shared, and `next` of a list's is atomic under the GIL."""
    move, base = ctypes.memmove, target.address
    for many in gathered:
        many.copy(target)
    for offset, address, size in pieces:
        move(base + offset, address, size)


class CopyThreads:
    """`count` threads for one piece of work at a time, the caller's own among them."""

    def __init__(self, count: int) -> None:
        if not 1 <= count <= THREADS_MAX:
            raise ValueError(f"copy_threads must be 1 to {THREADS_MAX}, not {count}")
        self.count = count
        self._pid = os.getpid()
        self._orders: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` in every thread; returns when all have. Raises what one of them raised."""
        if os.getpid() != self._pid:  # a forked child has the queues, but not the threads
            work()
            return
        while len(self._orders) < self.count - 1:
            self._start()
        for orders in self._orders:
            orders.put(work)
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - even an interrupt waits until nobody reads the tensors any more
            failure = error
        failure = self._await_others() or failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let the threads end."""
        for orders in self._orders:
            orders.put(None)
        self._orders.clear()

    def _start(self) -> None:
        orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(orders, self._done), name="checkpoint-copy", daemon=True)
        thread.start()
        self._orders.append(orders)

    def _await_others(self) -> BaseException | None:
        failure: BaseException | None = None
        left = len(self._orders)
        while left:
            try:
                failure = self._done.get() or failure
                left -= 1
            except BaseException as error:  # noqa: BLE001 - an interrupt while they still copy: kept for later
                failure = error
        return failure


def _serve(orders: queue.SimpleQueue[Callable[[], None] | None], done: queue.SimpleQueue[BaseException | None]) -> None:
    while (work := orders.get()) is not None:
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            failure = error
        done.put(failure)
        del work  # it holds what it copied


def threads_for(cores: int) -> int:
    """How many threads copy where nobody says so. Training waits meanwhile, and one core alone does not fill the
    memory's bandwidth: of tensors smaller than the last cache it copies at little more than half the pace of a large
    memcpy, which goes past the cache."""
    return max(1, min(4, cores))
