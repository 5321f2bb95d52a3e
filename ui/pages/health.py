"""Pipeline: whether the ledger is complete, how far it is behind on each topic, and when each job was last heard."""

from __future__ import annotations

import streamlit as st

from ui import markup, shell
from ui.source import Ledger
from ui.words import JOB_STATE_MARKS, age_words

LAG_HEADS = ("Topic", "Records not read yet", "State")
JOB_HEADS = ("Job", "State", "Attempt", "Ranks", "Last heard", "Step")


def draw(source: Ledger, now: float) -> None:
    health = source.health()
    columns = st.columns(3)
    columns[0].metric("Record service", "✓ ok" if health.status == "ok" else "✕ degraded", health.reason or None,
                      delta_color="off", delta_arrow="off")  # fmt: skip
    columns[1].metric("Complete up to", age_words(health.data_at, now))
    columns[2].metric("Records behind", f"{sum(health.lag.values()):,}")
    shell.heading("Lag by topic")
    if health.lag:
        rows = [
            (topic, f"{count:,}", "▲ behind" if count else "✓ up to date")
            for topic, count in sorted(health.lag.items())
        ]
        st.html(markup.table(LAG_HEADS, rows, "Records on the bus that the ledger has not read yet"))
    else:
        st.caption("Nothing is behind.")
    shell.heading("Jobs, by when they were last heard")
    jobs = sorted(source.jobs(), key=lambda job: -(job.last_seen_at or 0.0))
    if jobs:
        st.html(
            markup.table(
                JOB_HEADS,
                [
                    (job.job, f"{JOB_STATE_MARKS.get(job.state, '○')} {job.state}", str(job.attempt),
                     str(job.world_size), age_words(job.last_seen_at, now),
                     f"{job.last_step:,}" if job.last_step is not None else "–")
                    for job in jobs
                ],
                "Jobs and when each was last heard",
            )
        )  # fmt: skip
    else:
        st.html(markup.empty("No job yet", "The ledger has not heard of any job.", "transom demo"))
    st.caption(
        "Prometheus reads the same and more at `/metrics` of the record service (docs/ledger.md). What is wrong with "
        "the machine itself: `transom doctor`."
    )


live = shell.top_bar("Pipeline")
shell.refreshed(draw, live=live)
