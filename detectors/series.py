"""One entity's many metrics against their own history: a host, a service, a GPU that has no peers to compare with.

Two members decide. `forecast`: how far the metrics are from a linear forecast, on average. `neighbours`: how far the
rolling mean and change are from clean ones, PyOD's KNN. Each becomes decades on rows it was not fitted on; half their
maximum and half their mean is the score. The threshold is where the training rows, replayed, raise the budget of
alarms; it moves with the last days, so that an entity that drifts does not flood, nor one that calms down go deaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from detectors.calibration import (
    CalibrationError,
    Gate,
    Tail,
    extremal_index,
    gate_after,
    hysteresis,
    persistence,
    replayed_threshold,
    threshold_decades,
)
from detectors.ensemble.models import load_model
from detectors.series_features import Bools, Floats, Forecast, Units, filled, mean_and_change, rolling_mean

MEMBERS = ("forecast", "neighbours")
CHECK_ROWS = 16
BUDGET_ALARMS_MIN = 2.0  # fewer alarms in the training rows cannot be counted: the tail is extrapolated then
NO_CAP = 1e6  # decades: what ranks rows is not cut, what is published is


class SeriesRefused(ValueError):
    """There is too little to learn from, or a stored detector does not reproduce its scores; fit it anew."""


@dataclass(frozen=True, slots=True)
class SeriesConfig:
    """Few knobs, the same for every kind of entity; widths in rows. `alarms_per_day`: of all alarms, right ones too.

    The budget counts what the training rows would raise, and those hold events that nobody labelled.
    """

    rows_per_day: float
    alarms_per_day: float = 0.5
    window_rows: int = 5
    lag_rows: int = 3
    smooth_rows: int = 6
    folds: int = 3
    reference_rows_max: int = 2048
    persistence_rows: int = 2
    close_after_rows: int = 6
    recalibrate_days: float = 1.0
    history_days_max: float = 30.0
    train_rows_min: int = 200
    train_rows_max: int = 100_000

    @property
    def context_rows(self) -> int:
        """Rows before a block that its scores depend on."""
        return max(self.window_rows, self.lag_rows) + self.smooth_rows


class Scored(NamedTuple):
    """One block. `score`: decades, uncapped. `alarmed`: an alarm is open. `blame`: rows × metrics, in scales, ≥ 0."""

    score: Floats
    alarmed: Bools
    blame: Floats


class _Members:
    """Both members fitted on the same clean rows; raw scores, before calibration."""

    def __init__(self, rows: Floats, config: SeriesConfig) -> None:
        self.config = config
        self.units = Units.of(rows)
        if not len(self.units.kept):
            raise SeriesRefused("no metric of the series varies in the training rows; give a longer part")
        scaled = self.units(rows)
        self.forecast = Forecast.of(scaled, config.lag_rows)
        self.residual_units = Units.of(self.forecast.residuals(scaled))
        shape = mean_and_change(scaled, config.window_rows)
        self.shape_units = Units.of(shape)
        picked = np.unique(np.linspace(0, len(shape) - 1, config.reference_rows_max).astype(int))
        self.model = load_model("KNN")
        self.model.fit(self.shape_units(shape[picked]))

    def raw(self, rows: Floats) -> tuple[Floats, Floats]:
        """Rows → members × rows (higher = odder), and the blame of each metric, rows × metrics."""
        scaled = self.units(rows)
        residuals = np.zeros_like(scaled)
        residuals[:, self.residual_units.kept] = np.abs(self.residual_units(self.forecast.residuals(scaled)))
        shape = self.shape_units(mean_and_change(scaled, self.config.window_rows))
        raw = np.stack([residuals.mean(axis=1), np.asarray(self.model.decision_function(shape), dtype=np.float64)])
        blame = np.zeros(rows.shape)
        blame[:, self.units.kept] = residuals
        return rolling_mean(raw.T, self.config.smooth_rows).T, blame


class SeriesDetector:
    """Fit once on rows of a quiet time, then observe blocks in order; a score depends on rows up to its own only."""

    def __init__(self, config: SeriesConfig) -> None:
        self.config = config
        self._members: _Members | None = None
        self._tails: tuple[Tail, ...] = ()
        self._train: Floats = np.empty((0, 0))
        self._context: Floats = np.empty((0, 0))
        self._history: Floats = np.empty(0)
        self._flags: Bools = np.empty(0, dtype=np.bool_)  # the last exceedances, for persistence
        self._gate = Gate()
        self._since = 0  # rows since the threshold was set
        self.threshold = float("inf")

    def fit(self, rows: npt.ArrayLike) -> None:
        """Learn from rows × metrics in time order, at most the last `train_rows_max`. Raises SeriesRefused.

        Scores to calibrate on come from folds: each stretch is scored by members fitted on the others.
        """
        given = np.asarray(rows, dtype=np.float64)[-self.config.train_rows_max :]
        if given.ndim != 2 or len(given) < self.config.train_rows_min:
            raise SeriesRefused(f"a series needs {self.config.train_rows_min} rows × metrics to learn from")
        with np.errstate(all="ignore"):
            medians = np.array([np.median(column[np.isfinite(column)]) for column in given.T])
        train = filled(given, np.nan_to_num(medians))
        raw = np.empty((len(MEMBERS), len(train)))
        edges = np.linspace(0, len(train), self.config.folds + 1).astype(int)
        for start, end in zip(edges, edges[1:], strict=False):
            members = _Members(np.delete(train, slice(start, end), axis=0), self.config)
            first = max(0, start - self.config.context_rows)
            raw[:, start:end] = members.raw(train[first:end])[0][:, start - first :]
        self._tails = tuple(Tail.fit(scores) for scores in raw)
        self._members = _Members(train, self.config)
        self._train, self._context = train, train[-self.config.context_rows :]
        self._history = self._combined(raw)[-self._history_rows :]
        self._recalibrate()

    def observe(self, rows: npt.ArrayLike) -> Scored:
        """The next block, rows × metrics in the order of the training rows; any length, NaN where a value is missing."""
        if self._members is None:
            raise SeriesRefused("the detector was not fitted; fit it on rows of a quiet time first")
        given = filled(rows, self._context[-1])
        parts = []
        while len(given):
            room = max(1, int(self.config.recalibrate_days * self.config.rows_per_day) - self._since)
            parts.append(self._block(given[:room], self._members))
            given = given[room:]
        if not parts:
            return Scored(np.empty(0), np.empty(0, dtype=np.bool_), np.empty((0, given.shape[1])))
        return Scored(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _block(self, rows: Floats, members: _Members) -> Scored:
        """Rows up to the next recalibration."""
        whole = np.vstack([self._context, rows])
        raw, blame = members.raw(whole)
        score = self._combined(raw)[-len(rows) :]
        alarmed = self._alarmed(score)
        self._context = whole[-self.config.context_rows :]
        self._history = np.concatenate([self._history, score])[-self._history_rows :]
        self._since += len(rows)
        if self._since >= int(self.config.recalibrate_days * self.config.rows_per_day):
            self._recalibrate()
        return Scored(score, alarmed, blame[-len(rows) :])

    @property
    def _history_rows(self) -> int:
        return max(1, int(self.config.history_days_max * self.config.rows_per_day))

    def _combined(self, raw: Floats) -> Floats:
        decades = np.stack([tail.decades(scores, NO_CAP) for tail, scores in zip(self._tails, raw, strict=True)])
        return np.asarray(0.5 * decades.max(axis=0) + 0.5 * decades.mean(axis=0))

    def _alarmed(self, score: Floats) -> Bools:
        width = self.config.persistence_rows
        flags = np.concatenate([self._flags, score >= self.threshold])
        lasting = persistence(flags, width, width)[len(self._flags) :].astype(np.float64)
        alarmed = hysteresis(lasting, 1.0, 0.5, self.config.close_after_rows, self._gate)
        self._gate = gate_after(lasting, alarmed, 0.5, self._gate)
        self._flags = flags[len(flags) - min(len(flags), width - 1) :]
        return alarmed

    def _recalibrate(self) -> None:
        self.threshold = alarm_threshold(self._history, self.config)
        self._since = 0


def alarms(score: Floats, threshold: float, config: SeriesConfig) -> Bools:
    """Where an alarm is open in a whole series of scores."""
    lasting = persistence(score >= threshold, config.persistence_rows, config.persistence_rows)
    return hysteresis(lasting.astype(np.float64), 1.0, 0.5, config.close_after_rows)


def alarm_threshold(score: Floats, config: SeriesConfig) -> float:
    """The lowest threshold at which these scores raise no more alarms than the budget; a tail's where that is < 2."""
    budget = config.alarms_per_day * len(score) / config.rows_per_day
    if budget >= BUDGET_ALARMS_MIN:
        return replayed_threshold(score, budget, lambda at: _count(alarms(score, at, config)))
    tail = Tail.fit(score)
    index = extremal_index(score, tail.start)
    return tail.score_at(threshold_decades(config.alarms_per_day, 1, config.rows_per_day, extremal_index=index))


def _count(alarmed: Bools) -> int:
    return int(np.count_nonzero(np.diff(alarmed.astype(np.int8), prepend=0) == 1))
