"""Overview: how all jobs are, what is open, and the step time of one job with its incidents and restarts."""

from __future__ import annotations

import streamlit as st

from pipelines.ledger.shapes import IncidentView, JobView
from ui import charts, markup, shell, timeline, views
from ui.source import Ledger
from ui.words import metric_words

CHART_METRIC = "train.step.duration"
WINDOWS = {"5 min": 300.0, "15 min": 900.0, "1 h": 3_600.0, "all": None}
JOBS_SHOWN_MAX = 8
RECOVERIES_MAX = 20  # restarts that the median is taken over: the newest


def draw(source: Ledger, now: float) -> None:
    jobs, incidents = source.jobs(), source.incidents()
    if not jobs:
        st.html(
            markup.empty(
                "No job yet",
                "The ledger has not heard of any job. Start one, or watch the demo train, break and recover:",
                "transom run --nproc-per-node 2 train.py   or   transom demo",
            )
        )
        return
    _figures(source, jobs, incidents, now)
    left, right = st.columns([2.05, 1], gap="medium")
    with left:
        shell.heading("Jobs")
        _jobs(jobs, now)
        _chart(source, jobs, incidents, now)
    with right:
        shell.heading("Newest incidents")
        if incidents:
            st.html(markup.incident_cards(incidents[: views.NEWEST_INCIDENTS_MAX], now))
            st.page_link(
                str(shell.PAGES / "incidents.py"),
                label=f"All incidents ({len(incidents)})",
                icon=":material/arrow_forward:",
            )
        else:
            st.html(markup.no_incident(jobs[0].job))


def _figures(source: Ledger, jobs: tuple[JobView, ...], incidents: tuple[IncidentView, ...], now: float) -> None:
    recoveries = recovered_in(source, incidents)
    cells = views.figures(jobs, incidents, recoveries, source.health(), now)
    with st.container(key="figures"):
        for column, figure in zip(st.columns(len(cells)), cells, strict=True):
            column.metric(
                figure.label,
                figure.value,
                delta=figure.note,
                delta_color="off",
                delta_arrow="off",
                help=figure.help,
            )


def recovered_in(source: Ledger, incidents: tuple[IncidentView, ...]) -> list[float]:
    """Seconds from the onset to the first new step, of the newest restarts."""
    restarted = [row for row in incidents if row.action is not None and row.action.next_attempt is not None]
    seconds: list[float] = []
    unmeasured = {row.job for row in restarted if row.measures.recover_seconds is None}
    starts = {job: {start.attempt: start for start in source.starts(job)} for job in unmeasured}
    for row in restarted[:RECOVERIES_MAX]:
        if row.measures.recover_seconds is not None:
            seconds.append(row.measures.recover_seconds)
            continue
        start = starts[row.job].get(row.action.next_attempt) if row.action and row.action.next_attempt else None
        first = source.first_step_at(row.job, start) if start is not None else None
        if first is not None:
            seconds.append(first - views.onset(row))
    return seconds


def _jobs(jobs: tuple[JobView, ...], now: float) -> None:
    st.dataframe(
        views.jobs_table(jobs, now),
        key="jobs",
        hide_index=True,
        height="content" if len(jobs) <= JOBS_SHOWN_MAX else 38 + 35 * JOBS_SHOWN_MAX,
        column_config={
            "Goodput": st.column_config.ProgressColumn(format="%.1f %%", min_value=0, max_value=100, width="small"),
            "Step": st.column_config.TextColumn(alignment="right"),
        },
        alt="Jobs with state, attempt, step, goodput, newest checkpoint and open incidents",
    )


def _chart(source: Ledger, jobs: tuple[JobView, ...], incidents: tuple[IncidentView, ...], now: float) -> None:
    head, pick, span = st.columns([3, 1.3, 1.6], vertical_alignment="center")
    names = [job.job for job in sorted(jobs, key=lambda job: (job.state != "running", -(job.last_seen_at or 0.0)))]
    job = pick.selectbox("Job", names, key="chart_job", label_visibility="collapsed") or names[0]
    window = span.segmented_control(
        "Window",
        list(WINDOWS),
        default="15 min",
        key="window",
        bind="query-params",
        label_visibility="collapsed",
    )
    with head:
        shell.heading(f"{metric_words(CHART_METRIC)} · all ranks of the job")
    view = next(row for row in jobs if row.job == job)
    starts = source.starts(job)
    begin, end = timeline.job_window(view, starts, WINDOWS[window or "15 min"], now)
    series = source.series(job, CHART_METRIC, place=f"overview {window}", start=begin, end=end)
    mine = [row for row in incidents if row.job == job and (begin is None or views.onset(row) >= begin)]
    by_attempt = {start.attempt: start for start in starts}
    spans = []
    for row in mine:
        start = by_attempt.get(row.action.next_attempt) if row.action and row.action.next_attempt else None
        first = source.first_step_at(job, start) if start is not None else row.closed_at
        spans.append(charts.Span(views.onset(row), first, "", timeline.colour_of(row)))
    marks = timeline.restart_marks(starts, begin)
    st.echarts_chart(
        charts.step_time_chart(
            series, spans=spans, marks=[*marks, *timeline.incident_marks(mine)], start=begin, end=end
        ),
        height=410,
        key="step_time",
        alt=charts.chart_words(series, frozenset()) + f" {len(mine)} incidents and {len(marks)} restarts are marked.",
    )


live = shell.top_bar("Overview")
shell.refreshed(draw, live=live)
