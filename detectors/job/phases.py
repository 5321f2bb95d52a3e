"""Which phase a step belongs to: told by the ranks, or inferred from what all of them do together.

A checkpoint or an evaluation that is told while step n is in progress costs n or n + 1, by where in the loop it
stands: both are apart from training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from detectors.steps import APART
from ingest.events import Metrics

StepPhase = Literal["warmup", "train", "checkpoint", "eval"]


@dataclass(frozen=True, slots=True)
class PhasesConfig:
    """When the warm-up is over, and what a checkpoint that nobody told of looks like."""

    unseen_steps: int = 5  # of every attempt: compilers, caches, the first allocations
    warmup_steps_min: int = 20
    warmup_steps_max: int = 60
    stable_share: float = 0.02  # the median of the last ten steps against the ten before
    pause_factor: float = 3.0  # over the median step, on all ranks
    period_slack: float = 0.05  # of the period; at least one step
    told_max: int = 64
    pauses_max: int = 8


class _State(msgspec.Struct):
    told: dict[int, str] = {}
    seen: int = 0
    warm: list[float] = []  # seconds of the last steps of the warm-up
    stable: bool = False
    pauses: list[int] = []  # steps in which all ranks paused


class Phases:
    """Tells the phase of each closed step, in order."""

    def __init__(self, config: PhasesConfig | None = None) -> None:
        self.config = config or PhasesConfig()
        self._state = _State()

    @property
    def stable(self) -> bool:
        """The warm-up is over."""
        return self._state.stable

    @property
    def warm(self) -> list[float]:
        """Seconds of the last ten steps of the warm-up."""
        return self._state.warm[-10:]

    def observe(self, message: Metrics) -> None:
        """Take in the phase a rank says it is in."""
        told = self._state.told
        if message.phase in APART and message.step >= 0 and message.step not in told:
            told[message.step] = message.phase
            while len(told) > self.config.told_max:
                del told[min(told)]

    def phase_of(self, step: int, seconds: float, usual_seconds: float) -> StepPhase:
        """The phase of a closed step that took `seconds` on the quicker half of the ranks; each step once."""
        state, config = self._state, self.config
        told = state.told.get(step) or state.told.get(step - 1)
        if told in ("checkpoint", "eval"):
            return "checkpoint" if told == "checkpoint" else "eval"
        if not state.stable:
            self._warm_up(seconds, told)
            return "warmup"
        if usual_seconds > 0.0 and seconds > config.pause_factor * usual_seconds:
            expected = self._regular(step)
            state.pauses = [*state.pauses[-(config.pauses_max - 1) :], step]
            return "checkpoint" if expected else "train"
        return "train"

    def to_state(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return built

    def load_state(self, state: dict[str, Any]) -> None:
        self._state = msgspec.convert(state, _State, strict=False)

    def _warm_up(self, seconds: float, told: str | None) -> None:
        state, config = self._state, self.config
        state.seen += 1
        if told is not None or state.seen <= config.unseen_steps:
            return
        state.warm = [*state.warm[-19:], seconds]
        if state.seen >= config.warmup_steps_max:
            state.stable = True
        elif state.seen >= config.warmup_steps_min and len(state.warm) >= 15:
            before, after = np.log(state.warm[:-10]), np.log(state.warm[-10:])
            moved = abs(float(np.median(after) - np.median(before)))
            spread = 1.4826 * float(np.median(np.abs(after - np.median(after))))
            state.stable = moved < max(config.stable_share, spread)

    def _regular(self, step: int) -> bool:
        """This pause comes when the last ones say that it has to: three gaps alike."""
        pauses = self._state.pauses[-3:]
        if len(pauses) < 3:
            return False
        gaps = np.diff([*pauses, step])
        period = float(np.median(gaps))
        return period > 1 and bool(np.all(np.abs(gaps - period) <= max(1.0, self.config.period_slack * period)))
