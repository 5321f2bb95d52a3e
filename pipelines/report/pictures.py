"""Pictures of a report as SVG that stands in the page: colours are the page's, so that light and dark both hold."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from detectors.verdict import Verdict

from .series import BUCKETS, Curves, Floats
from .words import clock_text, number_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 220, 64, 12, 12, 30
ROW_PIXELS = 20
BARS_MAX = 40


def curves_picture(curves: Curves, verdict: Verdict) -> str:
    """Culprits as lines, everybody else as a band with its mean, the incident as a shade."""
    least, mean, most = curves.others
    lines = [curves.of(rank) for rank in curves.ranks]
    low, high = _span([least, most, mean, *lines])
    title = f"{curves.metric} around {verdict.fault_class}: " + (
        ", ".join(f"rank {rank}" for rank in curves.ranks) + " beside the others" if curves.ranks else "all ranks"
    )
    parts = [_begin(title, HEIGHT)]
    begin = _x_of(curves, max(verdict.onset_at, curves.begins_at))
    end = max(begin + 2.0, _x_of(curves, min(verdict.at, curves.ends_at)))
    parts.append(
        f'<rect class="anomaly" x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
    )
    parts += _axes(curves, low, high)
    there = np.flatnonzero(~np.isnan(mean)).tolist()
    if there:
        upper = [f"{_x(at):.1f},{_y(most[at], low, high):.1f}" for at in there]
        lower = [f"{_x(at):.1f},{_y(least[at], low, high):.1f}" for at in reversed(there)]
        parts.append(f'<polygon class="band" points="{" ".join([*upper, *lower])}"/>')
        parts.append(_line(mean, low, high, "others"))
    for number, line in enumerate(lines):
        parts.append(_line(line, low, high, f"culprit c{number}"))
        told = np.flatnonzero(~np.isnan(line))
        if len(told):
            at = int(told[-1])
            parts.append(
                f'<text class="name" x="{_x(at) - 4:.1f}" y="{_y(line[at], low, high) - 5:.1f}" text-anchor="end">'
                f"rank {curves.ranks[number]}</text>"
            )
    return "\n".join([*parts, "</svg>"])


def timeline_picture(verdicts: Sequence[Verdict], begins_at: float, ends_at: float) -> str:
    """A bar for each incident, from its onset to its last word."""
    shown = verdicts[:BARS_MAX]
    height = TOP + ROW_PIXELS * len(shown) + BOTTOM
    parts = [_begin(f"{len(verdicts)} incidents in the order in which they began", height)]
    room, span = WIDTH - LEFT - RIGHT, max(ends_at - begins_at, 1e-9)
    for row, verdict in enumerate(shown):
        x = LEFT + room * (verdict.onset_at - begins_at) / span
        x = min(max(x, LEFT), WIDTH - RIGHT - 4)
        width = max(4.0, room * (verdict.at - verdict.onset_at) / span)
        y = TOP + row * ROW_PIXELS
        parts.append(
            f'<rect class="bar {verdict.severity}" x="{x:.1f}" y="{y}" width="{min(width, WIDTH - RIGHT - x):.1f}"'
            f' height="{ROW_PIXELS - 6}"/>'
        )
        late = x > WIDTH / 2
        at, anchor = (x - 6, "end") if late else (min(x + width, WIDTH - RIGHT) + 6, "start")
        words = verdict.fault_class + (" (open)" if verdict.status == "open" else "")
        parts.append(f'<text x="{at:.1f}" y="{y + 11}" text-anchor="{anchor}">{escape(words)}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 8}">{clock_text(begins_at)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{clock_text(ends_at)}</text>')
    return "\n".join([*parts, "</svg>"])


def _begin(title: str, height: int) -> str:
    return (
        f'<svg class="picture" role="img" aria-label={quoteattr(title)} viewBox="0 0 {WIDTH} {height}"'
        f' xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
    )


def _axes(curves: Curves, low: float, high: float) -> list[str]:
    parts = []
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        y = _y(value, low, high)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_text(value)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">{clock_text(curves.begins_at)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{clock_text(curves.ends_at)}</text>')
    return parts


def _span(lines: Sequence[Floats]) -> tuple[float, float]:
    told = np.concatenate([line[~np.isnan(line)] for line in lines])
    low, high = (float(told.min()), float(told.max())) if len(told) else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _line(values: Floats, low: float, high: float, kind: str) -> str:
    points = " ".join(
        f"{_x(at):.1f},{_y(values[at], low, high):.1f}" for at in np.flatnonzero(~np.isnan(values)).tolist()
    )
    return f'<polyline class="{kind}" points="{points}"/>'


def _x(bucket: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (bucket + 0.5) / BUCKETS


def _x_of(curves: Curves, at: float) -> float:
    share = (at - curves.begins_at) / max(curves.ends_at - curves.begins_at, 1e-9)
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(share, 0.0), 1.0)


def _y(value: float, low: float, high: float) -> float:
    return float(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low))
