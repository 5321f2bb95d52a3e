"""Understands a change of the pace from the history of steps: which part grew, whose doing it is, what came with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from detectors.job.step_summary import SIGNALS, Rows
from detectors.steps import Floats

COLUMN_OF = {"compute": "wall", "delay": "delay", "wait": "wait", "optimizer": "optimizer", "data": "data"}


class Cut(NamedTuple):
    """The history in two: before a change and since."""

    before: slice
    since: slice


class PaceStory(NamedTuple):
    """A change of the pace: since when, how much, and which part of the step grew. Seconds of one step."""

    part: str  # data, compute, delay, wait, optimizer; one_rank, unknown; signals, accepted; checkpoint, eval
    onset: Floats  # the row of the first step, entries as in step_summary.COLUMNS
    before: float
    after: float
    part_before: float
    part_after: float
    steps: int
    signals: dict[str, tuple[float, float]]
    rank: int | None  # whom the others wait for, where that is known
    measured: bool  # the ranks tell the parts of their steps


@dataclass(frozen=True, slots=True)
class StoryConfig:
    """Limits of understanding."""

    before_steps: int = 64  # that a change is compared with
    common_share: float = 0.5  # of the step's growth has to be everybody's
    alone_share: float = 0.25  # or one rank's, where that is more than everybody's
    signal_min: float = 0.03  # log change of samples, tokens or learning rate
    signal_slack: float = 0.05  # a step may grow by twice the signal's growth and this


def cut_of(rows: Rows, count: int, config: StoryConfig) -> Cut:
    """The last `count` rows, and those they are compared with (at least one)."""
    end = len(rows.table)
    onset = max(1, end - count)
    return Cut(slice(max(0, onset - config.before_steps), onset), slice(onset, end))


def story_of(rows: Rows, cut: Cut, config: StoryConfig) -> PaceStory:
    """Who or what made the step longer."""

    def grown(name: str) -> float:
        difference = rows.median(name, cut.since) - rows.median(name, cut.before)
        return difference if math.isfinite(difference) else 0.0

    before, after = rows.median("seconds", cut.before), rows.median("seconds", cut.since)
    delay = max(0.0, grown("delay"))
    parts = {
        "data": grown("data"), "compute": grown("wall") - delay, "delay": delay, "wait": grown("wait"),
        "optimizer": grown("optimizer"),
    }  # fmt: skip
    step, common = after - before, sum(parts.values())
    part = max(parts, key=lambda name: parts[name])
    measured = bool(np.isfinite(rows.column("wall", cut.since)).any())
    if common < config.common_share * step or parts[part] <= 0.0:
        alone = grown("busy") - grown("wall") - grown("data")
        part = "one_rank" if measured and alone >= max(common, config.alone_share * step) else "unknown"
    column = COLUMN_OF.get(part)
    return PaceStory(
        part=part,
        onset=rows.table[cut.since.start],
        before=before,
        after=after,
        part_before=rows.median(column, cut.before) if column else math.nan,
        part_after=rows.median(column, cut.since) if column else math.nan,
        steps=cut.since.stop - cut.since.start,
        signals=signals_of(rows, cut),
        rank=None,
        measured=measured,
    )


def signals_of(rows: Rows, cut: Cut) -> dict[str, tuple[float, float]]:
    """Samples, tokens and learning rate, before and now, where they were told."""
    out: dict[str, tuple[float, float]] = {}
    for name in SIGNALS:
        values = _per_step(rows.column(name), rows.column("step"))
        before, since = finite(values[cut.before]), finite(values[cut.since])
        if len(before) and len(since):
            out[name] = (float(np.median(before[-16:])), float(np.median(since[-5:])))
    return out


def is_regime(rows: Rows, cut: Cut, config: StoryConfig) -> bool:
    """The change came with one of the batch or, in one jump, of the learning rate."""
    seconds = math.log(rows.median("seconds", cut.since) / rows.median("seconds", cut.before))
    for name, (before, since) in signals_of(rows, cut).items():
        if before <= 0.0 or since <= 0.0:
            continue
        grown = math.log(since / before)
        if name == "learning_rate":
            if _jumped(rows, cut, config):
                return True
        elif grown >= config.signal_min and seconds <= 2.0 * grown + config.signal_slack:
            return True
    return False


def _jumped(rows: Rows, cut: Cut, config: StoryConfig) -> bool:
    """The learning rate jumped within a few steps of the onset, and not before."""
    rates = rows.column("learning_rate")
    with np.errstate(invalid="ignore", divide="ignore"):
        moves = np.abs(np.diff(np.log(rates)))
    near = finite(moves[max(0, cut.since.start - 4) : cut.since.start + 3])
    older = finite(moves[cut.before.start : max(0, cut.since.start - 4)])
    if not len(near) or len(older) < 8:
        return False
    return bool(near.max() > max(config.signal_min, 10.0 * older.max()))


def finite(values: Floats) -> Floats:
    """The finite ones of them."""
    return np.asarray(values[np.isfinite(values)])


def _per_step(values: Floats, steps: Floats) -> Floats:
    """A count that only ever grows, far beyond its growth in one step, is a running total: its growth is meant."""
    if len(values) < 20 or not np.isfinite(values).all():
        return values
    growth = np.diff(values) / np.diff(steps)
    if (growth > 0.0).all() and float(np.median(values)) > 5.0 * float(np.median(growth)):
        return np.concatenate([growth[:1], growth])
    return values
