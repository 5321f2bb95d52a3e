"""Tells people what becomes of incidents, beside recovery: nothing here is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ingest.clock import Clock
from pipelines.settings import NotifySettings, Settings
from recovery.action import Incident
from recovery.incident import State
from recovery.store import RecoveryStore

from .alertmanager import Alertmanager
from .mailbox import Mailbox
from .notice import Subject, Telling, compose
from .sending import Command, Sender, Undelivered, Webhook, http_address, post, read_address

CLOSE_SECONDS_MAX = 3.0  # for what still waits, at each receiver
FRESH_SECONDS_MAX = 30.0  # a recovery that has not turned for longer does not watch
CULPRITS_MAX = 4
UNSEEN: tuple[State, ...] = ("blind",)


class Pulse:
    """Whether recovery may be taken for healthy: its loop turns, and it sees what it watches."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marked_at = float("-inf")

    def mark(self, sees: bool) -> None:
        """Called by the loop that has to turn; `sees` False: a backend or the bus does not answer."""
        if sees:
            self._marked_at = self._clock.monotonic()

    def healthy(self) -> bool:
        return self._clock.monotonic() - self._marked_at <= FRESH_SECONDS_MAX


class Heartbeat:
    """POSTs to an address that misses us when we stop, as long as `healthy` says so."""

    def __init__(self, url: str, seconds: float, healthy: Callable[[], bool], tell: Callable[[str], object]) -> None:
        self._url, self._seconds, self._healthy, self._tell = url, seconds, healthy, tell
        self._told = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="notify-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_SECONDS_MAX)

    def _beat(self) -> None:
        while not self._stop.is_set():
            said = "is sent again"
            try:
                if self._healthy():
                    post(self._url, b"{}", {})
                else:
                    said = "is held back: recovery does not see what it watches"
            except Undelivered as error:
                said = str(error)
            if said != self._told and (self._told or said != "is sent again"):
                self._tell(f"notify: the heartbeat {said}")
            self._told = said
            self._stop.wait(self._seconds)


class Notifications:
    """See the module. One thread, recovery's own, calls `begin`, `hear`, `turn` and `close`."""

    def __init__(self, settings: Settings, store: RecoveryStore, clock: Clock, tell: Callable[[str], object]) -> None:
        """Raises NotAnAddress, TokenRefused."""
        chosen = settings.notify
        self._store = store
        self._console_url = console_url(settings)
        self._telling = Telling(
            chosen.least,
            again_seconds=settings.recover.held_again_seconds,
            cooldown_seconds=chosen.cooldown_seconds,
        )
        self._pulse = Pulse(clock)
        beat_url = heartbeat_url(chosen)
        self._heartbeat = beat_url and Heartbeat(beat_url, chosen.heartbeat_seconds, self._pulse.healthy, tell)
        self._alertmanager = chosen.alertmanager_url and Alertmanager(
            chosen.alertmanager_url, chosen.alertmanager_token_file, chosen.least, chosen.resend_seconds, clock,
            self._pulse.healthy, tell,
        )  # fmt: skip
        self._mailboxes = [Mailbox(sender, tell) for sender in senders(chosen)]

    def begin(self) -> None:
        """Start to tell. Alerts of incidents that an earlier life left open are open again."""
        for row in self._store.unfinished():
            told = Incident(
                incident_id=row.incident_id, job=row.job, attempt=row.attempt, at=row.entered_at, state=row.state,
                cause="", sequence=row.sequence,
            )  # fmt: skip
            notice = compose(told, subject_of(self._store, told), self._console_url)
            if notice is not None and self._alertmanager:
                self._alertmanager.show(notice)
        if self._alertmanager:
            self._alertmanager.start()
        if self._heartbeat:
            self._heartbeat.start()

    def turn(self, sees_bus: bool) -> None:
        """The loop of recovery has turned once."""
        self._pulse.mark(sees_bus and not self._store.unfinished(states=UNSEEN))

    def hear(self, messages: Iterable[object]) -> None:
        """What recovery has written down; what was heard before is passed over."""
        for told in messages:
            if not isinstance(told, Incident) or not self._telling.new(told):
                continue
            notice = compose(told, subject_of(self._store, told), self._console_url)
            if notice is None:
                continue
            if self._alertmanager:
                self._alertmanager.show(notice)
            chosen = self._telling.choose(notice)
            if chosen is not None:
                for mailbox in self._mailboxes:
                    mailbox.put(chosen)

    def close(self) -> None:
        """What waits has a few seconds to go out."""
        for mailbox in self._mailboxes:
            mailbox.close(CLOSE_SECONDS_MAX)
        if self._alertmanager:
            self._alertmanager.close(CLOSE_SECONDS_MAX)
        if self._heartbeat:
            self._heartbeat.close()


def senders(chosen: NotifySettings) -> list[Sender]:
    """The receivers of single notices. Raises NotAnAddress, TokenRefused, MissingExtra."""
    found: list[Sender] = []
    url = chosen.webhook_url
    if chosen.webhook_url_file is not None:
        url = read_address("notify.webhook_url_file", chosen.webhook_url_file)
    if url is not None:
        found.append(Webhook(url, chosen.webhook_token_file, chosen.webhook_secret_file))
    if chosen.command:
        found.append(Command(chosen.command))
    if chosen.apprise.urls_file is not None:
        from .apprise_sender import apprise_senders  # an extra, and slow to import

        found += apprise_senders(chosen.apprise.urls_file)
    return found


def heartbeat_url(chosen: NotifySettings) -> str | None:
    """Where the heartbeat goes; None: nowhere. Raises NotAnAddress."""
    if chosen.heartbeat_url_file is not None:
        return read_address("notify.heartbeat_url_file", chosen.heartbeat_url_file)
    return None if chosen.heartbeat_url is None else http_address("notify.heartbeat_url", chosen.heartbeat_url)


def console_url(settings: Settings) -> str:
    """Where people open the console."""
    return settings.notify.console_url or f"http://{settings.console.host}:{settings.console.port}"


def subject_of(store: RecoveryStore, told: Incident) -> Subject:
    """What an incident is about, as it stands now."""
    row = store.incident(told.incident_id)
    verdicts = store.verdicts_of(told.incident_id)
    plan = row.plan if row is not None else None
    cause = next((one for one in verdicts if plan is not None and one.verdict_id == plan.verdict_id), None)
    cause = cause or (verdicts[0] if verdicts else None)
    named = [_place(one.rank, one.node) for one in cause.culprits] if cause is not None else []
    if len(named) > CULPRITS_MAX:
        named = [*named[:CULPRITS_MAX], f"{len(named) - CULPRITS_MAX} more"]
    return Subject(
        fault_class=plan.fault_class if plan is not None else cause.fault_class if cause is not None else told.state,
        culprits=tuple(named),
        plan_hash=plan.plan_hash if plan is not None else "",
        opened_at=row.opened_at if row is not None else told.at,
    )


def _place(rank: int | None, node: str | None) -> str:
    if rank is None:
        return node or "unknown"
    return f"rank {rank}" + (f" on {node}" if node else "")
