"""Ranks seen as nodes: what most ranks of a node share is the node's doing, not any rank's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from detectors.steps import Floats, Ints

MANY_NODES = 8  # with fewer the largest of the others decides
EXCHANGED_MAX = 16  # rows; more are sorted in the usual way


class NodeView:
    """Which columns of a rank array belong to which node; nodes are in the order of their names."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.names = sorted(set(nodes))
        number = {name: index for index, name in enumerate(self.names)}
        self.of_rank: Ints = np.array([number[name] for name in nodes], dtype=np.int64)
        order = np.argsort(self.of_rank, kind="stable")
        self.sizes: Ints = np.bincount(self.of_rank, minlength=len(self.names))
        widest = int(self.sizes.max(initial=0))
        place = np.arange(len(nodes)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        self._members: Ints = np.full((len(self.names), widest), len(nodes), dtype=np.int64)
        self._members[self.of_rank[order], place] = order
        self._places = np.ascontiguousarray(self._members.T)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def many(self) -> bool:
        return len(self.names) >= MANY_NODES

    def members(self, node: int) -> Ints:
        """Columns of its ranks."""
        return self._members[node, : self.sizes[node]]

    def middle(self, values: npt.NDArray[np.floating]) -> Floats:
        """The lower median of each node's ranks: at least half of them are there or above. NaN for a node of one
        rank, and where fewer than half of its ranks have told."""
        padded = np.append(values, np.nan)[self._members]
        padded.sort(axis=1)
        told = np.isfinite(padded).sum(axis=1)
        picked = padded[np.arange(len(self.names)), np.maximum(told - 1, 0) // 2]
        return np.where((told >= 2) & (2 * told >= self.sizes), picked, np.nan).astype(np.float64)

    def middles(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """node × column: the lower median of each node's ranks, of a rank × column array; NaN where none has told."""
        columns = values.shape[1]
        padded = np.concatenate([values, np.full((1, columns), np.nan, dtype=np.float32)])[self._members]
        padded = np.sort(padded.transpose(0, 2, 1), axis=2)
        told = np.isfinite(padded).sum(axis=2)
        picked = np.maximum(told - 1, 0) // 2
        return np.take_along_axis(padded, picked[:, :, None], axis=2)[:, :, 0]

    def others(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """rank × column: the lower median of the other ranks of its node, NaN where no other has told. Without itself,
        or the middle rank of a small node would always be at no distance from it, and its mates seem calm."""
        columns = values.shape[1]
        beyond = np.full((1, columns), np.inf, dtype=np.float32)  # stands for who is not there, and sorts last
        padded = np.concatenate([values, beyond])
        gaps = not np.isfinite(values).all()
        if gaps:
            padded[np.isnan(padded)] = np.inf
        lanes = np.take(padded, self._places, axis=0)  # place on the node × node × column
        below: npt.NDArray[np.int64] = (np.isfinite(lanes).sum(axis=0) if gaps else self.sizes[:, None]) - 2
        below //= 2  # of the others, where the rank is above it
        rows = sorted_lanes(lanes)
        if (below == below[0, 0]).all() and below[0, 0] >= 0:
            low, high = rows[int(below[0, 0])], rows[int(below[0, 0]) + 1]
        else:
            stacked, at = np.stack(rows), np.broadcast_to(np.maximum(below, 0), lanes.shape[1:])[None]
            last = len(rows) - 1
            low, high = (
                np.where(below < 0, np.nan, np.take_along_axis(stacked, np.minimum(at + more, last), axis=0)[0])
                for more in (0, 1)
            )
        out: npt.NDArray[np.float32] = np.take(low, self.of_rank, axis=0).astype(np.float32, copy=False)
        np.copyto(out, np.take(high, self.of_rank, axis=0).astype(np.float32, copy=False), where=values <= out)
        return out

    def excess(self, values: npt.NDArray[np.floating]) -> Floats:
        """How far each node's middle lies above its peers': as it is for many nodes, whose ranks' median is clean,
        and above the largest of the others for few."""
        middle = self.middle(values)
        return middle if self.many else middle - largest_other(middle)


def largest_other(values: Floats) -> Floats:
    """For each entry the largest of the others; NaN where no other has a value."""
    if len(values) < 2:
        return np.full(len(values), np.nan)
    filled = np.where(np.isfinite(values), values, -np.inf)
    order = np.argsort(filled, kind="stable")
    top, second = order[-1], order[-2]
    largest = np.full(len(values), filled[top])
    largest[top] = filled[second]
    return np.where(np.isfinite(largest), largest, np.nan)


def sorted_lanes(lanes: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Sorted along the first axis, without NaN: the smallest of each lane first. May write into `lanes`.

    A few exchanges of whole rows (Batcher's merge exchange) cost half of what sorting so many short lanes does.
    """
    rows = list(lanes)
    if len(rows) > EXCHANGED_MAX:
        return list(np.sort(lanes, axis=0))
    spare = np.empty_like(rows[0]) if rows else None
    for one, other in exchanges(len(rows)):
        first, second = rows[one], rows[other]
        rows[one] = np.minimum(first, second, out=spare)
        np.maximum(first, second, out=second)
        spare = first
    return rows


@lru_cache(maxsize=32)
def exchanges(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs to put in order, one after another, so that `count` rows are sorted (Knuth, 5.2.2, algorithm M)."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    part = top if count > 1 else 0
    while part:
        reach, rest, apart = top, 0, part
        while True:
            pairs += [(one, one + apart) for one in range(count - apart) if one & part == rest]
            if reach == part:
                break
            apart, reach, rest = reach - part, reach // 2, part
        part //= 2
    return tuple(pairs)
