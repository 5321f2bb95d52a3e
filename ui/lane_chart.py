"""Incidents in time, one lane for each job: severities are shapes as well as colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.ledger.shapes import IncidentView
from ui.views import onset
from ui.words import SEVERITIES, class_words, severity_words

LANES_MAX = 12
ROOM = 0.02  # of the time shown, left and right: no shape lies on the frame
SHAPES = {"critical": "rect", "error": "diamond", "warning": "triangle", "info": "circle"}
COLOURS = {"critical": "#d64545", "error": "#d9742b", "warning": "#c98a1b", "info": "#3f7fbf"}


def lanes(rows: Sequence[IncidentView], now: float) -> dict[str, Any]:
    """Each incident at its onset, in its job's lane."""
    jobs = _jobs(rows)
    series = []
    for severity in SEVERITIES:
        points = [
            {"value": [round(onset(row) * 1000.0), row.job], "name": f"{class_words(row.fault_class)}: {row.summary}"}
            for row in rows
            if row.severity == severity and row.job in jobs
        ]
        series.append({
            "type": "scatter", "name": severity_words(severity), "data": points, "symbol": SHAPES[severity],
            "symbolSize": 12, "itemStyle": {"color": COLOURS[severity]}, "tooltip": {"formatter": "{b}"},
        })  # fmt: skip
    first = min((onset(row) for row in rows), default=now)
    room = ROOM * max(1.0, now - first)
    return {
        "animation": False,
        "useUTC": True,
        "legend": {"top": 0, "left": 0, "itemWidth": 12, "itemHeight": 12, "itemGap": 16},
        "grid": {"left": 8, "right": 20, "top": 32, "bottom": 26, "containLabel": True},
        "tooltip": {"trigger": "item", "confine": True},
        "xAxis": {"type": "time", "min": round((first - room) * 1000.0), "max": round((now + room) * 1000.0),
                  "splitLine": {"show": False}, "axisLabel": {"hideOverlap": True}},
        "yAxis": {"type": "category", "data": jobs, "splitLine": {"show": True}},
        "series": series,
    }  # fmt: skip


def height(rows: Sequence[IncidentView]) -> int:
    """In pixels."""
    return 90 + 34 * len(_jobs(rows))


def lane_words(rows: Sequence[IncidentView]) -> str:
    """What the picture shows, for a reader who cannot see it; the table above has the same rows."""
    return f"{len(rows)} incidents of {len({row.job for row in rows})} jobs over time; the table has them one by one."


def _jobs(rows: Sequence[IncidentView]) -> list[str]:
    return list(dict.fromkeys(row.job for row in rows))[:LANES_MAX]
