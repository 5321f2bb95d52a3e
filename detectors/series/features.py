"""What a series looks like to its members: robust units, rolling means and differences, residuals of a forecast.

Everything is causal: row t of an output depends on rows up to t only. Public data say that this representation is
worth more than the detector behind it: a difference or a forecast residual is blind to the hour of the day.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

CLIP = 20.0
SCALE_FLOOR = 0.01  # in the metric's unit
SPREAD_SHARE = 0.25  # of the standard deviation: keeps a metric with rare bursts from exploding
CONSTANT = 1e-6
RIDGE = 1e-2  # in units of one scaled metric's variance


@dataclass(frozen=True, slots=True)
class Units:
    """Centre and scale of each metric, and which metrics vary at all (the others are left out)."""

    centre: Floats
    scale: Floats
    kept: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Floats) -> Units:
        """From clean rows: median, and the largest of IQR / 1.349, a quarter of the deviation, and a floor."""
        low, centre, high = np.quantile(rows, [0.25, 0.5, 0.75], axis=0)
        spread = rows.std(axis=0)
        scale = np.maximum(np.maximum((high - low) / 1.349, SPREAD_SHARE * spread), SCALE_FLOOR)
        kept = np.flatnonzero(spread > CONSTANT)
        return cls(centre[kept], scale[kept], kept)

    def __call__(self, rows: Floats) -> Floats:
        """Rows × kept metrics, in scales from the centre, within ±20."""
        return np.asarray(np.clip((rows[:, self.kept] - self.centre) / self.scale, -CLIP, CLIP))


def filled(rows: npt.ArrayLike, before: Floats) -> Floats:
    """Rows without a gap: a value that is missing is the last one of its metric; `before` is the row before."""
    given = np.array(rows, dtype=np.float64)
    missing = ~np.isfinite(given)
    if missing.any():
        given = np.vstack([before, given])
        at = np.where(np.vstack([np.zeros(len(before), dtype=np.bool_), missing]), 0, np.arange(len(given))[:, None])
        given = np.take_along_axis(given, np.maximum.accumulate(at, axis=0), axis=0)[1:]
    return given


def rolling_mean(rows: Floats, width: int) -> Floats:
    """The mean of the last `width` rows, of as many as there are at the start. Rows × anything, or rows."""
    shifted = [earlier(rows, back) for back in range(width)]
    return np.asarray(np.mean(np.stack(shifted), axis=0))


def earlier(rows: Floats, back: int) -> Floats:
    """The rows `back` rows ago; the first row stands for those before it."""
    if back == 0 or not len(rows):
        return rows
    return np.concatenate([np.repeat(rows[:1], min(back, len(rows)), axis=0), rows[:-back]])[: len(rows)]


def mean_and_change(rows: Floats, width: int) -> Floats:
    """Rows × 2 metrics: the rolling mean, and the change over `width` rows."""
    return np.hstack([rolling_mean(rows, width), rows - earlier(rows, width)])


@dataclass(frozen=True, slots=True)
class Forecast:
    """Each metric from the last `lags` rows of all metrics: one linear map, fitted by ridge regression."""

    weights: Floats  # (metrics · lags + 1) × metrics
    lags: int

    @classmethod
    def of(cls, rows: Floats, lags: int) -> Forecast:
        past = _past(rows, lags)
        penalty = np.full(past.shape[1], RIDGE * len(rows))
        penalty[-1] = 1e-9  # the constant is free
        weights = np.linalg.solve(past.T @ past + np.diag(penalty), past.T @ rows)
        return cls(np.asarray(weights), lags)

    def residuals(self, rows: Floats) -> Floats:
        """What each row is beyond its forecast, rows × metrics."""
        return np.asarray(rows - _past(rows, self.lags) @ self.weights)


def _past(rows: Floats, lags: int) -> Floats:
    """The last rows side by side, and a column of ones."""
    return np.hstack([*(earlier(rows, back) for back in range(1, lags + 1)), np.ones((len(rows), 1))])
