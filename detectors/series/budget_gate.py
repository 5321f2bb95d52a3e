"""From one entity's scores to alarms: a threshold that keeps to a budget, two rows that agree, a close after quiet.

The threshold is the lowest at which the last `history_days_max` of scores, replayed, raise no more alarms than the
budget; it is set anew every `recalibrate_days`. So an entity that drifts does not flood, and no label is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.calibration import (
    Bools,
    CalibrationError,
    Floats,
    Gate,
    Tail,
    extremal_index,
    gate_after,
    hysteresis,
    persistence,
    replayed_threshold,
    threshold_decades,
)

BUDGET_ALARMS_MIN = 2.0  # fewer alarms in the history cannot be counted: the tail is extrapolated then


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """`alarms_per_day` is of one entity and of all alarms: history holds events that nobody labelled."""

    rows_per_day: float
    alarms_per_day: float = 0.5
    persistence_rows: int = 2
    close_after_rows: int = 6
    recalibrate_days: float = 1.0
    history_days_max: float = 30.0

    @property
    def history_rows(self) -> int:
        return max(1, int(self.history_days_max * self.rows_per_day))

    @property
    def recalibrate_rows(self) -> int:
        return max(1, int(self.recalibrate_days * self.rows_per_day))


class _State(msgspec.Struct):
    threshold: float
    since: int
    open: bool
    quiet: int


class BudgetGate:
    """Starts from the scores of a quiet time; then observes blocks in order, of any length, to the same end."""

    def __init__(self, config: BudgetConfig, history: npt.ArrayLike, threshold: float | None = None) -> None:
        """`history`: scores in time order, from which the threshold comes where it is not given.

        Raises CalibrationError where no score is finite.
        """
        self.config = config
        self._history = np.asarray(history, dtype=np.float64)[-config.history_rows :]
        self._flags: Bools = np.zeros(0, dtype=np.bool_)  # the last exceedances, for persistence
        self._gate = Gate()
        self._since = 0  # rows since the threshold was set
        self.threshold = alarm_threshold(self._history, config) if threshold is None else threshold

    def observe(self, scores: Floats) -> Bools:
        """Where an alarm is open, a flag for each row."""
        parts = [np.zeros(0, dtype=np.bool_)]
        while len(scores):
            block = scores[: self.config.recalibrate_rows - self._since]
            parts.append(self._alarmed(block))
            self._history = np.concatenate([self._history, block])[-self.config.history_rows :]
            self._since += len(block)
            if self._since >= self.config.recalibrate_rows:
                self.threshold, self._since = alarm_threshold(self._history, self.config), 0
            scores = scores[len(block) :]
        return np.concatenate(parts)

    def _alarmed(self, scores: Floats) -> Bools:
        width = self.config.persistence_rows
        flags = np.concatenate([self._flags, scores >= self.threshold])
        lasting = persistence(flags, width, width)[len(self._flags) :].astype(np.float64)
        alarmed = hysteresis(lasting, 1.0, 0.5, self.config.close_after_rows, self._gate)
        self._gate = gate_after(lasting, alarmed, 0.5, self._gate)
        self._flags = flags[max(0, len(flags) - width + 1) :]
        return alarmed

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """JSON-able fields, and arrays for an npz file."""
        state = _State(self.threshold, self._since, self._gate.open, self._gate.quiet)
        return msgspec.to_builtins(state), {"history": self._history, "flags": self._flags}

    @classmethod
    def from_state(cls, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], config: BudgetConfig) -> BudgetGate:
        """Go on where `to_state` stopped. Raises CalibrationError where the state is not one."""
        try:
            fields = msgspec.convert(state, _State)
            gate = cls(config, arrays["history"], fields.threshold)
            gate._flags = np.asarray(arrays["flags"], dtype=np.bool_)
        except (KeyError, msgspec.ValidationError) as error:
            raise CalibrationError(f"the stored gate is not one ({error}); fit it anew") from error
        gate._since, gate._gate = fields.since, Gate(fields.open, fields.quiet)
        return gate


def alarms(scores: Floats, threshold: float, config: BudgetConfig) -> Bools:
    """Where an alarm is open in a whole series of scores, at one threshold."""
    lasting = persistence(scores >= threshold, config.persistence_rows, config.persistence_rows)
    return hysteresis(lasting.astype(np.float64), 1.0, 0.5, config.close_after_rows)


def alarm_threshold(scores: Floats, config: BudgetConfig) -> float:
    """The lowest threshold at which these scores raise no more alarms than the budget.

    Where the budget allows fewer than two in so short a history, their tail is extrapolated to it instead.
    """
    budget = config.alarms_per_day * len(scores) / config.rows_per_day
    if budget >= BUDGET_ALARMS_MIN:
        return replayed_threshold(scores, budget, lambda at: _count(alarms(scores, at, config)))
    tail = Tail.fit(scores)
    index = extremal_index(scores, tail.start)
    return tail.score_at(threshold_decades(config.alarms_per_day, 1, config.rows_per_day, extremal_index=index))


def _count(alarmed: Bools) -> int:
    return int(np.count_nonzero(np.diff(alarmed.astype(np.int8), prepend=0) == 1))
