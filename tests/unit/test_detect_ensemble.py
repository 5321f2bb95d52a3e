"""The committee: what PyOD's users stumbled over does not happen here, and a budget of false alarms is kept."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from detectors.ensemble.committee import Committee
from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.ensemble import Ensemble, UnsuitableMember, check_members
from detectors.ensemble.members import Fitted, MemberRefused, Top
from detectors.ensemble.models import EnsembleUnavailable, UnknownModel, load_model
from detectors.ensemble.suitability import check
from detectors.steps import TIMINGS
from tests.ensemble_rows import COMPUTE, FEATURES, OWN, rows, windows
from tests.synthetic_job import SyntheticJob, detect

CONFIG = EnsembleConfig()
LIGHT = replace(CONFIG, members=("top1", "PCA"), votes=())


@pytest.fixture(scope="module")
def committee() -> Committee:
    return Committee(windows(1, 400), CONFIG)


def odd(factor: float) -> np.ndarray:
    row = np.zeros(FEATURES)
    row[list(COMPUTE)] = factor
    row[TIMINGS.index("train.step.duration")] = 0.25
    row[TIMINGS.index("train.compute.cpu")] = np.nan
    return row[None, :]


def test_constant_and_unmeasured_columns_are_left_out_by_name(committee: Committee) -> None:
    names = {CONFIG.features[index] for index in committee.columns}
    assert names == set(TIMINGS) - {"train.compute.cpu", "train.step.duration"}


def test_a_row_scores_the_same_alone_and_among_two_hundred_copies(committee: Committee) -> None:
    row = odd(4.0)
    for member in (*committee.deciders, *committee.voters):
        alone, crowd = member.score(row)[0], member.score(np.repeat(row, 200, axis=0))
        assert np.allclose(crowd, alone, rtol=1e-9), member.name
    assert np.allclose(committee.decades(np.repeat(row, 200, axis=0)), committee.decades(row)[0])


def test_what_is_farther_from_clean_is_never_less_improbable(committee: Committee) -> None:
    seen = [committee.decades(odd(factor))[0] for factor in (0.7, 1.5, 3.0, 6.0, 20.0, 1000.0)]
    assert seen == sorted(seen)
    assert seen[0] < 2.0
    assert seen[-1] == 12.0
    assert committee.decades(-odd(20.0))[0] == 0.0  # being fast is no fault


def test_a_value_beyond_everything_seen_is_no_exception_and_nowhere_lower(committee: Committee) -> None:
    histogram = next(voter for voter in committee.voters if voter.name == "HBOS")
    assert histogram.score(odd(1e6))[0] >= histogram.score(odd(3.0))[0] > np.median(histogram.score(rows_of(3)))


def test_a_row_with_a_gap_is_scored_by_who_needs_no_whole_rows_and_never_by_a_number_made_up(
    committee: Committee,
) -> None:
    row = odd(20.0)
    row[0, OWN] = np.nan
    scores = {member.name: member.score(row)[0] for member in (*committee.deciders, *committee.voters)}
    assert np.isnan([scores[name] for name in ("PCA", "KNN", "HBOS", "IForest")]).all()
    assert scores["top2"] == 20.0
    decades = committee.decades(np.vstack([row, odd(20.0), np.full((1, FEATURES), np.nan)]))
    assert np.isfinite(decades).all()
    assert decades[1] >= decades[0] > 2.0
    assert decades[2] == 0.0


def test_a_model_is_not_fitted_on_gaps_or_constants() -> None:
    clean = rows_of(5)
    with pytest.raises(MemberRefused, match="gaps"):
        Fitted("PCA", clean, [0, TIMINGS.index("train.compute.cpu")], 512)
    with pytest.raises(MemberRefused, match="constant"):
        Fitted("PCA", clean, [0, TIMINGS.index("train.step.duration")], 512)


def test_four_threads_get_the_scores_that_one_gets(committee: Committee) -> None:
    batches = [rows(np.random.default_rng(seed), 64) * 3.0 for seed in range(24)]
    alone = [committee.decades(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(committee.decades, batches))
    assert all(np.array_equal(one, two) for one, two in zip(alone, together, strict=True))


def test_every_member_says_which_feature_made_a_new_row_odd(committee: Committee) -> None:
    row = rows(np.random.default_rng(8), 1)
    data = TIMINGS.index("train.data.duration")
    row[0, data] = 9.0
    for member in committee.deciders:
        assert int(np.argmax(member.contributions(row[0]))) == data, member.name
    opinion = committee.opinion(row[0])
    assert opinion.features[int(np.argmax(opinion.contributions))] == "train.data.duration"
    assert set(opinion.members) == set(CONFIG.members)
    assert set(opinion.votes) == set(CONFIG.votes)


def test_votes_add_to_what_was_decided_and_decide_nothing() -> None:
    learned = windows(1, 100)
    without = Committee(learned, replace(CONFIG, votes=(), members=("top1",)))
    voting = Committee(learned, replace(CONFIG, votes=("HBOS",), members=("top1",)))
    far, near = odd(6.0), odd(0.7)
    assert without.decades(far)[0] < voting.decades(far)[0] <= without.decades(far)[0] + 0.25 * 12.0
    assert without.decades(near)[0] == voting.decades(near)[0]


@pytest.mark.parametrize("chance", [0.02, 0.005])
def test_the_budget_is_kept_on_clean_windows_that_were_not_learned_from(chance: float) -> None:
    sure = replace(LIGHT, sure_windows=800)
    learned = Committee(windows(21, 800), sure)
    entities, step_seconds = 10, 1.0
    in_a_day = entities * 86_400.0 / step_seconds / (LIGHT.persistence[1] / 2)
    asked = Committee.threshold(_with(learned, replace(sure, budget_per_day=chance * in_a_day)), entities, step_seconds)
    measured = float((learned.level_of(windows(22, 8000)) >= asked).mean())
    assert chance / 3.0 <= measured <= chance * 3.0


def test_a_threshold_on_few_windows_is_a_quarter_higher() -> None:
    few, sure = (Committee(windows(21, 100), replace(LIGHT, sure_windows=enough)) for enough in (101, 100))
    assert few.threshold(64, 1.0) == pytest.approx(1.25 * sure.threshold(64, 1.0), rel=1e-5)


def test_clean_steps_cross_the_default_threshold_never(committee: Committee) -> None:
    """PyOD's own default calls one row in ten odd."""
    assert not (committee.level_of(windows(31, 4000)) >= committee.threshold(64, 1.0)).any()


