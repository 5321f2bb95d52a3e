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

from detectors.ranks.excess import DATA, DELAY, STEP
from detectors.ranks.hysteresis import Bools
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
    base_spreads: float = 3.0  # of that chance a base is part, too: it was learned from few steps
    long_chance_spreads: float = 6.0  # the same of the long window, whose own spread is the measure
    node_excess: float = 0.10  # of a node's least slow rank over the slowest rank of every other node
    node_steps: int = 26
    node_of_steps: int = 32
    node_seconds_min: float = 10.0  # it has been so for so long: neighbours slow a machine down for some seconds
    node_recovery: float = 3.0  # a second in which it is not slow takes away so many
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
    node_seconds: list[float] = []  # for how long each node has been slow, less what it has not


class FewPeers:
    """Rings of the last scored steps, newest last, one column for each rank (or node)."""

    def __init__(self, groups: list[Ints], nodes: NodeView, count: int, config: FewPeersConfig | None = None) -> None:
        self.config = config or FewPeersConfig()
        self.nodes, self.count = nodes, count
        self._state = _State()
        self._set_groups(groups)
        self._state.node_seconds = [0.0] * len(nodes)
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
        self._members = self._padded(groups)
        at_home = [
            members[self.nodes.of_rank[members] == node] for members in groups for node in range(len(self.nodes))
        ]
        self._mates = self._padded([mates for mates in at_home if len(mates) > 1])
        self._in_group = np.zeros(self.count, dtype=np.bool_)
        self.alone, self.paired = (np.zeros(self.count, dtype=np.bool_) for _ in range(2))
        for members in groups:
            self._in_group[members] = True
            self.paired[members] = len(members) == 2
            homes = self.nodes.of_rank[members]
            self.alone[members] = np.bincount(homes, minlength=len(self.nodes))[homes] == 1

    def _padded(self, groups: list[Ints]) -> Ints:
        """group × member, filled up with `count`."""
        out: Ints = np.full((len(groups), max(map(len, groups), default=0)), self.count, dtype=np.int64)
        for number, members in enumerate(groups):
            out[number, : len(members)] = members
        return out

    def set_groups(self, groups: list[Ints]) -> None:
        """Compare within these groups from now on."""
        self._set_groups(groups)
        for ring in (self.excess, self.data, self.node_excess):
            ring[:] = np.nan
        self.out[:] = False
        self._state.node_seconds = [0.0] * len(self.nodes)

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
        new = step not in state.scored
        if new:
            state.scored = [*state.scored[-(WINDOW - 1) :], step]
            for ring in (self.excess, self.data, self.delay, self.out, self.node_excess):
                ring[:-1] = ring[1:]
        row = state.scored.index(step) - len(state.scored)
        self._score_row(matrix, step, values, row)
        if new:
            length = matrix.values(step, STEP)
            self._count_node_seconds(0.0 if length is None else _median(length))
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
        chance = usual + config.chance_spreads * _spread(before, usual) / math.sqrt(config.of_steps)
        known = np.isfinite(before).sum(axis=0) >= config.before_steps_min
        return np.asarray((mean > least) & (mean > np.where(known, chance, config.chance_spreads * least)))

    def weak(self) -> Bools:
        """Ranks that were a little over the largest of the others in most of the long window."""
        config = self.config
        limit = np.where(self.alone, config.long_excess_alone, config.long_excess)
        with np.errstate(invalid="ignore"):
            over: Bools = (self.excess > limit).sum(axis=0) >= config.long_steps
        if self.cold or not over.any():
            return over & (not self.cold)
        told = np.maximum(np.isfinite(self.excess).sum(axis=0), 1)
        errors = config.long_chance_spreads / np.sqrt(told) + config.base_spreads / math.sqrt(self._state.learned)
        chance = _spread(self.excess, _nanmedian(self.excess)) * errors
        return np.asarray(over & (_mean(self.excess) > chance))

    def slow_nodes(self) -> Bools:
        """Nodes whose every rank was slower than every rank elsewhere in most of the last steps."""
        config = self.config
        with np.errstate(invalid="ignore"):
            over = self.node_excess[-config.node_of_steps :] > config.node_excess
        lasting = np.array(self._state.node_seconds) >= config.node_seconds_min
        return np.asarray((over.sum(axis=0) >= config.node_steps) & lasting) & (not self.cold)

    def _count_node_seconds(self, seconds: float) -> None:
        """The newest step took `seconds`: on to the account of the nodes that were slow in it, off that of others."""
        config, seconds = self.config, seconds if np.isfinite(seconds) else 0.0
        with np.errstate(invalid="ignore"):
            slow = self.node_excess[-1] > config.node_excess
        account = np.array(self._state.node_seconds) + np.where(slow, seconds, -config.node_recovery * seconds)
        self._state.node_seconds = np.clip(account, 0.0, 2.0 * config.node_seconds_min).tolist()

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
            self._state.node_seconds[column] = 0.0
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
            across = _positive(self._largest_other(y, self._members))
            others = np.where(self._alone_now(), across, _positive(self._largest_other(y, self._mates)))
            self.excess[row] = np.where(self._in_group, y / others - 1.0, np.nan)
            measure = across if self.cold else others
            usual = np.where(self.alone, config.excess_open_alone, config.excess_open)
            limit = np.where(self.paired, np.inf, config.slow_from_start_excess) if self.cold else usual
            self.out[row] = (y / measure - 1.0 > limit) & (values - base * measure > config.excess_seconds_min)
        data, delay, length = (matrix.values(step, name) for name in (DATA, DELAY, STEP))
        assert data is not None
        assert delay is not None
        assert length is not None
        normal = self.base(1)
        over_base = np.where(np.isfinite(normal), data - normal, data)
        floor = np.nanmax([config.data_excess_seconds, config.data_excess_fraction * _median(length)])
        excess = np.minimum(data - self._largest_other(data, self._members), over_base) / floor
        self.data[row] = np.where(self._in_group, excess, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            flat = values / self.base(0) - 1.0 < config.contended_own_max
            self.delay[row] = np.where(flat, (delay - self.base(2)) / self.base(0), 0.0)
        self.node_excess[row] = self._node_excess(y)

    def _alone_now(self) -> Bools:
        """Ranks without a node-mate to be compared with: a mate that has never told anything is none. One that is
        silent for a while is: who shares a node shares its neighbours, and no other rank is as good a measure."""
        if self.cold:
            return self.alone
        known = np.where(np.isfinite(self.base(0)), 1.0, np.nan)
        return np.asarray(self.alone | np.isnan(self._largest_other(known, self._mates)))

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

    def _largest_other(self, values: Floats, groups: Ints) -> Floats:
        """For each rank the largest value of its group's others; NaN where no other has one."""
        out = np.full(self.count, np.nan)
        if not len(groups):
            return out
        padded = np.append(values, np.nan)[groups]
        padded[~np.isfinite(padded)] = -np.inf
        order = np.argsort(padded, axis=1, kind="stable")
        rows = np.arange(len(padded))
        largest = np.repeat(padded[rows, order[:, -1]][:, None], padded.shape[1], axis=1)
        largest[rows, order[:, -1]] = padded[rows, order[:, -2]]
        there = groups < self.count
        out[groups[there]] = largest[there]
        return np.where(np.isfinite(out), out, np.nan)


def _positive(values: Floats) -> Floats:
    """NaN for who only waited for a core, and is no measure."""
    return np.where(values > 0.0, values, np.nan)


def _median(values: Floats) -> float:
    """Median of the finite values; NaN when there are none (numpy would warn)."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _mean(rows: Floats) -> Floats:
    """Column means of the finite values; 0 for a column without any."""
    told = np.isfinite(rows)
    return np.asarray(np.where(told, rows, 0.0).sum(axis=0) / np.maximum(told.sum(axis=0), 1))


def _spread(rows: Floats, middle: Floats) -> Floats:
    """Standard deviation of each column's finite values, from its quartiles and, where that is more, from its tails."""
    quartiles = 1.4826 * _nanmedian(np.abs(rows - middle))
    tails = np.array([np.quantile(told, (0.05, 0.95)) if len(told) else (np.nan, np.nan) for told in _told(rows)])
    return np.asarray(np.fmax(quartiles, (tails[:, 1] - tails[:, 0]) / 3.29))


def _told(rows: Floats) -> list[Floats]:
    return [column[np.isfinite(column)] for column in rows.T]


def _nanmedian(rows: Floats) -> Floats:
    """Column medians without NaN; NaN for a column that has nothing else."""
    if not np.isnan(rows).any():
        return np.asarray(np.median(rows, axis=0))
    return np.array([_median(column) for column in rows.T])
