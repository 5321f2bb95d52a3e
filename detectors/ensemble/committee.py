"""The fitted ensemble: raw scores become decades on clean rows it was not fitted on, and a budget becomes a threshold.

Deciders count by their maximum, votes add to it. A rank's level is the k-th largest of its last n decades: what an
alarm with that persistence could at most ask for. Its tail over clean windows says which level the budget allows, so
that nothing need be independent: bursts are in the windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from detectors.calibration import DECADES_MAX, CalibrationError, Tail, threshold_decades
from detectors.clues import six_digits
from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.members import STEADY, Fitted, Member, MemberRefused, Top, is_top, spread
from detectors.steps import TIMINGS, Floats

Singles = npt.NDArray[np.float32]

QUICK = frozenset(("PCA", "HBOS"))  # cheap enough for every rank of a step; the others score suspects
COMPUTE = frozenset((
    "train.compute.own", "train.compute.duration", "train.forward.duration", "train.backward.duration",
    "train.optimizer.duration", "train.compute.cpu",
))  # fmt: skip
DATA = "train.data.duration"
ROWS_MIN = 200
TOLD_MIN = 0.9  # of the rows have a column that models use
CHECK_ROWS = 16
SECONDS_A_DAY = 86_400.0


class Opinion(NamedTuple):
    """What the ensemble says of one row: decades of each member and vote, who leads, and what made the row odd."""

    decades: float
    members: Mapping[str, float]
    votes: Mapping[str, float]
    leader: str
    contributions: Floats  # of each of `features`
    features: tuple[str, ...]


class Committee:
    """Members fitted on clean windows (window × step × feature), with their tails. Nothing of it changes afterwards."""

    def __init__(self, windows: Singles, config: EnsembleConfig) -> None:
        """Raises CalibrationError where the windows are too few, MemberRefused where a model cannot take them."""
        self.config, self.windows = config, windows
        ours = [index for index, name in enumerate(config.features) if name in COMPUTE or name == DATA]
        self._ours = np.array(ours, dtype=np.int64)
        rows = _rows(windows)
        if not len(rows):
            raise CalibrationError("no clean rows to fit the ensemble on; give longer clean runs")
        told = np.isfinite(rows)
        steady = np.array([np.std(column[good]) <= STEADY if good.any() else True for column, good in zip(
            rows.T, told.T, strict=True)])  # fmt: skip
        self.columns = [int(index) for index in np.flatnonzero((told.mean(axis=0) >= TOLD_MIN) & ~steady)]
        train, held = (self._whole(windows[start::2]) for start in (0, 1))
        if len(self.columns) < 2 or min(len(train), len(held)) < ROWS_MIN // 2:
            raise CalibrationError("too few clean rows or features to fit the ensemble on; give longer clean runs")
        train, held = spread(train, config.rows_max // 2), spread(held, config.rows_max // 2)
        self.deciders = [self._member(name, train) for name in config.members]
        self.voters = [self._member(name, train) for name in config.votes]
        self.tails = {
            member.name: Tail.fit(member.score(rows if is_top(member.name) else held))
            for member in (*self.deciders, *self.voters)
        }
        self.levels = _light(Tail.fit(self.level_of(windows)))
        self.checks = tuple(float(f"{score:.9g}") for score in self._check_scores())

    def decades(self, rows: Floats, suspects_max: int | None = None) -> Floats:
        """Decades of each row (row × feature); 0 where neither computation nor data is slower than its peers'.

        Members that are slow score at most `suspects_max` rows, the oddest by the quick ones."""
        config = self.config
        with np.errstate(invalid="ignore"):
            wrong = (np.nan_to_num(rows[:, self._ours]) >= config.wrong_way_z).any(axis=1)
        out = np.zeros(len(rows))
        at = np.flatnonzero(wrong)
        if not len(at):
            return out
        rows = rows[at]
        best = np.zeros(len(rows))
        for member in self.deciders:
            if is_top(member.name) or member.name in QUICK:
                best = np.fmax(best, self._told(member, rows))
        some = _oddest(best, config.suspect_decades, suspects_max)
        for member in self.deciders:
            if len(some) and not is_top(member.name) and member.name not in QUICK:
                best[some] = np.fmax(best[some], self._told(member, rows[some]))
        some = _oddest(best, config.vote_decades, suspects_max)
        if len(some) and self.voters:
            votes = np.stack([np.nan_to_num(self._told(voter, rows[some])) for voter in self.voters])
            best[some] += config.vote_weight * votes.mean(axis=0)
        out[at] = np.minimum(best, DECADES_MAX)
        return out

    def opinion(self, row: Floats) -> Opinion:
        """Everything about one row."""
        given = row[None, :]
        members = {member.name: _digits(self._told(member, given)[0]) for member in self.deciders}
        votes = {voter.name: _digits(self._told(voter, given)[0]) for voter in self.voters}
        leader = max(self.deciders, key=lambda member: members[member.name])
        together = members[leader.name] + self.config.vote_weight * (sum(votes.values()) / max(1, len(votes)))
        return Opinion(
            six_digits(min(together, DECADES_MAX)), members, votes, leader.name, leader.contributions(row),
            self.config.features,
        )  # fmt: skip

    def level_of(self, windows: Singles) -> Floats:
        """The level of each window: the k-th largest of its steps' decades."""
        count, steps, _ = windows.shape
        return level(self.decades(_rows(windows)).reshape(count, steps).T, self.config.persistence[0])

    def threshold(self, entities: int, step_seconds: float) -> float:
        """The level at which a clean job of so many ranks raises as many alarms a day as the budget allows."""
        config = self.config
        windows = SECONDS_A_DAY / max(step_seconds, 1e-3) / max(1.0, config.persistence[1] / 2)
        wanted = threshold_decades(config.budget_per_day, entities, max(windows, 1.0))
        sure = 1.0 if len(self.windows) >= config.sure_windows else config.unsure_factor
        return six_digits(sure * self.levels.score_at(wanted))

    def like(self, other: Committee, windows: Singles) -> bool:
        """Both score these windows alike: 99th percentiles of no fitted member differ by more than `differ_max`."""
        rows = _rows(windows)
        for mine in (member for member in self.deciders if isinstance(member, Fitted)):
            theirs = next((member for member in other.deciders if member.name == mine.name), None)
            if theirs is None:
                continue
            one, two = (_high(member.score(rows)) for member in (mine, theirs))
            if not 1.0 / self.config.differ_max <= (one + 1e-9) / (two + 1e-9) <= self.config.differ_max:
                return False
        return True

    def _told(self, member: Member, rows: Floats) -> Floats:
        weight = dict(self.config.weights).get(member.name, 1.0)
        return weight * self.tails[member.name].decades(member.score(rows))

    def _member(self, name: str, train: Floats) -> Member:
        count = is_top(name)
        return Top(count) if count else Fitted(name, train, self.columns, self.config.reference_rows_max)

    def _whole(self, windows: Singles) -> Floats:
        rows = _rows(windows)
        return rows[np.isfinite(rows[:, self.columns]).all(axis=1)] if self.columns else rows[:0]

    def _check_scores(self) -> list[float]:
        rows = spread(self._whole(self.windows), CHECK_ROWS)
        return [float(score) for member in (*self.deciders, *self.voters) for score in member.score(rows)]


