"""Scores become tail probabilities, and a budget of false alarms becomes a threshold on them.

A clean score's distribution is its empirical one with a generalized Pareto tail above a high quantile (peaks over
threshold; Pickands 1975), fitted by probability-weighted moments (Hosking & Wallis 1987). A decade is -log10 of the
tail probability, so 3 means "one clean sample in a thousand is at least as odd".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

DECADES_MAX = 12.0
BODY_POINTS = 129  # quantiles kept of the empirical part
EXCESSES_MIN = 10  # fewer exceedances do not carry a shape: the tail is exponential then
REPLAY_LEVELS = 120
SHAPE_MAX = 0.5  # a heavier tail has no variance, and a few hundred points cannot show one


class CalibrationError(ValueError):
    """There is nothing to calibrate on; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The distribution of one clean score: quantiles up to `start`, a generalized Pareto tail beyond.

    `shape` is never negative: a bounded tail would call the first score beyond its end impossible.
    """

    points: Floats  # ascending scores
    point_decades: Floats  # of the same length, ascending
    start: float
    start_decades: float
    scale: float
    shape: float
    fitted_on: int

    @classmethod
    def fit(cls, scores: npt.ArrayLike, quantile: float = 0.98) -> Tail:
        """Fit to clean scores (any shape; NaN and Inf are left out). Raises CalibrationError without a finite one."""
        clean = np.sort(np.asarray(scores, dtype=np.float64).ravel())
        clean = clean[np.isfinite(clean)]
        if not 0.5 <= quantile < 1.0:
            raise CalibrationError(f"the tail starts at quantile {quantile}; it must be at least 0.5 and below 1")
        if not len(clean):
            raise CalibrationError("no finite clean score to calibrate on; give the scores of clean rows")
        count = len(clean)
        start = float(np.quantile(clean, quantile))
        beyond = clean[clean > start] - start
        share = max(len(beyond), 1) / (count + 1)  # at least one in n: what never happened is no rarer than that
        scale, shape = _pareto(beyond)
        smallest = 1e-9 + 1e-3 * max(abs(start), float(clean[-1] - clean[0]))
        body = np.unique(np.quantile(clean, np.linspace(0.0, quantile, BODY_POINTS)))
        at_least = count - np.searchsorted(clean, body, side="left")
        decades = np.minimum(-np.log10(np.maximum(at_least, 1) / (count + 1)), -math.log10(share))
        return cls(
            points=body,
            point_decades=np.maximum.accumulate(decades),
            start=start,
            start_decades=-math.log10(share),
            scale=max(scale, smallest),
            shape=shape,
            fitted_on=count,
        )

    def decades(self, scores: npt.ArrayLike, cap: float = DECADES_MAX) -> Floats:
        """-log10 of the probability that a clean score is at least this high, same shape; 0…cap, NaN stays NaN."""
        given = np.asarray(scores, dtype=np.float64)
        body = np.interp(given, self.points, self.point_decades)
        over = np.maximum(given - self.start, 0.0) / self.scale
        beyond = np.log1p(self.shape * over) / self.shape if self.shape > 1e-6 else over
        out = np.where(given > self.start, self.start_decades + beyond / math.log(10.0), body)
        return np.asarray(np.where(np.isnan(given), np.nan, np.clip(out, 0.0, cap)))

    def score_at(self, decades: float) -> float:
        """The score whose tail probability is 10^-decades: the inverse of `decades`."""
        if decades <= self.start_decades:
            return float(np.interp(decades, self.point_decades, self.points))
        over = (decades - self.start_decades) * math.log(10.0)
        return self.start + self.scale * (math.expm1(self.shape * over) / self.shape if self.shape > 1e-6 else over)

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """JSON-able fields, and arrays for an npz file."""
        fields = {name: getattr(self, name) for name in ("start", "start_decades", "scale", "shape", "fitted_on")}
        return fields, {"points": self.points, "point_decades": self.point_decades}

    @classmethod
    def from_state(cls, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Tail:
        """What `to_state` gave. Raises CalibrationError where a field is missing or not a number."""
        try:
            fields = {name: float(state[name]) for name in ("start", "start_decades", "scale", "shape")}
            points = np.asarray(arrays["points"], dtype=np.float64)
            decades = np.asarray(arrays["point_decades"], dtype=np.float64)
            count = int(state["fitted_on"])
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"the stored tail is not one ({error!r}); fit it anew") from error
        whole = np.isfinite([*fields.values(), *points, *decades]).all()
        if not whole or points.shape != decades.shape or not len(points) or fields["scale"] <= 0.0:
            raise CalibrationError("the stored tail has fields that no fit gives; fit it anew")
        return cls(points=points, point_decades=decades, fitted_on=count, **fields)


def _pareto(excesses: Floats) -> tuple[float, float]:
    """Scale and shape of a generalized Pareto distribution, by probability-weighted moments; excesses ascend."""
    count = len(excesses)
    if not count:
        return 0.0, 0.0
    mean = float(excesses.mean())
    if count < EXCESSES_MIN:
        return mean, 0.0
    weights = (count - 1 - np.arange(count)) / (count - 1)
    weighted = float((weights * excesses).mean())  # E[x (1 - F(x))]
    gap = mean - 2.0 * weighted
    if gap <= 0.0 or weighted <= 0.0:
        return mean, 0.0
    shape = 2.0 - mean / gap
    if shape <= 0.0:
        return mean, 0.0
    shape = min(shape, SHAPE_MAX)
    return mean * (1.0 - shape), shape  # the mean of the excesses is kept where the shape was cut


def extremal_index(scores: npt.ArrayLike, threshold: float) -> float:
    """How many of the exceedances of `threshold` begin a cluster: 1 = independent, 0.1 = they come in tens.

    The intervals estimator of Ferro & Segers (2003), on one series in time order. 1.0 with fewer than 3 exceedances.
    """
    at = np.flatnonzero(np.asarray(scores, dtype=np.float64) > threshold)
    if len(at) < 3:
        return 1.0
    gaps = np.diff(at).astype(np.float64)
    if gaps.max() <= 2.0:
        top, below = 2.0 * gaps.sum() ** 2, len(gaps) * (gaps**2).sum()
    else:
        top, below = 2.0 * (gaps - 1.0).sum() ** 2, len(gaps) * ((gaps - 1.0) * (gaps - 2.0)).sum()
    return float(min(1.0, max(top / below, 1.0 / len(at))))


def threshold_decades(
    alarms_per_day: float,
    entities: int,
    decisions_per_day: float,
    persistence_k: int = 1,
    *,
    extremal_index: float = 1.0,
) -> float:
    """The decades a score must reach so that clean data raise `alarms_per_day` alarms over all `entities`.

    An alarm needs `persistence_k` exceedances, taken as independent (p^k); `extremal_index` says how many of them
    begin an alarm of their own. Verify on a clean replay: the k exceedances of a slow score are not independent.
    """
    if alarms_per_day <= 0.0 or entities < 1 or decisions_per_day <= 0.0 or persistence_k < 1 or extremal_index <= 0.0:
        raise CalibrationError("a budget needs positive alarms per day, entities, decisions per day and persistence")
    rate = alarms_per_day / (entities * decisions_per_day * extremal_index)
    return min(DECADES_MAX, max(0.0, -math.log10(min(rate, 1.0)) / persistence_k))


def replayed_threshold(scores: npt.ArrayLike, alarms_max: float, alarms_at: Callable[[float], int]) -> float:
    """The lowest threshold, coming from above, at which a replay of clean scores raises at most `alarms_max` alarms.

    `alarms_at` counts them at a threshold, persistence and all, so that nothing need be independent. Levels are
    quantiles of the scores, 1 in 100,000 to 1 in 5. Just above the highest score where even that one is too low.
    """
    clean = np.asarray(scores, dtype=np.float64).ravel()
    clean = clean[np.isfinite(clean)]
    if not len(clean):
        raise CalibrationError("no finite clean score to calibrate on; give the scores of clean rows")
    found = float(np.nextafter(clean.max(), np.inf))
    for level in np.unique(np.quantile(clean, 1.0 - np.geomspace(1e-5, 0.2, REPLAY_LEVELS)))[::-1]:
        if alarms_at(float(level)) > alarms_max:
            break
        found = float(level)
    return found


def persistence(flags: npt.ArrayLike, k: int, n: int) -> Bools:
    """True where at least k of the last n flags (this one among them) are set; time is the first axis."""
    if not 1 <= k <= n:
        raise CalibrationError(f"{k} of {n} cannot be; k must be at least 1 and at most n")
    sums = np.cumsum(np.asarray(flags, dtype=np.int64), axis=0)
    before = np.zeros_like(sums)
    before[n:] = sums[:-n]
    return np.asarray(sums - before >= k)


class Gate(NamedTuple):
    """Where a hysteresis stands between two blocks of one series."""

    open: bool = False
    quiet: int = 0  # samples below the closing level since the last one above it


def hysteresis(
    scores: npt.ArrayLike, open_at: float, close_at: float | None = None, close_after: int = 1, gate: Gate | None = None
) -> Bools:
    """True while open: opens at `open_at`, closes with the `close_after`-th sample in a row below `close_at`.

    `close_at` is half of `open_at` by default. NaN neither opens nor counts as quiet. Time is the first axis; `gate`
    continues an earlier block (series of one dimension only), see `gate_after`.
    """
    given = np.asarray(scores, dtype=np.float64)
    low = open_at / 2.0 if close_at is None else close_at
    if low > open_at or close_after < 1:
        raise CalibrationError("a hysteresis closes at or below the level at which it opens, after one sample or more")
    rows = np.arange(len(given)).reshape((-1,) + (1,) * (given.ndim - 1))
    before = gate or Gate()
    loud = np.maximum.accumulate(np.where(given < low, -1 - before.quiet, rows), axis=0)
    closed = np.maximum.accumulate(np.where(rows - loud >= close_after, rows, -1), axis=0)
    opened = np.maximum.accumulate(np.where(given >= open_at, rows, -1), axis=0)
    return np.asarray((opened > closed) | (before.open & (closed < 0) & (opened < 0)))


def gate_after(scores: npt.ArrayLike, opened: Bools, low: float, gate: Gate | None = None) -> Gate:
    """The gate for the block after this one; `opened` is what `hysteresis` gave for it, `low` its closing level."""
    given = np.asarray(scores, dtype=np.float64)
    if not len(given):
        return gate or Gate()
    loud = np.flatnonzero(~(given < low))
    quiet = len(given) - 1 - int(loud[-1]) if len(loud) else (gate or Gate()).quiet + len(given)
    return Gate(bool(opened[-1]), quiet)
