"""`transom notify test`: one notice to every receiver, tried once, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ingest.clock import Clock
from pipelines.own_process import tell
from pipelines.settings import Settings

from .alertmanager import Alertmanager
from .notice import Notice
from .notifications import console_url, heartbeat_url, senders
from .sending import Undelivered, post

ALERT_SECONDS = 15.0  # the alert of a test is over after a minute


def try_receivers(settings: Settings, clock: Clock) -> dict[str, str]:
    """What each receiver that is set says, by its name; empty: it took it. Raises NotAnAddress, TokenRefused."""
    chosen, notice = settings.notify, trial_notice(settings, clock)
    ways: dict[str, Callable[[], None]] = {sender.name: partial(sender.send, notice) for sender in senders(chosen)}
    if chosen.alertmanager_url is not None:
        board = Alertmanager(
            chosen.alertmanager_url, chosen.alertmanager_token_file, "info", ALERT_SECONDS, clock, lambda: False, tell
        )
        board.show(notice)
        ways["alertmanager"] = board.send
    url = heartbeat_url(chosen)
    if url is not None:
        ways["heartbeat"] = partial(post, url, b"{}", {})
    outcomes: dict[str, str] = {}
    for name, send in ways.items():
        try:
            send()
            outcomes[name] = ""
        except Undelivered as error:
            outcomes[name] = str(error)
    return outcomes


def trial_notice(settings: Settings, clock: Clock) -> Notice:
    """What `transom notify test` sends."""
    now = clock.now()
    return Notice(
        notice_id=f"test/{now:.0f}", level="info", job="test", attempt=0, incident_id="test", state="test",
        closed=False, fault_class="test", culprits=(), title="Transom: this is a test", text="Nothing has happened.",
        plan_hash="", link=console_url(settings), opened_at=now, at=now,
    )  # fmt: skip
