"""What others would do with the same step times: rules and raw PyOD models, each with the best threshold it may have.

Every baseline gives each rank of each step a score. An alarm is a score above the threshold in `PERSIST_STEPS` of
`WINDOW_STEPS` steps, the same persistence as ours; it is over after `CALM_STEPS` without. The threshold is the lowest
that keeps to a budget of false alarms on the tuning part. Baselines know no classes: any alarm about the right time
counts as found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detectors.ensemble.models import Model
from detectors.steps import TIMINGS
from detectors.verdict import Culprit
from pipelines.evaluate.matching import Label, Matched, Story, Tally, match, tally
from pipelines.evaluate.step_arrays import Floats, StepArrays

WARM_UP_STEPS = 5
BASE_STEPS = 40  # after the warm-up: what a method may learn from, before any fault
WINDOW_STEPS, PERSIST_STEPS, CALM_STEPS = 8, 5, 8
REFERENCE_ROWS_MAX = 2_048
THRESHOLDS_MAX = 400
OWN, WALL = "train.compute.own", "train.compute.duration"

Scorer = Callable[[StepArrays], Floats]


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A run under one baseline: `level[step, rank]` is the highest threshold at which the alarm would stand."""

    arrays: StepArrays
    labels: tuple[Label, ...]
    clean_steps: int
    level: Floats


def rules() -> dict[str, Scorer]:
    """Baselines that need no model."""
    return {"k × median": _over_median, "k × fastest": _over_fastest, "own history, z": _own_history}


