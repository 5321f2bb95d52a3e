"""Evidence on several scales, the thresholds it learns, and roles by gaps."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.ranks.hysteresis import SCALES, Evidence, EvidenceConfig, since_shift
from detectors.ranks.node_view import NodeView
from detectors.ranks.roles import given_roles, learned_roles

FLOORS = (0.01, 0.01, 0.01, 0.01)


def pushed(evidence: Evidence, rows: np.ndarray) -> Evidence:
    for row in rows:
        evidence.push(row)
        evidence.calibrate([])
    return evidence


def test_bursts_of_fifteen_steps_raise_the_short_scales_thresholds_and_not_the_long_ones() -> None:
    dice = np.random.default_rng(1)
    rows = dice.normal(0.0, 0.01, (600, 200))
    for entity in range(200):
        for begin in dice.choice(580, 6, replace=False):
            rows[begin : begin + dice.integers(5, 16), entity] += 0.15
    evidence = pushed(Evidence(200, FLOORS, EvidenceConfig(), calibrated=True), rows)
    assert evidence.thresholds[0] > 0.15 > 2 * evidence.thresholds[3]
    assert evidence.hits() == []
    weak = dice.normal(0.0, 0.01, (60, 200))
    weak[:, 3] += 0.08
    assert pushed(evidence, weak).hits() == [(3, 3)] or evidence.hits()[0][0] == 3


def test_a_few_faulty_entities_do_not_raise_the_threshold_that_finds_them() -> None:
    rows = np.random.default_rng(2).normal(0.0, 0.01, (400, 100))
    clean = pushed(Evidence(100, FLOORS, EvidenceConfig(), calibrated=True), rows).thresholds
    rows[300:, 5] += 0.2
    spoiled = pushed(Evidence(100, FLOORS, EvidenceConfig(), calibrated=True), rows)
    assert spoiled.thresholds[3] < 0.15
    assert spoiled.thresholds[3] < 3 * clean[3]
    assert (5, 0) in spoiled.hits()


def test_late_values_count_as_if_they_had_come_in_time() -> None:
    rows = np.random.default_rng(3).normal(0.0, 0.05, (90, 10))
    whole = Evidence(10, (0.02,) * 4, EvidenceConfig(), calibrated=False)
    late = Evidence(10, (0.02,) * 4, EvidenceConfig(), calibrated=False)
    for index, row in enumerate(rows):
        whole.push(row)
        late.push(np.where(index % 3 == 0, np.nan, row))
        if index >= 7:
            late.replace(7, rows[index - 7])
    for age in range(7):
        late.replace(age, rows[89 - age])
    assert late.counts.tolist() == whole.counts.tolist()


def test_what_is_missing_is_no_evidence() -> None:
    evidence = Evidence(2, (0.02,) * 4, EvidenceConfig(), calibrated=False)
    for _ in range(80):
        evidence.push(np.array([np.nan, 1.0]))
    assert evidence.hits() == [(1, 0)]
    assert evidence.counts[:, 0].tolist() == [0] * len(SCALES)


def test_a_shift_begins_where_it_began_and_not_at_the_noise_before_it() -> None:
    excess = np.array([0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.11, 0.09, 0.12, 0.02, 0.1])
    assert np.flatnonzero(since_shift(excess, 0.05)).tolist() == [7, 8, 9, 11]


@pytest.mark.parametrize("seed", range(5))
def test_roles_are_found_where_times_have_gaps_and_only_there(seed: int) -> None:
    dice = np.random.default_rng(seed)
    nodes = [f"n{rank % 8}" for rank in range(64)]
    stages = np.repeat([0, 1, 2, 3], 16)
    compute = np.array([0.8, 0.95, 1.1, 1.25])[stages] * np.exp(dice.normal(0.0, 0.008, 64))
    nothing, error = np.full(64, 0.001), np.full(64, 0.003)
    assert learned_roles(compute, nothing, error, nodes).tolist() == stages.tolist()
    spread = np.exp(dice.normal(0.0, 0.03, 64))
    assert set(learned_roles(spread, nothing, error, nodes).tolist()) == {0}
    assert set(learned_roles(compute, nothing, np.full(64, 0.2), nodes).tolist()) == {0}  # not known well enough yet


def test_the_ranks_that_load_the_data_are_a_role_and_three_slow_ranks_are_none() -> None:
    nodes = [f"n{rank % 8}" for rank in range(64)]
    error = np.full(64, 0.003)
    data = np.where(np.arange(64) < 16, 0.2, 0.0)
    assert learned_roles(np.ones(64), data, error, nodes).tolist() == [1] * 16 + [0] * 48
    slow = np.ones(64)
    slow[:3] = 1.5
    assert set(learned_roles(slow, np.zeros(64), error, nodes).tolist()) == {0}


def test_one_slow_node_among_many_is_no_role() -> None:
    nodes = [f"n{rank // 8}" for rank in range(64)]
    compute = np.where(np.arange(64) < 8, 1.3, 1.0)
    assert set(learned_roles(compute, np.zeros(64), np.full(64, 0.003), nodes).tolist()) == {0}


def test_equal_words_are_equal_work() -> None:
    assert given_roles(["b", "a", "b"]).tolist() == [1, 0, 1]


def test_a_node_is_its_middle_and_a_node_of_one_is_none() -> None:
    view = NodeView(["b", "a", "a", "a", "b", "c"])
    values = np.array([1.0, 5.0, 6.0, 7.0, np.nan, 9.0])
    assert view.names == ["a", "b", "c"]
    assert view.middle(values).tolist()[0] == 6.0
    assert np.isnan(view.middle(values)[1:]).all()
    assert view.members(0).tolist() == [1, 2, 3]


def test_what_exceeded_has_an_onset_though_what_came_after_lies_far_below() -> None:
    excess = np.array([0.1] * 11 + [-1.0, -1.0, -1.0])
    assert np.flatnonzero(since_shift(excess, 0.05)).tolist() == [10]
