"""The curves beneath an incident: its culprits beside all others, thinned to what a picture can show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from detectors.step_block import StepBlock
from detectors.verdict import Verdict
from ingest.events import Metrics
from pipelines.historic.run import Told

Floats = npt.NDArray[np.float64]

BUCKETS = 160
NAMED_MAX = 4
AROUND_SHARE = 0.6  # of its length is shown before and after an incident
AROUND_SECONDS_MIN = 45.0
METRIC_OF = {
    "nan": "train.loss", "numeric": "train.loss", "loss_spike": "train.loss", "divergence": "train.loss",
    "data_stall": "train.data.duration",
}  # fmt: skip
USUAL_METRIC = "train.step.duration"


@dataclass(slots=True)
class Curves:
    """One metric in a span of time: for each of `BUCKETS` the mean of each culprit, and of the others the least, the
    mean and the most; NaN where nothing was told."""

    metric: str
    begins_at: float
    ends_at: float
    ranks: tuple[int, ...]
    _sums: Floats = field(init=False)
    _counts: Floats = field(init=False)
    _least: Floats = field(init=False)
    _most: Floats = field(init=False)

    def __post_init__(self) -> None:
        rows = len(self.ranks) + 1
        self._sums, self._counts = np.zeros((rows, BUCKETS)), np.zeros((rows, BUCKETS))
        self._least, self._most = np.full(BUCKETS, np.inf), np.full(BUCKETS, -np.inf)

    def take(self, rank: int, at: float, value: float) -> None:
        """One sample."""
        if not self.begins_at <= at <= self.ends_at or not abs(value) < 1e300:
            return
        bucket = self._bucket(at)
        row = self.ranks.index(rank) if rank in self.ranks else len(self.ranks)
        self._sums[row, bucket] += value
        self._counts[row, bucket] += 1
        if row == len(self.ranks):
            self._least[bucket] = min(self._least[bucket], value)
            self._most[bucket] = max(self._most[bucket], value)

    def take_block(self, block: StepBlock) -> None:
        """One step of many ranks."""
        if self.metric not in block.names or not self.begins_at <= block.at <= self.ends_at:
            return
        values = block.values[:, block.names.index(self.metric)]
        there = ~np.isnan(values)
        bucket = self._bucket(block.at)
        for row, rank in enumerate(self.ranks):
            own = there & (block.ranks == rank)
            self._sums[row, bucket] += values[own].sum()
            self._counts[row, bucket] += own.sum()
            there &= ~own
        if there.any():
            others = values[there]
            self._sums[-1, bucket] += others.sum()
            self._counts[-1, bucket] += len(others)
            self._least[bucket] = min(self._least[bucket], float(others.min()))
            self._most[bucket] = max(self._most[bucket], float(others.max()))

    def of(self, rank: int) -> Floats:
        """The curve of a culprit."""
        return self._mean(self.ranks.index(rank))

    @property
    def others(self) -> tuple[Floats, Floats, Floats]:
        """The least, the mean and the most of everybody else."""
        mean = self._mean(len(self.ranks))
        there = ~np.isnan(mean)
        return np.where(there, self._least, np.nan), mean, np.where(there, self._most, np.nan)

    @property
    def is_empty(self) -> bool:
        return not self._counts.any()

    def _bucket(self, at: float) -> int:
        share = (at - self.begins_at) / max(self.ends_at - self.begins_at, 1e-9)
        return min(BUCKETS - 1, int(share * BUCKETS))

    def _mean(self, row: int) -> Floats:
        counts = self._counts[row]
        return np.where(counts > 0, self._sums[row] / np.maximum(counts, 1), np.nan)


def curves_for(verdict: Verdict, begins_at: float, ends_at: float) -> Curves:
    """Which curve shows an incident of a run that lasted so long."""
    metric = next((item.metric for item in verdict.evidence if item.metric.startswith("train.")), "")
    metric = metric or METRIC_OF.get(verdict.fault_class, USUAL_METRIC)
    around = max(AROUND_SECONDS_MIN, AROUND_SHARE * (verdict.at - verdict.onset_at))
    ranks = tuple(sorted({culprit.rank for culprit in verdict.culprits if culprit.rank is not None}))[:NAMED_MAX]
    return Curves(metric, max(begins_at, verdict.onset_at - around), min(ends_at, verdict.at + around), ranks)


def fill(curves: Iterable[Curves], told: Told) -> None:
    """Give one message or block to all curves."""
    if isinstance(told, StepBlock):
        for curve in curves:
            curve.take_block(told)
    elif isinstance(told, Metrics) and told.rank >= 0:
        for curve in curves:
            values = told.columns.get(curve.metric)
            if values is not None:
                for at, value in zip(told.ended_at, values, strict=True):
                    if value is not None:
                        curve.take(told.rank, at, value)
