"""Checkpoints: each step by tier, what a fault now would cost, and from where the job could go on."""

from __future__ import annotations

import streamlit as st

from ui import checkpoint_views, markup, shell
from ui.source import Ledger, LedgerAway
from ui.words import age_words


def draw(source: Ledger, now: float, job: str) -> None:
    steps = checkpoint_views.steps_of(source.checkpoints(job))
    if not steps:
        st.html(
            markup.empty(
                "No checkpoint yet",
                "The job's checkpoint engine has told of none; see docs/checkpoints.md for the lines in the script.",
                f"transom ckpt ls --job {job}",
            )
        )
        return
    newest = checkpoint_views.restorable(steps)
    view = next((row for row in source.jobs() if row.job == job), None)
    columns = st.columns(4)
    columns[0].metric("Goes on from", f"step {newest.step:,}" if newest else "–")
    columns[1].metric("Its age", age_words(newest.at, now).removesuffix(" ago") if newest else "–")
    columns[2].metric("Its size", checkpoint_views.size_words(newest.size_bytes) if newest else "–")
    lost = view.last_step - newest.step if newest and view is not None and view.last_step is not None else None
    columns[3].metric("Steps since then", f"{max(0, lost):,}" if lost is not None else "–")
    shell.heading("Steps by tier, newest first")
    st.html(
        markup.table(checkpoint_views.HEADS, checkpoint_views.table_rows(steps, now), "Checkpoints of the job by tier")
    )
    st.caption("A step counts where all its ranks' shards are there. Look inside: `transom ckpt inspect`, `verify`.")


def page() -> None:
    live = shell.top_bar("Checkpoints")
    try:
        job = shell.job_choice(shell.ledger())
    except LedgerAway as error:
        st.html(markup.empty("No data yet", str(error), "transom up"))
        return
    if job:
        shell.refreshed(lambda source, now: draw(source, now, job), live=live)


page()
