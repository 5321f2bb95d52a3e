"""Incident detail: what happened, who did it, how long each thing took, what we saw, and what was done."""

from __future__ import annotations

from functools import partial

import streamlit as st
from msgspec.structs import replace

from pipelines.ledger.shapes import CommandRequest, IncidentStory, NotInLedger, Series
from ui import bundle, charts, deviations, markup, reasons, shell, timeline, views
from ui.source import Ledger, LedgerAway
from ui.words import metric_words

FEEDBACK = {"true_positive": "Yes, it was", "false_positive": "No, a false alarm", "unknown": "I cannot tell"}


def draw(source: Ledger, now: float, incident_id: str) -> None:
    try:
        story = source.story(incident_id)
    except NotInLedger:
        st.html(
            markup.empty("No such incident", f"The ledger has none with the id {incident_id}.", "transom incidents")
        )
        return
    row = story.incident
    moments = moments_of(source, story)
    st.html(markup.incident_head(row, now, shell.zone()))
    st.html(markup.timeline_strip(moments, shell.zone(), now, going_on=row.status == "open"))
    left, right = st.columns([2.05, 1], gap="medium")
    with left:
        series = _series(source, story, moments, now)
    with right:
        shell.heading("Who")
        st.html(markup.culprit_list(row))
        shell.heading("What was done")
        st.html(markup.facts_list(views.facts(row, story.actions)))
    if series is not None:
        _ranks(story, series)
    shell.heading("Why: what each detector said")
    st.html(markup.table(reasons.HEADS, reasons.rows(story), "Revisions of the verdict, with who said so and why"))
    shell.heading("What we saw")
    evidence = views.evidence_rows(story)
    if evidence:
        caption = "Evidence of the newest revision of the verdict"
        st.html(markup.table(views.EVIDENCE_HEADS, evidence, caption, wide_second=True))
    else:
        st.caption("The verdict carries no evidence.")
    sentence, groups = views.stack_groups(story)
    if groups:
        shell.heading("Where the ranks stood")
        st.caption(f"{sentence}.")
        st.html(markup.table(views.STACK_HEADS, groups, "Ranks grouped by their Python stacks"))
    _log(source, story)
    shell.heading("Decisions, receipts and people, in order")
    decided = views.audit_rows(story)
    if decided:
        st.html(markup.table(views.AUDIT_HEADS, decided, "Everything that was decided and done"))
    else:
        st.caption("Nothing was decided. See what recovery would do: `transom recover --dry-run`.")
    st.caption(f"Incident {row.incident_id} · the same on the command line: `transom explain {row.incident_id}`")


def moments_of(source: Ledger, story: IncidentStory) -> tuple[timeline.Moment, ...]:
    """The incident's moments, with the next attempt's start and first step where there was one."""
    action = story.incident.action
    if action is None or action.next_attempt is None:
        return timeline.timeline(story)
    starts = source.starts(story.incident.job)
    start = next((start for start in starts if start.attempt == action.next_attempt), None)
    first = source.first_step_at(story.incident.job, start) if start is not None else None
    return timeline.timeline(story, starts, first)


def _series(source: Ledger, story: IncidentStory, moments: tuple[timeline.Moment, ...], now: float) -> Series | None:
    row = story.incident
    metric, ranks = choices(source, story)
    start, end = timeline.chart_window(row, moments, now)
    series = source.series(row.job, metric, place=row.incident_id, start=start, end=end)
    if not any(series.ranks.values()):
        st.html(markup.empty("No samples here", f"No rank reported {metric} around the onset; choose another metric."))
        return None
    culprits = views.culprit_ranks(row, series)
    marks = [mark for mark in timeline.restart_marks(source.starts(row.job)) if start <= mark.at <= end]
    st.echarts_chart(
        charts.series_chart(
            series,
            culprits=culprits,
            chosen=ranks,
            spans=[timeline.incident_span(row, moments)],
            marks=[*marks, *charts.non_finite_marks(series)],
            start=start,
            end=end,
        ),
        height=350,
        key="series",
        alt=charts.chart_words(series, culprits),
    )
    return series


def _ranks(story: IncidentStory, series: Series) -> None:
    """Who stands out, and when: the picture, and beside it the same in numbers."""
    grid = deviations.grid_of(series)
    if grid is None:
        return
    culprits = views.culprit_ranks(story.incident, series)
    found = deviations.deviations(grid)
    shown = deviations.shown_ranks(found, culprits)
    left, right = st.columns([1.5, 1], gap="medium")
    with left:
        shell.heading(f"Ranks by time · {metric_words(series.metric)}")
        st.echarts_chart(
            deviations.heatmap(series, grid, shown),
            height=min(460, 110 + 22 * len(shown)),
            key="heatmap",
            alt=deviations.heatmap_words(series, found, len(shown)),
        )
        if len(shown) < len(found):
            st.caption(f"The {len(shown)} ranks that stand out most, of {len(found)}.")
    with right:
        shell.heading("Ranks that stand out")
        rows = deviations.table_rows(series, found, culprits)
        st.html(markup.table(deviations.HEADS, rows, "Ranks farthest from their peers"))


