"""Incidents: all of them, narrowed by filters that live in the URL; the selected one is there by its id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import streamlit as st
from msgspec.structs import replace

from pipelines.ledger.shapes import CommandRequest, IncidentView
from ui import lane_chart, markup, shell, views
from ui.source import Ledger, LedgerAway
from ui.words import SEVERITIES, SEVERITY_MARKS, class_words, severity_words

ROWS_SHOWN_MAX = 14
SELECTED_MAX = 50  # kept in the URL
MUTES = {"1 h": 3_600.0, "4 h": 14_400.0, "1 day": 86_400.0}
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
    wanted = st.query_params.get_all("selected")
    ids = [row.incident_id for row in rows]
    # A table's selection is by row number: a new incident above would move it. So the widget is a new one
    # whenever the rows change, and takes its selection from the id in the URL.
    key = "incidents-" + hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
    at = sorted(ids.index(name) for name in wanted if name in ids)
    state = st.dataframe(
        views.incidents_table(rows, now),
        key=key,
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
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
    selected = [rows[place] for place in picked if place < len(rows)]
    remember([row.incident_id for row in selected])
    counts = " · ".join(
        f"{SEVERITY_MARKS[name]} {sum(1 for row in rows if row.severity == name)} {name}" for name in SEVERITIES
    )
    st.caption(f"{len(rows)} of {len(everything)} incidents · {counts}")
    if not selected:
        st.caption("Select a row to see it, acknowledge it, mute it or open it; several, to do so with all of them.")
    elif len(selected) == 1:
        preview(source, selected[0], now)
    else:
        with st.container(border=True):
            st.markdown(f"**{len(selected)} incidents are selected**")
            act(source, selected)


def lanes(source: Ledger, now: float, chosen: views.Filters) -> None:
    """When it happened: a lane for each job."""
    rows = views.narrowed(source.incidents(), chosen)
    if len(rows) > 1:
        st.echarts_chart(
            lane_chart.lanes(rows, now), height=lane_chart.height(rows), key="lanes", alt=lane_chart.lane_words(rows)
        )


def remember(incident_ids: Sequence[str]) -> None:
    """Keep the selected ids in the URL, through refreshes and reloads."""
    names = list(incident_ids)[:SELECTED_MAX]
    if names == st.query_params.get_all("selected"):
        return
    if names:
        st.query_params["selected"] = names
    else:
        st.query_params.pop("selected", None)


def act(source: Ledger, rows: Sequence[IncidentView]) -> None:
    """Acknowledge or mute all of these."""
    author = st.text_input("Your name", key="author", persist_state="session", max_chars=80) or ""
    first, second, third = st.columns([1.3, 1, 1], vertical_alignment="bottom")
    dead = not author or bool(shell.refusal())
    fresh = [row for row in rows if not row.acknowledged_by]
    many = f" {len(rows)}" if len(rows) > 1 else ""
    if first.button(f"Acknowledge{many}", key="acknowledge", disabled=dead or not fresh, icon=":material/check:"):
        send(source, fresh, CommandRequest(verb="acknowledge", author=author), "Acknowledged.")
    span = second.selectbox("for", list(MUTES), key="mute_for", label_visibility="collapsed") or next(iter(MUTES))
    if third.button(f"Mute{many}", key="mute", disabled=dead, icon=":material/notifications_off:"):
        until = shell.CLOCK.now() + MUTES[span]
        send(source, rows, CommandRequest(verb="mute", author=author, until=until), f"Muted for {span}.")
    if shell.refusal():
        st.caption(shell.refusal())


def send(source: Ledger, rows: Sequence[IncidentView], request: CommandRequest, done: str) -> None:
    """The same command about each of them; what was refused is said."""

    def each() -> str:
        for row in rows:
            source.command(replace(request, incident_id=row.incident_id, job=row.job))
        return ""

    shell.tell(each, done)


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
            act(source, [row])


live = shell.top_bar("Incidents")
chosen = filters()


def draw(source: Ledger, now: float) -> None:
    table(source, now, chosen)
    lanes(source, now, chosen)


shell.refreshed(draw, live=live)
