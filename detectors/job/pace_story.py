"""Understands a change of the pace from the history of steps: which part grew, whose doing it is, what came with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from detectors.job.step_summary import SIGNALS, Rows
from detectors.medians import finite_median
from detectors.roster import Roster
from detectors.steps import Floats, StepMatrix

COLUMN_OF = {"compute": "wall", "delay": "delay", "wait": "wait", "optimizer": "optimizer", "data": "data"}


class Cut(NamedTuple):
    """The history in two: before a change and since."""

    before: slice
    since: slice


class PaceStory(NamedTuple):
    """A change of the pace: since when, how much, and which part of the step grew. Seconds of one step."""

    part: str  # data, compute, delay, wait, optimizer; one_rank, several, unknown; signals, accepted; checkpoint, eval
    onset: Floats  # the row of the first step, entries as in step_summary.COLUMNS
    before: float
    after: float
    part_before: float
    part_after: float
    steps: int
    signals: dict[str, tuple[float, float]]
    rank: int | None  # whom the others wait for, where that is known
    measured: bool  # the ranks tell the parts of their steps
    ranks: tuple[int, ...] = ()  # that compute longer, where that are several


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
        outside = step - common - alone  # of all that the ranks measure
        some = alone >= max(common, config.alone_share * step) or outside < config.common_share * step
        part = "one_rank" if measured and some else "unknown"
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


def with_slower_ranks(story: PaceStory, rows: Rows, cut: Cut, matrix: StepMatrix, least: float) -> PaceStory:
    """The story with the ranks that compute longer since the change: by this share, and by half of what the step
    grew. Without them where there are none, or the matrix has forgotten the steps before."""
    usual, now = (_usual_compute(rows.column("step", part), matrix) for part in cut)
    if usual is None or now is None:
        return story
    with np.errstate(invalid="ignore"):
        longer = (now >= (1.0 + least) * usual) & (now - usual >= 0.5 * (story.after - story.before))
    if not longer.any():
        return story
    ranks = tuple(rank for rank, grew in zip(matrix.ranks, longer.tolist(), strict=True) if grew)
    before, after = (float(np.median(seconds[longer])) for seconds in (usual, now))
    return story._replace(ranks=ranks, part_before=before, part_after=after)


def is_everywhere(story: PaceStory, rows: Rows, cut: Cut, matrix: StepMatrix, roster: Roster) -> bool:
    """Three quarters of the nodes compute longer by half of what all do, if it is that what grew: bursts on some of
    a few nodes move the median of all ranks too. True where the matrix has forgotten the steps before."""
    if story.part != "compute":
        return True
    usual, now = (_usual_compute(rows.column("step", part), matrix) for part in cut)
    if usual is None or now is None:
        return True
    nodes = np.array([roster.node_of(rank) or "" for rank in matrix.ranks])
    growth = now / usual - 1.0
    of_nodes = [finite_median(growth[nodes == node]) for node in np.unique(nodes)]
    return not float(np.nanquantile(of_nodes, 0.25)) < 0.5 * (story.part_after / story.part_before - 1.0)


def growth_of(rank: int, rows: Rows, cut: Cut, matrix: StepMatrix) -> float:
    """How much longer this rank is busy since the change, as a share; NaN where the matrix has forgotten."""
    column, medians = matrix.ranks.index(rank), []
    for part in cut:
        busy = [_busy(matrix, int(step), column) for step in rows.column("step", part)]
        known = finite(np.array(busy))
        medians.append(float(np.median(known)) if len(known) else math.nan)
    return medians[1] / medians[0] - 1.0 if medians[0] > 0.0 else math.nan


def _busy(matrix: StepMatrix, step: int, column: int) -> float:
    """Seconds of data and compute of one rank; NaN where they are not known."""
    data, compute = (matrix.values(step, name) for name in ("train.data.duration", "train.compute.duration"))
    if data is None or compute is None:
        return math.nan
    return float(compute[column] + np.nan_to_num(data[column]))


def _usual_compute(steps: Floats, matrix: StepMatrix) -> Floats | None:
    """Each rank's (lower) median compute seconds, its own where it can tell; None where the matrix has forgotten."""
    known = []
    for step in steps.astype(np.int64).tolist():
        own, wall = matrix.values(step, "train.compute.own"), matrix.values(step, "train.compute.duration")
        if own is not None and wall is not None:
            known.append(np.where(np.isfinite(own), own, wall))
    if not known:
        return None
    ordered = np.sort(np.stack(known), axis=0)  # NaN last
    told = np.isfinite(ordered).sum(axis=0)
    return np.asarray(np.take_along_axis(ordered, np.maximum(told - 1, 0)[None] // 2, axis=0)[0])


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