def export(source: Ledger, story: IncidentStory) -> None:
    """The incident as a zip; it is made when somebody asks for it."""
    row = story.incident
    began = views.onset(row)

    def made() -> bytes:
        metric = views.evidence_metrics(story)[0]
        series = source.series(
            row.job, metric, place=f"bundle {row.incident_id}", start=began - views.BUNDLE_SECONDS,
            end=(row.closed_at or shell.CLOCK.now()) + views.BUNDLE_SECONDS,
        )  # fmt: skip
        lines = source.logs(row.job, None, began - views.LOG_BEFORE_SECONDS, began + views.LOG_AFTER_SECONDS)
        return bundle.bundle(story, series, lines)

    st.download_button(
        "Export", made, file_name=bundle.file_name(row.incident_id), mime="application/zip", key="export",
        icon=":material/download:", on_click="ignore", width="stretch", help="Story, series and log as a zip",
    )  # fmt: skip


def _log(source: Ledger, story: IncidentStory) -> None:
    row = story.incident
    began = views.onset(row)
    ranks = views.culprit_ranks(row)
    rank = next(iter(ranks)) if len(ranks) == 1 and len(row.culprits) == 1 else None
    lines = source.logs(row.job, rank, began - views.LOG_BEFORE_SECONDS, began + views.LOG_AFTER_SECONDS)
    shown = views.around_onset(lines, row)
    shell.heading(f"Log of {views.log_owner(row)} around the onset")
    if shown:
        st.html(markup.log_lines(shown, began))
    else:
        st.caption("Nothing was printed in those seconds.")


def choices(source: Ledger, story: IncidentStory) -> tuple[str, tuple[int, ...]]:
    """Which metric and which ranks the chart shows; both in the URL."""
    offered = views.evidence_metrics(story, source.metric_names(story.incident.job))
    head, left, right = st.columns([1, 1.2, 2], vertical_alignment="center")
    with head:
        shell.heading("By rank")
    with left:
        metric = shell.url_choice("Metric", offered, key="metric", words=metric_words, hide_label=True)
    size = next((job.world_size for job in source.jobs() if job.job == story.incident.job), 0)
    with right:
        ranks = shell.url_choices(
            "Ranks", range(size), key="ranks", hint="ranks: the culprits and the farthest of the rest",
            words=str, hide_label=True,
        )  # fmt: skip
    return metric, ranks


def respond(source: Ledger, story: IncidentStory) -> None:
    """Acknowledge, decide on a plan that waits for a person, and say whether the verdict was right."""
    row = story.incident
    with st.popover("Respond", icon=":material/edit_note:", width="stretch"):
        author = st.text_input("Your name", key="author", persist_state="session", max_chars=80) or ""
        why = shell.refusal()
        if why:
            st.info(why)
        note = st.text_area("Note", key="note", max_chars=2_000, height=90) or ""
        request = CommandRequest(verb="acknowledge", incident_id=row.incident_id, job=row.job, author=author, note=note)
        plan = replace(request, plan_hash=row.action.plan_hash if row.action is not None else "")
        buttons: list[tuple[str, str, CommandRequest]] = [("acknowledge", "Acknowledge", request)]
        if row.outcome == "awaiting_approval" and row.action is not None:
            verb = row.action.verb.replace("_", " ")
            buttons.append(("approve", f"Approve: {verb}", replace(plan, verb="approve")))
            buttons.append(("reject", f"Reject: {verb}", replace(plan, verb="reject")))
        for key, label, command in buttons:
            if st.button(label, key=key, disabled=not author or bool(why), width="stretch"):
                shell.tell(partial(source.command, command), f"{label}: written down.")
        st.caption("Was the verdict right?")
        for value, label in FEEDBACK.items():
            if st.button(label, key=f"feedback-{value}", disabled=not author or bool(why), width="stretch"):
                command = replace(request, verb="feedback", feedback=value)
                shell.tell(partial(source.command, command), "Thank you, written down.")
        if not author:
            st.caption("Your name first: it stands in the record.")


def page() -> None:
    incident_id = st.query_params.get("id", "")
    crumb, out, act, toggle = st.columns([4, 1, 1.1, 0.9], vertical_alignment="center")
    crumb.page_link(str(shell.PAGES / "incidents.py"), label="Incidents", icon=":material/arrow_back:")
    live = shell.live_toggle(toggle)
    if not incident_id:
        st.html(markup.empty("No incident chosen", "Choose one on the incidents page; its address holds its id."))
        return
    closed = False
    try:
        source = shell.ledger()
        story = source.story(incident_id)
        closed = story.incident.status == "closed"
        with out:
            export(source, story)
        with act:
            respond(source, story)
    except (LedgerAway, NotInLedger):
        pass  # the changing part says it, and keeps asking
    shell.refreshed(
        lambda source, now: draw(source, now, incident_id),
        live=live,
        seconds=shell.QUIET_REFRESH_SECONDS if closed else shell.REFRESH_SECONDS,
    )


page()
