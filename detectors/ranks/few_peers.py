"""Two to seven ranks of a role: a rank's time over its own learned normal, against the largest of the others.

The largest, because a burst on one core slows two ranks together and would break the peers' median in a group this
small. A rank that is alone on its node has nobody to share its bursts, and needs more to be named. Nodes of such a
job are compared in the same way, by the least of their ranks, over spans that no burst fills.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.ranks.hysteresis import Bools
from detectors.ranks.many_peers import DATA, DELAY, STEP
from detectors.ranks.node_view import NodeView
from detectors.ranks.open_findings import Opened
from detectors.steps import Floats, Ints, StepMatrix

WINDOW = 60  # scored steps remembered
FEW_MAX = 7


@dataclass(frozen=True, slots=True)
class FewPeersConfig:
    """Thresholds measured on small jobs under noisy neighbours; changes here need a clean run to prove them."""

    base_steps_min: int = 20
    base_steps_max: int = 80
    excess_open: float = 0.10
    excess_open_alone: float = 0.35  # the only rank of its group on its node
    excess_close: float = 0.05
    open_steps: int = 5
    of_steps: int = 8
    chance_spreads: float = 7.0  # the mean of so few steps is beyond chance by so many of its deviations
    before_steps_min: int = 12  # that tell what chance is
    long_excess: float = 0.05  # a weak slowdown: over the largest of the others in most of the long window
    long_excess_alone: float = 0.08
    long_steps: int = 38
    node_excess: float = 0.10  # of a node's least slow rank over the slowest rank of every other node
    node_steps: int = 26
    node_of_steps: int = 32
    slow_from_start_excess: float = 0.30  # over the largest of the others while bases are learned; of two ranks with
    # different hardware, or different work that nobody told of, neither is the odd one
    excess_seconds_min: float = 0.002  # timers are not better than this
    data_excess_seconds: float = 0.010
    data_excess_fraction: float = 0.02  # of the step
    contended_delay_fraction: float = 0.5  # of the rank's own compute time
    contended_own_max: float = 0.15


class _State(msgspec.Struct):
    scored: list[int] = []  # the steps of the window, oldest first
    learned: int = 0  # clean rows in the base


class FewPeers:
    """Rings of the last scored steps, newest last, one column for each rank (or node)."""

    def __init__(self, groups: list[Ints], nodes: NodeView, count: int, config: FewPeersConfig | None = None) -> None:
        self.config = config or FewPeersConfig()
        self.nodes, self.count = nodes, count
        self._state = _State()
        self._set_groups(groups)
        self._base: Floats = np.full((self.config.base_steps_max, 3, count), np.nan)  # compute, data, delay
        self.excess: Floats = np.full((WINDOW, count), np.nan)
        self.out: Bools = np.zeros((WINDOW, count), dtype=np.bool_)
        self.data: Floats = np.full((WINDOW, count), np.nan)
        self.delay: Floats = np.full((WINDOW, count), np.nan)
        self.node_excess: Floats = np.full((WINDOW, len(nodes)), np.nan)
        self._known_at = -1  # `base` is computed once for each number of clean steps
        self._known: list[Floats] = []

    @property
    def grouped(self) -> bool:
        """Some ranks are compared here."""
        return len(self._members) > 0

    @property
    def scored(self) -> list[int]:
        return self._state.scored

    @property
    def learned(self) -> int:
        return self._state.learned

    @property
    def cold(self) -> bool:
        """Bases are not learned yet: only what is far from its peers counts."""
        return self._state.learned < self.config.base_steps_min

    def _set_groups(self, groups: list[Ints]) -> None:
        widest = max((len(members) for members in groups), default=0)
        self._members: Ints = np.full((len(groups), widest), self.count, dtype=np.int64)
        for number, members in enumerate(groups):
            self._members[number, : len(members)] = members
        self._in_group = np.zeros(self.count, dtype=np.bool_)
        self.alone, self.paired = (np.zeros(self.count, dtype=np.bool_) for _ in range(2))
        for members in groups:
            self._in_group[members] = True
            self.paired[members] = len(members) == 2
            homes = self.nodes.of_rank[members]
            self.alone[members] = np.bincount(homes, minlength=len(self.nodes))[homes] == 1

    def set_groups(self, groups: list[Ints]) -> None:
        """Compare within these groups from now on."""
        self._set_groups(groups)
        for ring in (self.excess, self.data, self.node_excess):
            ring[:] = np.nan
        self.out[:] = False

    def base(self, index: int) -> Floats:
        """Each rank's own learned normal: 0 compute, 1 data, 2 run-queue delay. NaN before it is known, and of the
        computation of a rank that has only ever waited for a core."""
        if self._known_at != self._state.learned:
            self._known_at = self._state.learned
            rows = self._base[: self._state.learned]
            empty = np.full(self.count, np.nan)
            self._known = [_nanmedian(rows[:, which]) if len(rows) else empty for which in range(3)]
            self._known[0] = np.where(self._known[0] > 0.0, self._known[0], np.nan)
        return self._known[index]

    def score(self, matrix: StepMatrix, step: int, metric: str) -> bool:
        """A new step (or, where it is known, a changed one); whether it could be scored."""
        values = matrix.values(step, metric)
        if values is None:
            return False
        state = self._state
        if step not in state.scored:
            state.scored = [*state.scored[-(WINDOW - 1) :], step]
            for ring in (self.excess, self.data, self.delay, self.out, self.node_excess):
                ring[:-1] = ring[1:]
        row = state.scored.index(step) - len(state.scored)
        self._score_row(matrix, step, values, row)
        return True

    def learn(self, matrix: StepMatrix, step: int, metric: str) -> None:
        """Add a clean step to the bases, until they are whole. A rank that has told nothing in the whole window is not
        waited for; when it tells at last, all are learned anew."""
        state, values = self._state, matrix.values(step, metric)
        if values is None:
            return
        told = np.isfinite(values)
        if state.learned >= self.config.base_steps_max:
            known = np.isfinite(self._base[:, 0]).sum(axis=0) >= self.config.base_steps_min
            if (known | ~told | ~self._in_group).all():
                return
            state.learned, self._known_at = 0, -1
        silent = np.isnan(self.excess).all(axis=0)
        if not (told | silent).all() or int(told.sum()) < 2:
            return
        self._base[state.learned, 0] = values
        self._base[state.learned, 1] = matrix.values(step, DATA)
        self._base[state.learned, 2] = matrix.values(step, DELAY)
        state.learned += 1

    def slow(self) -> Bools:
        """Ranks beyond their limit in most of the last steps, and on the whole over all of them."""
        config = self.config
        needed = config.of_steps if self.cold else config.open_steps
        often: Bools = self.out[-config.of_steps :].sum(axis=0) >= needed
        return np.asarray(often & self._on_the_whole(self.excess, config.excess_close)) if often.any() else often

    def late(self) -> Bools:
        """Ranks that waited for their data in most of the last steps, and on the whole longer than all others."""
        with np.errstate(invalid="ignore"):
            often: Bools = (self.data[-self.config.of_steps :] > 1.0).sum(axis=0) >= self.config.open_steps
        return np.asarray(often & self._on_the_whole(self.data, 1.0)) if often.any() else often

    def _on_the_whole(self, ring: Floats, least: float) -> Bools:
        """Whose mean over the last steps is above `least`, and above what such a mean may be by chance: where the work
        of all varies from step to step somebody is always the slowest, and now and then the same one."""
        config = self.config
        recent, before = ring[-config.of_steps :], ring[: -config.of_steps]
        mean, usual = _mean(recent), _nanmedian(before)
        spread = 1.4826 * _nanmedian(np.abs(before - usual))
        chance = usual + config.chance_spreads * spread / math.sqrt(config.of_steps)
        known = np.isfinite(before).sum(axis=0) >= config.before_steps_min
        return np.asarray((mean > least) & ~(known & (mean <= chance)))

    def weak(self) -> Bools:
        """Ranks that were a little over the largest of the others in most of the long window."""
        config = self.config
        limit = np.where(self.alone, config.long_excess_alone, config.long_excess)
        with np.errstate(invalid="ignore"):
            over: Bools = (self.excess > limit).sum(axis=0) >= config.long_steps
        return over & (not self.cold)

    def slow_nodes(self) -> Bools:
        """Nodes whose every rank was slower than every rank elsewhere in most of the last steps."""
        config = self.config
        with np.errstate(invalid="ignore"):
            over = self.node_excess[-config.node_of_steps :] > config.node_excess
        return np.asarray(over.sum(axis=0) >= config.node_steps) & (not self.cold)

    def calm(self, opened: Opened) -> bool:
        """The newest step is below half of what opened this finding."""
        config, column = self.config, opened.column
        if opened.kind == "data_stall":
            return bool(self.data[-1, column] < 0.5)
        if opened.kind == "contended_node":
            members = self.nodes.members(column)
            return bool((self.delay[-1, members] < config.contended_delay_fraction / 2).any())
        if opened.whole_node:
            return bool(self.node_excess[-1, column] < config.node_excess / 2)
        return bool(self.excess[-1, column] < opened.threshold)

    def clear(self, column: int, *, whole_node: bool) -> None:
        """A finding about it is over: the long windows begin anew."""
        if whole_node:
            self.node_excess[:, column] = np.nan
        else:
            self.excess[: -self.config.of_steps, column] = np.nan

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        built: dict[str, Any] = msgspec.to_builtins(self._state)
        return built, {
            "base": self._base, "excess": self.excess, "data": self.data, "delay": self.delay, "out": self.out,
            "node_excess": self.node_excess,
        }  # fmt: skip

    def load_state(self, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        self._state = msgspec.convert(state, _State)
        self._base, self.excess = arrays["base"].copy(), arrays["excess"].copy()
        self.data, self.delay = arrays["data"].copy(), arrays["delay"].copy()
        self.out, self.node_excess = arrays["out"].astype(np.bool_), arrays["node_excess"].copy()

    def _score_row(self, matrix: StepMatrix, step: int, values: Floats, row: int) -> None:
        config = self.config
        base = np.ones(self.count) if self.cold else self.base(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            y = values / base
            others = self._largest_other(y)
            others = np.where(others > 0.0, others, np.nan)  # who only waited for a core is no measure
            self.excess[row] = np.where(self._in_group, y / others - 1.0, np.nan)
            usual = np.where(self.alone, config.excess_open_alone, config.excess_open)
            limit = np.where(self.paired, np.inf, config.slow_from_start_excess) if self.cold else usual
            self.out[row] = (self.excess[row] > limit) & (values - base * others > config.excess_seconds_min)
        data, delay, length = (matrix.values(step, name) for name in (DATA, DELAY, STEP))
        assert data is not None
        assert delay is not None
        assert length is not None
        normal = self.base(1)
        over_base = np.where(np.isfinite(normal), data - normal, data)
        floor = np.nanmax([config.data_excess_seconds, config.data_excess_fraction * _median(length)])
        excess = np.minimum(data - self._largest_other(data), over_base) / floor
        self.data[row] = np.where(self._in_group, excess, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            flat = np.abs(values / self.base(0) - 1.0) < config.contended_own_max
            self.delay[row] = np.where(flat, (delay - self.base(2)) / self.base(0), 0.0)
        self.node_excess[row] = self._node_excess(y)

    def _node_excess(self, y: Floats) -> Floats:
        """The least of each node's ranks against the largest rank of all other nodes; only where the job is one
        group, and for nodes of two ranks and more."""
        count = len(self.nodes)
        out = np.full(count, np.nan)
        if count < 2 or len(self._members) != 1 or not self._in_group.all() or self.cold:
            return out
        for node in range(count):
            mine = y[self.nodes.members(node)]
            rest = y[self.nodes.of_rank != node]
            if len(mine) < 2 or not np.isfinite(mine).all() or not np.isfinite(rest).any():
                continue
            others = float(np.nanmax(rest))
            if others > 0.0:  # ranks that were only ever waiting for a core have no own time
                out[node] = float(mine.min()) / others - 1.0
        return out

    def _largest_other(self, values: Floats) -> Floats:
        """For each rank the largest value of its group's others; NaN where no other has one."""
        out = np.full(self.count, np.nan)
        if not len(self._members):
            return out
        padded = np.append(values, np.nan)[self._members]
        padded[~np.isfinite(padded)] = -np.inf
        order = np.argsort(padded, axis=1, kind="stable")
        rows = np.arange(len(padded))
        largest = np.repeat(padded[rows, order[:, -1]][:, None], padded.shape[1], axis=1)
        largest[rows, order[:, -1]] = padded[rows, order[:, -2]]
        there = self._members < self.count
        out[self._members[there]] = largest[there]
        return np.where(np.isfinite(out), out, np.nan)


def _median(values: Floats) -> float:
    """Median of the finite values; NaN when there are none (numpy would warn)."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _mean(rows: Floats) -> Floats:
    """Column means of the finite values; 0 for a column without any."""
    told = np.isfinite(rows)
    return np.asarray(np.where(told, rows, 0.0).sum(axis=0) / np.maximum(told.sum(axis=0), 1))


def _nanmedian(rows: Floats) -> Floats:
    """Column medians without NaN; NaN for a column that has nothing else."""
    if not np.isnan(rows).any():
        return np.asarray(np.median(rows, axis=0))
    return np.array([_median(column) for column in rows.T])
