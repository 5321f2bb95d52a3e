"""Scores become decades, budgets become thresholds."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from detectors.calibration import (
    DECADES_MAX,
    CalibrationError,
    Gate,
    Tail,
    extremal_index,
    gate_after,
    hysteresis,
    persistence,
    threshold_decades,
)


@pytest.mark.parametrize(
    ("draw", "probability"),
    [
        (lambda rng: rng.exponential(size=20_000), lambda x: math.exp(-x)),
        (lambda rng: rng.pareto(4.0, size=20_000), lambda x: (1.0 + x) ** -4.0),
    ],
    ids=["exponential", "heavy"],
)
def test_decades_are_those_of_the_true_distribution(draw, probability) -> None:
    tail = Tail.fit(draw(np.random.default_rng(0)))
    for wanted in (1.0, 2.0, 3.0, 4.0):
        score = next(x for x in np.linspace(0, 40, 40_001) if -math.log10(max(probability(x), 1e-300)) >= wanted)
        assert tail.decades(score) == pytest.approx(wanted, abs=0.06 * wanted + 0.05)
        assert tail.score_at(float(tail.decades(score))) == pytest.approx(score, rel=1e-6)


def test_decades_never_fall_and_are_capped() -> None:
    tail = Tail.fit(np.random.default_rng(1).gamma(2.0, size=500))
    decades = tail.decades(np.r_[np.linspace(-5, 200, 5_000), 1e9])
    assert (np.diff(decades) >= 0).all()
    assert decades[0] >= 0
    assert decades[-1] == DECADES_MAX


@pytest.mark.parametrize("scores", [[3.0], [0.0] * 100, [1.0, 2.0], np.r_[np.zeros(99), 1.0]])
def test_few_or_constant_scores_still_give_a_tail(scores) -> None:
    tail = Tail.fit(scores)
    low, high = tail.decades([np.min(scores), np.max(scores) + 10.0])
    assert np.isfinite([low, high]).all()
    assert high > low


def test_nothing_finite_is_said() -> None:
    with pytest.raises(CalibrationError, match="no finite clean score"):
        Tail.fit([math.nan, math.inf])


def test_a_missing_score_stays_missing() -> None:
    assert np.isnan(Tail.fit([1.0, 2.0, 3.0]).decades([math.nan, 2.0])).tolist() == [True, False]


def test_a_tail_survives_its_state_and_a_broken_one_is_refused() -> None:
    tail = Tail.fit(np.random.default_rng(2).normal(size=1_000))
    fields, arrays = tail.to_state()
    again = Tail.from_state(json.loads(json.dumps(fields)), arrays)
    at = np.linspace(-3, 9, 100)
    assert (again.decades(at) == tail.decades(at)).all()
    for broken in ({**fields, "scale": 0.0}, {**fields, "shape": math.nan}, {"start": 1.0}):
        with pytest.raises(CalibrationError, match="fit it anew"):
            Tail.from_state(broken, arrays)


def test_the_extremal_index_counts_clusters() -> None:
    rng = np.random.default_rng(3)
    alone = rng.normal(size=20_000)
    assert extremal_index(alone, float(np.quantile(alone, 0.98))) > 0.9
    in_fours = np.repeat(rng.normal(size=5_000), 4)
    assert extremal_index(in_fours, float(np.quantile(in_fours, 0.98))) == pytest.approx(0.25, abs=0.07)
    assert extremal_index([0.0, 1.0], 0.5) == 1.0


def test_a_budget_becomes_a_threshold() -> None:
    assert threshold_decades(1.0, 10, 100.0, 1) == pytest.approx(3.0)
    assert threshold_decades(1.0, 10, 100.0, 3) == pytest.approx(1.0)
    assert threshold_decades(1.0, 10, 100.0, 1, extremal_index=0.1) == pytest.approx(2.0)
    assert threshold_decades(500.0, 1, 100.0, 1) == 0.0
    with pytest.raises(CalibrationError, match="budget"):
        threshold_decades(0.0, 1, 1.0)


def test_a_budget_is_kept_on_clean_scores() -> None:
    rng = np.random.default_rng(4)
    tail = Tail.fit(rng.gumbel(size=5_000))
    flags = tail.decades(rng.gumbel(size=200_000)) >= threshold_decades(1.0, 1, 500.0, 1)
    assert 200 <= flags.sum() <= 800  # 400 days, 1 alarm a day


def test_persistence_counts_the_last_n() -> None:
    flags = [True, False, True, False, False, True, True, True]
    assert persistence(flags, 2, 3).tolist() == [False, False, True, False, False, False, True, True]
    assert persistence(flags, 1, 1).tolist() == flags
    assert persistence(np.array([flags, flags]).T, 2, 3).shape == (8, 2)
    with pytest.raises(CalibrationError, match="4 of 3"):
        persistence(flags, 4, 3)


SCORES = np.array([0, 4, 3, 1, 1, 3, 1, 1, 1, 3, 5, math.nan, 0, 0, 0, 0.0])


def test_hysteresis_opens_high_and_closes_low() -> None:
    wanted = [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    assert hysteresis(SCORES, 4.0, 2.0, 3).astype(int).tolist() == wanted
    assert hysteresis(SCORES, 4.0, close_after=3).astype(int).tolist() == wanted
    assert hysteresis(np.stack([SCORES, SCORES], axis=1), 4.0, 2.0, 3)[:, 1].astype(int).tolist() == wanted


@pytest.mark.parametrize("cut", range(len(SCORES) + 1))
def test_hysteresis_in_two_blocks_is_that_of_one(cut: int) -> None:
    first = hysteresis(SCORES[:cut], 4.0, 2.0, 3)
    gate = gate_after(SCORES[:cut], first, 2.0, Gate())
    second = hysteresis(SCORES[cut:], 4.0, 2.0, 3, gate)
    assert np.r_[first, second].tolist() == hysteresis(SCORES, 4.0, 2.0, 3).tolist()
