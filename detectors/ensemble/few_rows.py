"""Rows of a small job for the ensemble: distance from the rank's own normal, less what all ranks share.

With fewer than eight peers their spread says nothing, so the unit is the rank's own noise over its first clean steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from detectors.steps import TIMINGS, Floats

Singles = npt.NDArray[np.float32]

BASE_STEPS = 60
KEPT = 16
FRACTION_FLOOR = 0.01
SECONDS_FLOOR = 0.001
CLIP = 20.0


class FewRows:
    """Learns each rank's normal from clean steps; then gives rank × timing for each step, NaN = not measured."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._learned: list[Floats] = []
        self._base: Floats | None = None
        self._scale: Floats = np.ones((ranks, len(TIMINGS)))
        self._steps: list[int] = []
        self._shown: Singles = np.full((KEPT, ranks, len(TIMINGS)), np.nan, dtype=np.float32)

    def learn(self, rows: Floats) -> None:
        """One clean step, rank × timing in seconds, until the base is full."""
        if self._base is not None:
            return
        self._learned.append(rows)
        if len(self._learned) < BASE_STEPS:
            return
        stack = np.stack(self._learned)
        self._base = _median(stack)
        apart = self._apart(stack)
        self._scale = np.fmax(1.4826 * _median(np.abs(apart - _median(apart))), FRACTION_FLOOR)
        self._learned = []

    def show(self, step: int, rows: Floats) -> None:
        """Keep the row of a scored step."""
        if self._base is None:
            return
        self._steps = [*self._steps[-(KEPT - 1) :], step]
        deviations = np.clip(self._apart(rows[None])[0] / self._scale, -CLIP, CLIP)
        self._shown[step % KEPT] = deviations

    def ratios(self, rows: Floats, name: str) -> Floats:
        """One timing of a step over each rank's own normal; NaN where either is not known."""
        index = TIMINGS.index(name)
        if self._base is None:
            return np.full(self.ranks, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(rows[:, index] / self._base[:, index])

    def deviations(self, step: int) -> Singles | None:
        """rank × timing of one of the newest sixteen steps; None before the base is known."""
        return self._shown[step % KEPT].copy() if step in self._steps else None

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        arrays: dict[str, npt.NDArray[Any]] = {"shown": self._shown, "scale": self._scale}
        if self._base is not None:
            arrays["base"] = self._base
        if self._learned:
            arrays["learned"] = np.stack(self._learned)
        return {"steps": self._steps}, arrays

    def load_state(self, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        self._steps = list(state["steps"])
        self._shown, self._scale = arrays["shown"].copy(), arrays["scale"].copy()
        self._base = arrays["base"].copy() if "base" in arrays else None
        self._learned = [rows.copy() for rows in arrays["learned"]] if "learned" in arrays else []

    def _apart(self, stack: Floats) -> Floats:
        """step × rank × timing: distance from the base in shares of it, less the ranks' median."""
        assert self._base is not None
        apart = (stack - self._base) / np.maximum(np.abs(self._base), SECONDS_FLOOR)
        return np.asarray(apart - _median(apart.transpose(1, 0, 2))[:, None, :])


def _median(stack: Floats) -> Floats:
    """Median along the first axis without NaN; NaN where there is nothing else."""
    if not np.isnan(stack).any():
        return np.asarray(np.median(stack, axis=0))
    ordered = np.sort(stack, axis=0)  # NaN last
    told = np.isfinite(stack).sum(axis=0)
    lower, upper = np.maximum(told - 1, 0) // 2, np.minimum(told // 2, len(stack) - 1)
    picked = [np.take_along_axis(ordered, at[None], axis=0)[0] for at in (lower, upper)]
    return np.asarray((picked[0] + picked[1]) / 2)
