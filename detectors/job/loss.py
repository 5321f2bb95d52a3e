"""Loss and gradient norm of the job: a spike that passes, and a divergence that does not.

One-sided and on a logarithmic scale, against the running level of the values that were in order. The norm of the
gradient rises some steps before the loss does (BLOOM's log of 12 April 2022: 0.24, 0.95, 2.39, 15.9, 145, 960 while
the loss went from 2.20 to 5.10; it recovered by itself in thirty steps): a spike is a warning, never a rollback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from detectors.channel import Arrays, Ended, Told
from detectors.clues import Place, six_digits
from detectors.job.loss_words import DIVERGENCE, LOSS, NORM, SPIKE, LossStory, condition_of
from detectors.job.wild_gradient import WildConfig, WildGradient, wild_gradient
from detectors.medians import finite_median, median
from detectors.roster import Roster
from detectors.steps import Floats, StepMatrix
from ingest.events import Message

LOCAL_NORM = "train.gradient.local_norm"
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Limits on z (robust σ of the running level) and on logarithms (0.1 is ten per cent)."""

    learn_min: int = 30  # steps of an attempt before anything is said
    cold_steps: int = 100  # of a training from scratch: limits are half as high again
    level_steps: int = 30
    spread_steps: int = 200
    loss_sigma_min: float = 0.01
    norm_sigma_min: float = 0.05
    lag_steps: int = 15  # of which the running level's own lag behind a falling loss is learned
    lag_sigmas: float = 3.0  # it is believed no further
    loss_z: float = 7.5  # beside a norm that is out
    twice_loss_z: float = 4.5  # or two of three so high
    norm_z: float = 6.0  # within `together_steps`
    alone_loss_z: float = 6.0
    alone_norm_z: float = 10.0  # so many steps in a row, and `alone_norm_rise`: the loss will follow
    alone_norm_steps: int = 3
    alone_norm_rise: float = 2.08  # log(8)
    rise_min: float = 0.06
    alone_rise_min: float = 0.2  # of a loss whose gradients are calm or unknown
    alone_steps: int = 4  # of the last `alone_of_steps`
    alone_of_steps: int = 6
    together_steps: int = 10
    freeze_z: float = 4.0  # such values are not learned
    frozen_steps_max: int = 50  # but a level that has stayed so long is the level
    calm_z: float = 3.0
    calm_steps: int = 5
    diverged_after_steps: int = 100
    recovering_until_steps: int = 300
    diverged_rise_min: float = 0.1  # of a loss that still rises, or with a norm that is still out
    diverged_rise_sure: float = 0.5
    climb_steps: int = 80  # four blocks of it, each above the one before: a warning
    slope_steps: int = 200  # the same over so many steps: a divergence
    climb_rise_min: float = 0.08
    climb_norm_rise: float = 0.25  # log(1.28): of the norm, meanwhile
    climb_rise_alone: float = 0.3  # where no norm is told
    wild: WildConfig = field(default_factory=WildConfig)


class _Series(msgspec.Struct):
    """The running level of one number."""

    clean: list[float] = []
    residuals: list[float] = []
    frozen: list[float] = []  # since values are out of order without anything being said


class _Open(msgspec.Struct):
    kind: Literal["loss_spike", "divergence"]
    onset_step: int
    since: int = 0  # steps
    peak: float = 0.0  # largest rise of the loss
    calm: int = 0
    level: float = 0.0
    sigma: float = 0.0
    wild: WildGradient | None = None  # what began it, where that was one rank's doing


class _State(msgspec.Struct):
    last_step: int = -1
    seen: int = 0
    linear: bool = False  # the loss has been zero or less: its logarithm means nothing
    loss: _Series = msgspec.field(default_factory=_Series)
    norm: _Series = msgspec.field(default_factory=_Series)
    steps: list[int] = []  # of the history below
    losses: list[float] = []
    norms: list[float | None] = []
    loss_z: list[float] = []  # of the last steps
    norm_z: list[float] = []
    widest: list[float] = []  # how far the largest local norm of a step was above the others', of the last steps
    open: _Open | None = None


