"""Small jobs under noisy neighbours: what slows a whole machine for seconds blames nobody, and hides no slow rank."""

from __future__ import annotations

import numpy as np

from detectors.steps import TIMINGS, Floats
from tests.unit.test_detect_rank_channel import DELAY, OWN, STEP, Steps, channel_of, more, opened, told, trained


def quick(steps: Steps, seconds: float) -> Steps:
    """The same job with steps of so many seconds."""
    steps.values_ *= seconds / float(np.nanmedian(steps.values_[:, :, TIMINGS.index(STEP)]))
    return steps


def bursts(node: slice, begin: int, end: int) -> Floats:
    """A neighbour that slows a node by 40 % for fifty steps, and lets go of it for fifty."""
    factor = np.ones((end - begin, 1))
    factor[(np.arange(end - begin) // 50) % 2 == 0] = 1.4
    return factor


def test_a_node_is_slow_when_it_is_for_ten_seconds_and_not_when_it_is_for_three() -> None:
    def found(seconds: float) -> list[tuple[str, str]]:
        fault = more(OWN, slice(2, 4), 120, 180, factor=1.4)
        return opened(told(channel_of(4, 2), quick(trained(4, 260, fault, per_node=2), seconds)))

    assert found(0.05) == []
    assert found(0.5) == [("straggler", "node/node1")]


def test_a_rank_slower_than_its_node_mate_is_named_though_another_node_is_slower_still() -> None:
    steps = trained(4, 320, more(OWN, 1, 120, 320, factor=1.25), per_node=2)
    steps.values_[120:, 2:, TIMINGS.index(OWN)] *= bursts(slice(2, 4), 120, 320)
    assert opened(told(channel_of(4, 2), quick(steps, 0.05)))[:1] == [("straggler", "1")]


def test_a_rank_whose_node_mate_is_silent_for_a_while_is_not_held_against_other_nodes() -> None:
    steps = trained(4, 320, more(OWN, slice(0, 2), 120, 180, factor=1.4), per_node=2)
    steps.values_[118:190, 0] = np.nan
    assert opened(told(channel_of(4, 2), quick(steps, 0.05))) == []


def test_a_crowded_node_is_told_though_its_ranks_have_become_quicker_since_their_base_was_learned() -> None:
    def crowded(parts: dict[str, Floats]) -> None:
        parts[OWN][110:] *= 0.75
        parts[DELAY][140:200, 2:] += 0.9 * parts[OWN][140:200, 2:]

    found = told(channel_of(4, 2), trained(4, 260, crowded, per_node=2))
    assert opened(found) == [("contended_node", "node1")]


def test_the_account_of_a_slow_node_survives_a_restart() -> None:
    steps = quick(trained(4, 400, more(OWN, slice(2, 4), 120, 390, factor=1.4), per_node=2), 0.05)
    one, other = channel_of(4, 2), channel_of(4, 2)
    expected = told(one, steps)
    found = told(other, steps, end=200)
    state, arrays = other.to_state()
    other = type(other).from_state([0, 1, 2, 3], ["node0", "node0", "node1", "node1"], state, arrays)
    assert found + told(other, steps, begin=200) == expected
    assert ("straggler", "node/node1") in opened(expected)
