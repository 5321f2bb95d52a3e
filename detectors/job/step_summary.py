"""One row for each step: what all ranks have in common of it, and what the busiest of them adds.

The *lower* median of the ranks, so that in a job of two or four one rank (or the two of one core) moves nothing. Of
the collective's wait the least: the rank that arrives last waits only for the transfer, which is everybody's; what
the others wait beyond it is that rank's doing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detectors.steps import TIMINGS, Floats, StepMatrix

COLUMNS = (
    "step", "seen_at", "rank", "sequence", "offset",  # which step, and the first rank's report of it
    "seconds", "data", "own", "wall", "delay", "wait", "optimizer",  # seconds, common to all ranks
    "busy", "busiest",  # the longest data + compute of a rank, and the rank
    "samples", "tokens", "learning_rate",
)  # fmt: skip
INDEX = {name: index for index, name in enumerate(COLUMNS)}
SIGNALS = ("samples", "tokens", "learning_rate")
ROWS_MAX = 320
RANKS_SHARE_MIN = 0.5  # of fewer ranks nothing is said


def summary_of(matrix: StepMatrix, step: int) -> Floats | None:
    """The row of `step`, entries as in COLUMNS, NaN where nobody measured; None where too few ranks told of it."""
    rows = matrix.rows(step)
    if rows is None:
        return None
    columns = np.ascontiguousarray(rows.T)
    timing = dict(zip(TIMINGS, columns, strict=True))
    common = dict(zip(TIMINGS, lower_medians(columns), strict=True))
    there = np.flatnonzero(np.isfinite(timing["train.step.duration"]))
    if len(there) < max(1.0, RANKS_SHARE_MIN * len(matrix.ranks)):
        return None
    wall = timing["train.compute.duration"]
    with np.errstate(invalid="ignore"):
        busy = np.nan_to_num(wall, nan=-np.inf) + np.nan_to_num(timing["train.data.duration"])
    top = int(np.argmax(busy))
    first = int(there[0])
    seen_at, sequence, _, offset = matrix.report(step, matrix.ranks[first])
    waits = timing["train.collective.wait"]
    finite = waits[np.isfinite(waits)]
    row = {
        "step": step, "seen_at": seen_at, "rank": matrix.ranks[first], "sequence": sequence,
        "offset": -1 if offset is None else offset, "seconds": common["train.step.duration"],
        "data": common["train.data.duration"], "own": common["train.compute.own"],
        "wall": common["train.compute.duration"], "delay": common["train.run_queue.delay"],
        "wait": float(finite.min()) if len(finite) else np.nan,
        "optimizer": common["train.optimizer.duration"],
        "busy": float(busy[top]) if np.isfinite(busy[top]) else np.nan, "busiest": matrix.ranks[top],
    }  # fmt: skip
    for name in SIGNALS:
        values = matrix.values(step, f"train.{name}")
        row[name] = np.nan if values is None else lower_median(values)
    return np.array([row[name] for name in COLUMNS])


def block_of(rows: Floats) -> Floats:
    """Several rows as one: the first one's identity, the lower median of each measure, the usual busiest."""
    out: Floats = np.array(rows[0])
    if len(rows) == 1:
        out[~np.isfinite(out)] = np.nan
        return out
    for name in COLUMNS[INDEX["seconds"] :]:
        out[INDEX[name]] = lower_median(rows[:, INDEX[name]])
    ranks, counts = np.unique(rows[:, INDEX["busiest"]], return_counts=True)
    out[INDEX["busiest"]] = ranks[np.argmax(counts)]
    return out


def lower_median(values: Floats) -> float:
    """The lower of the two middle finite values; NaN when there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return float("nan")
    middle = (len(finite) - 1) // 2
    return float(np.partition(finite, middle)[middle])


def lower_medians(block: Floats) -> list[float]:
    """The same of each row."""
    if not np.isfinite(block).all():
        return [lower_median(row) for row in block]
    middle = (block.shape[1] - 1) // 2
    medians: list[float] = np.partition(block, middle, axis=1)[:, middle].tolist()
    return medians


@dataclass
class Rows:
    """The summaries of the last ROWS_MAX steps (or blocks of steps) of one phase, oldest first."""

    table: Floats

    @classmethod
    def empty(cls) -> Rows:
        return cls(np.empty((0, len(COLUMNS))))

    def add(self, row: Floats) -> None:
        self.table = np.vstack([self.table[-(ROWS_MAX - 1) :], row])

    def column(self, name: str, rows: slice = slice(None)) -> Floats:
        """One column of some rows, NaN included."""
        return self.table[rows, INDEX[name]]

    def median(self, name: str, rows: slice) -> float:
        """The median of the finite entries; NaN where there are none."""
        values = self.column(name, rows)
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else float("nan")
