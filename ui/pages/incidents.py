"""Incidents: all of them, narrowed by filters that live in the URL; the selected one is there by its id."""

from __future__ import annotations

import hashlib

import streamlit as st

from pipelines.ledger.shapes import CommandRequest, IncidentView
from ui import markup, shell, views
from ui.source import Ledger, LedgerAway
from ui.words import SEVERITIES, SEVERITY_MARKS, class_words, severity_words

ROWS_SHOWN_MAX = 14
COLOURS = {"critical": "red", "error": "orange", "warning": "yellow", "info": "blue"}


def filters() -> views.Filters:
    """The filter row; every choice is a query parameter, so that a link shows what its sender saw."""
    try:
        rows = shell.ledger().incidents()
    except LedgerAway:
        rows = ()
    jobs = list(dict.fromkeys([*(row.job for row in rows), *st.query_params.get_all("job")]))
    first, second, third, fourth = st.columns(4)
    with first:
        chosen_jobs = shell.url_choices("Job", jobs, key="job", hint="all jobs", words=str)
    with second:
        severities = shell.url_choices(
            "Severity", SEVERITIES, key="severity", hint="all severities", words=severity_words
        )
    with third:
        classes = shell.url_choices(
            "Class", views.class_options(rows), key="class", hint="all classes", words=class_words
        )
    with fourth:
        states = shell.url_choices("State", ("open", "closed"), key="state", hint="open and closed", words=str)
    return views.Filters(chosen_jobs, severities, classes, states)


def table(source: Ledger, now: float, chosen: views.Filters) -> None:
    everything = source.incidents()
    rows = views.narrowed(everything, chosen)
    if not everything:
        st.html(markup.no_incident())
        return
    if not rows:
        st.html(markup.empty("Nothing passes these filters", f"{len(everything)} incidents are there; clear a filter."))
        return
    wanted = st.query_params.get("selected", "")
    ids = [row.incident_id for row in rows]
    # A table's selection is by row number: a new incident above would move it. So the widget is a new one
    # whenever the rows change, and takes its selection from the id in the URL.
    key = "incidents-" + hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
    at = [ids.index(wanted)] if wanted in ids else []
    state = st.dataframe(
        views.incidents_table(rows, now),
        key=key,
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        selection_default={"selection": {"rows": at}},
        height="content" if len(rows) <= ROWS_SHOWN_MAX else 38 + 35 * ROWS_SHOWN_MAX,
        column_config={
            "Severity": st.column_config.MultiselectColumn(
                options=[severity_words(name) for name in SEVERITIES],
                color=[COLOURS[name] for name in SEVERITIES],
                width=110,
            ),
            "What happened": st.column_config.TextColumn(width="large"),
            "Onset": st.column_config.DatetimeColumn("Onset (UTC)", format="MMM DD, HH:mm:ss", width=130),
        },
        alt="Incidents with severity, class, culprit, what happened, onset, state and what was done",
    )  # fmt: skip
    picked = state["selection"]["rows"]
    selected = rows[picked[0]] if picked and picked[0] < len(rows) else None
    remember(selected.incident_id if selected else "")
    counts = " · ".join(
        f"{SEVERITY_MARKS[name]} {sum(1 for row in rows if row.severity == name)} {name}" for name in SEVERITIES
    )
    st.caption(f"{len(rows)} of {len(everything)} incidents · {counts}")
    if selected is None:
        st.caption("Select a row to see it, acknowledge it or open it.")
    else:
        preview(source, selected, now)


def remember(incident_id: str) -> None:
    """Keep the selected id in the URL, through refreshes and reloads."""
    if incident_id == st.query_params.get("selected", ""):
        return
    if incident_id:
        st.query_params["selected"] = incident_id
    else:
        st.query_params.pop("selected", None)


def preview(source: Ledger, row: IncidentView, now: float) -> None:
    """The selected incident in short, with what can be done."""
    with st.container(border=True):
        left, right = st.columns([2.4, 1], gap="large")
        left.html(markup.incident_head(row, now, shell.zone(), small=True))
        left.page_link(
            str(shell.PAGES / "incident.py"),
            label="Open: series, log, evidence, actions",
            icon=":material/arrow_forward:",
            query_params={"id": row.incident_id},
        )
        with right:
            st.html(markup.facts_list(views.facts(row)))
            if not row.acknowledged_by:
                name, button = st.columns([1.4, 1], vertical_alignment="bottom")
                author = name.text_input("Your name", key="author", persist_state="session", max_chars=80)
                if button.button("Acknowledge", key="acknowledge", disabled=not author, icon=":material/check:"):
                    request = CommandRequest(
                        verb="acknowledge", incident_id=row.incident_id, job=row.job, author=author or ""
                    )
                    shell.tell(lambda: source.command(request), "Acknowledged.")


live = shell.top_bar("Incidents")
chosen = filters()
shell.refreshed(lambda source, now: table(source, now, chosen), live=live)
