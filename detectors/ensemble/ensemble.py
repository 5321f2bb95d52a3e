"""One job's ensemble: it collects clean windows, fits at fixed counts of clean steps, and keeps the better committee.

State is the windows and the numbers, never a pickle; loading fits again and refuses what scores otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.clues import six_digits
from detectors.ensemble.committee import Committee, fitted
from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.members import is_top
from detectors.ensemble.models import SEED, EnsembleUnavailable, UnknownModel, version
from detectors.ensemble.start import same_checks
from detectors.ensemble.stored import Peers, StoredPart
from detectors.ensemble.suitability import check

Singles = npt.NDArray[np.float32]

NEWEST_STEPS = 100  # clean steps that a refit and the committee before it are compared on
LENGTHS = 64  # step durations remembered


class EnsembleRefused(ValueError):
    """A stored ensemble does not reproduce its scores with the libraries at hand; it is learned anew."""


class _State(msgspec.Struct):
    peers: Peers | None = None
    clean: int = 0  # clean steps of this job
    held: list[list[int]] = []  # [clean step, windows] of what waits to be learned from
    kept: list[list[int]] = []  # the same of what is kept, oldest first
    fits: int = 0
    fitted_at: int = 0
    rejected: int = 0  # refits, in a row
    checks: list[float] = []
    lengths: list[float] = []
    step_seconds: float = 1.0
    shadow: int = 0  # clean steps since the committee last thought of an alarm that nobody else saw


class Ensemble:
    """`reason` says why it is off, or is empty. Without PyOD, or switched off, it learns and says nothing."""

    def __init__(self, config: EnsembleConfig | None = None) -> None:
        self.config = config or EnsembleConfig()
        self.reason = "" if self.config.on else "the ensemble is switched off by configuration"
        self.committee: Committee | None = None
        self._plain = replace(self.config, start=None)
        self._state = _State()
        steps, features = self.config.persistence[1], len(self.config.features)
        self._windows: Singles = np.empty((0, steps, features), dtype=np.float32)
        self._held: Singles = self._windows.copy()
        self._thresholds: dict[int, float] = {}

    def preload(self) -> None:
        """Import PyOD, fit once so that nothing is imported in mid-stream, and check members that are not Transom's
        own; without PyOD the ensemble is off and `reason` says so. Raises UnsuitableMember."""
        if self.reason:
            return
        try:
            check_members(self.config)
            shape = (200, self.config.persistence[1], len(self.config.features))
            fitted(np.random.default_rng(SEED).normal(0.0, 1.0, shape).astype(np.float32), self._plain)
        except EnsembleUnavailable as error:
            self.reason = f"the ensemble is off: {error}"

    @property
    def peers(self) -> Peers | None:
        return self._state.peers

    @property
    def clean_steps(self) -> int:
        return self._state.clean

    @property
    def step_seconds(self) -> float:
        """The usual duration of its clean steps."""
        lengths = self._state.lengths
        return six_digits(float(np.median(lengths))) if lengths else 1.0

    @property
    def rejected(self) -> int:
        """Refits in a row that were worse than the committee at work."""
        return self._state.rejected

    @property
    def windows(self) -> Singles:
        """Clean windows it has learned from: window × step × feature."""
        return self._windows

    def begin(self, peers: Peers) -> None:
        """Ranks are compared in this way from now on; what was learned in the other way is of no use."""
        if self._state.peers == peers:
            return
        empty = self._windows[:0]
        self._state, self._windows, self._held = _State(peers=peers), empty, empty.copy()
        self.committee, self._thresholds = None, {}
        start = self.config.start
        if start is not None and not self.reason and peers in start.committees:
            self.committee = start.committees[peers]
            self._windows = self.committee.windows[-self.config.windows_max :]
            self._state.kept = [[0, len(self._windows)]]
            self._state.shadow = self.config.few_shadow_steps

    def learn(self, windows: Singles, step_seconds: float) -> None:
        """One clean step: its sampled windows (none is none too) and its duration. Fits at fixed counts."""
        if self.reason:
            return
        state, config = self._state, self.config
        state.clean += 1
        state.shadow += 1
        if step_seconds > 0.0:
            state.lengths = [*state.lengths[-(LENGTHS - 1) :], step_seconds]
        if len(windows):
            self._held = np.concatenate([self._held, windows])
            state.held.append([state.clean, len(windows)])
        while state.held and state.held[0][0] <= state.clean - config.hold_steps:
            self._keep(*state.held.pop(0))
        if state.clean == config.fit_steps or (state.clean > config.fit_steps and not state.clean % config.refit_steps):
            self._fit()

    def doubt(self) -> None:
        """Something is odd: what waits to be learned from may be a part of it."""
        self._state.held, self._held = [], self._held[:0]

    def alarmed_alone(self) -> None:
        """In a small job: the committee would have spoken where nobody else saw a thing."""
        self._state.shadow = 0

    @property
    def decides(self) -> bool:
        """It may open verdicts: always among many peers, in a small job after so many clean steps without an alarm."""
        if self.committee is None:
            return False
        return self.peers == "many" or self._state.shadow >= self.config.few_shadow_steps

    def threshold(self, entities: int, fault_class: str = "") -> float:
        """The level at which it speaks of a class; what people said of its verdicts is in it."""
        assert self.committee is not None
        if entities not in self._thresholds:
            self._thresholds[entities] = self.committee.threshold(entities, self._state.step_seconds)
        found = self._thresholds[entities]
        start = self.config.start
        if start is not None:
            found = max(found - start.model.eased.get(fault_class, 0.0), start.model.least.get(fault_class, 0.0))
        return found

    def least(self, fault_class: str) -> float:
        """Decades that a rule's finding of this class needs as well, because people called such verdicts wrong."""
        start = self.config.start
        return 0.0 if start is None else start.model.least.get(fault_class, 0.0)

    def stored(self, runs: tuple[str, ...] = ()) -> tuple[StoredPart, Singles] | None:
        """What a model file keeps of it; None before the first fit."""
        if self.committee is None:
            return None
        part = StoredPart(
            windows=len(self.committee.windows), checks=self.committee.checks, runs=runs, steps=self._state.clean,
            level_decades=six_digits(self.committee.levels.score_at(3.0)),
        )  # fmt: skip
        return part, self.committee.windows

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """JSON-able fields, and arrays for an npz file."""
        state: dict[str, Any] = msgspec.to_builtins(self._state)
        arrays: dict[str, npt.NDArray[Any]] = {"windows": self._windows, "held": self._held}
        if self.committee is not None:
            arrays["fitted"] = self.committee.windows
        return {"made_of": _made_of(self.config), "versions": versions(self.config), **state}, arrays

    @classmethod
    def from_state(
        cls, state: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], config: EnsembleConfig | None = None
    ) -> Ensemble:
        """Fit again on the stored windows. Raises EnsembleRefused where it is another one or its scores differ."""
        ensemble = cls(config)
        if state.get("made_of") != _made_of(ensemble.config):
            raise EnsembleRefused("the stored ensemble is made of other members or features than configured")
        held = {name: value for name, value in state.items() if name not in ("made_of", "versions")}
        ensemble._state = msgspec.convert(held, _State)
        ensemble._windows, ensemble._held = arrays["windows"].copy(), arrays["held"].copy()
        if "fitted" in arrays and not ensemble.reason:
            committee = ensemble._fitted(np.asarray(arrays["fitted"], np.float32))
            if committee is None:
                return ensemble  # PyOD is gone, and `reason` says so
            if not same_checks(committee, tuple(ensemble._state.checks) or committee.checks):
                raise EnsembleRefused("the stored ensemble does not reproduce its scores here; it is learned anew")
            ensemble.committee = committee
        return ensemble

    def _keep(self, clean_step: int, count: int) -> None:
        """Move the oldest windows that waited to those that are learned from; the oldest of all go."""
        state = self._state
        joined = np.concatenate([self._windows, self._held[:count]])
        self._held = self._held[count:]
        self._windows = joined[-self.config.windows_max :]
        state.kept.append([clean_step, count])
        over = sum(each for _, each in state.kept) - len(self._windows)
        while over > 0:
            gone = min(over, state.kept[0][1])
            state.kept[0][1] -= gone
            over -= gone
            if not state.kept[0][1]:
                state.kept.pop(0)

    def _fit(self) -> None:
        state = self._state
        found = self._fitted(self._windows)
        if found is None:
            return
        newest = self._newest()
        worse = self.committee is not None and len(newest) and not found.like(self.committee, newest)
        if worse and state.rejected < self.config.rejections_max:
            state.rejected += 1
            return
        self.committee, self._thresholds = found, {}
        state.rejected, state.fits, state.fitted_at = 0, state.fits + 1, state.clean
        state.checks = list(found.checks)
        state.step_seconds = self.step_seconds

    def _fitted(self, windows: Singles) -> Committee | None:
        try:
            return fitted(windows, self._plain)
        except (EnsembleUnavailable, UnknownModel) as error:
            self.reason = f"the ensemble is off: {error}"
            return None

    def _newest(self) -> Singles:
        """The windows of the last hundred clean steps."""
        count = sum(each for clean, each in self._state.kept if clean > self._state.clean - NEWEST_STEPS)
        return self._windows[len(self._windows) - count :]


class UnsuitableMember(ValueError):
    """A configured member cannot do what it is named for; the text says why."""


def check_members(config: EnsembleConfig) -> None:
    """Members of other people's choice must pass the suitability check. Raises UnsuitableMember."""
    shipped = EnsembleConfig()
    for role, names, ours in (("members", config.members, shipped.members), ("votes", config.votes, shipped.votes)):
        for name in names:
            if is_top(name) or name in ours:
                continue
            found = check(name)
            if not (found.ok if role == "members" else found.votes_ok):
                raise UnsuitableMember(
                    f"{name} cannot be in detect.ensemble.{role}: {'; '.join(found.reasons)}; name another model"
                )


def versions(config: EnsembleConfig) -> dict[str, str]:
    """Of the libraries behind the scores."""
    found = {"numpy": np.__version__}
    if config.on:
        with suppress(EnsembleUnavailable):
            found["pyod"] = version()
    return found


def _made_of(config: EnsembleConfig) -> dict[str, Any]:
    return {
        "members": list(config.members), "votes": list(config.votes), "features": list(config.features),
        "persistence": list(config.persistence), "seed": SEED, "smooth": config.smooth,
    }  # fmt: skip
