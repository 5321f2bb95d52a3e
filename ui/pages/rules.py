"""Rules: the log rules that stand, what recovery does about each class, and who is muted until when."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from pipelines.rule_folder import BadRules, rules_for
from recovery.policy_rows import DEFAULT_ROWS
from ui import markup, rule_views, shell
from ui.source import Ledger, address


def mutes(source: Ledger, now: float) -> None:
    shell.heading("Muted now")
    rows = rule_views.muted(source.incidents(), now)
    if rows:
        st.html(markup.table(rule_views.MUTE_HEADS, rows, "Incidents that nobody is told of now"))
    else:
        st.caption("Nothing is muted. Select incidents on their page to mute them; a mute ends with the incident.")


def log_rules() -> None:
    folder = address().rules
    shell.heading("Log rules, in the order in which they are tried")
    words = st.text_input("Search", key="q", bind="query-params", max_chars=80, placeholder="xid, nccl, oom …") or ""
    try:
        book = rules_for(Path(folder) if folder else None)
    except BadRules as error:
        st.html(markup.banner(f"{error}. Detection goes on with the shipped rules; try yours with `transom evaluate`."))
        book = rules_for(None)
    rows = rule_views.rule_rows(book.rules, words)
    if rows:
        st.html(markup.table(rule_views.RULE_HEADS, rows, "Log rules"))
    else:
        st.html(markup.empty("No rule has these words", "Write your own: docs/log-rules.md", "detect.rules_dir"))
    where = f"Yours are read from {folder}." if folder else "Set `detect.rules_dir` for rules of your own."
    st.caption(f"{len(rows)} of {len(book.rules)} rules. {where}")


def page() -> None:
    live = shell.top_bar("Rules and mutes")
    shell.refreshed(mutes, live=live)
    if address().login_token and not st.session_state.get("role"):
        return  # the changing part has said why
    log_rules()
    shell.heading("What recovery does about each class, as shipped")
    st.html(markup.table(rule_views.POLICY_HEADS, rule_views.policy_table(DEFAULT_ROWS), "Policy by fault class"))
    st.caption("`recover.modes` and `recover.actions` change it (docs/configuration.md); see plans beforehand with "
               "`transom recover --dry-run`.")  # fmt: skip


page()
