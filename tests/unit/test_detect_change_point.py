"""Change points on plain series: found where a level changes for good, quiet for everything that only looks so."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from detectors.job.change_point import Change, ChangePoint, ChangePointState, changes

Floats = npt.NDArray[np.float64]
STEPS = 10_000


def began(values: Floats) -> list[tuple[int, Change]]:
    return [(index, change) for index, change in changes(values) if change.kind == "began"]


def bursts(dice: np.random.Generator, sigma: float) -> Floats:
    """Every hundred steps or so up to fifteen of them are up to three times as long, as on a machine with tenants."""
    values, index = dice.normal(0.0, sigma, STEPS), 300
    while index < STEPS:
        values[index : index + int(dice.integers(1, 16))] += dice.uniform(0.1, 1.1)
        index += int(dice.integers(60, 180))
    return values


def alike(dice: np.random.Generator) -> Floats:
    """Neighbours that are alike (AR(1), φ = 0.9), one per cent in all."""
    values, shocks = np.zeros(STEPS), dice.normal(0.0, 0.01 * np.sqrt(1 - 0.81), STEPS)
    for index in range(1, STEPS):
        values[index] = 0.9 * values[index - 1] + shocks[index]
    return values


def periodic(dice: np.random.Generator) -> Floats:
    """Two of five steps are half as long again, for ever."""
    values = dice.normal(0.0, 0.01, STEPS)
    values[::5] += 0.5
    values[1::5] += 0.4
    return values


QUIET = {
    "gauss": lambda dice: dice.normal(0.0, 0.003, STEPS),
    "heavy tails": lambda dice: 0.02 * dice.standard_t(2, STEPS),
    "neighbours alike": alike,
    "periodic": periodic,
    "a slow drift of three per cent in 2,000 steps": lambda dice: (
        dice.normal(0.0, 0.003, STEPS) + 0.03 * np.arange(STEPS) / 2000
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_ten_thousand_steps_without_a_change_say_nothing(name: str) -> None:
    assert began(QUIET[name](np.random.default_rng(4))) == []


@pytest.mark.parametrize(("sigma", "most"), [(0.1, 1), (0.03, 1), (0.005, 3)])
def test_bursts_are_told_at_most_until_they_are_known(sigma: float, most: int) -> None:
    assert len(began(bursts(np.random.default_rng(9), sigma))) <= most


@pytest.mark.parametrize("seed", range(5))
def test_a_small_change_of_a_steady_series_is_found_within_ten_steps_of_its_onset(seed: int) -> None:
    values = np.random.default_rng(seed).normal(0.0, 0.003, 600)
    values[300:] += np.log(1.056)
    [(index, change)] = began(values)
    assert index - 300 < 10
    assert abs(change.size - np.log(1.056)) < 0.004
    assert index - change.values + 1 in range(298, 302)


def test_a_noisy_series_needs_a_larger_change_and_more_time() -> None:
    values = np.random.default_rng(1).normal(0.0, 0.1, 600)
    small, large = values.copy(), values.copy()
    small[300:] += 0.04
    large[300:] += 0.3
    assert began(small) == []
    [(index, _)] = began(large)
    assert 16 <= index - 300 <= 48


def test_nothing_is_said_before_enough_is_learned() -> None:
    values = np.zeros(40)
    values[10:] = 1.0
    assert began(values) == []


def test_a_held_change_ends_when_the_old_level_is_back() -> None:
    values = np.random.default_rng(2).normal(0.0, 0.003, 500)
    values[200:300] += 0.2
    first, second = changes(values)
    assert (first[1].kind, second[1].kind) == ("began", "ended")
    assert 300 < second[0] <= 310


def test_an_accepted_level_is_normal_and_the_next_change_is_seen_from_it() -> None:
    point = ChangePoint()
    values = np.random.default_rng(3).normal(0.0, 0.003, 900)
    values[300:] += 0.2
    values[600:] += 0.2
    seen = []
    for index, value in enumerate(values.tolist()):
        change = point.add(value)
        if change is not None:
            seen.append(index)
            point.accept()
    assert len(seen) == 2
    assert seen[1] - 600 < 16


def test_its_state_goes_through_json_at_any_point() -> None:
    values = bursts(np.random.default_rng(6), 0.01)[:600]
    values[400:] += 0.3
    whole = ChangePoint()
    point = ChangePoint()
    for index, value in enumerate(values.tolist()):
        expected = whole.add(value)
        if index % 7 == 0:
            text = json.dumps(msgspec.to_builtins(point.state), allow_nan=False)
            point = ChangePoint(state=msgspec.convert(json.loads(text), ChangePointState))
        assert point.add(value) == expected
