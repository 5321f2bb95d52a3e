"""The door to PyOD: one model fitted on clean steps, whose tail probability supports what the rank channel decides.

PCA keeps magnitude: it scores a thousand-sigma step higher than a four-sigma one, which most of PyOD does not.
State is the clean rows it was fitted on, never a pickle; loading fits again and refuses a model that scores otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.ensemble.models import EnsembleUnavailable, load_model
from detectors.ensemble.models import Model as _Model
from detectors.steps import TIMINGS, Floats

CLIP = 20.0
TAIL_QUANTILE = 0.98
DECADES_MAX = 12
CHECK_ROWS = 16



class EnsembleRefused(ValueError):
    """A stored model does not reproduce its scores with the libraries at hand; fit it anew."""


@dataclass(frozen=True, slots=True)
class EnsembleConfig:
    """Which model, and at which clean steps it is fitted: counts, not times, so that replay fits the same."""

    model: str = "PCA"  # "" = off
    base_steps: int = 60
    refit_steps: int = 500
    rows_max: int = 4096
    seconds_floor: float = 0.001


class _State(msgspec.Struct):
    clean: int = 0  # clean steps seen
    rows: int = 0  # reference rows kept
    columns: list[str] = []
    checks: list[float] = []
    tail_start: float = 0.0
    tail_mean: float = 1.0
    versions: dict[str, str] = {}


def warm_up(config: EnsembleConfig) -> str:
    """Import PyOD before the first message; why the ensemble will be off, or an empty text."""
    ensemble = Ensemble(config)
    ensemble.preload()
    return ensemble.reason


class Ensemble:
    """Learns from clean steps and says how unlike them a rank's step is. `reason` says why it is off, or is empty."""

    def __init__(self, config: EnsembleConfig | None = None) -> None:
        self.config = config or EnsembleConfig()
        self.reason = "" if self.config.model else "the ensemble is switched off by configuration"
        self._state = _State()
        self._model: _Model | None = None
        self._base_rows: list[Floats] = []
        self._base: Floats | None = None
        self._reference: Floats = np.empty((0, len(TIMINGS)))
        self._fitted: Floats = np.empty((0, len(TIMINGS)))  # exactly what the model was fitted on

    def preload(self) -> None:
        """Import PyOD now; without it the ensemble is off and `reason` says so."""
        if self.config.model and not self.reason:
            try:
                load_model(self.config.model)
            except EnsembleUnavailable as error:
                self.reason = f"the ensemble is off: {error}"

    @property
    def fitted(self) -> bool:
        return self._model is not None

    def reset_ranks(self) -> None:
        """A new attempt: every rank's own normal is learned again; the model of clean deviations stays."""
        self._base_rows, self._base = [], None

    def learn(self, rows: Floats) -> None:
        """One clean step, rank × feature in seconds. Fits at fixed counts of clean steps."""
        if self.reason:
            return
        self._state.clean += 1
        if self._base is None:
            self._base_rows.append(rows)
            if len(self._base_rows) < self.config.base_steps:
                return
            self._base = _column_medians(np.stack(self._base_rows))
            for earlier in self._base_rows:
                self._keep(earlier)
            self._base_rows = []
        else:
            self._keep(rows)
        if self._model is None or self._state.clean % self.config.refit_steps == 0:
            self._fit(self._reference)

    def decades(self, rows: Floats, column: int) -> int | None:
        """How improbable the row of one rank is among clean ones: n for 10^-n, at most 12. None without a model."""
        if self._model is None or self._base is None:
            return None
        deviations = self._deviations(rows)[[column]]
        columns = [TIMINGS.index(name) for name in self._state.columns]
        picked = deviations[:, columns]
        if not np.isfinite(picked).all():
            return None
        score = float(self._model.decision_function(picked)[0])
        if not math.isfinite(score):
            return None
        over = max(0.0, score - self._state.tail_start) / self._state.tail_mean
        return min(DECADES_MAX, int((over - math.log(1.0 - TAIL_QUANTILE)) / math.log(10.0)))

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        arrays: dict[str, npt.NDArray[Any]] = {"reference": self._reference, "fitted": self._fitted}
        if self._base is not None:
            arrays["base"] = self._base
        if self._base_rows:
            arrays["base_rows"] = np.stack(self._base_rows)
        return {"model": self.config.model, **msgspec.to_builtins(self._state)}, arrays

    @classmethod
    def from_state(
        cls, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], config: EnsembleConfig | None = None
    ) -> Ensemble:
        """Fit again on the stored rows. Raises EnsembleRefused where the scores differ."""
        ensemble = cls(config)
        if state["model"] != ensemble.config.model:
            raise EnsembleRefused(
                f"the stored ensemble is {state['model']!r}, the configured one {ensemble.config.model!r}; fit it anew"
            )
        ensemble._state = msgspec.convert({k: v for k, v in state.items() if k != "model"}, _State)
        ensemble._reference = arrays["reference"].copy()
        ensemble._base = arrays["base"].copy() if "base" in arrays else None
        ensemble._base_rows = [row.copy() for row in arrays["base_rows"]] if "base_rows" in arrays else []
        if len(arrays["fitted"]):
            wanted = list(ensemble._state.checks)
            ensemble._fit(arrays["fitted"].copy())
            if not ensemble.reason and not np.allclose(wanted, ensemble._state.checks, rtol=1e-6, atol=1e-9):
                raise EnsembleRefused("the stored ensemble does not reproduce its scores here; fit it anew")
        return ensemble

    def _deviations(self, rows: Floats) -> Floats:
        assert self._base is not None
        scale = np.maximum(np.abs(self._base), self.config.seconds_floor)
        return np.asarray(np.clip((rows - self._base) / scale, -CLIP, CLIP))

    def _keep(self, rows: Floats) -> None:
        """Add a step's rows to the reference, the oldest go."""
        self._reference = np.concatenate([self._reference, self._deviations(rows)])[-self.config.rows_max :]
        self._state.rows = len(self._reference)

    def _fit(self, reference: Floats) -> None:
        """Fit on these rows. Columns by name; those missing somewhere or constant are left out."""
        columns = [
            index
            for index in range(len(TIMINGS))
            if np.isfinite(reference[:, index]).all() and float(np.std(reference[:, index])) > 1e-6
        ]
        if len(columns) < 2 or len(reference) < 50:
            return
        try:
            model = load_model(self.config.model)
        except EnsembleUnavailable as error:
            self.reason = f"the ensemble is off: {error}"
            return
        picked = reference[:, columns]
        model.fit(picked)
        scores = model.decision_function(picked)
        if not np.isfinite(scores).all():
            return
        self._model, self._fitted = model, reference
        start = float(np.quantile(scores, TAIL_QUANTILE))
        beyond = scores[scores > start]
        state = self._state
        state.columns, state.tail_start = [TIMINGS[index] for index in columns], start
        state.tail_mean = max(float(np.mean(beyond - start)) if len(beyond) else 0.0, 1e-3 * abs(start), 1e-9)
        state.checks = [float(f"{score:.9g}") for score in scores[:CHECK_ROWS]]
        state.versions = {"numpy": np.__version__}


def _column_medians(stack: Floats) -> Floats:
    """Medians over steps of rank × feature, NaN where a rank never had the feature."""
    if not np.isnan(stack).any():
        return np.asarray(np.median(stack, axis=0))
    out = np.full(stack.shape[1:], np.nan)
    for index in np.ndindex(*out.shape):
        column = stack[(slice(None), *index)]
        finite = column[np.isfinite(column)]
        if len(finite):
            out[index] = np.median(finite)
    return out
