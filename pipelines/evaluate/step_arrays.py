"""The step times of a whole run as one array, for baselines: what detection sees, without its memory's bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from detectors.steps import APART, TIMINGS
from ingest.events import Metrics

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """`values[step, rank, timing]` in seconds, NaN where nothing was told.

    `ended_at[step]` is when its last rank ended it. Only steps of plain training, in order.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    values: Floats
    ended_at: Floats

    def timing(self, name: str) -> Floats:
        """step × rank of one timing."""
        return self.values[:, :, TIMINGS.index(name)]


class StepCollector:
    """Takes the metrics of one attempt as they come."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, tuple[float, ...]]] = {}
        self._ended_at: dict[int, float] = {}
        self._nodes: dict[int, str] = {}
        self._apart: set[int] = set()

    def take(self, message: Metrics) -> None:
        """Add the steps of one message; a step that comes twice counts once."""
        if message.phase in APART:
            self._apart.add(message.step)
        if not message.steps:
            return
        self._nodes[message.rank] = message.node
        columns: Mapping[str, tuple[float | None, ...]] = message.columns
        for index, (step, ended_at) in enumerate(zip(message.steps, message.ended_at, strict=True)):
            row = tuple(_number(columns.get(name), index) for name in TIMINGS)
            self._rows.setdefault(step, {})[message.rank] = row
            self._ended_at[step] = max(ended_at, self._ended_at.get(step, 0.0))

    @property
    def ended_at(self) -> Mapping[int, float]:
        """When each step ended, by step; all of them."""
        return self._ended_at

    def arrays(self) -> StepArrays:
        ranks = sorted(self._nodes)
        steps = [step for step in sorted(self._rows) if step not in self._apart]
        values = np.full((len(steps), len(ranks), len(TIMINGS)), np.nan)
        for row, step in enumerate(steps):
            for column, rank in enumerate(ranks):
                told = self._rows[step].get(rank)
                if told is not None:
                    values[row, column] = told
        return StepArrays(
            tuple(ranks), tuple(self._nodes[rank] for rank in ranks), values,
            np.array([self._ended_at[step] for step in steps]),
        )  # fmt: skip


def _number(samples: tuple[float | None, ...] | None, index: int) -> float:
    value = None if samples is None else samples[index]
    return float("nan") if value is None else value