class LossChannel:
    """Watches one attempt; see `Channel`."""

    wants: ClassVar[tuple[type[Message], ...]] = ()

    def __init__(self, config: LossConfig | None = None) -> None:
        self.config = config or LossConfig()
        self._state = _State()
        self._told: list[Told] = []

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        """Nothing: the numbers come with the closed steps."""

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        state = self._state
        loss = _common(matrix.values(step, LOSS))
        if loss is None or step <= state.last_step:
            return
        state.last_step = step
        norm = _common(matrix.values(step, NORM))
        norm = _common(matrix.values(step, LOCAL_NORM)) if norm is None else norm
        state.seen += 1
        if loss <= 0.0 and not state.linear:
            state.linear = True
            state.loss, state.losses, state.norms, state.steps = _Series(), [], [], []
        x = loss if state.linear else math.log(loss)
        y = None if norm is None else math.log(max(norm, TINY))
        depth = self.config.slope_steps
        state.steps = [*state.steps[-(depth - 1) :], step]
        state.losses = [*state.losses[-(depth - 1) :], x]
        state.norms = [*state.norms[-(depth - 1) :], y]
        wild = wild_gradient(matrix.values(step, LOCAL_NORM), matrix.ranks, state.widest, self.config.wild)
        if wild is not None and (state.open is None or state.open.wild is None):
            self._begin_wild(wild, x, matrix, roster)
        elif state.open is None:
            self._watch(x, y, step, matrix, roster)
        else:
            self._while_open(x, y, matrix, roster)

    def look(self, now: float, roster: Roster) -> list[Told]:
        told, self._told = self._told, []
        return told

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        assert not self._told
        return msgspec.to_builtins(self._state), {}

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._state = msgspec.convert(state, _State)

    def _watch(self, x: float, y: float | None, step: int, matrix: StepMatrix, roster: Roster) -> None:
        """Nothing is open: is this value one that opens it?"""
        state, config = self._state, self.config
        level, sigma = self._level(state.loss, config.loss_sigma_min)
        zx = 0.0 if sigma is None else (x - level) / sigma
        norm_level, norm_sigma = self._level(state.norm, config.norm_sigma_min)
        zy = 0.0 if norm_sigma is None or y is None else (y - norm_level) / norm_sigma
        state.loss_z = [*state.loss_z[-(config.together_steps - 1) :], zx]
        state.norm_z = [*state.norm_z[-(config.together_steps - 1) :], zy]
        if sigma is not None and self._opens(x - level, 0.0 if y is None else y - norm_level, roster):
            onset = self._onset()
            state.open = _Open(SPIKE, onset, 0, x - level, 0, level, sigma)
            self._say(SPIKE, matrix, roster)
            return
        self._learn(state.loss, x, zx)
        if y is not None:
            self._learn(state.norm, y, zy)
        for kind, steps in ((DIVERGENCE, config.slope_steps), (SPIKE, config.climb_steps)):
            if state.seen % 5 == 0 and sigma is not None and self._climbs(steps, sigma):
                level = float(np.median(state.losses[-steps : -steps + steps // 4]))
                onset = state.steps[-steps + steps // 4]
                state.open = _Open(kind, onset, 0, x - level, 0, level, sigma)
                self._say(kind, matrix, roster)
                return

    def _begin_wild(self, wild: WildGradient, x: float, matrix: StepMatrix, roster: Roster) -> None:
        """One rank's gradient is beyond all others': whatever the loss does next comes from there."""
        state = self._state
        if state.open is not None:
            self._told.append(Ended(state.open.kind))
        level, sigma = self._level(state.loss, self.config.loss_sigma_min)
        spread = self.config.loss_sigma_min * self._unit() if sigma is None else sigma
        state.open = _Open(SPIKE, state.last_step, 0, 0.0, 0, x if sigma is None else level, spread, wild)
        self._say(SPIKE, matrix, roster)

    def _opens(self, rise: float, norm_rise: float, roster: Roster) -> bool:
        """The loss is out with the norm, or by itself for some steps, or the norm runs away ahead of it."""
        state, config = self._state, self.config
        cold = 1.5 if roster.resume_step is None and state.seen <= config.cold_steps else 1.0
        least = config.rise_min * self._unit()
        zx = np.array(state.loss_z) / cold
        zy = np.array(state.norm_z) / cold
        high = zx[-1] > config.loss_z or int((zx[-3:] > config.twice_loss_z).sum()) >= 2
        if high and rise > least and zy.max() > config.norm_z:
            return True
        out = zx > config.alone_loss_z
        alone = config.alone_rise_min * self._unit() * cold
        if out[-1] and rise > alone and int(out[-config.alone_of_steps :].sum()) >= config.alone_steps:
            return True
        ahead = zy[-config.alone_norm_steps :] > config.alone_norm_z
        return bool(len(ahead) == config.alone_norm_steps and ahead.all() and norm_rise > config.alone_norm_rise)

    def _unit(self) -> float:
        """What a rise of 1.0 means: an e-fold, or for a loss that may be negative its own size."""
        if not self._state.linear:
            return 1.0
        return max(TINY, float(np.median(np.abs(self._state.loss.clean))))

    def _onset(self) -> int:
        """The first of the last steps in which the norm or the loss was out."""
        state, config = self._state, self.config
        count = len(state.loss_z)
        out = [
            max(z / config.twice_loss_z, w / config.norm_z) > 1.0
            for z, w in zip(state.loss_z, state.norm_z, strict=True)
        ]
        onset = count - 1
        while onset > 0 and out[onset - 1]:
            onset -= 1
        return state.steps[max(0, len(state.steps) - (count - onset))]

    def _level(self, series: _Series, sigma_min: float) -> tuple[float, float | None]:
        """The running level and the spread around it; None while too little is known."""
        if len(series.clean) < self.config.learn_min:
            return 0.0, None
        level = median(series.clean)
        residuals = np.array(series.residuals or [0.0])
        if len(residuals) < self.config.lag_steps:
            residuals = np.array(series.clean) - level
        spread = 1.4826 * median(np.abs(residuals - median(residuals)))
        unit = self._unit() if series is self._state.loss else 1.0
        sigma = max(sigma_min * unit, spread)
        lag = max(median(residuals[-self.config.lag_steps :]), median(residuals[-5:]))
        return level + max(-self.config.lag_sigmas * sigma, min(0.0, lag)), sigma

    def _learn(self, series: _Series, value: float, z: float) -> None:
        config = self.config
        if z > config.freeze_z:
            series.frozen.append(value)
            if len(series.frozen) < config.frozen_steps_max:
                return
            series.clean, series.frozen = series.frozen, []
            return
        if series.frozen and z < config.calm_z:
            series.frozen = []
        if len(series.clean) >= config.learn_min:
            distance = value - median(series.clean)  # from the level as it runs, its lag included
            series.residuals = [*series.residuals[-(config.spread_steps - 1) :], distance]
        series.clean = [*series.clean[-(config.level_steps - 1) :], value]

    def _while_open(self, x: float, y: float | None, matrix: StepMatrix, roster: Roster) -> None:
        """A spike recovers, or becomes a divergence; a divergence may still recover."""
        state, config, spike = self._state, self.config, self._state.open
        assert spike is not None
        spike.since += 1
        rise = x - spike.level
        spike.peak = max(spike.peak, rise)
        norm_level, norm_sigma = self._level(state.norm, config.norm_sigma_min)
        zy = 0.0 if norm_sigma is None or y is None else (y - norm_level) / norm_sigma
        back = rise < max(config.calm_z * spike.sigma, config.rise_min / 2 * self._unit())
        spike.calm = spike.calm + 1 if back and zy < config.norm_z else 0
        if spike.calm >= config.calm_steps:
            self._close()
        elif spike.kind == SPIKE and spike.since >= config.diverged_after_steps and spike.since % 10 == 0:
            half = config.diverged_after_steps // 4
            recent = np.array(state.losses[-2 * half :])
            moved = float(np.median(recent[half:])) - float(np.median(recent[:half]))
            if moved < -spike.sigma / 2 and spike.since < config.recovering_until_steps:
                return
            stays = (float(np.median(recent[half:])) - spike.level) / self._unit()
            worse = moved > spike.sigma / 2 or zy > config.norm_z
            if stays < config.diverged_rise_min or not (worse or stays > config.diverged_rise_sure):
                self._close(forget=True)  # harder than before, and calm: this is its level now
                return
            self._told.append(Ended(SPIKE))
            state.open = _Open(DIVERGENCE, spike.onset_step, 0, spike.peak, 0, spike.level, spike.sigma, spike.wild)
            self._say(DIVERGENCE, matrix, roster)

    def _close(self, *, forget: bool = False) -> None:
        state = self._state
        assert state.open is not None
        if forget:
            state.loss, state.norm = _Series(clean=state.losses[-30:]), _Series()
        self._told.append(Ended(state.open.kind))
        state.open = None
        state.loss_z, state.norm_z = [], []
        state.loss.frozen, state.norm.frozen = [], []
        state.steps, state.losses, state.norms = [], [], []

    def _climbs(self, steps: int, sigma: float) -> bool:
        """The loss has risen over the last steps, block by block, and the norm with it."""
        state, config = self._state, self.config
        if len(state.losses) < steps or state.seen < steps + config.learn_min:
            return False
        blocks = np.median(np.array(state.losses[-steps:]).reshape(4, -1), axis=1)
        rise = float(blocks[-1] - blocks[0])
        if not (np.diff(blocks) > 0.0).all() or rise < max(config.climb_rise_min * self._unit(), 4.0 * sigma):
            return False
        norms = np.array([np.nan if norm is None else norm for norm in state.norms[-steps:]]).reshape(4, -1)
        if not np.isfinite(norms).all():
            return rise >= config.climb_rise_alone * self._unit()
        levels = np.median(norms, axis=1)
        return float(levels[-1] - levels[0]) >= config.climb_norm_rise

    def _say(self, kind: Literal["loss_spike", "divergence"], matrix: StepMatrix, roster: Roster) -> None:
        state, opened = self._state, self._state.open
        assert opened is not None
        norm = state.norms[-1]
        usual = self._level(state.norm, self.config.norm_sigma_min)[0]
        told = LossStory(
            kind=kind, onset_step=opened.onset_step, step=state.last_step, usual=_plain(opened.level, state.linear),
            now=_plain(state.losses[-1], state.linear), norm_usual=_plain(usual, False),
            norm_now=None if norm is None or not state.norm.clean else _plain(norm, False), wild=opened.wild,
        )  # fmt: skip
        self._told.append(condition_of(told, matrix, roster))


def _common(values: Floats | None) -> float | None:
    """The median over the ranks that told it; None where nobody did."""
    if values is None:
        return None
    common = finite_median(values)
    return common if math.isfinite(common) else None


def _plain(value: float, linear: bool) -> float:
    """The number itself, of a logarithm or not."""
    return six_digits(value if linear else math.exp(min(value, 700.0)))