def model_scorer(make: Callable[[], Model]) -> Scorer:
    """A raw model over pooled rows of all ranks, in units of its own clean scores."""

    def scorer(arrays: StepArrays) -> Floats:
        steps, ranks, _ = arrays.values.shape
        scores = np.full((steps, ranks), np.nan)
        base = arrays.values[WARM_UP_STEPS : WARM_UP_STEPS + BASE_STEPS].reshape(-1, len(TIMINGS))
        columns = [
            index for index in range(len(TIMINGS))
            if len(base) and np.isfinite(base[:, index]).mean() > 0.5 and np.nanstd(base[:, index]) > 1e-9
        ]  # fmt: skip
        base = base[:, columns]
        base = base[np.isfinite(base).all(axis=1)][:: max(1, len(base) // REFERENCE_ROWS_MAX)]
        if len(columns) < 2 or len(base) < 30:
            return scores
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models about small samples: a baseline takes what it gets
            model.fit(base)
            usual = model.decision_function(base)
            rows = arrays.values[:, :, columns].reshape(-1, len(columns))
            whole = np.isfinite(rows).all(axis=1)
            flat = scores.reshape(-1)
            if whole.any():
                flat[whole] = model.decision_function(rows[whole])
        spread = max(1.4826 * float(np.median(np.abs(usual - np.median(usual)))), 1e-9)
        scores = (scores - float(np.median(usual))) / spread
        scores[: WARM_UP_STEPS + BASE_STEPS] = np.nan
        return scores

    return scorer


def _compute(arrays: StepArrays) -> Floats:
    own = arrays.timing(OWN)
    return own if np.isfinite(own).mean() > 0.5 else arrays.timing(WALL)


def _over_median(arrays: StepArrays) -> Floats:
    values = _compute(arrays)
    return _trained(values / np.maximum(_by_step(np.nanmedian, values), 1e-9))


def _over_fastest(arrays: StepArrays) -> Floats:
    values = _compute(arrays)
    return _trained(values / np.maximum(_by_step(np.nanmin, values), 1e-9))


def _own_history(arrays: StepArrays) -> Floats:
    """The largest deviation of any timing from the rank's own base, in robust sigmas."""
    base = arrays.values[WARM_UP_STEPS : WARM_UP_STEPS + BASE_STEPS]
    if not len(base):
        return np.full(arrays.values.shape[:2], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a timing that a rank never told
        middle = np.nanmedian(base, axis=0)
        spread = 1.4826 * np.nanmedian(np.abs(base - middle), axis=0)
        z = np.abs(arrays.values - middle) / np.maximum(spread, np.maximum(0.005 * np.abs(middle), 1e-4))
        scores = np.asarray(np.nanmax(z, axis=2))
    scores[: WARM_UP_STEPS + BASE_STEPS] = np.nan
    return scores


def _by_step(of: Callable[..., Any], values: Floats) -> Floats:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that nobody told
        return np.asarray(of(values, axis=1))[:, None]


def _trained(scores: Floats) -> Floats:
    scores = scores.copy()
    scores[:WARM_UP_STEPS] = np.nan
    return scores


def score_run(scorer: Scorer, arrays: StepArrays, labels: Sequence[Label], clean_steps: int) -> ScoredRun:
    """Score a run, and turn scores into the threshold at which each window of them would be an alarm."""
    scores = np.nan_to_num(scorer(arrays), nan=-np.inf, posinf=1e300, neginf=-np.inf)
    steps, ranks = scores.shape
    level = np.full((steps, ranks), -np.inf)
    if steps >= WINDOW_STEPS:
        windows = np.lib.stride_tricks.sliding_window_view(scores, WINDOW_STEPS, axis=0)
        level[WINDOW_STEPS - 1 :] = np.sort(windows, axis=2)[:, :, WINDOW_STEPS - PERSIST_STEPS]
    return ScoredRun(arrays, tuple(labels), clean_steps, level)


def alarms(run: ScoredRun, threshold: float) -> list[Story]:
    """The alarms of one run. While one stands there is no other: it names the rank that was highest when it began,
    or every victim of a slow rank would be a false alarm of its own."""
    stories: list[Story] = []
    over = np.flatnonzero((run.level > threshold).any(axis=1))
    last = -(10**9)
    for step in over.tolist():
        if step - last > CALM_STEPS:
            column = int(run.level[step].argmax())
            culprit = Culprit(rank=run.arrays.ranks[column], node=run.arrays.nodes[column])
            stories.append(Story(float(run.arrays.ended_at[step]), None, (culprit,)))
        last = step
    return stories


def threshold_of(runs: Sequence[ScoredRun], false_per_1k_max: float) -> float:
    """The lowest threshold that keeps to the budget in the clean steps of these runs."""
    levels = [run.level[_clean_rows(run)] for run in runs]
    finite = np.concatenate([level[np.isfinite(level)] for level in levels]) if levels else np.empty(0)
    if not len(finite):
        return float("inf")
    candidates = np.unique(finite)[::-1][:THRESHOLDS_MAX]
    steps = sum(run.clean_steps for run in runs)
    best = float(candidates[0])
    for candidate in candidates:
        false = sum(len(_false_in_clean(run, float(candidate))) for run in runs)
        if 1_000.0 * false / max(1, steps) > false_per_1k_max:
            break
        best = float(candidate)
    return best


def _false_in_clean(run: ScoredRun, threshold: float) -> list[Story]:
    return [
        story for story in alarms(run, threshold) if not any(label.covers(story.opened_at, 5.0) for label in run.labels)
    ]


def _clean_rows(run: ScoredRun) -> Floats:
    return np.array(
        [not any(label.covers(float(at), 5.0) for label in run.labels) for at in run.arrays.ended_at], dtype=np.bool_
    )


def matched(runs: Iterable[ScoredRun], threshold: float) -> list[tuple[ScoredRun, Matched]]:
    """Every run held against its labels at this threshold."""
    return [(run, match(run.labels, alarms(run, threshold))) for run in runs]


def total(pairs: Iterable[tuple[ScoredRun, Matched]]) -> Tally:
    """Their counts."""
    out = Tally()
    for run, result in pairs:
        out += tally(result, run.clean_steps)
    return out
