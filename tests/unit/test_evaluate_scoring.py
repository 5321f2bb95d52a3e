"""Alarms against labelled events, by hand-made cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.evaluate.scoring import (
    EventScore,
    Span,
    hit_rate,
    period,
    score_events,
    spans,
    vus_pr,
)

ROWS = 100


def flags(*rows: tuple[int, int]) -> np.ndarray:
    out = np.zeros(ROWS, dtype=bool)
    for start, end in rows:
        out[start : end + 1] = True
    return out


EVENTS = [Span(20, 29), Span(60, 61)]


def score(*alarms: tuple[int, int]) -> EventScore:
    return score_events(EVENTS, flags(*alarms), tolerance=5, rows_per_day=50.0)


def test_runs_of_flags_are_spans_to_the_edges() -> None:
    assert spans([1, 1, 0, 1]) == [Span(0, 1), Span(3, 3)]
    assert spans(np.zeros(3)) == []


def test_one_alarm_inside_each_event_is_all_right() -> None:
    got = score((22, 23), (60, 60))
    assert (got.precision, got.recall, got.f1, got.delays) == (1.0, 1.0, 1.0, (2, 0))
    assert (got.entity_days, got.false_per_day) == (2.0, 0.0)


@pytest.mark.parametrize(("alarm", "found"), [((34, 40), 1), ((35, 40), 0), ((19, 20), 1), ((10, 19), 0)], ids=str)
def test_an_event_is_found_up_to_the_tolerance_and_not_before_it_begins(alarm: tuple[int, int], found: int) -> None:
    got = score(alarm)
    assert got.found == found
    assert got.false == 1 - found


def test_an_event_is_not_credited_by_its_length() -> None:
    """One of the long event, nothing of the short one: half, not 10 rows of 12 as with point adjustment."""
    assert score((25, 25)).recall == 0.5


def test_precision_counts_alarms_not_rows() -> None:
    got = score((20, 29), (70, 70), (80, 95))
    assert (got.alarms, got.false) == (3, 2)
    assert got.precision == pytest.approx(1 / 3)


def test_several_alarms_in_one_event_are_one_find_and_no_error() -> None:
    got = score((20, 21), (24, 25))
    assert (got.found, got.alarms, got.false, got.delays) == (1, 2, 0, (0,))


def test_an_alarm_that_never_closes_finds_all_and_its_share_shows_it() -> None:
    got = score((0, 99))
    assert (got.recall, got.precision) == (1.0, 1.0)
    assert got.alarmed_share == 1.0


def test_silence_is_precise_and_finds_nothing() -> None:
    got = score()
    assert (got.precision, got.recall, got.f1) == (1.0, 0.0, 0.0)
    assert math.isnan(got.delay())


def test_scores_of_entities_add_up() -> None:
    both = score((22, 23)) + score((60, 61), (80, 80))
    assert (both.events, both.found, both.alarms, both.false, both.delays) == (4, 2, 3, 1, (2, 0))
    assert both.entity_days == 4.0


def test_hit_rate_looks_at_as_many_as_there_are_causes() -> None:
    assert hit_rate([3, 1, 2, 0], {1, 3}) == 1.0
    assert hit_rate([3, 0, 1, 2], {1, 3}) == 0.5
    assert hit_rate([3, 0, 1, 2], {1, 3}, percent=150.0) == 1.0
    assert math.isnan(hit_rate([1], set()))


def test_the_period_is_the_highest_peak_of_the_autocorrelation() -> None:
    rows = np.arange(2_000)
    assert period(np.sin(2 * np.pi * rows / 50)) == 50
    assert period(np.ones(500)) == 125
    assert period(np.sin(2 * np.pi * rows / 350)) == 125  # beyond what counts as a period


LABELS = flags((40, 49)).astype(int)


def test_vus_of_a_perfect_score_is_high_and_of_noise_low() -> None:
    noise = np.random.default_rng(0).random(ROWS)
    assert vus_pr(LABELS, LABELS + 1e-3 * noise, 0) > 0.99
    assert vus_pr(LABELS, noise, 10) < 0.35
    assert math.isnan(vus_pr(np.zeros(ROWS), noise, 10))


def test_vus_forgives_a_score_beside_the_event_within_the_buffer() -> None:
    shifted = flags((50, 54)).astype(float)
    assert vus_pr(LABELS, shifted, 20) > vus_pr(LABELS, shifted, 0)


def test_vus_without_a_buffer_by_hand() -> None:
    """Ten rows, one event of two; its rows rank first and fourth: (1/2)(1) + (1/2)(1/2)."""
    labels = [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    scores = [0, 8, 9, 6, 7, 0, 0, 0, 0, 0]
    assert vus_pr(labels, scores, 0, thresholds=10) == pytest.approx(0.75)


def test_vus_multiplies_recall_by_the_share_of_events_touched() -> None:
    """Two events of one row; the first found at rank 1, the second at rank 4: recall 1/2 · 1/2, then 1."""
    labels = [0, 1, 0, 0, 0, 0, 0, 1, 0, 0]
    scores = [0, 9, 8, 7, 0, 0, 0, 6, 0, 0]
    assert vus_pr(labels, scores, 0, thresholds=10) == pytest.approx(0.25 * 1.0 + 0.75 * 0.5)
