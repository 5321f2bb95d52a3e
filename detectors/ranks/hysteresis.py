"""Evidence on several time scales: how many of the last n steps exceeded a threshold that clean windows calibrate.

Counting steps above a line, not averaging them, is what tells a weak slowdown from bursts: a burst of fifteen steps
moves a mean over sixty, but cannot fill most of them. The k-th largest of n clean steps is collected over
entities and time; its tail, a Weibull type through two quantiles that a few faulty entities do not move, is
extrapolated to the budget of false alarms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.steps import Floats, Ints

Bools = npt.NDArray[np.bool_]
Singles = npt.NDArray[np.float32]

SAMPLED_MAX = 2048  # entities looked at in one calibration; which ones rotates
POOL = 8192  # order statistics remembered of each scale
POOL_MIN, WINDOWS_MIN = 24, 4  # fewer samples, or windows that they come from, say nothing
TAIL_MIN, TAIL_SAMPLES = 500, 20  # fewer say nothing about a tail; so many are taken to lie in it
SHAPE_MIN, SHAPE_MAX = 0.65, 1.0  # of the tail: exp(-x^(1/shape)); 0.65 is a normal distribution's, 1 an exponential's
LONGER = 0.6  # of the next shorter scale's reach: while its samples are few a longer one is not trusted to be quieter
BENT = 0.2  # so much flatter is the tail's far end than its shape between the two quantiles


class Scale(NamedTuple):
    """At least `steps` of the last `of` above the threshold open a finding."""

    steps: int
    of: int


SCALES = (Scale(4, 5), Scale(11, 16), Scale(20, 32), Scale(36, 60))
SPANS: Ints = np.array([scale.of for scale in SCALES], dtype=np.int64)
ENOUGH: npt.NDArray[np.int16] = np.array([scale.steps for scale in SCALES], dtype=np.int16)


@dataclass(frozen=True, slots=True)
class EvidenceConfig:
    """The budget, and what is true of every kind of evidence."""

    false_per_step: float = 1e-5  # of one kind of evidence, over all entities and scales
    calibrate_steps: int = 16
    stretch: float = 1.1  # on what the tail says
    sparse_reach: float = 1.5  # on the 98th percentile, while samples are few: bursts may be all there is beyond it
    sparse_stretch: float = 1.25  # on the width of a normal distribution, all there is while samples are few
    cold: tuple[float, ...] = (0.40, 0.30, 0.20, 0.15)  # thresholds of each scale before it is calibrated
    unsure_factor: float = 1.3  # while a scale has seen few windows
    sure_windows: int = 8


class _State(msgspec.Struct):
    pushed: int = 0
    thresholds: list[float] = []
    pooled: list[int] = []  # order statistics ever put into each scale's pool
    windows: list[int] = []  # windows they come from
    reach: list[float] = []  # what clean windows may reach, floors aside


class Evidence:
    """Excess of each entity (a rank, a node) over its peers, step by step, in a ring; NaN = not measured."""

    def __init__(self, entities: int, floors: tuple[float, ...], config: EvidenceConfig, *, calibrated: bool) -> None:
        """`floors`: the least threshold of each scale. Not `calibrated`: they are the thresholds."""
        self.config, self.floors, self.calibrated = config, floors, calibrated
        self.entities = entities
        self._depth = max(scale.of for scale in SCALES)
        self._ring: Singles = np.full((self._depth, entities), np.nan, dtype=np.float32)
        self._counts: npt.NDArray[np.int16] = np.zeros((len(SCALES), entities), dtype=np.int16)
        self._pool: Singles = np.full((len(SCALES), POOL if calibrated else 1), np.nan, dtype=np.float32)
        begin = config.cold if calibrated else floors
        none = [0] * len(SCALES)
        self._state = _State(thresholds=list(begin), pooled=none.copy(), windows=none.copy(), reach=[0.0] * len(SCALES))

    @property
    def thresholds(self) -> tuple[float, ...]:
        return tuple(self._state.thresholds)

    @property
    def counts(self) -> npt.NDArray[np.int16]:
        """scale × entity: steps above the threshold among the scale's last."""
        return self._counts

    def push(self, excess: npt.NDArray[Any]) -> None:
        """One more step, one value for each entity."""
        state, depth = self._state, self._depth
        values = excess.astype(np.float32)
        limits = np.array(state.thresholds, dtype=np.float32)[:, None]
        leaving = self._ring[(state.pushed - SPANS) % depth]  # one step for each scale
        with np.errstate(invalid="ignore"):
            self._counts += values > limits
            self._counts -= leaving > limits
        self._ring[state.pushed % depth] = values
        state.pushed += 1

    def replace(self, age: int, excess: npt.NDArray[Any]) -> None:
        """The step `age` steps before the newest (0) has changed: late samples."""
        state = self._state
        if age >= min(self._depth, state.pushed):
            return
        slot, values = (state.pushed - 1 - age) % self._depth, excess.astype(np.float32)
        with np.errstate(invalid="ignore"):
            for index, scale in enumerate(SCALES):
                if age < scale.of:
                    limit = np.float32(state.thresholds[index])
                    self._counts[index] += values > limit
                    self._counts[index] -= self._ring[slot] > limit
        self._ring[slot] = values

    def hits(self) -> list[tuple[int, int]]:
        """(entity, scale) of those with enough steps above a threshold; the shortest scale of each, by entity."""
        over = self._counts >= ENOUGH[:, None]
        if not over.any():
            return []
        entities = np.flatnonzero(over.any(axis=0))
        return [(int(entity), int(np.argmax(over[:, entity]))) for entity in entities]

    def share(self, entities: Ints, scale: int) -> Floats:
        """How far each entity is towards a finding on this scale: 1.0 is one."""
        shares: Floats = self._counts[scale, entities] / float(SCALES[scale].steps)
        return shares

    def last(self, entity: int, steps: int) -> Floats:
        """Its newest excesses, oldest first, at most `steps`."""
        count = min(steps, self._depth, self._state.pushed)
        slots = (self._state.pushed - count + np.arange(count)) % self._depth
        values: Floats = self._ring[slots, entity].astype(np.float64)
        return values

    def calm(self, entity: int, scale: int, threshold: float) -> bool:
        """Of its newest steps at most a third still exceed half the threshold that it was found by."""
        recent = self.last(entity, max(8, SCALES[scale].of // 2))
        told = recent[np.isfinite(recent)]
        return len(told) >= 8 and int((told > threshold / 2).sum()) * 3 <= len(told)

    def onset(self, entity: int, scale: int) -> Bools:
        """Which of the scale's last steps (oldest first) exceeded since the shift most likely began."""
        return since_shift(self.last(entity, SCALES[scale].of), self._state.thresholds[scale])

    def clear(self, entity: int) -> None:
        """Its finding is over: what it was found by is not to open another one."""
        self._ring[:, entity] = np.nan
        self._counts[:, entity] = 0

    def calibrate(self, excluded: list[int]) -> None:
        """Called after each push: at fixed steps learn what clean windows look like and set the thresholds anew."""
        state, config = self._state, self.config
        if not self.calibrated or state.pushed % config.calibrate_steps:
            return
        picked = self._picked(excluded)
        changed = False
        for index, scale in enumerate(SCALES):
            due = state.pushed % max(config.calibrate_steps, scale.of // 2) < config.calibrate_steps
            if state.pushed < scale.of or not due or not len(picked):
                continue
            self._collect(index, scale, picked)
            wanted = self._wanted(index, scale)
            if index > 0 and state.pooled[index] < TAIL_MIN:
                wanted = max(wanted, LONGER * state.reach[index - 1])
            changed |= wanted != state.thresholds[index]
            state.thresholds[index] = wanted
        if changed:
            self._count_again()

    def forget(self) -> None:
        """Who is compared with whom has changed: nothing of the old comparison counts."""
        fresh = Evidence(self.entities, self.floors, self.config, calibrated=self.calibrated)
        self._ring, self._counts, self._pool, self._state = fresh._ring, fresh._counts, fresh._pool, fresh._state

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        built: dict[str, Any] = msgspec.to_builtins(self._state)
        return built, {"ring": self._ring, "counts": self._counts, "pool": self._pool}

    def load_state(self, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        self._state = msgspec.convert(state, _State)
        self._ring, self._counts, self._pool = (arrays[name].copy() for name in ("ring", "counts", "pool"))

    def _picked(self, excluded: list[int]) -> Ints:
        """The entities whose windows are taken for clean now: all, or an evenly spaced part that rotates."""
        stride = -(-self.entities // SAMPLED_MAX)
        turn = self._state.pushed // self.config.calibrate_steps
        picked = np.arange(turn % stride, self.entities, stride)
        return picked[~np.isin(picked, excluded)] if excluded else picked

    def _collect(self, index: int, scale: Scale, picked: Ints) -> None:
        state = self._state
        slots = (state.pushed - scale.of + np.arange(scale.of)) % self._depth
        window = np.where(np.isnan(rows := self._ring[slots][:, picked]), -np.inf, rows)
        place = scale.of - scale.steps
        statistics = np.partition(window, place, axis=0)[place]
        statistics = statistics[np.isfinite(statistics)]
        where = (state.pooled[index] + np.arange(len(statistics))) % POOL
        self._pool[index, where] = statistics
        state.pooled[index] += len(statistics)
        state.windows[index] += 1

    def _wanted(self, index: int, scale: Scale) -> float:
        """The threshold that clean windows of this scale exceed as seldom as the budget wants."""
        state, config, floor = self._state, self.config, self.floors[index]
        samples = np.sort(self._pool[index, : min(state.pooled[index], POOL)].astype(np.float64))
        if len(samples) < POOL_MIN or state.windows[index] < WINDOWS_MIN:
            return max(floor, config.cold[index])
        independent = max(1.0, scale.of / 2)  # steps after which a window is another one
        chance = config.false_per_step * independent / (self.entities * len(SCALES))
        middle = float(np.median(samples))
        width = 1.4826 * float(np.median(np.abs(samples - middle)))
        far = config.sparse_stretch * NormalDist().inv_cdf(1.0 - chance) * width
        if len(samples) >= TAIL_MIN:
            rare = TAIL_SAMPLES / len(samples)
            beyond = np.quantile(samples, (1.0 - 0.05, 1.0 - rare))
            inner, outer = (max(float(one) - middle, 1e-9) for one in beyond)
            growth = math.log(outer / inner) / math.log(math.log(rare) / math.log(0.05)) - BENT
            shape = min(max(growth, SHAPE_MIN), SHAPE_MAX)
            far = max(far, config.stretch * outer * (math.log(chance) / math.log(rare)) ** shape)
        else:
            far = max(far, config.sparse_reach * (float(np.quantile(samples, 0.98)) - middle))
        state.reach[index] = middle + far
        unsure = config.unsure_factor if state.windows[index] < config.sure_windows else 1.0
        return float(f"{max(unsure * floor, middle + unsure * far):.6g}")

    def _count_again(self) -> None:
        depth, pushed = self._depth, self._state.pushed
        with np.errstate(invalid="ignore"):
            for index, scale in enumerate(SCALES):
                slots = (pushed - scale.of + np.arange(scale.of)) % depth
                over = self._ring[slots] > np.float32(self._state.thresholds[index])
                self._counts[index] = over.sum(axis=0, dtype=np.int16)


def since_shift(excess: Floats, threshold: float) -> Bools:
    """Which steps (oldest first) exceeded the threshold since a shift most likely began: the place from which on the
    sum of what lies above half the shift is largest."""
    with np.errstate(invalid="ignore"):
        over: Bools = excess > threshold
    if over.any():
        level = float(np.median(excess[over])) / 2
        gain = np.where(np.isfinite(excess), excess - level, 0.0)
        began = int(np.argmax(np.cumsum(gain[::-1])[::-1]))
        over[: min(began, int(np.flatnonzero(over)[-1]))] = False  # what came after may have been far below
    return over
