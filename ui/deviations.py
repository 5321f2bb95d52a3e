"""Which ranks stand out, and when: a series as a rank × time heatmap, and the same as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from pipelines.ledger.shapes import Series
from ui.words import metric_unit, metric_words, number_words

COLUMNS_MAX = 90
RANKS_MAX = 64  # rows of the picture: the ranks that stand out most
TOP_MAX = 8
RATIO_MAX = 4.0  # said where the peers' median is zero: any number would be as true
SPREAD_MIN, SPREAD_MAX = (
    0.25,
    1.0,
)  # of the colours around 1; what is farther has the last one, its number in the tooltip
# Low to high around a middle that is the page's own ground, light or dark: what is like its peers recedes.
COLOURS = ("#3b6fb6", "rgba(133,147,166,0.22)", "#d6392f")
HEADS = ("Rank", "Farthest", "Value then", "Peers then", "As a rule", "Peers as a rule")


@dataclass(frozen=True, slots=True)
class Deviation:
    """One rank beside its peers: where it was farthest from them, and how it is as a rule."""

    rank: int
    ratio: float  # its value ÷ the peers' median, at the farthest bucket
    value: float
    peers: float
    typical: float
    peers_typical: float
    at: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks × buckets of time; `cells[rank][bucket]` is a mean, absent where the rank said nothing."""

    start: float
    width: float
    cells: dict[int, dict[int, float]]
    medians: dict[int, float]


def grid_of(series: Series) -> Grid | None:
    """The series in at most COLUMNS_MAX buckets; None where there is nothing to compare."""
    times = [at for points in series.ranks.values() for at, _, value in points if value is not None]
    if not times or len(series.ranks) < 2:
        return None
    start, end = min(times), max(times)
    width = max((end - start) / COLUMNS_MAX, 0.05) * (1.0 + 1e-9)
    cells: dict[int, dict[int, float]] = {}
    for rank, points in series.ranks.items():
        sums: dict[int, list[float]] = {}
        for at, _, value in points:
            if value is not None:
                sums.setdefault(int((at - start) / width), []).append(value)
        cells[int(rank)] = {bucket: sum(values) / len(values) for bucket, values in sums.items()}
    buckets = sorted({bucket for row in cells.values() for bucket in row})
    medians = {bucket: median([row[bucket] for row in cells.values() if bucket in row]) for bucket in buckets}
    return Grid(start, width, cells, medians)


def deviations(grid: Grid) -> tuple[Deviation, ...]:
    """All ranks, the one farthest from its peers first."""
    peers_typical = median(grid.medians.values())
    found: list[Deviation] = []
    for rank, row in grid.cells.items():
        if not row:
            continue
        worst = max(row, key=lambda bucket: abs(_ratio(row[bucket], grid.medians[bucket]) - 1.0))
        found.append(Deviation(
            rank, _ratio(row[worst], grid.medians[worst]), row[worst], grid.medians[worst], median(row.values()),
            peers_typical, grid.start + (worst + 0.5) * grid.width,
        ))  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-abs(one.ratio - 1.0), one.rank)))


def heatmap(series: Series, grid: Grid, shown: Sequence[int]) -> dict[str, Any]:
    """The picture: each cell is a rank's value ÷ the median of all at that time."""
    buckets = sorted(grid.medians)
    place = {bucket: index for index, bucket in enumerate(buckets)}
    rows = {rank: index for index, rank in enumerate(shown)}
    cells = [
        (place[bucket], rows[rank], round(_ratio(value, grid.medians[bucket]), 3))
        for rank in shown
        for bucket, value in grid.cells.get(rank, {}).items()
    ]
    frame = pd.DataFrame(cells, columns=["time", "rank", "times the median"])
    spread = _spread(cells)
    return {
        "animation": False,
        "dataset": [{"source": frame}],
        "grid": {"left": 8, "right": 96, "top": 8, "bottom": 24, "containLabel": True},
        "tooltip": {"confine": True, "valueFormatter": "%.2f"},
        "xAxis": {"type": "category", "data": [_clock(grid, bucket) for bucket in buckets],
                  "axisLabel": {"hideOverlap": True}},
        "yAxis": {"type": "category", "inverse": True, "data": [f"rank {rank}" for rank in shown],
                  "axisLabel": {"hideOverlap": True}},
        "visualMap": {
            "type": "continuous", "min": 1.0 - spread, "max": 1.0 + spread, "calculable": False, "dimension": 2,
            "orient": "vertical", "right": 0, "top": "middle", "itemHeight": 120, "itemWidth": 12, "precision": 2,
            "text": [f"{1.0 + spread:.2f} times", f"{1.0 - spread:.2f} times"], "textGap": 6,
            "inRange": {"color": list(COLOURS)},
        },
        "series": [{
            "type": "heatmap", "name": metric_words(series.metric), "datasetIndex": 0, "progressive": 0,
            "encode": {"x": "time", "y": "rank", "value": "times the median"},
        }],
    }  # fmt: skip


def shown_ranks(found: Sequence[Deviation], culprits: frozenset[int]) -> tuple[int, ...]:
    """Rows of the picture: the culprits and the ranks that stand out most, in the order of their numbers."""
    worst = [one.rank for one in found if one.rank not in culprits][: max(0, RANKS_MAX - len(culprits))]
    present = {one.rank for one in found}
    return tuple(sorted({*worst, *(rank for rank in culprits if rank in present)}))


def table_rows(series: Series, found: Sequence[Deviation], culprits: frozenset[int]) -> tuple[tuple[str, ...], ...]:
    """The ranks that stand out most, in numbers; a culprit says so in words."""
    unit = metric_unit(series.metric)
    return tuple(
        (
            f"{one.rank}{' (culprit)' if one.rank in culprits else ''}", f"{one.ratio:.2f} times",
            number_words(one.value, unit), number_words(one.peers, unit), number_words(one.typical, unit),
            number_words(one.peers_typical, unit),
        )
        for one in found[:TOP_MAX]
    )  # fmt: skip


def heatmap_words(series: Series, found: Sequence[Deviation], shown: int) -> str:
    """What the picture shows, for a reader who cannot see it."""
    if not found:
        return f"{metric_words(series.metric)}: nothing to compare."
    first = found[0]
    return (
        f"{metric_words(series.metric)} of {shown} of {len(found)} ranks over time, each beside the median of all. "
        f"Rank {first.rank} stands out most: {first.ratio:.2f} times the median at its worst."
    )


def _ratio(value: float, middle: float) -> float:
    if abs(middle) < 1e-12:
        return 1.0 if abs(value) < 1e-12 else RATIO_MAX
    return value / middle


def _spread(cells: Sequence[tuple[int, int, float]]) -> float:
    """How far the colours reach on either side of 1: what is like its peers is always the middle one."""
    return round(max(SPREAD_MIN, min(SPREAD_MAX, max((abs(value - 1.0) for _, _, value in cells), default=0.0))), 2)


def _clock(grid: Grid, bucket: int) -> str:
    at = grid.start + (bucket + 0.5) * grid.width
    return f"{int(at // 3600) % 24:02d}:{int(at // 60) % 60:02d}:{int(at) % 60:02d}"
