"""What people said of verdicts becomes thresholds of classes: higher where wrong, lower where faults were missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from detectors.clues import six_digits

MARGIN_DECADES = 0.1
LEAST_MAX = 6.0  # so many decades at most may a class be asked for
EASED_MAX = 1.0  # and by so many at most may its threshold be lowered


class Judged(NamedTuple):
    """A person's last word on a verdict, and the ensemble's score in its evidence."""

    fault_class: str
    feedback: Literal["true_positive", "false_positive", "unknown"]
    decades: float


def least(judged: Iterable[Judged]) -> tuple[dict[str, float], list[str]]:
    """Decades that a verdict of a class needs so that those called wrong would not have opened; and what to tell.

    Never more than `LEAST_MAX`, and never so many that a verdict that was called right would not have opened either.
    """
    wrong: dict[str, list[float]] = {}
    right: dict[str, list[float]] = {}
    for one in judged:
        if one.feedback != "unknown":
            (wrong if one.feedback == "false_positive" else right).setdefault(one.fault_class, []).append(one.decades)
    found, notes = {}, []
    for name, scores in sorted(wrong.items()):
        wanted = max(scores) + MARGIN_DECADES
        bound = min([LEAST_MAX, *(score - MARGIN_DECADES for score in right.get(name, ()))])
        value = six_digits(min(wanted, bound))
        if value <= 0.0:
            notes.append(f"{name}: {len(scores)} called wrong, but right ones score no higher; left as it is")
            continue
        found[name] = value
        kept = sum(score >= value for score in scores)
        rest = f"; {kept} of them would still open" if kept else ""
        notes.append(f"{name}: {len(scores)} called wrong; verdicts need {value:.2f} decades now{rest}")
    return found, notes


def eased(missed: Sequence[tuple[str, float, float]]) -> tuple[dict[str, float], list[str]]:
    """Decades by which a class's threshold is lowered. `missed`: (class, level reached, threshold) of each fault."""
    found: dict[str, float] = {}
    notes = []
    for name, reached, asked in missed:
        short = asked - reached + MARGIN_DECADES
        if 0.0 < short <= EASED_MAX:
            found[name] = six_digits(max(found.get(name, 0.0), short))
    for name, by in sorted(found.items()):
        notes.append(
            f"{name}: faults were missed; its threshold is {by:.2f} decades lower now, which allows up to "
            f"{10.0**by:.1f} times as many false alarms of it"
        )
    return found, notes
