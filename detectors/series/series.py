"""One entity's many metrics against their own history: a host, a service, a GPU that has no peers to compare with.

Two members decide. `forecast`: how far the metrics are from a linear forecast of theirs, on average. `neighbours`:
how far their rolling means and changes are from clean ones (PyOD's KNN). Each becomes decades on rows that it was not
fitted on; half their maximum and half their mean is the score. Members that vote (HBOS, IForest) and members refitted
on the way were measured and left out: both made it worse (docs/evaluation.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from detectors.calibration import Tail
from detectors.ensemble.models import load_model
from detectors.series.budget_gate import BudgetConfig, BudgetGate
from detectors.series.features import Bools, Floats, Forecast, Units, filled, mean_and_change, rolling_mean

MEMBERS = ("forecast", "neighbours")
NEIGHBOURS = "KNN"
CHECK_ROWS = 16
NO_CAP = 1e6  # decades: what ranks rows is not cut, only what is published is


class SeriesRefused(ValueError):
    """There is too little to learn from, or a stored detector does not reproduce its scores; fit it anew."""


@dataclass(frozen=True, slots=True)
class SeriesConfig:
    """Few knobs, the same for every kind of entity. `window_rows`: of means, of changes and of the forecast's past."""

    budget: BudgetConfig
    window_rows: int = 5
    smooth_rows: int = 6
    folds: int = 3
    reference_rows_max: int = 2048
    train_rows_min: int = 200
    train_rows_max: int = 100_000

    @property
    def context_rows(self) -> int:
        """Rows before a block that its scores depend on."""
        return self.window_rows + self.smooth_rows


class Scored(NamedTuple):
    """One block. `score`: decades, uncapped. `alarmed`: an alarm is open. `blame`: rows × metrics, in scales, ≥ 0."""

    score: Floats
    alarmed: Bools
    blame: Floats


@dataclass(frozen=True, slots=True)
class _Members:
    """Both members, fitted on the same clean rows; raw scores, before calibration."""

    units: Units
    forecast: Forecast
    residual_units: Units
    shape_units: Units
    reference: Floats  # what the neighbours are looked for among
    model: Any

    @classmethod
    def of(cls, rows: Floats, config: SeriesConfig) -> _Members:
        units = Units.of(rows)
        scaled = units(rows)
        if not len(units.kept):
            raise SeriesRefused("no metric of the series varies in the training rows; give a longer part")
        forecast = Forecast.of(scaled, config.window_rows)
        shape = mean_and_change(scaled, config.window_rows)
        picked = np.unique(np.linspace(0, len(shape) - 1, config.reference_rows_max).astype(int))
        shape_units = Units.of(shape)
        reference = shape_units(shape[picked])
        return cls(
            units, forecast, Units.of(forecast.residuals(scaled)), shape_units, reference, _neighbours(reference)
        )

    def raw(self, rows: Floats, config: SeriesConfig) -> tuple[Floats, Floats]:
        """Members × rows (higher = odder), and the blame of each metric, rows × metrics."""
        scaled = self.units(rows)
        residuals = _spread(self.residual_units, self.forecast.residuals(scaled))
        shape = mean_and_change(scaled, config.window_rows)
        distances = self.model.decision_function(self.shape_units(shape))
        raw = np.stack([residuals.mean(axis=1), np.asarray(distances, dtype=np.float64)])
        change = _spread(self.shape_units, shape)[:, len(self.units.kept) :]
        blame = np.zeros(rows.shape)
        blame[:, self.units.kept] = residuals + np.abs(scaled) + change
        return rolling_mean(raw.T, config.smooth_rows).T, blame

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {"weights": self.forecast.weights, "reference": self.reference}
        for name in ("units", "residual_units", "shape_units"):
            units = getattr(self, name)
            arrays |= {f"{name}.centre": units.centre, f"{name}.scale": units.scale, f"{name}.kept": units.kept}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]], config: SeriesConfig) -> _Members:
        def units(name: str) -> Units:
            return Units(arrays[f"{name}.centre"], arrays[f"{name}.scale"], arrays[f"{name}.kept"])

        reference = arrays["reference"]
        forecast = Forecast(arrays["weights"], config.window_rows)
        parts = [units(name) for name in ("units", "residual_units", "shape_units")]
        return cls(parts[0], forecast, parts[1], parts[2], reference, _neighbours(reference))


