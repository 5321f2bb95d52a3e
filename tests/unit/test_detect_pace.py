"""The job's pace: what everybody does is told, what one rank does to all is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from detectors.job.change_point import ChangePointConfig
from detectors.job.pace import PaceChannel, PaceConfig
from detectors.job.phases import Phases
from detectors.job.step_summary import lower_median
from pipelines.simulation.noise import OWN, NoiseStream, recorded_noise
from tests.step_series import Floats, Series, noise, step_parts

RANKS = 8  # on eight nodes


def own(steps: int, seed: int = 0, sigma: float = 0.01, ranks: int = RANKS) -> Floats:
    """Own compute seconds, steps × ranks; a step of it takes a little more than a second."""
    return 0.9 * noise(seed, (steps, ranks), sigma)


def watched(columns: dict[str, Floats], ranks: int = RANKS, per_node: int = 1, **told: object) -> Series:
    return Series(PaceChannel(), ranks, per_node).feed(columns, **told)  # type: ignore[arg-type]


def after(columns: dict[str, Floats], onset: int, **factors: float) -> dict[str, Floats]:
    """The columns with `samples=2.0` and the like multiplied from `onset` on."""
    steps = len(columns["train.step.duration"])
    numbers = {f"train.{name}": np.full(steps, 64.0) for name in factors}
    for name, factor in factors.items():
        numbers[f"train.{name}"][onset:] *= factor
    return {**columns, **numbers}


def test_bloom_of_28_april_2022_is_found_within_ten_steps() -> None:
    """105.2 s a step became 111.1 s (+5.6 %) at iteration 42782 of a steady job; only the step's time was known."""
    seconds = np.where(np.arange(400) < 200, 105.2, 111.1) * noise(1, 400, 0.003)
    job = watched({"train.step.duration": seconds})
    assert job.classes == ["job_slow"]
    condition = job.conditions[0]
    assert 200 <= job.said_at("job_slow") < 210
    assert condition.onset_step in range(198, 203)
    assert condition.culprits == ()
    assert re.search(r"\(\+5\.[567] %\)", condition.summary)
    assert "do not tell the parts" in condition.summary


def test_everybody_who_computes_longer_is_nobody_in_particular() -> None:
    work = own(300)
    work[150:210] *= 1.15
    job = watched(step_parts(work))
    assert job.classes == ["job_slow"]
    assert job.said_at("job_slow") - 150 < 12
    assert "everybody computes longer" in job.conditions[0].summary
    assert job.conditions[0].victims == RANKS
    assert {evidence.metric for evidence in job.conditions[0].evidence} >= {
        "train.step.duration", "train.compute.duration",
    }  # fmt: skip
    assert 210 < job.ended_at("job_slow") < 225


def test_a_slow_network_is_the_collective_of_the_rank_that_arrives_last() -> None:
    transfer = np.where(np.arange(300) < 150, 0.1, 0.25)
    job = watched(step_parts(own(300), transfer=transfer))
    assert job.classes == ["job_slow"]
    assert "look at the network" in job.conditions[0].summary


@pytest.mark.parametrize("slow", [[3], [2, 3]])
def test_what_one_rank_or_one_node_does_to_all_is_not_said_here(slow: list[int]) -> None:
    work = own(300)
    work[150:, slow] *= 1.5
    assert watched(step_parts(work)).told == []


def test_a_rank_too_slight_for_any_limit_is_named_after_a_while_with_half_a_heart() -> None:
    work = own(300, sigma=0.003)
    work[150:, 3] *= 1.08
    job = watched(step_parts(work))
    assert job.classes == ["job_slow"]
    assert job.said_at("job_slow") >= 190
    assert [(culprit.rank, culprit.confidence) for culprit in job.conditions[0].culprits] == [(3, 0.5)]


def test_in_a_job_of_two_one_slow_rank_is_not_everybody() -> None:
    work = own(400, ranks=2)
    work[200:, 1] *= 1.5
    assert watched(step_parts(work), ranks=2).told == []


