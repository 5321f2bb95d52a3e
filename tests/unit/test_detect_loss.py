"""Loss and gradient norm: a spike that passes is a warning, what does not come back a divergence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detectors.job.loss import LossChannel
from tests.step_series import Floats, Series, noise

BLOOM_NORMS = (0.95, 2.39, 15.9, 145.0, 960.0)
STEPS = 600


def falling(steps: int = STEPS, seed: int = 0, floor: float = 2.0) -> Floats:
    """A loss that falls fast at first, with the noise of a real small job (1.5 %)."""
    return (floor + (8.0 - floor) / (1.0 + np.arange(steps) / 60.0)) * noise(seed, steps, 0.015)


def norms(steps: int = STEPS, seed: int = 1) -> Floats:
    return 0.24 * noise(seed, steps, 0.12)


def watched(loss: Floats, norm: Floats | None, ranks: int = 2, resumed: int | None = None) -> Series:
    job = Series(LossChannel(), ranks)
    job.roster.resume_step = resumed
    columns = {"train.loss": loss}
    if norm is not None:
        columns["train.gradient.norm"] = norm
    return job.feed(columns)


def bloom(onset: int = 300, recovers: bool = True) -> tuple[Floats, Floats]:
    """12 April 2022: the norm runs away, the loss follows from 2.20 to 5.10, and recovers in some thirty steps."""
    loss, norm = 2.2 * noise(5, STEPS, 0.01), norms()
    norm[onset : onset + 5] = BLOOM_NORMS
    after = np.arange(STEPS - onset - 3)
    loss[onset + 3 :] *= 1.0 + 1.318 * (np.exp(-after / 8.0) if recovers else 1.0)
    if not recovers:
        norm[onset + 5 :] *= 30.0
    return loss, norm


def test_bloom_of_12_april_2022_is_a_warning_that_ends_by_itself() -> None:
    job = watched(*bloom())
    assert job.classes == ["loss_spike"]
    spike = job.conditions[0]
    assert job.said_at("loss_spike") <= 304
    assert spike.onset_step in (300, 301)
    assert (spike.advice, spike.first_bad_step, spike.culprits) == (None, None, ())
    assert "wait before you roll back" in spike.summary
    assert 310 < job.ended_at("loss_spike") < 350


def test_the_norm_alone_warns_before_the_loss_moves() -> None:
    loss, norm = bloom()
    loss[303:] = loss[:1]
    job = watched(loss, norm)
    assert job.classes == ["loss_spike"]
    assert "may follow" in job.conditions[0].summary


def test_a_spike_that_does_not_recover_in_a_hundred_steps_is_a_divergence_and_says_the_first_bad_step() -> None:
    job = watched(*bloom(recovers=False))
    assert job.classes == ["loss_spike", "divergence"]
    assert 400 <= job.said_at("divergence") <= 412
    assert job.ended_at("loss_spike") == job.said_at("divergence")
    assert job.conditions[1].first_bad_step in (300, 301)
    assert "Go back to a checkpoint before step 30" in job.conditions[1].summary


def test_a_divergence_that_comes_back_after_all_ends() -> None:
    loss, norm = bloom(recovers=False)
    loss[500:], norm[500:] = 2.2, 0.24
    assert 500 < watched(loss, norm).ended_at("divergence") < 510


def test_a_loss_that_climbs_with_its_gradients_is_told_before_it_has_jumped() -> None:
    loss, norm = 2.2 * noise(5, STEPS, 0.01), norms()
    climb = np.clip((np.arange(STEPS) - 250) / 50.0, 0.0, None)
    job = watched(loss * (1.0 + 0.1 * climb), norm * (1.0 + 0.6 * np.minimum(climb, 3.0)))
    assert job.classes == ["loss_spike", "divergence"]
    assert job.said_at("loss_spike") < 340
    assert abs((job.conditions[1].first_bad_step or 0) - 260) < 40


def test_a_slow_climb_of_two_hundred_steps_is_a_divergence() -> None:
    loss, norm = 2.2 * noise(5, STEPS, 0.005), norms()
    climb = np.clip((np.arange(STEPS) - 200) / 200.0, 0.0, 2.0)
    assert "divergence" in watched(loss * (1.0 + 0.14 * climb), norm * (1.0 + 0.8 * climb)).classes


def test_a_harder_set_of_data_is_its_new_level_when_the_gradients_are_calm() -> None:
    loss, norm = 2.2 * noise(5, STEPS, 0.01), norms()
    loss[300:] *= 1.3
    job = watched(loss, norm)
    assert job.classes == ["loss_spike"]
    assert 400 <= job.ended_at("loss_spike") <= 412


@pytest.mark.parametrize("seed", range(3))
def test_a_cold_start_that_falls_fast_says_nothing(seed: int) -> None:
    assert watched(falling(seed=seed), norms(seed=seed + 50)).told == []


def test_gradients_that_grow_while_the_loss_falls_say_nothing() -> None:
    assert watched(falling(), norms() * np.linspace(1.0, 6.0, STEPS)).told == []


def test_one_high_norm_or_one_odd_batch_alone_says_nothing() -> None:
    loss, norm = 2.2 * noise(5, STEPS, 0.01), norms()
    norm[200], norm[320:322] = 60.0, 40.0
    loss[400] *= 1.5
    assert watched(loss, norm).told == []


def test_without_norms_a_loss_has_to_be_out_for_some_steps() -> None:
    loss = 2.2 * noise(5, STEPS, 0.01)
    loss[200] *= 2.0
    assert watched(loss, None).told == []
    loss[300:330] *= 1.6
    assert watched(loss, None).classes == ["loss_spike"]


def test_a_restart_from_a_checkpoint_goes_on_without_a_word() -> None:
    loss = falling()
    assert watched(loss[:200], norms(200)).told == []
    assert watched(loss[180:], norms()[180:], resumed=180).told == []


def test_a_drop_of_the_learning_rate_lowers_the_loss_and_nobody_minds() -> None:
    loss, norm = 2.2 * noise(5, STEPS, 0.01), norms()
    loss[300:] *= 0.8
    norm[300:] *= 1.6
    assert watched(loss, norm).told == []


def test_a_loss_that_may_be_negative_is_watched_on_its_own_scale() -> None:
    loss = 0.1 + 0.05 * np.random.default_rng(4).standard_normal(STEPS)
    loss[300:320] += 2.0
    job = watched(loss, None)
    assert job.classes == ["loss_spike"]
    assert 320 < job.ended_at("loss_spike") < 335


def test_steps_and_ranks_without_numbers_are_left_out() -> None:
    loss, norm = bloom()
    wide = np.repeat(loss[:, None], 4, axis=1)
    wide[np.random.default_rng(2).random(wide.shape) < 0.3] = np.nan
    assert watched(wide, norm, ranks=4).classes == ["loss_spike"]


def test_names_that_users_give_are_understood() -> None:
    loss, norm = bloom()
    job = Series(LossChannel(), 2).feed({"train.lm_loss": loss, "train.grad_norm": norm})
    assert job.classes == ["loss_spike"]
    assert job.said_at("loss_spike") <= 304


def test_its_state_goes_through_json_at_any_step() -> None:
    loss, norm = bloom(recovers=False)
    expected = watched(loss, norm)
    job = Series(LossChannel(), 2)
    for row in range(0, STEPS, 25):
        state, arrays = job.channel.to_state()
        job.channel = LossChannel()
        job.channel.load_state(json.loads(json.dumps(state, allow_nan=False)), arrays)
        job.feed({"train.loss": loss[row : row + 25], "train.gradient.norm": norm[row : row + 25]})
    assert job.told == expected.told


def local_norms(rank: int, step: int, factor: float, ranks: int = 4) -> Floats:
    """Own norms, steps × ranks: as much apart as different samples make them, and once `factor` times."""
    own = 0.24 * np.exp(np.random.default_rng(3).normal(0.0, 0.2, (STEPS, ranks)))
    own[step, rank] *= factor
    return own


def test_one_wild_gradient_names_its_rank_at_once_and_what_the_loss_does_next_is_the_same_story() -> None:
    loss, norm = bloom(onset=300)
    job = Series(LossChannel(), 4)
    own = local_norms(2, 299, 1000.0)
    job.feed({"train.loss": loss, "train.gradient.norm": norm, "train.gradient.local_norm": own})
    assert job.classes == ["loss_spike"]
    spike = job.conditions[0]
    assert job.said_at("loss_spike") == 299
    assert [(culprit.rank, culprit.node) for culprit in spike.culprits] == [(2, "node2")]
    assert "rank 2 on node2" in spike.summary
    assert "times any other's at step 299" in spike.summary


@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_gradients_as_different_as_samples_make_them_name_nobody(factor: float) -> None:
    job = Series(LossChannel(), 4)
    job.feed({"train.loss": 2.2 * noise(5, STEPS, 0.01), "train.gradient.local_norm": local_norms(1, 300, factor)})
    assert job.told == []


def test_where_one_rank_is_wild_now_and_then_as_experts_are_it_is_nothing_new() -> None:
    own = local_norms(1, 5, 60.0)
    own[10::40, 1] *= 40.0
    job = Series(LossChannel(), 4)
    job.feed({"train.loss": 2.2 * noise(5, STEPS, 0.01), "train.gradient.local_norm": own})
    assert job.told == []
