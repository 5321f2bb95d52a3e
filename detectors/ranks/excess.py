"""One step of many peers as one rank × timing array, and what evidence is counted of in it.

Times that make up the computation count as shares of themselves, waits as shares of the step, so that a batch ramp
moves nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from detectors.medians import finite_median
from detectors.ranks.hysteresis import Bools, Singles
from detectors.steps import TIMINGS, StepMatrix

OWN, WALL = "train.compute.own", "train.compute.duration"
DATA, DELAY, STEP = "train.data.duration", "train.run_queue.delay", "train.step.duration"
OPTIMIZER, WAIT = "train.optimizer.duration", "train.collective.wait"
BUSY = "compute + data + collective wait"  # ends later than the peers' only where a rank's own collective does
COLUMNS = (*TIMINGS, BUSY)
OF_STEP = frozenset((STEP, DATA, WAIT, DELAY, OPTIMIZER, BUSY))  # measured in shares of the step
AT = {name: index for index, name in enumerate(COLUMNS)}
IN_STEPS: Bools = np.array([name in OF_STEP for name in COLUMNS])


class StepRows(NamedTuple):
    """One step as it is read from the matrix: rank × COLUMNS, and the median of its durations (None: not told)."""

    rows: Singles
    seconds: float | None


class Excesses(NamedTuple):
    """One step: each rank's distance from its peers, and from its node-mates where it has enough, in `unit`s."""

    own: Singles
    apart: Singles
    unit: Singles
    metric: str  # of the computation

    def peers(self) -> dict[str, Singles]:
        """Against the peers, by kind of evidence."""
        return self._excess(self.own)

    def mates(self) -> dict[str, Singles]:
        """By kind of evidence: against the node-mates."""
        return self._excess(self.apart)

    def _excess(self, own: Singles) -> dict[str, Singles]:
        """What evidence is counted of. A link: its wait is longer although neither its computation nor data is."""
        unit, metric = self.unit, AT[self.metric]
        return {
            "compute": _worth(own[:, metric], unit[:, metric], 0.002),
            "optimizer": _worth(own[:, AT[OPTIMIZER]], unit[:, AT[OPTIMIZER]], 0.002),
            "data": _worth(own[:, AT[DATA]], unit[:, AT[DATA]], 0.010),
            "link": np.minimum(own[:, AT[BUSY]], own[:, AT[WAIT]]),
            "delay": own[:, AT[DELAY]],
        }


def rows_of(matrix: StepMatrix, step: int) -> StepRows | None:
    """One step; None where the matrix no longer has it."""
    told = matrix.rows(step)
    if told is None:
        return None
    rows: Singles = np.empty((len(told), len(COLUMNS)), dtype=np.float32)
    rows[:, :-1] = told
    rows[:, -1] = told[:, AT[WALL]] + told[:, AT[DATA]] + told[:, AT[WAIT]]
    seconds = finite_median(rows[:, AT[STEP]])
    return StepRows(rows, seconds if math.isfinite(seconds) else None)


def far_out(excess: dict[str, Singles], spreads: float, least: float) -> dict[str, Singles]:
    """Before offsets are known only what is far beyond the spread of all values counts."""
    out = {}
    for name, values in excess.items():
        spread = 1.4826 * finite_median(np.abs(values - finite_median(values)))
        with np.errstate(invalid="ignore"):
            far = (values > spreads * spread) & (values > least)
            out[name] = np.where(far, values, np.minimum(values, 0.0))
    return out


def _worth(excess: Singles, unit: Singles, seconds_min: float) -> Singles:
    """An excess of fewer seconds than timers can tell, or than a person would care for, is none."""
    with np.errstate(invalid="ignore"):
        return np.where(excess * unit < seconds_min, np.minimum(excess, 0.0), excess)
