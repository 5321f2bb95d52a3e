"""Watches how long all ranks wait for their data: too long, steadily or in every second or third step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

REFRESH_VALUES = 8


@dataclass(frozen=True, slots=True)
class DataWatchConfig:
    """Limits of waiting; shares are of a normal step."""

    learn_min: int = 20
    clean_max: int = 200
    seconds_min: float = 0.005
    share_min: float = 0.05
    sigmas: float = 4.0
    open_steps: int = 8
    of_steps: int = 20
    close_steps: int = 10


class DataWatchState(msgspec.Struct):
    """Bounded, JSON-able."""

    clean: list[float] = []
    stale: int = 0
    limit: float | None = None  # None before enough is learned
    hits: list[bool] = []
    open: bool = False


class DataWatch:
    """`add` what the ranks have in common of their data wait, step by step."""

    def __init__(self, config: DataWatchConfig | None = None) -> None:
        self.config = config or DataWatchConfig()
        self.state = DataWatchState()

    @property
    def since_first_hit(self) -> int:
        """Steps since the first of the window that was too long, that step included."""
        return len(self.state.hits) - self.state.hits.index(True)

    def hit_rows(self) -> list[int]:
        """Which of the last steps were too long, counted from the end (-1 is the newest)."""
        return [index - len(self.state.hits) for index, hit in enumerate(self.state.hits) if hit]

    def add(self, seconds: float, step_seconds: float) -> Literal["began", "ended"] | None:
        """The wait of one step (NaN: not measured), and what a normal step takes as a whole."""
        state, config = self.state, self.config
        if not math.isfinite(seconds):
            return None
        hit = state.limit is not None and seconds > state.limit
        state.hits = [*state.hits[-(config.of_steps - 1) :], hit]
        if not hit:
            self._learn(seconds, step_seconds)
        if state.open and sum(state.hits[-config.close_steps :]) <= 1:
            state.open = False
            return "ended"
        if not state.open and hit and sum(state.hits) >= config.open_steps:
            state.open = True
            return "began"
        return None

    def forget(self) -> None:
        """Another regime: learn the wait anew."""
        self.state = DataWatchState()

    def _learn(self, seconds: float, step_seconds: float) -> None:
        state, config = self.state, self.config
        state.clean = [*state.clean[-(config.clean_max - 1) :], seconds]
        state.stale += 1
        if len(state.clean) < config.learn_min or (state.limit is not None and state.stale < REFRESH_VALUES):
            return
        clean = np.array(state.clean)
        usual = float(np.median(clean))
        spread = 1.4826 * float(np.median(np.abs(clean - usual)))
        floor = max(config.seconds_min, config.share_min * step_seconds)
        state.limit, state.stale = usual + max(config.sigmas * spread, floor), 0
