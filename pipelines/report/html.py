"""A report as one HTML file: nothing is loaded from anywhere, no script runs in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from detectors.verdict import Verdict

from .pictures import curves_picture, timeline_picture
from .report import EVIDENCE_MAX, RunReport, Table
from .words import clock_text, culprits_text, number_text, span_text

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6875; --paper: #ffffff; --rule: #d8dee4; --band: #9db4c8;
 --shade: #f3d9a4; --c0: #b3432b; --c1: #7a4fa3; --c2: #1f7a6d; --c3: #a06a00; --info: #6b7c8c; --warning: #b07a10;
 --error: #b3432b; --critical: #7d1128 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b3; --paper: #14191f; --rule: #323c46;
 --band: #3d5468; --shade: #4d3f1c; --c0: #ff9479; --c1: #c9a3f0; --c2: #6fd3c3; --c3: #f0b94d; --info: #8fa3b5;
 --warning: #e0a93a; --error: #ff9479; --critical: #ff6f8d } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
 margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.2rem } h3 { font-size: 1.05rem; margin: 1.6rem 0 .2rem }
.soft, .note { color: var(--soft) } code { font-size: .92em; overflow-wrap: anywhere }
table { border-collapse: collapse; margin: .6rem 0 } th, td { text-align: left; padding: .25rem .9rem .25rem 0;
 border-bottom: 1px solid var(--rule); vertical-align: top } td { font-variant-numeric: tabular-nums }
.picture { width: 100%; height: auto; margin: .4rem 0 } .picture text { font-size: 11px; fill: var(--soft) }
.picture .name { fill: var(--ink) } .grid { stroke: var(--rule) } .band { fill: var(--band); opacity: .45 }
.anomaly { fill: var(--shade) } polyline { fill: none; stroke-width: 1.6 } .others { stroke: var(--soft) }
.c0 { stroke: var(--c0) } .c1 { stroke: var(--c1); stroke-dasharray: 6 3 } .c2 { stroke: var(--c2);
 stroke-dasharray: 2 3 } .c3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3 } .bar.info { fill: var(--info) }
.bar.warning { fill: var(--warning) } .bar.error { fill: var(--error) } .bar.critical { fill: var(--critical) }
"""


def html_of(title: str, reports: Sequence[RunReport], tables: Sequence[Table] = ()) -> str:
    """The page. `tables`: what is said of all runs together."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    parts += [_table(table) for table in tables]
    for report in reports:
        parts += _run(report)
    return "\n".join([*parts, "</body></html>", ""])


def _run(report: RunReport) -> list[str]:
    span = span_text(max(0.0, report.ends_at - report.begins_at))
    parts = [
        f"<h2>{escape(report.job)}</h2>",
        f"<p>{escape(report.kind)} in <code>{escape(report.source)}</code>: {report.ranks} ranks, {span} from"
        f" {clock_text(report.begins_at)}, {report.messages:,} messages. {_count(report)}</p>",
    ]
    if report.incidents:
        parts.append(timeline_picture(report.incidents, report.begins_at, report.ends_at))
        parts += [_table(_overview(report.incidents))]
    parts += [_table(table) for table in report.tables]
    for number, verdict in enumerate(report.incidents, start=1):
        parts += _incident(number, verdict, report)
    if report.notes:
        told = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts.append(f'<h3>How it was read</h3><ul class="note">{told}</ul>')
    return parts


def _count(report: RunReport) -> str:
    if not report.incidents:
        return "<strong>Nothing was found to be wrong.</strong>"
    number = len(report.incidents)
    return f"<strong>{number} incident{'s' if number > 1 else ''}.</strong>"


def _overview(incidents: Sequence[Verdict]) -> Table:
    rows = tuple(
        (
            str(number), verdict.fault_class, verdict.severity, culprits_text(verdict), clock_text(verdict.onset_at),
            "" if verdict.onset_step is None else str(verdict.onset_step), verdict.status, verdict.advice,
        )
        for number, verdict in enumerate(incidents, start=1)
    )  # fmt: skip
    return Table("Incidents", ("", "class", "severity", "culprit", "since", "step", "status", "advice"), rows)


def _incident(number: int, verdict: Verdict, report: RunReport) -> list[str]:
    parts = [
        f'<h3 id="i{number}">{number}. {escape(verdict.fault_class)}: {escape(verdict.summary)}</h3>',
        f'<p class="soft">{escape(verdict.severity)}, {escape(verdict.status)}; culprit'
        f" {escape(culprits_text(verdict))}; since {clock_text(verdict.onset_at)};"
        f" said by {escape(verdict.detector)}; advice {escape(verdict.advice)};"
        f" <code>{escape(verdict.verdict_id)}</code></p>",
    ]
    curves = report.curves.get(verdict.verdict_id)
    if curves is not None and not curves.is_empty:
        parts.append(curves_picture(curves, verdict))
    if verdict.evidence:
        parts.append(_table(_evidence(verdict)))
    return parts


def _evidence(verdict: Verdict) -> Table:
    rows = tuple(
        (
            item.kind, clock_text(item.at), "" if item.rank is None else str(item.rank), item.text,
            "" if item.value is None else f"{number_text(item.value)} {item.unit}",
            "" if item.peers_median is None else f"{number_text(item.peers_median)} {item.unit}",
        )
        for item in verdict.evidence[:EVIDENCE_MAX]
    )  # fmt: skip
    return Table("", ("evidence", "at", "rank", "what", "value", "peers' median"), rows)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    words = f"<p>{escape(table.words)}</p>" if table.words else ""
    return f"{title}{words}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
