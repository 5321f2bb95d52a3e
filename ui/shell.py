"""What all pages share: the look, the connection, the live toggle, the stale banner, the login."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import tzinfo
from html import escape
from pathlib import Path
from typing import TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ingest.clock import SystemClock
from pipelines.ledger.shapes import Health, JobView, LedgerError, NotInLedger
from ui.access import role_of, why_not
from ui.markup import banner, empty
from ui.source import Ledger, LedgerAway, address, connect
from ui.views import stale_words
from ui.words import local_zone

REFRESH_SECONDS = 2.0
WRONG_TOKEN_SECONDS = 1.0  # guessing takes time
QUIET_REFRESH_SECONDS = 10.0  # where nothing is going on any more
PAGES = Path(__file__).parent / "pages"
CONFIG = Path(__file__).parent / "config"
STYLE = CONFIG / "console.css"
CLOCK = SystemClock()
Choice = TypeVar("Choice", str, int)


@st.cache_resource(max_entries=4, show_spinner=False)
def _ledger(socket: str, url: str, finished: str) -> Ledger:
    """One client for all sessions of this process; never a database connection."""
    return Ledger(connect(address()))


def ledger() -> Ledger:
    """The ledger that this console was started for. Raises LedgerAway where none was named, or nobody logged in."""
    where = address()
    if where.login_token and not st.session_state.get("role"):
        raise LedgerAway("This console asks for a token first: open its front page.")
    return _ledger(where.socket, where.url, where.finished)


def refusal() -> str:
    """Why this session may not send commands; empty where it may."""
    where = address()
    role = st.session_state.get("role")
    return why_not(finished=bool(where.finished), login=bool(where.login_token), role=role)


def zone() -> tzinfo | None:
    """The reader's own time zone, as the browser tells it."""
    return local_zone(st.context.timezone)


def style() -> None:
    st.html(STYLE)


def heading(text: str) -> None:
    """A small section head."""
    st.html(f'<h2 class="t-h">{escape(text)}</h2>')


def top_bar(title: str) -> bool:
    """The page's title and the live toggle, which is kept in the URL; whether the page refreshes itself."""
    left, right = st.columns([6, 1], vertical_alignment="center")
    if title:
        left.markdown(f"## {title}")
    return live_toggle(right)


def live_toggle(place: DeltaGenerator) -> bool:
    """Whether the page refreshes by itself; kept in the URL. A finished ledger has nothing new, and says so."""
    if address().finished:
        place.caption("finished, read-only")
        return False
    with place, st.container(horizontal=True, horizontal_alignment="right"):
        return bool(st.toggle("Live", value=True, key="live", bind="query-params"))


def url_choices(
    label: str,
    options: Sequence[Choice],
    *,
    key: str,
    hint: str,
    words: Callable[[Choice], str],
    hide_label: bool = False,
) -> tuple[Choice, ...]:
    """Several of `options`, kept in the URL by their own names (a bound widget would write what it shows)."""
    in_url = st.query_params.get_all(key)
    if key not in st.session_state:
        st.session_state[key] = [option for option in options if str(option) in in_url]
    chosen = st.multiselect(
        label, options, key=key, placeholder=hint, format_func=words,
        label_visibility="collapsed" if hide_label else "visible",
    )  # fmt: skip
    names = [str(option) for option in chosen]
    if names and names != in_url:
        st.query_params[key] = names
    elif not names and in_url:
        del st.query_params[key]
    return tuple(chosen)


def url_choice(
    label: str,
    options: Sequence[str],
    *,
    key: str,
    words: Callable[[str], str] = str,
    hide_label: bool = False,
) -> str:
    """One of `options`, kept in the URL by its own name; the first where the URL names none of them."""
    in_url = st.query_params.get(key, "")
    if st.session_state.get(key) not in options:
        st.session_state[key] = in_url if in_url in options else options[0]
    chosen = st.selectbox(
        label, options, key=key, format_func=words, label_visibility="collapsed" if hide_label else "visible"
    )
    name = chosen if chosen is not None else options[0]
    if name != options[0] and name != in_url:
        st.query_params[key] = name
    elif name == options[0] and in_url:
        del st.query_params[key]
    return name


def job_choice(source: Ledger) -> str:
    """The job that a page is about, kept in the URL; empty, and said so, where there is none. Raises LedgerAway."""
    order = sorted(source.jobs(), key=lambda row: (row.state != "running", -(row.started_at or 0.0)))
    if not order:
        st.html(empty("No job yet", "The ledger has not heard of any job.", "transom demo"))
        return ""
    left, _ = st.columns([1, 3])
    with left:
        return url_choice("Job", [row.job for row in order], key="job")


def login_needed(token: str, viewer_token: str = "") -> bool:
    """Ask for the token where others can reach the console; True while it has not been given."""
    if not token or st.session_state.get("role"):
        return False
    st.title("Transom console")
    given = st.text_input("Token", type="password", help="The token that `transom console` was started with.")
    role = role_of(given, token, viewer_token) if given else None
    if role is not None:
        st.session_state["role"] = role
        st.rerun()
    if given:
        CLOCK.sleep(WRONG_TOKEN_SECONDS)
        st.error("That is not the token.")
    return True


def refreshed(draw: Callable[[Ledger, float], None], *, live: bool, seconds: float = REFRESH_SECONDS) -> None:
    """Draw a page's changing part, again and again while `live`; trouble is a sentence, no traceback."""

    def once() -> None:
        top = st.container()
        try:
            source = ledger()
            # A finished ledger's clock stands where its newest message was.
            now = source.health().data_at if address().finished else CLOCK.now()
            draw(source, now)
            text = stale_words(*_state(source), now, source.away)
        except LedgerAway as error:
            st.html(empty("No data yet", str(error), "transom up"))
            return
        if text is not None:
            top.html(banner(text))

    st.fragment(once, run_every=seconds if live and not address().finished else None)()


def _state(source: Ledger) -> tuple[Health | None, tuple[JobView, ...]]:
    try:
        return source.health(), source.jobs()
    except LedgerAway:
        return None, ()


def tell(send: Callable[[], str], done: str) -> None:
    """Send a command and say what became of it; a session that may not command sends nothing."""
    why = refusal()
    if why:
        st.error(why)
        return
    try:
        send()
    except (LedgerError, NotInLedger) as error:
        st.error(str(error))
        return
    st.toast(done)
