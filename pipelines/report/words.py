"""Numbers and times as a report writes them."""

from __future__ import annotations

from datetime import UTC, datetime

from detectors.verdict import Verdict

CALENDAR_BEGINS_AT = 86_400.0 * 365  # smaller times count from the run's own beginning


def clock_text(at: float) -> str:
    """A time in UTC; seconds since the run's beginning where it has no calendar."""
    if at < CALENDAR_BEGINS_AT:
        return f"{at:.1f} s"
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def span_text(seconds: float) -> str:
    """A duration in the unit that fits it."""
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def number_text(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


def culprits_text(verdict: Verdict) -> str:
    """Who did it."""
    named = [
        f"rank {culprit.rank}" + (f" on {culprit.node}" if culprit.node else "")
        if culprit.rank is not None
        else f"node {culprit.node}"
        for culprit in verdict.culprits
    ]
    return ", ".join(named) or "unknown"
