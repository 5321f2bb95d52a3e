"""Series rows → ECharts specs: a line for each rank, the peers' band and median, the fault's span, marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import pandas as pd

from pipelines.ledger.shapes import Series
from ui.words import metric_unit, metric_words, number_words

Point = tuple[float, int | None, float | None]  # event_at, step, value
RANK_LINES_MAX = 12
BAND_BUCKETS_MAX = 160
FLAT_RATIO = 1.25
PEERS_FOR_QUANTILES = 8  # below that the band is the peers' whole range
RED = "#d64545"
AMBER = "#c98a1b"
SLATE = "#8593a6"
ACCENT = "#3f7fbf"
PEER_COLOURS = ("#5b8db8", "#7a9e7e", "#a88bc0", "#b99a6b", "#6aa5a9", "#9a8f9f", "#7f97c9", "#a3a86b")
CLEAR = "rgba(0,0,0,0)"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time with a name; `end` None where it is still going on."""

    start: float
    end: float | None
    label: str
    colour: str = RED


@dataclass(frozen=True, slots=True)
class Mark:
    """One instant with a name: a restart, an incident."""

    at: float
    label: str
    colour: str = SLATE
    top: bool = False  # the name stands above the plot, else along the line


def series_chart(
    series: Series,
    *,
    culprits: frozenset[int] = frozenset(),
    chosen: Sequence[int] = (),
    spans: Sequence[Span] = (),
    marks: Sequence[Mark] = (),
    start: float | None = None,
    end: float | None = None,
) -> dict[str, Any]:
    """One metric over time; culprits are drawn last, thick and named, so that colour is never needed."""
    shown = ranks_shown(series, culprits, chosen)
    peers = {rank: points for rank, points in _by_rank(series).items() if rank not in culprits}
    datasets: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    if culprits or len(shown) < len(peers):  # else the lines say it all
        _add_band(datasets, lines, peers)
    _add_median(datasets, lines, series)
    for place, rank in enumerate(shown):
        datasets.append({"source": rank_frame(series.ranks[str(rank)])})
        colour = RED if rank in culprits else PEER_COLOURS[place % len(PEER_COLOURS)]
        lines.append(_rank_line(len(datasets) - 1, rank, colour, rank in culprits))
    lines.append(_marks_series(spans, marks, end if end is not None else newest_at(series)))
    unit = metric_unit(series.metric)
    return {
        "animation": False,
        "useUTC": True,
        "dataset": datasets,
        "grid": {"left": 8, "right": 76, "top": 46, "bottom": 30, "containLabel": True},
        "legend": {
            "top": 0, "left": 0, "itemWidth": 18, "itemHeight": 8, "itemGap": 14, "type": "scroll",
            "data": [line["name"] for line in lines if line["name"] and not line["name"].startswith("_")],
        },
        "tooltip": {"trigger": "axis", "valueFormatter": f"%.4g {unit}".rstrip(), "confine": True},
        "xAxis": {
            "type": "time", "min": _ms(start), "max": _ms(end), "splitLine": {"show": False},
            "axisLabel": {"formatter": "{HH}:{mm}:{ss}", "hideOverlap": True},
            "name": "UTC", "nameLocation": "end", "nameGap": 12,
        },
        "yAxis": {
            "type": "value", "scale": not _is_flat(series), "splitNumber": 4,
            "name": f"{metric_words(series.metric)}{f' ({unit})' if unit else ''}", "nameLocation": "end",
            "nameTextStyle": {"align": "left"}, "nameGap": 10,
        },
        "dataZoom": [{"type": "inside", "filterMode": "none", "zoomOnMouseWheel": "ctrl"}],
        "series": lines,
    }  # fmt: skip


def step_time_chart(
    series: Series, *, spans: Sequence[Span], marks: Sequence[Mark], start: float | None, end: float | None
) -> dict[str, Any]:
    """The overview's chart: the ranks' median and range of one metric, with incidents and restarts."""
    datasets: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    _add_band(datasets, lines, _by_rank(series), name="range of the ranks")
    _add_median(datasets, lines, series, name="median of the ranks", colour=ACCENT, width=1.8, kind="solid")
    lines.append(_marks_series(spans, marks, end if end is not None else newest_at(series)))
    unit = metric_unit(series.metric)
    return {
        "animation": False,
        "useUTC": True,
        "dataset": datasets,
        "grid": {"left": 4, "right": 20, "top": 30, "bottom": 26, "containLabel": True},
        "legend": {"show": False},
        "tooltip": {"trigger": "axis", "valueFormatter": f"%.4g {unit}".rstrip(), "confine": True},
        "xAxis": {
            "type": "time", "min": _ms(start), "max": _ms(end), "splitLine": {"show": False},
            "axisLabel": {"formatter": "{HH}:{mm}:{ss}", "hideOverlap": True},
        },
        "yAxis": {
            "type": "value", "min": 0, "splitNumber": 3,
            "axisLabel": {"formatter": f"{{value}} {unit}".rstrip()},
        },
        "series": lines,
    }  # fmt: skip


