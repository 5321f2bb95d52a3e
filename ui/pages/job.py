"""Job: any metric of any ranks of one job over time, with its incidents and restarts."""

from __future__ import annotations

import streamlit as st

from ui import charts, markup, shell, timeline, views
from ui.source import Ledger, LedgerAway
from ui.words import METRICS, metric_words

WINDOWS = {"15 min": 900.0, "5 min": 300.0, "1 h": 3_600.0, "all": None}  # the first is the default


def draw(source: Ledger, now: float, job: str, metric: str, ranks: tuple[int, ...], window: str) -> None:
    view = next((row for row in source.jobs() if row.job == job), None)
    if view is None:
        st.html(markup.empty("No such job", f"The ledger has not heard of a job named {job}.", "transom run train.py"))
        return
    starts = source.starts(job)
    begin, end = timeline.job_window(view, starts, WINDOWS[window], now)
    series = source.series(job, metric, place=f"job {window}", start=begin, end=end)
    if not any(series.ranks.values()):
        st.html(
            markup.empty("No samples", f"No rank reported {metric} in this stretch of time; choose another metric.")
        )
        return
    incidents = [row for row in source.incidents(job) if begin is None or views.onset(row) >= begin]
    st.echarts_chart(
        charts.series_chart(
            series,
            chosen=ranks,
            marks=[*timeline.restart_marks(starts, begin), *timeline.incident_marks(incidents),
                   *charts.non_finite_marks(series)],
            start=begin,
            end=end,
        ),
        height=460,
        key="series",
        alt=charts.chart_words(series, frozenset()),
    )  # fmt: skip
    shell.heading("Attempts")
    st.html(markup.table(views.ATTEMPT_HEADS, views.attempt_rows(starts), "Starts of this job"))


def page() -> None:
    live = shell.top_bar("Job")
    try:
        source = shell.ledger()
        jobs = [
            row.job for row in sorted(source.jobs(), key=lambda row: (row.state != "running", -(row.started_at or 0.0)))
        ]
    except LedgerAway as error:
        st.html(markup.empty("No data yet", str(error), "transom up"))
        return
    if not jobs:
        st.html(markup.empty("No job yet", "The ledger has not heard of any job.", "transom demo"))
        return
    first, second, third, fourth = st.columns([1, 1.1, 1.5, 1])
    with first:
        job = shell.url_choice("Job", jobs, key="job")
    names = list(dict.fromkeys([*METRICS, *source.metric_names(job)]))
    with second:
        metric = shell.url_choice("Metric", names, key="metric", words=metric_words)
    size = next((row.world_size for row in source.jobs() if row.job == job), 0)
    with third:
        ranks = shell.url_choices("Ranks", range(size), key="ranks", hint="the farthest from the median", words=str)
    with fourth:
        window = shell.url_choice("Window", list(WINDOWS), key="window")
    shell.refreshed(lambda source, now: draw(source, now, job, metric, ranks, window), live=live)


page()
