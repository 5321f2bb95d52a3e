"""What people said of verdicts, counted by class: right, wrong, not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rich.table import Table

from detectors.verdict import Verdict
from ingest.bus import Record
from ingest.codec import Codec, Undecodable
from recovery.action import RECOVERY_TYPES, Command

UNNAMED = "(an incident that is not in the run)"


class Counts(NamedTuple):
    """How often people called a class of verdicts right or wrong, or could not say."""

    right: int = 0
    wrong: int = 0
    unknown: int = 0


FeedbackCounts = Mapping[str, Counts]
_FIELDS = {"true_positive": "right", "false_positive": "wrong", "unknown": "unknown"}


def count_feedback(records: Iterable[Record], verdicts: Iterable[Verdict]) -> dict[str, Counts]:
    """Counts by class. A person's last word on an incident counts, and only that; a class is an incident's newest."""
    codec = Codec(RECOVERY_TYPES)
    last: dict[tuple[str, str], Command] = {}
    for record in records:
        if record.topic != "commands":
            continue
        try:
            message = codec.decode(record.headers, record.value)
        except Undecodable:
            continue  # it is in the dead letters
        if isinstance(message, Command) and message.verb == "feedback" and message.feedback:
            known = last.get((message.incident_id, message.author))
            if known is None or message.at >= known.at:
                last[message.incident_id, message.author] = message
    classes: dict[str, str] = {}
    if last:
        newest = sorted(verdicts, key=lambda verdict: verdict.revision)
        classes = {verdict.verdict_id: verdict.fault_class for verdict in newest}
    counts: dict[str, Counts] = {}
    for command in last.values():
        name = classes.get(command.incident_id, UNNAMED)
        field = _FIELDS[command.feedback]
        before = counts.get(name, Counts())
        counts[name] = before._replace(**{field: getattr(before, field) + 1})
    return counts


def added(parts: Iterable[FeedbackCounts]) -> dict[str, Counts]:
    """The counts of several runs."""
    out: dict[str, Counts] = {}
    for part in parts:
        for name, counts in part.items():
            before = out.get(name, Counts())
            out[name] = Counts(*(one + two for one, two in zip(before, counts, strict=True)))
    return out


def feedback_table(counts: FeedbackCounts) -> Table:
    """What people said, by class."""
    table = Table(title="What people said of the verdicts", title_justify="left", box=None, pad_edge=False)
    for column in ("class", "right", "wrong", "not known"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name, (right, wrong, unknown) in sorted(counts.items()):
        table.add_row(name, str(right), str(wrong), str(unknown))
    return table
