"""A report as Markdown, for an issue or a chat."""

from __future__ import annotations

from collections.abc import Sequence

from detectors.verdict import Verdict

from .report import EVIDENCE_MAX, RunReport, Table
from .words import clock_text, culprits_text, number_text, span_text


def markdown_of(title: str, reports: Sequence[RunReport], tables: Sequence[Table] = ()) -> str:
    """The text. `tables`: what is said of all runs together."""
    parts = [f"# {_plain(title)}", *map(_table, tables)]
    for report in reports:
        parts += _run(report)
    return "\n\n".join(parts) + "\n"


def _run(report: RunReport) -> list[str]:
    number = len(report.incidents)
    found = "Nothing was found to be wrong." if not number else f"{number} incident{'s' if number > 1 else ''}."
    parts = [
        f"## {_plain(report.job)}",
        f"{_plain(report.kind)} in `{report.source}`: {report.ranks} ranks,"
        f" {span_text(max(0.0, report.ends_at - report.begins_at))} from {clock_text(report.begins_at)},"
        f" {report.messages:,} messages. **{found}**",
    ]
    parts += [_table(table) for table in report.tables]
    for at, verdict in enumerate(report.incidents, start=1):
        parts += _incident(at, verdict)
    if report.notes:
        parts.append("### How it was read\n\n" + "\n".join(f"- {_plain(note)}" for note in report.notes))
    return parts


def _incident(number: int, verdict: Verdict) -> list[str]:
    parts = [
        f"### {number}. {verdict.fault_class}: {_plain(verdict.summary)}",
        f"{verdict.severity}, {verdict.status}; culprit {_plain(culprits_text(verdict))}; since"
        f" {clock_text(verdict.onset_at)}; said by {verdict.detector}; advice {verdict.advice}; `{verdict.verdict_id}`",
    ]
    told = []
    for item in verdict.evidence[:EVIDENCE_MAX]:
        value = "" if item.value is None else f" ({number_text(item.value)} {item.unit}".rstrip()
        peers = "" if item.peers_median is None else f", peers' median {number_text(item.peers_median)} {item.unit}"
        told.append(f"- {item.kind}: {_plain(item.text)}{value}{peers.rstrip()}{')' if value else ''}")
    if told:
        parts.append("\n".join(told))
    return parts


def _table(table: Table) -> str:
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    lines = "\n".join(f"| {' | '.join(_plain(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    head = [part for part in (f"### {table.title}" if table.title else "", table.words) if part]
    return "\n\n".join([*head, lines])


def _plain(text: str) -> str:
    """One line in which nothing is taken for markup."""
    kept = " ".join(text.split())
    for mark in ("\\", "`", "*", "_", "<", "[", "]"):
        kept = kept.replace(mark, "\\" + mark)
    return kept