def test_a_job_of_one_rank_is_watched_the_same() -> None:
    work = own(400, ranks=1)
    work[200:] *= 1.5
    assert watched(step_parts(work), ranks=1).classes == ["job_slow"]


def test_crowded_processors_are_not_a_slow_job() -> None:
    columns = step_parts(own(300))
    delay = np.where(np.arange(300) < 150, 0.01, 0.3)[:, None]
    for name in ("train.compute.duration", "train.step.duration"):
        columns[name] = columns[name] + delay
    columns["train.run_queue.delay"] = np.broadcast_to(delay, (300, RANKS))
    assert watched(columns).told == []


def test_all_ranks_that_wait_for_data_are_a_data_stall_without_a_culprit() -> None:
    data = np.where((np.arange(300) >= 150) & (np.arange(300) < 200), 0.3, 0.002)[:, None] * np.ones(RANKS)
    job = watched(step_parts(own(300), data=data))
    assert job.classes == ["data_stall"]
    assert job.conditions[0].culprits == ()
    assert job.said_at("data_stall") - 150 < 9
    assert 200 < job.ended_at("data_stall/job") < 215


def test_data_that_is_late_in_every_second_step_is_a_stall_too() -> None:
    late = (np.arange(300) >= 150) & (np.arange(300) % 2 == 0)
    data = np.where(late, 0.5, 0.002)[:, None] * np.ones(RANKS)
    assert watched(step_parts(own(300), data=data)).classes == ["data_stall"]


def test_data_that_is_late_once_an_epoch_is_none() -> None:
    data = np.where(np.arange(600) % 50 == 0, 2.0, 0.002)[:, None] * np.ones(RANKS)
    assert watched(step_parts(own(600), data=data)).told == []


def test_a_larger_batch_is_another_regime_and_not_a_fault() -> None:
    work = own(400)
    work[150:] *= 1.25
    job = watched(after(step_parts(work), 150, samples=1.25))
    assert job.classes == ["regime_change"]
    assert "samples a step went from 64 to 80" in job.conditions[0].summary
    assert job.conditions[0].onset_step in range(148, 153)
    assert job.ended_at(job.conditions[0].key) > 200


def test_a_ramp_of_the_batch_is_one_regime_change_until_it_has_settled() -> None:
    work, samples = own(500), np.full(500, 64.0)
    for onset in range(150, 300, 30):
        work[onset:] *= 1.12
        samples[onset:] *= 1.12
    job = watched({**step_parts(work), "train.samples": samples})
    assert job.classes == ["regime_change"]


def test_more_tokens_do_not_excuse_a_step_that_grew_far_more() -> None:
    work = own(300)
    work[150:] *= 1.5
    assert watched(after(step_parts(work), 150, tokens=1.05)).classes == ["job_slow"]


def test_a_running_total_of_samples_is_understood() -> None:
    work = own(300)
    work[150:] *= 1.25
    each = np.where(np.arange(300) < 150, 64.0, 80.0)
    job = watched({**step_parts(work), "train.samples": 1e6 + np.cumsum(each)})
    assert job.classes == ["regime_change"]


def test_a_drop_of_the_learning_rate_at_the_onset_is_a_regime_and_a_schedule_is_not() -> None:
    work = own(300)
    work[150:] *= 1.2
    rate = np.where(np.arange(300) < 150, 3e-4, 3e-5)
    assert watched({**step_parts(work), "train.learning_rate": rate}).classes == ["regime_change"]
    cosine = 3e-4 * (1.0 + np.cos(np.arange(300) / 300.0))
    assert watched({**step_parts(work), "train.learning_rate": cosine}).classes == ["job_slow"]


def test_a_pace_that_stays_is_told_once_then_taken_as_normal_and_the_next_change_is_seen_from_there() -> None:
    work = own(700)
    work[150:] *= 1.2
    work[550:] *= 1.3
    job = watched(step_parts(work))
    assert job.classes == ["job_slow", "regime_change", "job_slow"]
    assert "taken as normal" in job.conditions[1].summary


def test_a_faster_pace_is_taken_as_it_comes() -> None:
    work = own(500)
    work[150:] *= 0.7
    assert watched(step_parts(work)).told == []