def test_memory_is_bounded_and_refits_come_at_fixed_steps() -> None:
    ensemble = Ensemble(replace(LIGHT, fit_steps=20, refit_steps=50, windows_max=100, hold_steps=3))
    ensemble.begin("many")
    fits = []
    for step in range(1, 121):
        before = ensemble.committee
        ensemble.learn(windows(step, 8), 1.0)
        fits += [step] if ensemble.committee is not before else []
    assert fits == [20, 50, 100]
    assert len(ensemble.windows) == 100


def test_what_was_clean_a_moment_ago_is_not_learned_from_when_something_turns_out_odd() -> None:
    ensemble = Ensemble(replace(LIGHT, hold_steps=10))
    ensemble.begin("many")
    for step in range(30):
        ensemble.learn(windows(step, 8), 1.0)
    assert len(ensemble.windows) == 20 * 8
    ensemble.doubt()
    for step in range(10):
        ensemble.learn(windows(step, 8), 1.0)
    assert len(ensemble.windows) == 20 * 8


def test_a_refit_that_scores_the_last_clean_steps_otherwise_is_rejected_twice_and_then_believed() -> None:
    ensemble = Ensemble(replace(LIGHT, fit_steps=40, refit_steps=20, hold_steps=1, windows_max=240))
    ensemble.begin("many")
    for step in range(40):
        ensemble.learn(windows(step, 8), 1.0)
    first = ensemble.committee
    for step in range(40, 79):
        ensemble.learn(windows(step, 8) * np.float32(9.0), 1.0)
        assert ensemble.committee is first
    assert ensemble.rejected == 1
    for step in range(79, 100):
        ensemble.learn(windows(step, 8) * np.float32(9.0), 1.0)
    assert ensemble.committee is not first
    assert ensemble.rejected == 0


@pytest.mark.parametrize("name", ["PCA", "KNN"])
def test_what_keeps_distance_may_decide(name: str) -> None:
    found = check(name)
    assert (found.ok, found.votes_ok, found.reasons) == (True, True, ())


@pytest.mark.parametrize("name", ["HBOS", "IForest"])
def test_what_saturates_may_only_vote_and_is_told_why(name: str) -> None:
    found = check(name)
    assert (found.ok, found.votes_ok) == (False, True)
    assert "does not grow with distance" in found.reasons[0]


@pytest.mark.parametrize("name", ["ECOD", "COPOD"])
def test_what_scores_a_row_by_its_batch_is_no_member_at_all(name: str) -> None:
    found = check(name)
    assert (found.ok, found.votes_ok) == (False, False)
    assert "by the batch it comes in" in found.reasons[0]
    for wrong in (replace(CONFIG, members=(name,)), replace(CONFIG, votes=(name,))):
        with pytest.raises(UnsuitableMember, match=f"{name} cannot be in detect.ensemble"):
            check_members(wrong)


def test_a_name_that_pyod_does_not_know_is_said() -> None:
    with pytest.raises(UnknownModel, match="no detector 'Nothing'"):
        load_model("Nothing")
    with pytest.raises(UnknownModel, match="no name"):
        load_model("../evil")


def test_without_pyod_detection_works_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyod.models.base", None)
    with pytest.raises(EnsembleUnavailable, match=r"transom\[detect\]"):
        load_model("PCA")
    ensemble = Ensemble()
    ensemble.preload()
    assert "transom[detect]" in ensemble.reason
    opened = detect(SyntheticJob(seed=1).start().train(100).train(20, slow={2: 1.5}).end().ordered())[0]
    assert opened.fault_class == "straggler"


def test_before_anything_is_fitted_the_largest_deviation_supports_a_stragglers_verdict() -> None:
    opened = detect(SyntheticJob(seed=1).start().train(100).train(20, slow={2: 1.5}).end().ordered())[0]
    support = opened.evidence[1]
    assert (support.metric, support.unit) == ("detect.ensemble", "decades")
    assert support.value is not None
    assert support.value >= 2.0
    assert "not fitted yet" in support.text


def test_top_k_means_the_k_largest() -> None:
    row = np.array([[3.0, -5.0, np.nan, 1.0]])
    assert [float(Top(count).score(row)[0]) for count in (1, 2, 3, 9)] == [5.0, 4.0, 3.0, 2.25]


def rows_of(seed: int) -> np.ndarray:
    return rows(np.random.default_rng(seed), 400)


def _with(committee: Committee, config: EnsembleConfig) -> Committee:
    other = object.__new__(Committee)
    other.__dict__.update(committee.__dict__, config=config)
    return other
