"""The ensemble supports a straggler's verdict, grows with distance, and is off, and says so, without PyOD."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from detectors.ensemble.ensemble import Ensemble, EnsembleConfig, EnsembleRefused
from detectors.ensemble.models import EnsembleUnavailable, load_model
from detectors.steps import TIMINGS
from tests.synthetic_job import SyntheticJob, detect


def rows(dice: np.random.Generator, ranks: int = 4) -> np.ndarray:
    values = 0.1 * (1.0 + dice.normal(0.0, 0.02, (ranks, len(TIMINGS))))
    values[:, TIMINGS.index("train.compute.cpu")] = 0.05  # constant: PCA would answer infinity
    values[:, TIMINGS.index("train.optimizer.duration")] = np.nan  # not measured
    return values


def fitted(steps: int = 80) -> Ensemble:
    dice = np.random.default_rng(1)
    ensemble = Ensemble()
    for _ in range(steps):
        ensemble.learn(rows(dice))
    assert ensemble.fitted
    return ensemble


def test_what_is_farther_from_clean_is_never_less_improbable() -> None:
    ensemble, clean = fitted(), rows(np.random.default_rng(2))
    seen = []
    for factor in (1.0, 1.1, 1.3, 2.0, 10.0, 1000.0):
        odd = clean.copy()
        odd[2, :4] *= factor
        seen.append(ensemble.decades(odd, 2))
    assert seen == sorted(seen)
    assert seen[0] is not None
    assert seen[0] <= 3
    assert seen[-1] == 12


def test_a_row_scores_the_same_alone_and_beside_others() -> None:
    ensemble, clean = fitted(), rows(np.random.default_rng(3))
    crowd = np.repeat(clean[[1]], 4, axis=0)
    assert ensemble.decades(clean, 1) == ensemble.decades(crowd, 3)


def test_a_row_with_a_missing_feature_is_refused_not_guessed() -> None:
    ensemble, clean = fitted(), rows(np.random.default_rng(4))
    clean[0, 0] = np.nan
    assert ensemble.decades(clean, 0) is None


def test_loading_fits_again_and_refuses_a_model_that_scores_otherwise() -> None:
    ensemble = fitted(120)
    state, arrays = ensemble.to_state()
    again = Ensemble.from_state(state, arrays)
    odd = rows(np.random.default_rng(5))
    odd[1] *= 1.05
    assert again.decades(odd, 1) == ensemble.decades(odd, 1)
    with pytest.raises(EnsembleRefused, match="does not reproduce"):
        Ensemble.from_state({**state, "checks": [score + 1.0 for score in state["checks"]]}, arrays)
    with pytest.raises(EnsembleRefused, match="configured"):
        Ensemble.from_state({**state, "model": "KNN"}, arrays)


def test_memory_is_bounded_and_refits_come_at_fixed_steps() -> None:
    ensemble = Ensemble(EnsembleConfig(base_steps=20, refit_steps=50, rows_max=100))
    dice, fits = np.random.default_rng(6), []
    for step in range(1, 121):
        before = ensemble._fitted
        ensemble.learn(rows(dice))
        if ensemble._fitted is not before:
            fits.append(step)
    assert fits == [20, 50, 100]
    assert len(ensemble.to_state()[1]["reference"]) == 100


def test_without_pyod_detection_works_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyod.models.base", None)
    with pytest.raises(EnsembleUnavailable, match=r"transom\[detect\]"):
        load_model("PCA")
    ensemble = Ensemble()
    ensemble.preload()
    assert "transom[detect]" in ensemble.reason
    opened = detect(SyntheticJob(seed=1).start().train(100).train(20, slow={2: 1.5}).end().ordered())[0]
    assert opened.fault_class == "straggler"
    assert len(opened.evidence) == 1


def test_a_stragglers_verdict_carries_the_models_opinion() -> None:
    opened = detect(SyntheticJob(seed=1).start().train(100).train(20, slow={2: 1.5}).end().ordered())[0]
    support = opened.evidence[1]
    assert (support.metric, support.unit) == ("detect.ensemble.pca", "probability")
    assert support.value is not None
    assert support.value <= 1e-4
    assert opened.culprits[0].confidence == 0.95
