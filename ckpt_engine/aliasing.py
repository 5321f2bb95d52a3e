"""Which tensors of a state share memory, and how such a run of memory is stored once with views on it.

Tied weights are one tensor under two names. A flat buffer and the parameters in it, a matrix and its transpose,
overlapping windows: the bytes they cover are stored once, each of them is a view with its own shape and strides,
and after a load they share one storage again. Tensors that merely lie in one storage, side by side, are tensors of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .layout import ELEMENT_TYPES, StoredTensor, TensorView
from .sharding import Sharding

SPARSE_FACTOR_MAX = 2  # how much larger than the tensors in it a run may be before we look whether they truly overlap
ALIGNMENT_BYTES = 16  # of a run of mixed dtypes: each of them starts at a multiple of its size within its storage

Run = tuple[tuple[int, ...], tuple[int, ...]]  # tensors by rising address, and how far behind the first each starts


@dataclass(frozen=True, slots=True)
class Span:
    """Where one tensor lies. `start` and `storage_start` are addresses, strides count elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    storage_start: int
    contiguous: bool
    conjugate: bool = False
    negative: bool = False
    sharding: Sharding | None = None

    @property
    def element_bytes(self) -> int:
        return ELEMENT_TYPES[self.dtype].size_bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    @property
    def extent_bytes(self) -> int:
        """From its first byte to its last, gaps included."""
        if self.contiguous or not all(self.shape):
            return self.size_bytes
        steps = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (steps + 1) * self.element_bytes

    @property
    def as_it_lies(self) -> bool:
        """Whether its bytes in memory are its values row by row."""
        return self.contiguous and not self.conjugate and not self.negative

    @property
    def overlaps_itself(self) -> bool:
        """Whether two of its elements may be one in memory, as where it was expanded."""
        if self.contiguous:
            return False
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += (size - 1) * stride
        return False


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of a stored tensor come from: tensor number `tensor` of the state where it is `whole`; else a
    run of memory that begins `behind_bytes` behind the start of that tensor, or before it."""

    tensor: int
    whole: bool = True
    behind_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Grouping:
    """What to store and from where, what is a view of it, and which of them (views count behind) each tensor is."""

    stored: tuple[StoredTensor, ...]
    sources: tuple[Source, ...]
    views: tuple[TensorView, ...]
    index_of: tuple[int, ...]


def find_runs(starts: Sequence[int], extents: Sequence[int]) -> dict[int, Run]:
    """The runs of memory in which more than one tensor lies, by the lowest number in each."""
    runs: dict[int, Run] = {}
    order = sorted((at for at, extent in enumerate(extents) if extent), key=starts.__getitem__)
    end = previous = -1
    members: list[int] = []
    for number in order:
        start = starts[number]
        stop = start + extents[number]
        if start < end:
            if not members:
                members.append(previous)
            members.append(number)
            end = max(end, stop)
        else:
            if members:
                _note(runs, members, starts)
                members = []
            end = stop
        previous = number
    if members:
        _note(runs, members, starts)
    return runs


def group_spans(
    spans: Sequence[Span], runs: dict[int, Run], share_elements: Callable[[Sequence[Span]], bool]
) -> Grouping:
    """Decide for all tensors of a state; `runs` is `find_runs` of their starts and extents.

    `share_elements` is asked whether any two of some strided tensors have an element in common.
    """
    grouper = _Grouper(spans)
    run_of = {member: members for members, _ in runs.values() for member in members}
    for number, span in enumerate(spans):
        if number not in run_of and span.contiguous:
            grouper.store_itself(number)
        elif number not in grouper.index_of and number not in grouper.view_of:
            grouper.take(sorted(run_of.get(number, (number,))), share_elements)
    return grouper.grouping()


def _note(runs: dict[int, Run], members: list[int], starts: Sequence[int]) -> None:
    lowest = starts[members[0]]
    runs[min(members)] = (tuple(members), tuple(starts[member] - lowest for member in members))


class _Grouper:
    """The tables of one grouping while they are filled."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._stored: list[StoredTensor] = []
        self._sources: list[Source] = []
        self._views: list[TensorView] = []
        self.index_of: dict[int, int] = {}  # tensors that are stored as themselves
        self.view_of: dict[int, int] = {}  # tensors that are views, numbered from 0

    def take(self, members: Sequence[int], share_elements: Callable[[Sequence[Span]], bool]) -> None:
        """Decide for the tensors of one run, or for one that lies alone."""
        twins = self._twins(members)
        firsts = list(dict.fromkeys(twins.values()))
        parts = [self._spans[first] for first in firsts]
        if self._are_apart(parts, share_elements):
            for first in firsts:
                self.store_itself(first)
        else:
            place, origin = self._store_run(firsts)
            for first in firsts:
                if first not in self.index_of:
                    self._look(first, place, origin)
        for member, first in twins.items():
            numbers = self.index_of if first in self.index_of else self.view_of
            numbers[member] = numbers[first]

    def grouping(self) -> Grouping:
        places = len(self._stored)
        index_of = tuple(
            self.index_of[number] if number in self.index_of else places + self.view_of[number]
            for number in range(len(self._spans))
        )
        return Grouping(tuple(self._stored), tuple(self._sources), tuple(self._views), index_of)

    def _twins(self, members: Sequence[int]) -> dict[int, int]:
        """For each of `members` the first that is the very same tensor."""
        seen: dict[object, int] = {}
        twins = {}
        for member in members:
            span = self._spans[member]
            looks = (span.start, span.dtype, span.shape, span.strides, span.conjugate, span.negative, span.sharding)
            twins[member] = seen.setdefault(looks if span.extent_bytes else member, member)
        return twins

    def _are_apart(self, parts: Sequence[Span], share_elements: Callable[[Sequence[Span]], bool]) -> bool:
        """Whether no two elements are one in memory, as far as it is worth finding out."""
        if any(part.extent_bytes and part.overlaps_itself for part in parts):
            return False
        if len(parts) == 1:
            return True
        extent = max(part.start + part.extent_bytes for part in parts) - min(part.start for part in parts)
        return extent > SPARSE_FACTOR_MAX * sum(part.size_bytes for part in parts) and not share_elements(parts)

    def store_itself(self, number: int) -> None:
        """A stored tensor of its own."""
        span = self._spans[number]
        strides = None if span.contiguous else span.strides
        self.index_of[number] = len(self._stored)
        self._stored.append(StoredTensor(span.name, span.dtype, span.shape, strides, span.sharding))
        self._sources.append(Source(number))

    def _store_run(self, firsts: Sequence[int]) -> tuple[int, int]:
        """Store the memory of a run: as the tensor that covers it, where there is one; its place and address."""
        place = len(self._stored)
        parts = [self._spans[first] for first in firsts]
        start = min(part.start for part in parts)
        end = max(part.start + part.extent_bytes for part in parts)
        even = all((part.start - start) % part.element_bytes == 0 for part in parts)
        for first, part in zip(firsts, parts, strict=True):
            if even and part.as_it_lies and part.start == start and part.size_bytes == end - start:
                self.store_itself(first)
                return place, start
        dtype = parts[0].dtype
        if not even or any(part.dtype != dtype for part in parts):
            dtype = "uint8"
            storage = max(part.storage_start for part in parts if part.storage_start <= start)
            start -= (start - storage) % ALIGNMENT_BYTES
        shape = ((end - start) // ELEMENT_TYPES[dtype].size_bytes,)
        self._stored.append(StoredTensor(f"{parts[0].name}:memory", dtype, shape))
        self._sources.append(Source(firsts[0], whole=False, behind_bytes=start - parts[0].start))
        return place, start

    def _look(self, number: int, place: int, origin: int) -> None:
        span = self._spans[number]
        self.view_of[number] = len(self._views)
        self._views.append(
            TensorView(
                place, span.dtype, span.shape, span.strides, (span.start - origin) // span.element_bytes,
                span.conjugate, span.negative, span.sharding,
            )
        )  # fmt: skip
