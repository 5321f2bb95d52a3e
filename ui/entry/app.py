"""The console's entry: which pages there are. Streamlit runs this file by path; nothing imports it.

It has a folder of its own: a folder `pages` beside the started file would be served by Streamlit itself, on a first
visit by a deep link even before this file has asked for the token.
"""

from __future__ import annotations

import streamlit as st

from ui import shell
from ui.source import address

# The icon is a file of ours: Streamlit would have the browser fetch a named one from a host outside.
st.set_page_config(page_title="Transom", page_icon=str(shell.CONFIG / "icon.svg"), layout="wide")
st.logo(str(shell.CONFIG / "logo.svg"), size="medium")
shell.style()
PAGES = [
    st.Page(shell.PAGES / "overview.py", title="Overview", icon=":material/space_dashboard:", default=True),
    st.Page(shell.PAGES / "incidents.py", title="Incidents", icon=":material/warning:", url_path="incidents"),
    st.Page(shell.PAGES / "job.py", title="Job", icon=":material/monitoring:", url_path="job"),
    st.Page(shell.PAGES / "recovery.py", title="Recovery", icon=":material/restart_alt:", url_path="recovery"),
    st.Page(shell.PAGES / "checkpoints.py", title="Checkpoints", icon=":material/save:", url_path="checkpoints"),
    st.Page(shell.PAGES / "health.py", title="Pipeline", icon=":material/monitor_heart:", url_path="health"),
    st.Page(shell.PAGES / "rules.py", title="Rules", icon=":material/rule:", url_path="rules"),
    st.Page(shell.PAGES / "incident.py", title="Incident", url_path="incident", visibility="hidden"),
]
where = address()
if shell.login_needed(where.login_token, where.viewer_token):
    st.stop()
st.navigation(PAGES, position="top").run()
