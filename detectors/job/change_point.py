"""Finds where a series of numbers has changed its level for good: a two-sided CUSUM that asks for persistence.

CUSUM after E. S. Page, "Continuous inspection schemes" (Biometrika 41, 1954), on robust scores. A sum that passes its
limit is only a suspicion: bursts, periodic outliers and slow drifts pass it too. A change is said when most of the
values since its onset, and their median, are beyond what this series has shown while nothing was wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

REFRESH_VALUES = 8  # the level and the spread are computed anew after so many clean values
ALIKE_MAX = 0.95  # autocorrelation of neighbours, as far as it is believed


@dataclass(frozen=True, slots=True)
class ChangePointConfig:
    """Limits; values are logarithms, so that 0.05 means five per cent."""

    learn_min: int = 20  # clean values before anything is said
    sure_min: int = 100  # before, a change has to persist half as long again
    clean_max: int = 200
    drift: float = 0.5  # k of the CUSUM, in σ
    limit: float = 8.0  # h of the CUSUM, in σ
    z_clip: float = 4.0  # one value adds no more than this
    sigma_min: float = 0.002
    change_min: float = 0.048  # log(1.05)
    change_sigmas: float = 4.0  # of the median of the values since the onset
    persist_min: int = 8  # values since the onset, where σ is at most `quiet_sigma`
    persist_max: int = 32  # where it is at least `noisy_sigma`
    quiet_sigma: float = 0.005
    noisy_sigma: float = 0.03
    majority: float = 0.7  # of the values since the onset lie beyond half the change
    excursion_factor: float = 2.0  # over the largest median any window of this length had while all was well
    calm_values: int = 8  # a suspicion is dropped when the median of so many is back
    recover_values: int = 10
    suspects_max: int = 256
    restart_values: int = 16
    block_values: int = 16  # the level of each block beside the learned one: how far it wanders while all is well
    blocks_max: int = 64
    burst_max: int = 16  # a change that ended by itself so soon was a burst


class Change(NamedTuple):
    """A level changed (`began`), or a change that was held is over (`ended`)."""

    kind: Literal["began", "ended"]
    size: float  # of the change, in the unit of the series
    values: int  # since the onset, the newest included
    sigma: float


class ChangePointState(msgspec.Struct):
    """All that a change point knows; bounded, JSON-able."""

    clean: list[float] = []
    suspects: list[float] = []  # since the oldest sum that is not zero began
    up: float = 0.0
    down: float = 0.0
    up_count: int = 0
    down_count: int = 0
    level: float = 0.0
    sigma: float = 0.0
    spread: float = 0.0  # σ before the last restart, 0 without one
    stale: int = 0
    burst: int = 0  # the longest run beyond `change_min` that was over by itself
    held: float | None = None
    held_count: int = 0
    block: list[float] = []  # distances from the level, of the block that is not full
    blocks: list[float] = []  # the medians of the last blocks


class ChangePoint:
    """One series. `add` each value in order; after `began` the old level is held until it returns or `accept`."""

    def __init__(self, config: ChangePointConfig | None = None, state: ChangePointState | None = None) -> None:
        self.config = config or ChangePointConfig()
        self.state = state or ChangePointState()

    @property
    def armed(self) -> bool:
        """Enough is learned for a change to be seen."""
        return len(self.state.clean) >= self.config.learn_min

    @property
    def level(self) -> float:
        """The median of what is clean."""
        return self.state.level

    @property
    def persist(self) -> int:
        """How many values a change has to last: longer where it is noisy, twice the longest burst seen."""
        config, state = self.config, self.state
        share = (state.sigma - config.quiet_sigma) / (config.noisy_sigma - config.quiet_sigma)
        steps = config.persist_min + (config.persist_max - config.persist_min) * min(1.0, max(0.0, share))
        steps *= 1.0 if len(state.clean) >= config.sure_min else 1.5
        return max(round(steps), min(2 * state.burst, 2 * config.persist_max))

    def add(self, value: float) -> Change | None:
        """Take in the next value (finite)."""
        state, config = self.state, self.config
        if not self.armed:
            self._learn([value])
            self._refresh()
            return None
        if state.held is not None:
            return self._while_held(value)
        self._wander(value - state.level)
        z = (value - state.level) / state.sigma
        z = min(config.z_clip, max(-config.z_clip, z))
        state.up = min(2.0 * config.limit, max(0.0, state.up + z - config.drift))
        state.down = min(2.0 * config.limit, max(0.0, state.down - z - config.drift))
        state.up_count = state.up_count + 1 if state.up > 0.0 else 0
        state.down_count = state.down_count + 1 if state.down > 0.0 else 0
        state.suspects.append(value)
        keep = max(state.up_count, state.down_count)
        if keep < len(state.suspects):
            self._clear(len(state.suspects) - keep)
        return self._weigh(1) or self._weigh(-1)

    def accept(self) -> None:
        """The values since the onset are the new normal."""
        self.restart(self.state.suspects)

    def restart(self, values: list[float]) -> None:
        """The newest of these values are the normal ones; of what is older only the spread and the bursts are kept."""
        state = self.state
        state.spread = state.sigma
        state.clean, state.block, state.blocks = [], [], []
        self.release()
        self._learn(values[-self.config.restart_values :])
        self._refresh()

    def release(self) -> None:
        """Whatever is held or suspected is over, the old level stands."""
        self.state.held, self.state.held_count = None, 0
        self._forget_suspicion()

    def _weigh(self, sign: Literal[1, -1]) -> Change | None:
        """Is the suspicion in this direction a change, is it over, or is it not yet known?"""
        state, config = self.state, self.config
        total, count = (state.up, state.up_count) if sign > 0 else (state.down, state.down_count)
        if count < config.calm_values:
            return None
        since = sign * (np.array(state.suspects[-count:]) - state.level)
        if max(float(np.median(since[-config.calm_values :])), float(since[-1])) < config.change_min / 2:
            self._drop(sign)
            return None
        if total <= config.limit or count < self.persist:
            return None
        since = since[int(np.argmax(since > np.median(since) / 2)) :]  # the sum may have begun before the change
        size, count, whole = float(np.median(since)), len(since), count
        median_sigma = 1.2533 * state.sigma * self._memory() / math.sqrt(count)
        needed = max(config.change_min, config.change_sigmas * median_sigma)
        lasting = float((since > size / 2).mean()) >= config.majority
        if (
            count >= self.persist
            and size >= needed
            and lasting
            and size > config.excursion_factor * self._excursion(count, sign)
        ):
            state.suspects = state.suspects[-count:]
            state.held, state.held_count = sign * size, count
            return Change("began", sign * size, count, state.sigma)
        if whole >= 2 * self.persist or whole >= config.suspects_max:
            self._drop(sign)
        return None

    def _while_held(self, value: float) -> Change | None:
        state, config = self.state, self.config
        assert state.held is not None
        state.suspects = [*state.suspects[-(config.suspects_max - 1) :], value]
        state.held_count += 1
        if state.held_count < config.recover_values:
            return None
        recent = np.array(state.suspects[-config.recover_values :]) - state.level
        back = float(np.median(recent)) / state.held
        if back >= 0.5:
            return None
        change = Change("ended", state.held, state.held_count, state.sigma)
        lasted = state.held_count - config.recover_values // 2
        state.burst = max(state.burst, lasted) if lasted <= config.burst_max else state.burst
        state.held, state.held_count = None, 0
        values = state.suspects[-config.recover_values // 2 :]
        self._forget_suspicion()
        self._learn(values)
        return change

    def _excursion(self, count: int, sign: int) -> float:
        """The largest median that a window of `count` clean values, or a block, had above (below) the level."""
        clean = np.array(self.state.clean)
        known = self.state.blocks[: -(-count // self.config.block_values) or None]  # without the suspects' own
        if len(clean) < 2 * count:
            count = max(1, len(clean) // 2)
        windows = np.lib.stride_tricks.sliding_window_view(clean, count)
        seen = float((sign * (np.median(windows, axis=1) - self.state.level)).max())
        return max(seen, *(sign * block for block in known), 0.0)

    def _memory(self) -> float:
        """How much wider means of a window spread because neighbours are alike: √((1 + φ) / (1 - φ)) of an AR(1)."""
        residual = np.clip((np.array(self.state.clean) - self.state.level) / self.state.sigma, -5.0, 5.0)
        power = float((residual * residual).sum())
        alike = float((residual[1:] * residual[:-1]).sum()) / power if power > 0.0 else 0.0
        alike = min(ALIKE_MAX, max(0.0, alike))
        return math.sqrt((1.0 + alike) / (1.0 - alike))

    def _wander(self, distance: float) -> None:
        state = self.state
        state.block.append(distance)
        if len(state.block) >= self.config.block_values:
            state.blocks = [*state.blocks[-(self.config.blocks_max - 1) :], float(np.median(state.block))]
            state.block = []

    def _drop(self, sign: int) -> None:
        """A suspicion that came to nothing: its values belong to the normal ones, a burst is remembered."""
        state = self.state
        beyond = [sign * (value - state.level) >= self.config.change_min for value in state.suspects]
        state.burst = max(state.burst, _longest_run(beyond))
        self._clear(len(state.suspects))
        self._forget_suspicion()

    def _clear(self, count: int) -> None:
        state = self.state
        self._learn(state.suspects[:count])
        state.suspects = state.suspects[count:]

    def _forget_suspicion(self) -> None:
        state = self.state
        state.suspects, state.up, state.down, state.up_count, state.down_count = [], 0.0, 0.0, 0, 0

    def _learn(self, values: list[float]) -> None:
        state = self.state
        state.clean = [*state.clean, *values][-self.config.clean_max :]
        state.stale += len(values)
        if state.stale >= REFRESH_VALUES:
            self._refresh()

    def _refresh(self) -> None:
        state = self.state
        state.stale = 0
        if state.clean:
            state.level, state.sigma = level_and_spread(np.array(state.clean), self.config.sigma_min)
        if state.spread > 0.0 and len(state.clean) < self.config.sure_min:  # few values of a level that is new
            state.sigma = min(1.5 * state.spread, max(state.spread / 1.5, state.sigma))


def level_and_spread(values: npt.NDArray[np.float64], sigma_min: float) -> tuple[float, float]:
    """Median and 1.4826 MAD (not less than `sigma_min`) of finite values, at least one."""
    level = float(np.median(values))
    return level, max(sigma_min, 1.4826 * float(np.median(np.abs(values - level))))


def changes(values: npt.NDArray[np.float64], config: ChangePointConfig | None = None) -> list[tuple[int, Change]]:
    """All changes of a whole series, each with the index at which it was known; held until the level returns."""
    point, found = ChangePoint(config), []
    for index, value in enumerate(values.tolist()):
        change = point.add(value)
        if change is not None:
            found.append((index, change))
    return found


def _longest_run(flags: list[bool]) -> int:
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest
