"""The few pieces of HTML that Streamlit has no element for; every text from outside is escaped here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import tzinfo
from html import escape
from urllib.parse import quote

from pipelines.ledger.shapes import IncidentView, LogRow
from ui.timeline import Moment
from ui.views import action_words, is_error_line, onset, pairs
from ui.words import (
    SEVERITY_MARKS,
    SEVERITY_MEANINGS,
    age_words,
    class_words,
    clock_words,
    culprit_words,
    precise_clock,
    seconds_words,
    state_words,
)

LOG_TEXT_MAX = 2_000


def chip(severity: str) -> str:
    """The severity as a chip: shape, word and colour say the same."""
    mark = SEVERITY_MARKS.get(severity, "○")
    meaning = escape(SEVERITY_MEANINGS.get(severity, ""))
    known = severity if severity in SEVERITY_MARKS else "info"
    sign = f'<i aria-hidden="true">{mark}</i>'
    return f'<span class="t-chip t-{known}" title="{meaning}">{sign}{escape(severity)}</span>'


def tag(text: str, *, strong: bool = False) -> str:
    return f'<span class="t-tag{" t-strong" if strong else ""}">{escape(text)}</span>'


def incident_head(row: IncidentView, now: float, zone: tzinfo | None, *, small: bool = False) -> str:
    """The sentence that says what happened, and under it how bad, who, where and when."""
    tags = [chip(row.severity), tag(class_words(row.fault_class), strong=True)]
    tags.append(tag(state_words(row.state, row.status)))
    tags.append(tag("settled" if row.settled else "more evidence is awaited"))
    if row.acknowledged_by:
        tags.append(tag(f"✓ acknowledged by {row.acknowledged_by}"))
    if row.feedback:
        tags.append(tag(f"verdict judged: {row.feedback.replace('_', ' ')}"))
    meta = f"job {row.job}, attempt {row.attempt} · began {clock_words(onset(row), zone, day=True)}"
    meta += f" ({age_words(onset(row), now)})"
    if row.victims:
        meta += f" · {row.victims} rank{'s' if row.victims != 1 else ''} suffered with it"
    return (
        f'<h1 class="t-sentence{" t-small" if small else ""}">{escape(row.summary)}</h1>'
        f'<div class="t-tags">{"".join(tags)}</div><p class="t-meta">{escape(meta)}</p>'
    )


def culprit_list(row: IncidentView) -> str:
    """Who did it and how sure we are."""
    if not row.culprits:
        return '<p class="t-meta">Nobody is blamed: the culprit is not known, which is an answer too.</p>'
    lines = "".join(
        f"<li><b>{escape(culprit_words(((who.rank, who.node),)))}</b>"
        f'<meter min="0" max="1" value="{who.confidence:.3f}" aria-label="confidence"></meter>'
        f"<span>{100.0 * who.confidence:.0f} % sure</span></li>"
        for who in row.culprits[:16]
    )
    return f'<ul class="t-culprits">{lines}</ul>'


def facts_list(facts: Sequence[tuple[str, str]]) -> str:
    """Label and words, one under the other."""
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(words)}</dd>" for label, words in facts)
    return f'<dl class="t-facts">{rows}</dl>'


def timeline_strip(moments: Sequence[Moment], zone: tzinfo | None, now: float, *, going_on: bool) -> str:
    """The moments of an incident from left to right, with the seconds between them."""
    cells: list[str] = []
    for moment in moments:
        since = f'<span class="t-gap">+{escape(seconds_words(moment.since))}</span>' if moment.since is not None else ""
        cells.append(
            f'<li title="{escape(clock_words(moment.at, zone, day=True))}">{since}'
            f"<b>{escape(moment.label)}</b>"
            f"<time>{precise_clock(moment.at)}</time><small>{escape(moment.text)}</small></li>"
        )
    if going_on and moments:
        so_far = seconds_words(max(0.0, now - moments[-1].at))
        cells.append(
            f'<li class="t-now"><span class="t-gap">{escape(so_far)} so far</span>'
            f"<b>Now</b><time>{precise_clock(now)}</time><small>not over yet</small></li>"
        )
    return f'<ol class="t-timeline" aria-label="timeline, UTC">{"".join(cells)}</ol>'


def incident_cards(rows: Sequence[IncidentView], now: float) -> str:
    """The newest incidents as a short list of links."""
    cards = "".join(
        f'<li class="t-edge-{row.severity if row.severity in SEVERITY_MARKS else "info"}">'
        f'<a href="{incident_href(row.incident_id)}" target="_self">'
        f'<div class="t-tags">{chip(row.severity)}{tag(class_words(row.fault_class), strong=True)}'
        f'<span class="t-when">{escape(age_words(onset(row), now))}</span></div>'
        f"<p>{escape(row.summary)}</p>"
        f"<small>{escape(_in_short(row))}</small></a></li>"
        for row in rows
    )
    return f'<ul class="t-cards">{cards}</ul>'


def _in_short(row: IncidentView) -> str:
    """Who, what was done and how it stands; nothing where nothing was done."""
    done = (action_words(row),) if row.action is not None else ()
    return " · ".join((culprit_words(pairs(row)), *done, state_words(row.state, row.status)))


def incident_href(incident_id: str) -> str:
    return f"incident?id={quote(incident_id, safe='')}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str, *, wide_second: bool = False) -> str:
    """A plain table; for a screen reader it has a caption and column heads.

    `wide_second`: its second column holds sentences, which many others must not squeeze.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    kind = "t-table t-wide-second" if wide_second else "t-table"
    return (
        f'<div class="t-scroll"><table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def log_lines(lines: Sequence[LogRow], onset_at: float) -> str:
    """Log records with their distance to the onset; trouble is marked by a sign as well as by colour."""
    rows: list[str] = []
    past = False
    for line in lines:
        if not past and line.event_at >= onset_at:
            past = True
            rows.append('<li class="t-onset">onset</li>')
        trouble = is_error_line(line)
        who = f"rank {line.rank}" if line.rank is not None and line.rank >= 0 else line.node or ""
        text = line.text if len(line.text) <= LOG_TEXT_MAX else line.text[:LOG_TEXT_MAX] + " …"
        rows.append(
            f'<li class="{"t-trouble" if trouble else ""}">'
            f'<span class="t-sign">{"!" if trouble else ""}</span>'
            f"<time>{_offset(line.event_at - onset_at)}</time><span>{escape(who)}</span>"
            f"<span>{escape(line.stream)}</span><code>{escape(text)}</code></li>"
        )
    return f'<ol class="t-log" tabindex="0" aria-label="log lines around the onset">{"".join(rows)}</ol>'


def banner(text: str) -> str:
    """Something the reader must know before he believes the page; `commands` stand in backticks."""
    words = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f'<div class="t-banner" role="status"><b aria-hidden="true">!</b><span>{words}</span></div>'


def empty(title: str, text: str, command: str = "") -> str:
    """An empty place that says what to do next."""
    code = f"<code>{escape(command)}</code>" if command else ""
    return f'<div class="t-empty"><b>{escape(title)}</b><p>{escape(text)}</p>{code}</div>'


def _offset(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{abs(seconds):.2f} s"


def no_incident(job: str = "JOB") -> str:
    """The place of the incidents while there are none."""
    words = "To see one, break a job that was started with --allow-inject:"
    return empty("No incident so far", words, f"transom inject kill --job {job} --rank 2")