def level(decades: Floats, steps: int) -> Floats:
    """step × entity → the `steps`-th largest of each entity."""
    return np.asarray(np.partition(decades, len(decades) - steps, axis=0)[len(decades) - steps])


def fitted(windows: Singles, config: EnsembleConfig) -> Committee | None:
    """A committee, or None where the windows do not carry one."""
    try:
        return Committee(windows, config)
    except (CalibrationError, MemberRefused):
        return None


def cold_decades(rows: Floats) -> Floats:
    """Before anything is fitted: a normal tail of half the largest |z| (floors doubled), at most six decades."""
    halved = Top(1).score(rows) / 2.0
    return np.asarray(np.minimum(halved**2 / 2.0 / np.log(10.0), 6.0))


def columns_of(features: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Where the features stand among TIMINGS."""
    return np.array([TIMINGS.index(name) for name in features], dtype=np.int64)


def _light(tail: Tail) -> Tail:
    """An exponential tail of the same mean: decades are logarithms already, and a heavier one would ask for levels that
    no row can reach (deviations are clipped)."""
    return replace(tail, shape=0.0, scale=tail.scale / (1.0 - tail.shape))


def _rows(windows: Singles) -> Floats:
    return windows.reshape(-1, windows.shape[-1]).astype(np.float64)


def _oddest(best: Floats, least: float, count_max: int | None) -> npt.NDArray[np.int64]:
    some = np.flatnonzero(best >= least)
    if count_max is not None and len(some) > count_max:
        order = np.argsort(-best[some], kind="stable")
        some = np.sort(some[order[:count_max]])
    return some


def _high(scores: Floats) -> float:
    finite = scores[np.isfinite(scores)]
    return float(np.quantile(finite, 0.99)) if len(finite) else 0.0


def _digits(value: float) -> float:
    return six_digits(float(value)) if np.isfinite(value) else 0.0
