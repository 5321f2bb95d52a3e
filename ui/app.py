"""The console's shell: which pages there are. Streamlit runs this file by path; nothing imports it."""

from __future__ import annotations

import streamlit as st

from ui import shell
from ui.source import address

# The icon is a file of ours: Streamlit would have the browser fetch a named one from a host outside.
st.set_page_config(page_title="Transom", page_icon=str(shell.CONFIG / "icon.svg"), layout="wide")
st.logo(str(shell.CONFIG / "logo.svg"), size="medium")
shell.style()
PAGES = [
    st.Page("pages/overview.py", title="Overview", icon=":material/space_dashboard:", default=True),
    st.Page("pages/incidents.py", title="Incidents", icon=":material/warning:", url_path="incidents"),
    st.Page("pages/job.py", title="Job", icon=":material/monitoring:", url_path="job"),
    st.Page("pages/incident.py", title="Incident", url_path="incident", visibility="hidden"),
]
if shell.login_needed(address().login_token):
    st.stop()
st.navigation(PAGES, position="top").run()
