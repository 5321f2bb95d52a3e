"""Members of the ensemble: each scores a row of deviations and says which features made it odd.

`topK` is the mean of the K largest |z|: it needs no fitting, keeps distance, and scores rows with gaps. All others are
models of PyOD behind one wrapper: columns by name, nothing constant, nothing missing, one call at a time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import numpy as np

from detectors.ensemble.models import Floats, load_model

VARIANCE_KEPT = 0.95
NEIGHBOURS = 5
STEADY = 1e-6  # a column that varies less says nothing, and a model that divides by it answers infinity


class MemberRefused(ValueError):
    """A member cannot be fitted on these rows, or answered with what is no number; the text says which."""


class Member(Protocol):
    """Rows are row × feature in the order of the ensemble's features, NaN = not measured."""

    name: str

    def score(self, rows: Floats) -> Floats:
        """One score for each row, higher = odder; NaN where it cannot score a row."""
        ...

    def contributions(self, row: Floats) -> Floats:
        """One number ≥ 0 for each feature: what made this row odd."""
        ...


class Top:
    """The mean of the `count` largest |z| of a row."""

    def __init__(self, count: int) -> None:
        self.name, self.count = f"top{count}", count

    def score(self, rows: Floats) -> Floats:
        apart = np.abs(np.nan_to_num(rows))
        count = min(self.count, apart.shape[1])
        if count == 1:
            return np.asarray(apart.max(axis=1))
        return np.asarray(np.partition(apart, -count, axis=1)[:, -count:].mean(axis=1))

    def contributions(self, row: Floats) -> Floats:
        apart = np.abs(np.nan_to_num(row))
        return np.where(apart >= np.sort(apart)[-min(self.count, len(apart))], apart, 0.0)


class Fitted:
    """A model of PyOD, fitted on rows of these columns.

    PCA is given whitened rows (95 % of the variance, each component in its own deviations), so that its score is a
    Mahalanobis distance: the model's own weights do not do that. KNN is fitted on few rows, spread over all.
    """

    def __init__(self, name: str, rows: Floats, columns: Sequence[int], reference_rows_max: int) -> None:
        """`rows`: row × feature, finite in `columns`. Raises MemberRefused."""
        self.name, self.columns = name, np.array(columns, dtype=np.int64)
        picked = rows[:, self.columns]
        if not np.isfinite(picked).all():
            raise MemberRefused(f"{name} is not fitted on rows with gaps; leave those rows or columns out")
        steady = np.std(picked, axis=0) <= STEADY
        if steady.any() or len(self.columns) < 2:
            raise MemberRefused(f"{name} is not fitted on constant columns; leave them out and keep at least two")
        self._lock = Lock()  # some models write into themselves while they score
        self._centre = picked.mean(axis=0)
        self._turn = _whitening(picked) if name == "PCA" else None
        if name == "KNN":
            picked = spread(picked, reference_rows_max)
        self._reference = picked
        self._model = load_model(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models about their own defaults: the suitability check has the word
            self._model.fit(self._seen(picked))
        self._finite(self.score(rows[:256]))

    def score(self, rows: Floats) -> Floats:
        picked = rows[:, self.columns]
        whole = np.isfinite(picked).all(axis=1)
        out = np.full(len(rows), np.nan)
        if whole.any():
            with self._lock, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out[whole] = self._model.decision_function(self._seen(picked[whole]))
            self._finite(out[whole])
        return out

    def contributions(self, row: Floats) -> Floats:
        """PCA: shares of the Mahalanobis distance. KNN: squared distance to the mean neighbour. Others: z²."""
        out = np.zeros(len(row))
        picked = row[self.columns]
        if not np.isfinite(picked).all():
            return np.nan_to_num(row) ** 2
        if self._turn is not None:
            apart = picked - self._centre
            out[self.columns] = np.maximum(apart * (self._turn @ (apart @ self._turn)), 0.0)
        elif self.name == "KNN":
            squares = (self._reference - picked) ** 2
            near = np.argsort(squares.sum(axis=1), kind="stable")[:NEIGHBOURS]
            out[self.columns] = (picked - self._reference[near].mean(axis=0)) ** 2
        else:
            out[self.columns] = (picked - self._centre) ** 2
        return out

    def _seen(self, picked: Floats) -> Floats:
        """What the model itself is given."""
        return picked if self._turn is None else (picked - self._centre) @ self._turn

    def _finite(self, scores: Floats) -> None:
        if not np.isfinite(scores).all():
            raise MemberRefused(f"{self.name} answered with a score that is no number; name another model")


def is_top(name: str) -> int:
    """K of a name `topK`, 0 for others."""
    found = re.fullmatch(r"top([1-9])", name)
    return int(found.group(1)) if found else 0


def spread(rows: Floats, count_max: int) -> Floats:
    """At most so many rows, evenly spread over all of them."""
    if len(rows) <= count_max:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, count_max).astype(np.int64))]


def _whitening(rows: Floats) -> Floats:
    """feature × component: turns centred rows into components of unit variance, the smallest 5 % left out."""
    scale = rows.std(axis=0)
    values, vectors = np.linalg.eigh(np.cov((rows / scale).T))
    order = np.argsort(values)[::-1]
    values, vectors = np.maximum(values[order], 0.0), vectors[:, order]
    kept = min(len(values), int(np.searchsorted(np.cumsum(values) / values.sum(), VARIANCE_KEPT)) + 1)
    kept = max(2, kept)
    return np.asarray(vectors[:, :kept] / np.sqrt(np.maximum(values[:kept], 1e-9)) / scale[:, None])
