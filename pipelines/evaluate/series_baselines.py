"""Who our series detector is measured against: raw PyOD models and a plain z, each with the same gate and budget."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from detectors.ensemble.models import load_model
from detectors.series.budget_gate import BudgetConfig, BudgetGate
from detectors.series.features import Bools, Floats, Units, filled, rolling_mean
from detectors.series.series import SeriesConfig, SeriesDetector

OURS = "transom"
OWN_Z = "own-history z"
MODELS = ("PCA", "KNN", "HBOS", "IForest", "ECOD", "COPOD")
METHODS = (OURS, OWN_Z, *MODELS)
SMOOTH_ROWS, FOLDS, REFERENCE_ROWS_MAX = 6, 3, 4096


class Answer(NamedTuple):
    """What a method says of the test rows. `blame`: rows × metrics where it can name metrics, else None."""

    score: Floats
    alarmed: Bools
    blame: Floats | None


class _Scorer(Protocol):
    def decision_function(self, rows: Floats) -> Floats: ...


class _HighestZ:
    """The highest |z| of a row: no model."""

    def decision_function(self, rows: Floats) -> Floats:
        return np.asarray(np.abs(rows).max(axis=1))


def answer(method: str, train: Floats, test: Floats, rows_per_day: float, alarms_per_day: float) -> Answer:
    """Fit a method on the training part, threshold by the budget, and let it see the test part once.

    A baseline scores rows in robust units; its scores are smoothed and gated as ours are, and the training scores that
    set its threshold come from folds, so that only the score itself differs.
    """
    budget = BudgetConfig(rows_per_day, alarms_per_day)
    if method == OURS:
        return Answer(*SeriesDetector.fit(train, SeriesConfig(budget)).observe(test))
    first = np.nan_to_num(train[:1])
    clean = filled(train, first)
    history = np.empty(len(clean))
    for start, end in pairwise(np.linspace(0, len(clean), FOLDS + 1).astype(int)):
        history[start:end] = _scores(method, np.delete(clean, slice(start, end), axis=0), clean[start:end])
    unseen = filled(test, clean[-1])
    score = _scores(method, clean, unseen)
    return Answer(score, BudgetGate(budget, history).observe(score), _blame(method, clean, unseen))


def _scores(method: str, fitted_on: Floats, rows: Floats) -> Floats:
    units = Units.of(fitted_on)
    scorer: _Scorer = _HighestZ()
    if method != OWN_Z:
        scaled = units(fitted_on)
        model = load_model(method)
        model.fit(scaled[np.unique(np.linspace(0, len(scaled) - 1, REFERENCE_ROWS_MAX).astype(int))])
        scorer = model
    return rolling_mean(np.asarray(scorer.decision_function(units(rows)), dtype=np.float64), SMOOTH_ROWS)


def _blame(method: str, train: Floats, rows: Floats) -> Floats | None:
    """|z| of each metric; raw models do not say which metric it was."""
    if method != OWN_Z:
        return None
    units = Units.of(train)
    blame = np.zeros(rows.shape)
    blame[:, units.kept] = np.abs(units(rows))
    return blame
