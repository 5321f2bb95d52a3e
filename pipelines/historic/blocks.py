"""Sorted rows of a table cut into blocks: one step of many ranks, told between two ticks of detection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from detectors.step_block import StepBlock
from ingest.events import Metrics, split_non_finite

from .run import Told

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
TICKS_A_SECOND = 4.0


class Places:
    """On which node each rank of each attempt runs."""

    def __init__(self, nodes: Mapping[tuple[int, int], str]) -> None:
        self._nodes = dict(nodes)
        self._known: dict[int, tuple[Ints, tuple[str, ...]]] = {}
        for attempt in {attempt for attempt, _ in self._nodes}:
            ranks = self.of_attempt(attempt)
            self._known[attempt] = (np.array([rank for rank, _ in ranks]), tuple(node for _, node in ranks))

    def of_attempt(self, attempt: int) -> list[tuple[int, str]]:
        """Ranks in their order, each with its node."""
        return sorted((rank, node) for (of, rank), node in self._nodes.items() if of == attempt)

    def nodes_of(self, attempt: int, ranks: Ints) -> tuple[str, ...]:
        known, nodes = self._known[attempt]
        if len(known) == len(ranks) and np.array_equal(known, ranks):  # nearly always
            return nodes
        return tuple(nodes[at] for at in np.searchsorted(known, ranks))

    def columns_of(self, attempt: int, ranks: Ints) -> npt.NDArray[np.intp]:
        """The place of each rank among all ranks of its attempt."""
        return np.searchsorted(self._known[attempt][0], ranks)

    def size_of(self, attempt: int) -> int:
        return len(self._known[attempt][0])


class BlockCutter:
    """Takes rows in the order of (tick, attempt, step, rank), gives blocks; rows of one may come in two calls."""

    def __init__(self, job: str, metrics: tuple[str, ...], places: Places) -> None:
        self._job = job
        self._metrics = metrics
        self._places = places
        self._sequences: dict[int, Ints] = {}
        self._at = 0.0
        self._held: tuple[Ints, Floats, Floats, Bools | None] | None = None

    def cut(self, keys: Ints, at: Floats, values: Floats, odd: Bools | None) -> Iterator[Told]:
        """`keys`: attempt, rank, step of each row; `odd`: NaN and infinities that were told."""
        if self._held is not None:
            keys, at, values, odd = _joined(self._held, (keys, at, values, odd))
        if not len(keys):
            return
        ticks = np.ceil(at * TICKS_A_SECOND)
        assert not (ticks[1:] < ticks[:-1]).any(), "rows must be sorted"
        changed = (ticks[1:] != ticks[:-1]) | (keys[1:, 0] != keys[:-1, 0]) | (keys[1:, 2] != keys[:-1, 2])
        begins = [0, *(np.flatnonzero(changed) + 1).tolist()]
        for begin, end in pairwise(begins):
            rows = slice(begin, end)
            yield from self._group(keys[rows], at[rows], values[rows], None if odd is None else odd[rows])
        last = slice(begins[-1], None)
        self._held = (keys[last], at[last], values[last], None if odd is None else odd[last])

    def rest(self) -> Iterator[Told]:
        """The last group."""
        held, self._held = self._held, None
        if held is not None:
            yield from self._group(*held)

    def _group(self, keys: Ints, at: Floats, values: Floats, odd: Bools | None) -> Iterator[Told]:
        attempt, ranks, step = int(keys[0, 0]), keys[:, 1], int(keys[0, 2])
        self._at = max(self._at, float(at.max()))
        if (odd is not None and odd.any()) or (ranks[1:] <= ranks[:-1]).any():
            for row in range(len(ranks)):
                yield self._message(keys[row], float(at[row]), values[row], None if odd is None else odd[row])
            return
        sequences, columns = self._sequences_of(attempt), self._places.columns_of(attempt, ranks)
        sequences[columns] += 1
        told: Bools = np.asarray(~np.isnan(values).all(axis=0))
        names, values = self._metrics, values
        if not told.all():
            names, values = tuple(compress(names, told.tolist())), values[:, told]
        yield StepBlock(
            job=self._job, attempt=attempt, step=step, at=self._at, ranks=ranks,
            nodes=self._places.nodes_of(attempt, ranks), sequence=sequences[columns], ended_at=at, names=names,
            values=values,
        )  # fmt: skip

    def _message(self, key: Ints, at: float, values: Floats, odd: Bools | None) -> Metrics:
        attempt, rank, step = (int(part) for part in key)
        sequences = self._sequences_of(attempt)
        column = int(self._places.columns_of(attempt, key[1:2])[0])
        sequences[column] += 1
        told = {
            name: [float(values[index])]
            for index, name in enumerate(self._metrics)
            if values[index] == values[index] or (odd is not None and odd[index])
        }
        columns, non_finite = split_non_finite(told)
        return Metrics(
            job=self._job, attempt=attempt, rank=rank, node=self._places.nodes_of(attempt, key[1:2])[0],
            sequence=int(sequences[column]), at=self._at, phase="train", step=step, steps=(step,), ended_at=(at,),
            columns=columns, non_finite=non_finite,
        )  # fmt: skip

    def _sequences_of(self, attempt: int) -> Ints:
        if attempt not in self._sequences:
            self._sequences[attempt] = np.full(self._places.size_of(attempt), -1, dtype=np.int64)
        return self._sequences[attempt]


def _joined(
    first: tuple[Ints, Floats, Floats, Bools | None], second: tuple[Ints, Floats, Floats, Bools | None]
) -> tuple[Ints, Floats, Floats, Bools | None]:
    odd: Bools | None = None
    if first[3] is not None or second[3] is not None:
        parts = [np.zeros(part[2].shape, dtype=np.bool_) if part[3] is None else part[3] for part in (first, second)]
        odd = np.concatenate(parts)
    return (
        np.concatenate((first[0], second[0])), np.concatenate((first[1], second[1])),
        np.concatenate((first[2], second[2])), odd,
    )  # fmt: skip