def test_the_warm_up_and_a_slow_drift_of_all_say_nothing() -> None:
    work = own(800) * (1.0 + 0.03 * np.arange(800) / 2000)[:, None]
    work[:15] *= np.linspace(6.0, 1.1, 15)[:, None]
    assert watched(step_parts(work)).told == []


def test_checkpoints_that_nobody_tells_of_and_evaluations_say_nothing() -> None:
    columns = step_parts(own(600))
    steps = np.arange(600)
    columns["train.step.duration"] = columns["train.step.duration"] + np.where(steps % 20 == 7, 4.0, 0.0)[:, None]
    columns["train.step.duration"] = columns["train.step.duration"] + np.where(steps % 100 == 50, 30.0, 0.0)[:, None]
    assert watched(columns).told == []


def test_told_checkpoints_are_compared_with_checkpoints() -> None:
    columns = step_parts(own(700))
    steps = np.arange(700)
    saves = steps % 14 == 0
    cost = np.where(saves & (steps > 0), np.where(steps > 500, 9.0, 3.0), 0.0)
    columns["train.step.duration"] = columns["train.step.duration"] + cost[:, None]
    job = watched(columns, phases={int(step) - 1: "checkpoint" for step in steps[saves] if step})
    assert job.classes == ["job_slow"]
    assert job.conditions[0].key == "job_slow/checkpoint"
    assert "Checkpoints take longer" in job.conditions[0].summary


def test_a_regular_pause_is_inferred_to_be_a_checkpoint() -> None:
    phases, said = Phases(), []
    for step in range(200):
        said.append(phases.phase_of(step, 5.0 if step % 40 == 0 else 1.0, 1.0))
    assert said[:20] == ["warmup"] * 20
    assert [step for step, phase in enumerate(said) if phase == "checkpoint"] == [160]  # the fourth at one distance


def test_a_noisy_small_machine_with_bursts_says_nothing() -> None:
    dice = np.random.default_rng(8)
    work = own(900, sigma=0.08, ranks=4)
    step = 60
    while step < 900:
        length = int(dice.integers(3, 16))
        work[step : step + length] *= dice.uniform(1.1, 2.7)
        step += length + int(dice.integers(60, 150))
    assert watched(step_parts(work), ranks=4, per_node=2).told == []


def test_missing_ranks_and_missing_parts_are_left_out() -> None:
    work = own(300)
    work[150:] *= 1.2
    columns = step_parts(work)
    gone = np.random.default_rng(3).random((300, RANKS)) < 0.1
    columns = {name: np.where(gone, np.nan, values) for name, values in columns.items()}
    del columns["train.compute.own"], columns["train.optimizer.duration"]
    assert watched(columns).classes == ["job_slow"]


def test_the_lower_median_is_not_moved_by_half_of_the_ranks() -> None:
    assert lower_median(np.array([1.0, 9.0])) == 1.0
    assert lower_median(np.array([1.0, 2.0, 9.0, 9.0])) == 2.0
    assert lower_median(np.array([np.nan, 3.0, np.nan])) == 3.0
    assert np.isnan(lower_median(np.array([np.nan])))


def test_its_state_goes_through_json_at_any_step() -> None:
    work = own(400)
    work[150:200] *= 1.2
    work[260:] *= 1.3
    columns = {**step_parts(work, data=np.full((400, RANKS), 0.002)), "train.samples": np.full(400, 8.0)}
    expected = watched(columns)
    job = Series(PaceChannel(), RANKS)
    for row in range(0, 400, 20):
        state, arrays = job.channel.to_state()
        job.channel = PaceChannel()
        job.channel.load_state(json.loads(json.dumps(state, allow_nan=False)), arrays)
        job.feed({name: values[row : row + 20] for name, values in columns.items()})
    assert expected.classes == ["job_slow", "job_slow"]
    assert job.told == expected.told


