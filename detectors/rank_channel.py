"""The rank channel: compares every rank with its peers, step by step, and names the odd one.

Few peers (2 to 7): a rank's own compute time over its own learned base, against the largest of the others. The
largest, because a burst on one core slows two ranks together and would break the peers' median in a job this small.
Many peers (8 and more): distance from the peers' median, less the rank's own offset, over the peers' MAD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.steps import Floats, StepMatrix

OWN, WALL = "train.compute.own", "train.compute.duration"
DATA, DELAY, STEP = "train.data.duration", "train.run_queue.delay", "train.step.duration"
WINDOW = 16  # scored steps remembered; every rule looks at the last of them

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankChannelConfig:
    """Thresholds measured on small jobs under noisy neighbours; changes here need a clean run to prove them."""

    warmup_steps: int = 5  # after every (re)start
    base_steps_min: int = 20
    base_steps_max: int = 80
    excess_open: float = 0.10
    excess_close: float = 0.05
    open_steps: int = 5
    of_steps: int = 8
    close_steps: int = 8
    slow_from_start_excess: float = 0.30  # over the largest of the others while bases are learned
    excess_seconds_min: float = 0.002  # timers are not better than this
    many_peers: int = 8
    z_open: float = 6.0
    z_freeze: float = 4.0
    z_clip: float = 20.0
    floor_fraction: float = 0.005  # of the peers' median
    offset_steps_max: int = 200
    data_excess_seconds: float = 0.010
    data_excess_fraction: float = 0.02  # of the step
    contended_delay_fraction: float = 0.5  # of the rank's own compute time
    contended_own_max: float = 0.15
    contended_steps: int = 12


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rank (or, contended, a node) begins or ceases to be odd."""

    kind: Literal["straggler", "data_stall", "contended_node"]
    subject: str  # the rank's number, or the node's name
    open: bool
    steps: tuple[int, ...] = ()  # where it exceeded, oldest first
    metric: str = ""
    value: float = 0.0
    peers_median: float = 0.0
    excess: float = 0.0


class _State(msgspec.Struct):
    metric: str = ""
    scored: list[int] = []  # the steps of the window, oldest first
    learned: int = 0  # clean rows in the base
    offset_rows: int = 0
    open: list[str] = []
    calm: dict[str, int] = {}