class SeriesDetector:
    """Made by `fit` from rows of a quiet time, then observes blocks in order; row t is scored by rows up to t only."""

    def __init__(
        self, config: SeriesConfig, members: _Members, tails: tuple[Tail, ...], gate: BudgetGate, context: Floats
    ) -> None:
        self.config = config
        self.gate = gate
        self._members, self._tails, self._context = members, tails, context

    @classmethod
    def fit(cls, rows: npt.ArrayLike, config: SeriesConfig) -> SeriesDetector:
        """Learn from rows × metrics in time order, at most the last `train_rows_max`. Raises SeriesRefused.

        What it calibrates on comes from folds: each stretch is scored by members fitted on the others.
        """
        given = np.asarray(rows, dtype=np.float64)[-config.train_rows_max :]
        if given.ndim != 2 or len(given) < config.train_rows_min:
            raise SeriesRefused(f"a series needs {config.train_rows_min} rows × metrics to learn from; give more")
        train = filled(given, _medians(given))
        raw = np.empty((len(MEMBERS), len(train)))
        for start, end in pairwise(np.linspace(0, len(train), config.folds + 1).astype(int)):
            members = _Members.of(np.delete(train, slice(start, end), axis=0), config)
            first = max(0, start - config.context_rows)
            raw[:, start:end] = members.raw(train[first:end], config)[0][:, start - first :]
        tails = tuple(Tail.fit(scores) for scores in raw)
        gate = BudgetGate(config.budget, _combined(tails, raw))
        return cls(config, _Members.of(train, config), tails, gate, train[-config.context_rows :])

    def observe(self, rows: npt.ArrayLike) -> Scored:
        """The next block: rows × metrics in the order of the training rows, any length; NaN = missing."""
        given = filled(rows, self._context[-1])
        if not len(given):
            return Scored(np.empty(0), np.empty(0, dtype=np.bool_), np.empty((0, self._context.shape[1])))
        whole = np.vstack([self._context, given])
        raw, blame = self._members.raw(whole, self.config)
        score = _combined(self._tails, raw)[-len(given) :]
        self._context = whole[-self.config.context_rows :]
        return Scored(score, self.gate.observe(score), blame[-len(given) :])

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """JSON-able fields, and arrays for an npz file: reference rows and weights, never a pickled model."""
        fields: dict[str, Any] = {"members": list(MEMBERS), "tails": [], "checks": self._checks()}
        arrays = {"context": self._context, **self._members.to_arrays()}
        for name, tail in zip(MEMBERS, self._tails, strict=True):
            state, own = tail.to_state()
            fields["tails"].append(state)
            arrays |= {f"{name}.{key}": value for key, value in own.items()}
        fields["gate"], own = self.gate.to_state()
        return fields, arrays | {f"gate.{key}": value for key, value in own.items()}

    @classmethod
    def from_state(
        cls, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], config: SeriesConfig
    ) -> SeriesDetector:
        """Go on where `to_state` stopped. Raises SeriesRefused where it is no state, or scores differently here."""
        try:
            members = _Members.from_arrays(arrays, config)
            tails = tuple(
                Tail.from_state(fields, {key: arrays[f"{name}.{key}"] for key in ("points", "point_decades")})
                for name, fields in zip(MEMBERS, state["tails"], strict=True)
            )
            own = {key: arrays[f"gate.{key}"] for key in ("history", "flags")}
            gate = BudgetGate.from_state(state["gate"], own, config.budget)
            found = cls(config, members, tails, gate, arrays["context"])
            wanted = np.asarray(state["checks"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:  # CalibrationError among them
            raise SeriesRefused(f"the stored detector is not one ({error}); fit it anew") from error
        if wanted.shape != np.shape(found._checks()) or not np.allclose(wanted, found._checks(), rtol=1e-6, atol=1e-9):
            raise SeriesRefused("the stored detector does not reproduce its scores here; fit it anew")
        return found

    def _checks(self) -> list[float]:
        """Scores of some reference rows far from their neighbours, to prove a refit."""
        probes = self._members.reference[:CHECK_ROWS] + 1.0
        return [float(f"{score:.9g}") for score in self._members.model.decision_function(probes)]


def ranked_metrics(blame: Floats) -> list[int]:
    """Column numbers by their worst row, the most to blame first; `blame`: an alarm's rows, at least one."""
    return [int(column) for column in np.argsort(-blame.max(axis=0), kind="stable")]


def _spread(units: Units, rows: Floats) -> Floats:
    """Distances from the centre in scales, rows × all columns; 0 for those that never varied."""
    out = np.zeros_like(rows)
    out[:, units.kept] = np.abs(units(rows))
    return out


def _neighbours(reference: Floats) -> Any:
    model = load_model(NEIGHBOURS)
    model.fit(reference)
    return model


def _combined(tails: tuple[Tail, ...], raw: Floats) -> Floats:
    decades = np.stack([tail.decades(scores, NO_CAP) for tail, scores in zip(tails, raw, strict=True)])
    return np.asarray(0.5 * decades.max(axis=0) + 0.5 * decades.mean(axis=0))


def _medians(rows: Floats) -> Floats:
    """The median of each metric's values that are there; 0 where it has none."""
    present = [column[np.isfinite(column)] for column in rows.T]
    return np.array([np.median(values) if len(values) else 0.0 for values in present])