@pytest.mark.parametrize(("nodes", "said"), [(5, []), (8, ["job_slow"])])
def test_what_some_of_a_few_nodes_do_is_not_what_everybody_does(nodes: int, said: list[str]) -> None:
    """Five of eight nodes compute a little longer for a while: the median of all ranks does too."""
    work = own(400, ranks=64)
    work[200:260, : 8 * nodes] *= 1.12
    assert watched(step_parts(work), ranks=64, per_node=8).classes == said


def test_bursts_of_neighbours_on_a_few_nodes_are_no_slower_job() -> None:
    """Noise as it was recorded, of 8 nodes of 8 ranks, beside a drift of 3 %: what all have in common wanders."""
    nodes = np.repeat(np.arange(8), 8)
    recorded = NoiseStream(recorded_noise(Path("data/clean")), nodes, 1.0, np.random.default_rng(3))
    work = 0.62 * np.stack([recorded.next()[:, OWN] for _ in range(1000)])
    work *= (1.0 + 0.03 * np.sin(2.0 * np.pi * np.arange(1000) / 700.0 + 3.0))[:, None]
    assert watched(step_parts(work), ranks=64, per_node=8).classes == []


def test_limits_are_configuration() -> None:
    work = own(300)
    work[150:] *= 1.15
    config = PaceConfig(change=ChangePointConfig(change_min=0.5))
    assert Series(PaceChannel(config), RANKS).feed(step_parts(work)).told == []


@pytest.mark.parametrize(
    ("slow", "ranks", "per_node", "named"), [([0, 2], 4, 2, [0, 2]), (list(range(8)), 16, 2, [])], ids=["two", "half"]
)
def test_so_many_slow_ranks_that_none_is_the_odd_one_are_told_together(
    slow: list[int], ranks: int, per_node: int, named: list[int]
) -> None:
    work = own(300, ranks=ranks)
    work[150:, slow] *= 1.5
    job = watched(step_parts(work), ranks=ranks, per_node=per_node)
    assert job.classes == ["job_slow"]
    condition = job.conditions[0]
    assert [culprit.rank for culprit in condition.culprits] == named
    assert ("rank 0 on node0 and rank 2 on node1" if named else "8 of 16 ranks") in condition.summary
    assert job.said_at("job_slow") < 190


def test_half_of_a_job_that_waits_for_its_processors_is_not_told_as_slow() -> None:
    columns = step_parts(own(300, ranks=4))
    delay = np.zeros((300, 4))
    delay[150:, [0, 2]] = 0.4
    columns["train.compute.duration"] = columns["train.compute.duration"] + delay
    columns["train.step.duration"] = columns["train.step.duration"] + delay.max(axis=1, keepdims=True)
    columns["train.run_queue.delay"] = delay
    assert watched(columns, ranks=4, per_node=2).told == []


def test_short_steps_are_weighed_together_so_that_a_neighbour_of_five_seconds_says_nothing() -> None:
    work = own(3000, ranks=4)
    work[1500:1600] *= 1.2
    short = {name: 0.05 * values for name, values in step_parts(work).items()}
    assert watched(short, ranks=4, per_node=2).classes == []
    work = own(3000, ranks=4)
    work[1500:] *= 1.2
    short = {name: 0.05 * values for name, values in step_parts(work).items()}
    job = watched(short, ranks=4, per_node=2)
    assert job.classes == ["job_slow"]
    assert job.said_at("job_slow") - 1500 < 60 / 0.05


def test_data_late_in_every_second_of_short_steps_is_seen_step_by_step() -> None:
    late = np.full((1000, 1), 0.001)
    late[600:700:2] = 0.5
    short = {name: 0.1 * values for name, values in step_parts(own(1000, ranks=4), data=late).items()}
    assert watched(short, ranks=4, per_node=2).classes == ["data_stall"]


def test_when_the_job_is_as_fast_as_before_no_other_series_waits_for_it() -> None:
    channel = PaceChannel()
    state = channel._state
    state.open, state.opener, state.waiting, state.silent = ["job_slow"], "seconds", ["own"], ["wait"]
    channel._points["own"].state.held = 0.1
    channel._ended("seconds")
    assert (state.waiting, state.silent, channel._points["own"].state.held) == ([], [], None)
