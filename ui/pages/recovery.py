"""Recovery: what waits for a person, a person's word on the job itself, and the audit of everything that was done."""

from __future__ import annotations

import streamlit as st

from pipelines.ledger.shapes import CommandRequest, IncidentView
from ui import markup, recovery_views, shell
from ui.source import Ledger, LedgerAway

JOB_COMMANDS = {
    "hold": ("Hold", "Nothing is decided or started for the job any more; the job itself is left alone."),
    "resume": ("Resume", "Holds end, and incidents that were held are decided anew."),
    "abort": ("Abort", "The job is over: its ranks are stopped, and nothing starts it again."),
    "unexclude": ("Give the node back", "The node may be used from the next start on, whoever had excluded it."),
}


def draw(source: Ledger, now: float, job: str) -> None:
    shell.heading("Waits for you")
    waiting = recovery_views.waiting(source.incidents(job), job)
    if not waiting:
        st.caption("No plan waits for a person. Classes in the mode `approve` ask here before anything is done.")
    for row in waiting:
        plan(source, row, now)
    told = {name: source.told(name, job) for name in ("actions", "receipts", "transitions", "commands")}
    left_out = recovery_views.excluded(told["actions"], told["commands"])
    if left_out:
        shell.heading("Nodes left out")
        st.html(markup.facts_list(left_out))
    shell.heading("Audit, newest first")
    rows = recovery_views.audit(told)
    if rows:
        st.html(markup.table(recovery_views.AUDIT_HEADS, rows, "Intents, results, states and people's commands"))
    else:
        st.html(markup.empty("Nothing was decided yet", "See beforehand what would be:", "transom recover --dry-run"))


def plan(source: Ledger, row: IncidentView, now: float) -> None:
    """One plan, with the two answers to it; it is approved by its hash, so that no other plan can slip in."""
    with st.container(border=True):
        left, right = st.columns([2.2, 1], gap="large")
        left.html(markup.incident_head(row, now, shell.zone(), small=True))
        left.html(markup.facts_list(recovery_views.plan_words(row)))
        with right:
            asked = row.incident_id
            author = st.text_input("Your name", key=f"author-{asked}", persist_state="session", max_chars=80) or ""
            sure = st.checkbox("I have read the plan", key=f"sure-{asked}")
            for verb, label in (("approve", "Approve"), ("reject", "Reject")):
                if st.button(label, key=f"{verb}-{asked}", disabled=not (author and sure and not shell.refusal())):
                    answer(source, row, verb, author)


def answer(source: Ledger, row: IncidentView, verb: str, author: str) -> None:
    assert verb in ("approve", "reject")
    assert row.action is not None
    request = CommandRequest(
        verb="approve" if verb == "approve" else "reject", incident_id=row.incident_id, job=row.job, author=author,
        plan_hash=row.action.plan_hash,
    )  # fmt: skip
    shell.tell(lambda: source.command(request), f"{verb.capitalize()}: written down.")


def command(source: Ledger, job: str) -> None:
    """Hold, resume, abort, give a node back: each is confirmed by the job's name."""
    why = shell.refusal()
    with st.popover("Command the job", icon=":material/gavel:", width="stretch"):
        if why:
            st.info(why)
        verb = st.selectbox("Command", list(JOB_COMMANDS), key="verb", format_func=lambda name: JOB_COMMANDS[name][0])
        chosen = verb or "hold"
        st.caption(JOB_COMMANDS[chosen][1])
        node = st.text_input("Node", key="node", max_chars=128) if chosen == "unexclude" else ""
        author = st.text_input("Your name", key="author", persist_state="session", max_chars=80) or ""
        note = st.text_input("Why", key="note", max_chars=2_000) or ""
        typed = st.text_input(f"Type {job} to confirm", key="confirm", max_chars=80)
        ready = bool(author) and typed == job and not why and (chosen != "unexclude" or bool(node))
        if st.button(JOB_COMMANDS[chosen][0], key="send", disabled=not ready, type="primary", width="stretch"):
            request = CommandRequest(verb=chosen, job=job, author=author, note=note, node=node or "")  # type: ignore[arg-type]
            shell.tell(lambda: source.command(request), f"{JOB_COMMANDS[chosen][0]}: written down.")


def page() -> None:
    live = shell.top_bar("Recovery")
    try:
        source = shell.ledger()
        job = shell.job_choice(source)
    except LedgerAway as error:
        st.html(markup.empty("No data yet", str(error), "transom up"))
        return
    if not job:
        return
    left, _ = st.columns([1, 3])
    with left:
        command(source, job)
    shell.refreshed(lambda source, now: draw(source, now, job), live=live)


page()