def ranks_shown(series: Series, culprits: frozenset[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Ranks with a line: those chosen; else the culprits and the farthest from the median. Culprits last."""
    present = sorted(_by_rank(series))
    wanted = [rank for rank in present if rank in chosen]
    if not chosen:
        middle = median([value for _, value in series.median if value is not None] or [0.0])
        distance = {rank: abs(_mean(series.ranks[str(rank)]) - middle) for rank in present}
        wanted = [rank for rank in present if rank in culprits]
        others = sorted((rank for rank in present if rank not in culprits), key=lambda rank: -distance[rank])
        wanted += sorted(others[: max(0, RANK_LINES_MAX - len(wanted))])
    return tuple(sorted(wanted, key=lambda rank: (rank in culprits, rank)))[:RANK_LINES_MAX]


def rank_frame(points: Sequence[Point]) -> pd.DataFrame:
    """One rank's line; a step that goes backwards is a restart, and the line is broken there."""
    times: list[float] = []
    values: list[float | None] = []
    before: Point | None = None
    for point in sorted(points, key=lambda point: point[0]):
        at, step, value = point
        if before is not None and step is not None and before[1] is not None and step < before[1]:
            times.append(round((before[0] + at) * 500.0))
            values.append(None)
        times.append(round(at * 1000.0))
        values.append(value if value is not None and math.isfinite(value) else None)
        before = point
    return pd.DataFrame({"at": times, "value": pd.array(values, dtype="Float64")})


def band_frame(peers: Mapping[int, Sequence[Point]]) -> pd.DataFrame:
    """Low and width of the peers' band over time: their range, or with many peers the middle 80 %."""
    points = [(at, value) for rank in peers.values() for at, _, value in rank if value is not None]
    if not points:
        return pd.DataFrame({"at": [], "low": [], "width": []})
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    width = max((last - first) / BAND_BUCKETS_MAX, 0.05)
    buckets: dict[int, list[float]] = {}
    for at, value in points:
        buckets.setdefault(int((at - first) / width), []).append(value)
    rows: list[tuple[float, float | None, float | None]] = []
    used = sorted(buckets)
    typical = median([b - a for a, b in pairwise(used)] or [1.0])
    before: int | None = None
    for bucket in used:
        at = round((first + (bucket + 0.5) * width) * 1000.0)
        if before is not None and bucket - before > 2 * typical:  # nobody spoke: a restart
            rows.append((round((first + (before + 1.0) * width) * 1000.0), None, None))
        low, high = _low_high(buckets[bucket], len(peers))
        rows.append((at, low, high - low))
        before = bucket
    return pd.DataFrame(
        {
            "at": [row[0] for row in rows],
            "low": pd.array([row[1] for row in rows], dtype="Float64"),
            "width": pd.array([row[2] for row in rows], dtype="Float64"),
        }
    )


def chart_words(series: Series, culprits: frozenset[int]) -> str:
    """What the chart shows, for a reader who cannot see it."""
    unit = metric_unit(series.metric)
    middles = [value for _, value in series.median if value is not None]
    if not middles:
        return f"{metric_words(series.metric)}: no samples in this stretch of time."
    middle = number_words(median(middles), unit)
    text = f"{metric_words(series.metric)} of {len(series.ranks)} ranks over time; median {middle}."
    for rank in sorted(culprits):
        values = [value for _, _, value in series.ranks.get(str(rank), ()) if value is not None]
        if values:
            low, high = number_words(min(values), unit), number_words(max(values), unit)
            text += f" Rank {rank}, the culprit, between {low} and {high}."
    for rank, step, value in series.non_finite[:3]:
        text += f" Rank {rank} is {value} at step {step}."
    return text


def non_finite_marks(series: Series) -> tuple[Mark, ...]:
    """The first NaN or infinity, and on how many ranks it followed, as a mark: a line cannot show it."""
    found: dict[int, tuple[int, str]] = {}
    for rank, step, value in series.non_finite:
        found.setdefault(rank, (step, value))
    marks: list[Mark] = []
    for rank, (bad_step, value) in sorted(found.items(), key=lambda one: (one[1][0], one[0])):
        times = [at for points in series.ranks.values() for at, step, _ in points if step == bad_step]
        if times:
            name = "NaN" if value == "nan" else value
            marks.append(Mark(min(times), f"{name} on rank {rank}, step {bad_step}", RED, top=True))
    if len(marks) > 1:  # it spreads within a step or two: their names would lie on one another
        return (Mark(marks[0].at, f"{marks[0].label}, then on {len(marks) - 1} more", RED, top=True),)
    return tuple(marks)


def newest_at(series: Series) -> float | None:
    """The time of the newest sample."""
    times = [points[-1][0] for points in series.ranks.values() if points]
    return max(times, default=None)


def _by_rank(series: Series) -> dict[int, Sequence[Point]]:
    return {int(rank): points for rank, points in series.ranks.items() if points}


def _mean(points: Iterable[Point]) -> float:
    values = [value for _, _, value in points if value is not None]
    return sum(values) / len(values) if values else 0.0


def _low_high(values: Sequence[float], peers: int) -> tuple[float, float]:
    if peers < PEERS_FOR_QUANTILES or len(values) < PEERS_FOR_QUANTILES:
        return min(values), max(values)
    cuts = quantiles(values, n=10)
    return cuts[0], cuts[-1]


def _is_flat(series: Series) -> bool:
    """Whether the durations hardly differ: then the axis starts at zero, so that noise does not look like news."""
    values = [value for points in series.ranks.values() for _, _, value in points if value is not None]
    if metric_unit(series.metric) != "s" or not values:
        return False
    return max(values) < FLAT_RATIO * min(values)


def _ms(at: float | None) -> int | None:
    return None if at is None else round(at * 1000.0)


def _add_band(
    datasets: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    peers: Mapping[int, Sequence[Point]],
    name: str = "peers' range",
) -> None:
    frame = band_frame(peers)
    if frame.empty:
        return
    datasets.append({"source": frame})
    place = len(datasets) - 1
    common = {
        "type": "line", "datasetIndex": place, "stack": "band", "symbol": "none", "silent": True,
        "lineStyle": {"width": 0}, "tooltip": {"show": False}, "z": 1,
    }  # fmt: skip
    lines.append({**common, "name": "_low", "encode": {"x": "at", "y": "low"}, "itemStyle": {"color": CLEAR}})
    lines.append(
        {
            **common,
            "name": name,
            "encode": {"x": "at", "y": "width"},
            "itemStyle": {"color": SLATE},
            "areaStyle": {"color": SLATE, "opacity": 0.20},
        }
    )


def _add_median(
    datasets: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    series: Series,
    *,
    name: str = "median",
    colour: str = SLATE,
    width: float = 1.4,
    kind: str = "dashed",
) -> None:
    points: list[Point] = [(at, None, value) for at, value in series.median]
    if not points:
        return
    gap = max(1.5, 6.0 * median([b[0] - a[0] for a, b in pairwise(points)] or [0.0]))
    broken: list[Point] = []
    for point in points:
        if broken and point[0] - broken[-1][0] > gap:
            broken.append((broken[-1][0] + 0.001, None, None))
        broken.append(point)
    datasets.append({"source": rank_frame(broken)})
    lines.append(
        {
            "type": "line", "name": name, "datasetIndex": len(datasets) - 1, "symbol": "none",
            "encode": {"x": "at", "y": "value", "tooltip": ["value"]}, "z": 2,
            "lineStyle": {"width": width, "type": kind, "color": colour}, "itemStyle": {"color": colour},
        }
    )  # fmt: skip


def _rank_line(dataset: int, rank: int, colour: str, culprit: bool) -> dict[str, Any]:
    name = f"rank {rank} (culprit)" if culprit else f"rank {rank}"
    return {
        "type": "line", "name": name, "datasetIndex": dataset, "showSymbol": False, "symbolSize": 5,
        "encode": {"x": "at", "y": "value", "tooltip": ["value"]}, "z": 5 if culprit else 3,
        "lineStyle": {"width": 2.4 if culprit else 1.1, "color": colour, "opacity": 1.0 if culprit else 0.85},
        "itemStyle": {"color": colour},
        "endLabel": {"show": culprit, "formatter": f"rank {rank}", "color": colour, "fontWeight": "bold"},
    }  # fmt: skip


def _marks_series(spans: Sequence[Span], marks: Sequence[Mark], last: float | None) -> dict[str, Any]:
    areas = [
        [
            {
                "xAxis": _ms(span.start), "name": span.label,
                "itemStyle": {"color": span.colour, "opacity": 0.13},
                "label": {
                    "show": bool(span.label), "position": "insideBottom", "color": span.colour,
                    "fontSize": 11,
                },
            },
            {"xAxis": _ms(span.end if span.end is not None else last or span.start)},
        ]
        for span in spans
    ]  # fmt: skip
    lines = [
        {
            "xAxis": _ms(mark.at), "name": mark.label,
            "lineStyle": {"color": mark.colour, "width": 1, "type": "solid" if mark.top else "dashed"},
            "label": {"formatter": "{b}", "color": mark.colour, "fontSize": 11,
                      "position": "end" if mark.top else "insideEndBottom"},
        }
        for mark in marks
    ]  # fmt: skip
    return {
        "type": "line", "name": "", "data": [], "silent": True, "z": 0,
        "markArea": {"silent": True, "data": areas},
        "markLine": {"silent": True, "symbol": "none", "data": lines, "animation": False},
    }  # fmt: skip
