"""What is quicker than numpy's own gives the same: medians of rows and lists, and of a rank's node-mates."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.medians import finite_median, median, row_medians
from detectors.ranks.node_view import EXCHANGED_MAX, NodeView, exchanges, sorted_lanes


def with_gaps(shape: tuple[int, ...], share: float, seed: int = 0) -> np.ndarray:
    dice = np.random.default_rng(seed)
    values = dice.normal(size=shape).astype(np.float32)
    values[dice.random(shape) < share] = np.nan
    return values


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_medians_of_rows_leave_gaps_out(count: int, share: float) -> None:
    block = with_gaps((40, count), share)
    wanted = [np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in block]
    assert np.array_equal(row_medians(block), np.array(wanted, dtype=np.float32), equal_nan=True)


@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 2.0, 9.0], list(range(31))])
def test_a_median_of_a_list_is_numpys(values: list[float]) -> None:
    assert median(values) == np.median(values)
    assert finite_median(np.array([*values, np.nan, np.inf])) == np.median(values)
    assert np.isnan(finite_median(np.array([np.nan])))


@pytest.mark.parametrize("rows", range(1, EXCHANGED_MAX + 3))
def test_lanes_are_sorted_by_exchanges_as_they_are_by_sorting(rows: int) -> None:
    lanes = np.random.default_rng(rows).integers(0, 9, (rows, 500)).astype(np.float32)
    lanes[lanes == 8.0] = np.inf
    wanted = np.sort(lanes, axis=0)
    assert np.array_equal(np.stack(sorted_lanes(lanes)), wanted)
    assert all(one < other < rows for one, other in exchanges(rows))


def lower_median_of_the_others(values: np.ndarray, mates: list[int]) -> float:
    told = sorted(float(values[mate]) for mate in mates if np.isfinite(values[mate]))
    return told[(len(told) - 1) // 2] if told else np.nan


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (4, 4, 1, 7), (1, 2, 3), (20, 5), (1, 1)])
def test_of_its_node_mates_a_rank_is_not_one(sizes: tuple[int, ...], share: float) -> None:
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    order = np.random.default_rng(1).permutation(len(nodes))
    nodes = [nodes[at] for at in order]
    values = with_gaps((len(nodes), 5), share, seed=2)
    found = NodeView(nodes).others(values)
    for rank, node in enumerate(nodes):
        mates = [other for other, home in enumerate(nodes) if home == node and other != rank]
        for column in np.flatnonzero(np.isfinite(values[rank])):
            wanted = lower_median_of_the_others(values[:, column], mates)
            assert found[rank, column] == pytest.approx(wanted, nan_ok=True)
