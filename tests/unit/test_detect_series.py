"""One entity against its own history: what it finds, that it sees no later row, that it goes on where it was."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detectors.calibration import CalibrationError
from detectors.series.budget_gate import BudgetConfig, BudgetGate, alarm_threshold, alarms
from detectors.series.features import Forecast, Units, earlier, filled, mean_and_change, rolling_mean
from detectors.series.series import SeriesConfig, SeriesDetector, SeriesRefused, ranked_metrics

CONFIG = SeriesConfig(BudgetConfig(rows_per_day=100.0), reference_rows_max=300)


def service(rows: int, seed: int = 0) -> np.ndarray:
    """Four metrics that follow one load with a daily wave, one of pure noise, one that never moves."""
    rng = np.random.default_rng(seed)
    load = 2.0 + np.sin(2 * np.pi * np.arange(rows) / 100) + 0.02 * rng.normal(size=rows).cumsum() / 10
    follow = load[:, None] * np.array([1.0, 0.5, 2.0, -1.0]) + 0.05 * rng.normal(size=(rows, 4))
    return np.hstack([follow, rng.normal(size=(rows, 1)), np.full((rows, 1), 7.0)])


TRAIN, LATER = service(1_200), service(500, seed=1)
LATER[300:320, 2] += 2.0  # one metric leaves the others


@pytest.fixture(scope="module")
def fitted() -> tuple[dict, dict]:
    return SeriesDetector.fit(TRAIN, CONFIG).to_state()


@pytest.fixture
def detector(fitted: tuple[dict, dict]) -> SeriesDetector:
    return SeriesDetector.from_state(*fitted, CONFIG)


def test_a_metric_that_leaves_the_others_raises_an_alarm_and_is_blamed(detector: SeriesDetector) -> None:
    scored = detector.observe(LATER)
    assert scored.alarmed[300:325].any()
    assert scored.alarmed[:300].sum() <= 20
    assert ranked_metrics(scored.blame[300:320])[0] == 2
    assert scored.score[300:320].max() > 1.5 * scored.score[:300].max()


def test_a_row_is_scored_by_rows_up_to_its_own(detector: SeriesDetector, fitted: tuple[dict, dict]) -> None:
    whole = detector.observe(LATER)
    other = LATER.copy()
    other[250:] = 99.0
    prefix = SeriesDetector.from_state(*fitted, CONFIG).observe(other)
    assert prefix.score[:250] == pytest.approx(whole.score[:250], rel=1e-9)
    assert (prefix.alarmed[:250] == whole.alarmed[:250]).all()


@pytest.mark.parametrize("width", [1, 130])
def test_blocks_of_any_length_give_the_same(detector: SeriesDetector, fitted: tuple[dict, dict], width: int) -> None:
    whole = detector.observe(LATER[270:330])
    blocks = SeriesDetector.from_state(*fitted, CONFIG)
    parts = [blocks.observe(LATER[at : min(at + width, 330)]) for at in range(270, 330, width)]
    assert np.concatenate([part.score for part in parts]) == pytest.approx(whole.score, rel=1e-9, abs=1e-9)
    assert (np.concatenate([part.alarmed for part in parts]) == whole.alarmed).all()
    assert len(blocks.observe(LATER[:0]).score) == 0


def test_the_state_goes_on_in_the_middle_of_an_alarm(detector: SeriesDetector) -> None:
    detector.observe(LATER[:310])
    fields, arrays = detector.to_state()
    again = SeriesDetector.from_state(json.loads(json.dumps(fields)), arrays, CONFIG)
    rest, wanted = again.observe(LATER[310:]), detector.observe(LATER[310:])
    assert (rest.score == wanted.score).all()
    assert (rest.alarmed == wanted.alarmed).all()
    assert again.gate.threshold == detector.gate.threshold


@pytest.mark.parametrize("broken", ["a field", "an array", "other neighbours"])
def test_a_state_that_is_none_or_scores_otherwise_is_refused(detector: SeriesDetector, broken: str) -> None:
    fields, arrays = detector.to_state()
    if broken == "a field":
        del fields["tails"]
    elif broken == "an array":
        del arrays["weights"]
    else:
        arrays["reference"] = arrays["reference"] * 1.5
    with pytest.raises(SeriesRefused, match="fit it anew"):
        SeriesDetector.from_state(fields, arrays, CONFIG)


def test_a_missing_value_is_the_last_one_known(detector: SeriesDetector, fitted: tuple[dict, dict]) -> None:
    gaps, known = LATER[:60].copy(), LATER[:60].copy()
    gaps[10:14, 1] = np.nan
    known[10:14, 1] = known[9, 1]
    filled_in = SeriesDetector.from_state(*fitted, CONFIG).observe(known)
    assert (detector.observe(gaps).score == filled_in.score).all()


def test_what_cannot_be_learned_from_is_refused_in_a_sentence() -> None:
    with pytest.raises(SeriesRefused, match="200 rows"):
        SeriesDetector.fit(TRAIN[:100], CONFIG)
    with pytest.raises(SeriesRefused, match="no metric"):
        SeriesDetector.fit(np.ones((300, 3)), CONFIG)


BUDGET = BudgetConfig(rows_per_day=100.0, alarms_per_day=0.5)
NOISE = np.random.default_rng(2).exponential(size=4_000)


def test_the_budget_is_kept_on_the_history() -> None:
    threshold = alarm_threshold(NOISE, BUDGET)
    count = np.count_nonzero(np.diff(alarms(NOISE, threshold, BUDGET).astype(int), prepend=0) == 1)
    assert 10 <= count <= 20  # 40 days


def test_a_short_history_extrapolates_its_tail() -> None:
    assert alarm_threshold(NOISE[:300], BUDGET) > np.quantile(NOISE[:300], 0.99)


def test_one_odd_row_is_no_alarm_and_an_alarm_closes_after_quiet() -> None:
    scores = np.zeros(30)
    scores[[5, 10, 11, 14, 15]] = 100.0
    alarmed = BudgetGate(BUDGET, NOISE).observe(scores)
    assert np.flatnonzero(alarmed).tolist() == list(range(11, 21))


@pytest.mark.parametrize("width", [1, 33, 250])
def test_the_gate_says_the_same_in_blocks_and_after_a_restart(width: int) -> None:
    scores = np.random.default_rng(3).exponential(2.0, size=250)
    whole = BudgetGate(BUDGET, NOISE)
    wanted = whole.observe(scores)
    gate, parts = BudgetGate(BUDGET, NOISE), []
    for at in range(0, len(scores), width):
        parts.append(gate.observe(scores[at : at + width]))
        fields, arrays = gate.to_state()
        gate = BudgetGate.from_state(json.loads(json.dumps(fields)), arrays, BUDGET)
    assert (np.concatenate(parts) == wanted).all()
    assert gate.threshold == whole.threshold
    with pytest.raises(CalibrationError, match="fit it anew"):
        BudgetGate.from_state({"threshold": 1.0}, arrays, BUDGET)


def test_an_entity_that_drifts_does_not_flood() -> None:
    gate = BudgetGate(BUDGET, NOISE[:1_000])
    before = gate.threshold
    drifted = np.random.default_rng(4).exponential(4.0, size=3_000)
    openings = np.diff(gate.observe(drifted).astype(int), prepend=0) == 1
    assert gate.threshold > 2 * before
    assert openings[-1_000:].sum() < openings[:1_000].sum() / 2


def test_representations_look_back_only() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    assert earlier(rows, 2)[:, 0].tolist() == [0, 0, 0, 2, 4, 6]
    assert rolling_mean(rows, 2)[:, 0].tolist() == [0, 1, 3, 5, 7, 9]
    assert mean_and_change(rows, 2)[3].tolist() == [5, 6, 4, 4]
    assert len(earlier(rows, 9)) == 6


def test_a_forecast_leaves_nothing_of_what_is_linear() -> None:
    rows = np.column_stack([np.sin(np.arange(400) / 9.0), np.cos(np.arange(400) / 9.0)])
    assert np.abs(Forecast.of(rows, 2).residuals(rows)[5:]).max() < 0.05


def test_units_leave_constants_out_and_bound_the_rest() -> None:
    units = Units.of(TRAIN)
    assert units.kept.tolist() == [0, 1, 2, 3, 4]
    assert np.abs(units(TRAIN * 1e6)).max() == 20.0


def test_gaps_are_filled_from_the_row_before() -> None:
    got = filled([[np.nan, 1.0], [2.0, np.nan], [np.inf, 3.0]], np.array([9.0, 9.0]))
    assert got.tolist() == [[9.0, 1.0], [2.0, 1.0], [2.0, 3.0]]