class RankChannel:
    """Scores closed steps; `score` returns what began and what ended."""

    def __init__(self, ranks: list[int], nodes: list[str], config: RankChannelConfig | None = None) -> None:
        self.config = config or RankChannelConfig()
        self.ranks, self.nodes = list(ranks), list(nodes)
        count = len(ranks)
        self._state = _State()
        self._base: Floats = np.full((self.config.base_steps_max, 3, count), np.nan)  # compute, data, delay
        self._offsets: Floats = np.full((self.config.offset_steps_max, count), np.nan)
        self._offset: Floats = np.zeros(count)
        self._excess: Floats = np.full((WINDOW, count), np.nan)
        self._data: Floats = np.full((WINDOW, count), np.nan)
        self._delay: Floats = np.full((WINDOW, count), np.nan)
        self._out: Bools = np.zeros((WINDOW, count), dtype=np.bool_)
        self._known_at = -1  # `base` is computed once for each number of clean steps
        self._known: list[Floats] = []

    @property
    def learned(self) -> int:
        """Clean steps in the ranks' bases."""
        return self._state.learned

    @property
    def anomalous(self) -> bool:
        """Something is odd in the newest step or open: models must not learn from it."""
        return bool(self._state.open) or bool(self._out[-1].any())

    def warm(self, step: int) -> bool:
        """`step` was the last one scored, with all bases learned."""
        return self._state.learned >= self.config.base_steps_max and self._state.scored[-1:] == [step]

    def base(self, index: int) -> Floats:
        """Each rank's own learned normal: 0 compute, 1 data, 2 run-queue delay. NaN before it is known."""
        if self._known_at != self._state.learned:
            self._known_at = self._state.learned
            rows = self._base[: self._state.learned]
            empty = np.full(len(self.ranks), np.nan)
            self._known = [_nanmedian(rows[:, which]) if len(rows) else empty for which in range(3)]
        return self._known[index]

    def score(self, matrix: StepMatrix, step: int) -> list[Finding]:
        """Score one closed step. Steps of the warm-up, and steps a rank marked as no plain training, say nothing."""
        first = matrix.first_step
        if len(self.ranks) < 2 or first is None or step < first + self.config.warmup_steps or matrix.is_apart(step):
            return []
        if self._values(matrix, step) is None:
            return []
        state = self._state
        state.scored = [*state.scored[-(WINDOW - 1) :], step]
        for ring in (self._excess, self._data, self._delay, self._out):
            ring[:-1] = ring[1:]
        self._score_row(matrix, step, -1)
        self._learn(matrix, step)
        return self._judge(matrix)

    def rescore(self, matrix: StepMatrix, step: int) -> list[Finding]:
        """A late message changed a closed step: score it again if it is still in the window."""
        if step not in self._state.scored or self._values(matrix, step) is None:
            return []
        self._score_row(matrix, step, self._state.scored.index(step) - len(self._state.scored))
        return self._judge(matrix, count_calm=False)

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        return msgspec.to_builtins(self._state), {
            "base": self._base, "offsets": self._offsets, "offset": self._offset, "excess": self._excess,
            "data": self._data, "delay": self._delay, "out": self._out,
        }  # fmt: skip

    @classmethod
    def from_state(
        cls,
        ranks: list[int],
        nodes: list[str],
        state: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]],
        config: RankChannelConfig | None = None,
    ) -> RankChannel:
        channel = cls(ranks, nodes, config)
        channel._state = msgspec.convert(state, _State)
        channel._base, channel._offsets = arrays["base"].copy(), arrays["offsets"].copy()
        channel._offset, channel._excess = arrays["offset"].copy(), arrays["excess"].copy()
        channel._data, channel._delay = arrays["data"].copy(), arrays["delay"].copy()
        channel._out = arrays["out"].astype(np.bool_)
        return channel

    def _values(self, matrix: StepMatrix, step: int) -> Floats | None:
        """Compute time of the step: own time where ranks can tell it, wall time otherwise; the choice is made once."""
        if not self._state.metric:
            own = matrix.values(step, OWN)
            if own is None:
                return None
            self._state.metric = OWN if np.isfinite(own).sum() * 2 >= len(own) else WALL
        return matrix.values(step, self._state.metric)

    def _score_row(self, matrix: StepMatrix, step: int, row: int) -> None:
        values, config = self._values(matrix, step), self.config
        assert values is not None
        if len(self.ranks) >= self.config.many_peers:
            self._score_many(values, row)
        else:
            self._score_few(values, row)
        data, delay, length = (matrix.values(step, name) for name in (DATA, DELAY, STEP))
        assert data is not None
        assert delay is not None
        assert length is not None
        base = self.base(1)
        over_base = np.where(np.isfinite(base), data - base, data)
        floor = np.nanmax([config.data_excess_seconds, config.data_excess_fraction * _median(length)])
        self._data[row] = np.minimum(data - _largest_other(data), over_base) / floor
        with np.errstate(invalid="ignore", divide="ignore"):
            self._delay[row] = np.where(self._flat(values), (delay - self.base(2)) / self.base(0), 0.0)

    def _score_few(self, values: Floats, row: int) -> None:
        cold = self._state.learned < self.config.base_steps_min
        base = np.ones(len(values)) if cold else self.base(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            y = values / base
            others = _largest_other(y)
            self._excess[row] = y / others - 1.0
        limit = self.config.slow_from_start_excess if cold else self.config.excess_open
        expected = base * others
        self._out[row] = (self._excess[row] > limit) & (values - expected > self.config.excess_seconds_min)

    def _score_many(self, values: Floats, row: int) -> None:
        config = self.config
        median = _median(values)
        if not np.isfinite(median) or median <= 0.0:
            self._excess[row], self._out[row] = np.nan, False
            return
        relative = values / median - 1.0
        own = relative - self._offset
        spread = max(1.4826 * _median(np.abs(own - _median(own))), config.floor_fraction)
        z = np.clip((own - _median(own)) / spread, -config.z_clip, config.z_clip)
        self._excess[row] = own
        out = (z > config.z_open) & (own > config.excess_open) & (own * median > config.excess_seconds_min)
        self._out[row] = out
        clean = np.where(np.abs(z) > config.z_freeze, np.nan, relative)
        if row == -1:
            rows = self._state.offset_rows
            self._offsets[rows % len(self._offsets)] = clean
            self._state.offset_rows = rows + 1
            if self._state.offset_rows >= config.base_steps_min and self._state.offset_rows % 10 == 0:
                cap = 10.0 * config.floor_fraction
                learned = np.nan_to_num(np.asarray(_nanmedian(self._offsets)), nan=0.0)
                self._offset = np.clip(learned, -cap, cap) if self._state.offset_rows < 100 else learned

    def _flat(self, values: Floats) -> Bools:
        """Ranks whose own compute time is as usual."""
        with np.errstate(invalid="ignore", divide="ignore"):
            flat: Bools = np.abs(values / self.base(0) - 1.0) < self.config.contended_own_max
        return flat

    def _learn(self, matrix: StepMatrix, step: int) -> None:
        """Add a clean step to the bases; after an odd step, or while something is open, nothing is learned."""
        state = self._state
        if state.learned >= self.config.base_steps_max or self.anomalous:
            return
        values = self._values(matrix, step)
        if values is None or not np.isfinite(values).all():
            return
        self._base[state.learned, 0] = values
        self._base[state.learned, 1] = matrix.values(step, DATA)
        self._base[state.learned, 2] = matrix.values(step, DELAY)
        state.learned += 1

    def _judge(self, matrix: StepMatrix, *, count_calm: bool = True) -> list[Finding]:
        config, found = self.config, []
        recent = slice(-config.of_steps, None)
        late_data = self._data > 1.0
        cold = self._state.learned < config.base_steps_min and len(self.ranks) < config.many_peers
        needed = config.of_steps if cold else config.open_steps
        calm_below = config.slow_from_start_excess / 2 if cold else config.excess_close
        for index, rank in enumerate(self.ranks):
            found += self._hysteresis(
                matrix, "straggler", str(rank), index, np.asarray(self._out[recent, index]), needed,
                calm=bool(self._excess[-1, index] < calm_below), count_calm=count_calm,
            )  # fmt: skip
            found += self._hysteresis(
                matrix, "data_stall", str(rank), index, late_data[recent, index], config.open_steps,
                calm=bool(self._data[-1, index] < 0.5), count_calm=count_calm,
            )  # fmt: skip
        for node in sorted(set(self.nodes)):
            members = [index for index, name in enumerate(self.nodes) if name == node]
            busy: Bools = np.all(self._delay[:, members] > config.contended_delay_fraction, axis=1)
            calm = bool((self._delay[-1, members] < config.contended_delay_fraction / 2).any())
            found += self._hysteresis(
                matrix, "contended_node", node, members[0], busy, config.contended_steps, calm, count_calm
            )
        return found

    def _hysteresis(
        self,
        matrix: StepMatrix,
        kind: Literal["straggler", "data_stall", "contended_node"],
        subject: str,
        index: int,
        out: Bools,
        needed: int,
        calm: bool,
        count_calm: bool,
    ) -> list[Finding]:
        state, key = self._state, f"{kind}/{subject}"
        if key not in state.open:
            if int(out.sum()) < needed:
                return []
            state.open.append(key)
            state.calm[key] = 0
            return [self._describe(matrix, kind, subject, index, out)]
        if count_calm:
            state.calm[key] = state.calm[key] + 1 if calm else 0
        if state.calm[key] < self.config.close_steps:
            return []
        state.open.remove(key)
        return [Finding(kind=kind, subject=subject, open=False)]

    def _describe(
        self,
        matrix: StepMatrix,
        kind: Literal["straggler", "data_stall", "contended_node"],
        subject: str,
        index: int,
        out: Bools,
    ) -> Finding:
        metric = {"straggler": self._state.metric, "data_stall": DATA, "contended_node": DELAY}[kind]
        recent = self._state.scored[-len(out) :]
        steps = [step for step, hit in zip(recent, out[-len(recent) :], strict=True) if hit]
        own, peers = [], []
        for step in steps:
            values = matrix.values(step, metric)
            if values is not None:
                own.append(values[index])
                peers.append(_median(np.delete(values, index)))
        excess = {"straggler": self._excess, "data_stall": self._data, "contended_node": self._delay}[kind][:, index]
        return Finding(
            kind=kind,
            subject=subject,
            open=True,
            steps=tuple(steps),
            metric=metric,
            value=_median(np.array(own)),
            peers_median=_median(np.array(peers)),
            excess=_median(excess[-len(out) :][out]),
        )


def _largest_other(values: Floats) -> Floats:
    """For each rank the largest value of the others; NaN where no other has one."""
    filled = np.where(np.isfinite(values), values, -np.inf)
    order = np.argsort(filled)
    top, second = order[-1], order[-2]
    largest = np.full(len(values), filled[top])
    largest[top] = filled[second]
    return np.where(np.isfinite(largest), largest, np.nan)


def _median(values: Floats) -> float:
    """Median of the finite values; NaN when there are none (numpy would warn)."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _nanmedian(rows: Floats) -> Floats:
    """Column medians without NaN; NaN for a column that has nothing else."""
    if not np.isnan(rows).any():
        return np.asarray(np.median(rows, axis=0))
    return np.array([_median(column) for column in rows.T])
