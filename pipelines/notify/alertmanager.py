"""Alertmanager: an alert for each open incident, sent again while it is open, then resolved; and one that we watch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ingest.clock import Clock
from pipelines.ledger_address import read_token

from .notice import LEVELS, Level, Notice
from .sending import Undelivered, http_address, post

ALERTS_MAX = 1000  # open ones; the oldest makes room, and lapses by itself
LAPSE_ROUNDS = 4  # an alert that nobody sends again is over after so many rounds
STAYS_SECONDS = 3600.0  # an alert about a job that was stopped for good
WATCHING = "TransomWatches"


class Alert(msgspec.Struct, rename="camel"):
    """As version 2 of its API has it; the labels are who the alert is."""

    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str
    generator_url: str = msgspec.field(name="generatorURL", default="")


class Alertmanager:
    """Keeps it up to date in a thread of its own, from `start` to `close`. `watching`: may we be taken for healthy?

    A louder incident is another alert for Alertmanager, which routes by labels: the quieter one is resolved with it.
    """

    def __init__(
        self, url: str, token_file: Path | None, least: Level, resend_seconds: float, clock: Clock,
        watching: Callable[[], bool], tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Raises NotAnAddress, TokenRefused."""
        self._url = f"{http_address('notify.alertmanager_url', url).rstrip('/')}/api/v2/alerts"
        self._headers = {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
        self._least = LEVELS.index(least)
        self._resend_seconds = resend_seconds
        self._clock = clock
        self._watching = watching
        self._tell = tell
        self._told = ""
        self._lock = threading.Lock()
        self._open: dict[str, Notice] = {}
        self._over: list[tuple[Notice, float]] = []  # and when; until Alertmanager knows
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="notify-alertmanager", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, notice: Notice) -> None:
        """Returns at once."""
        with self._lock:
            before = self._open.pop(notice.incident_id, None)
            loud = LEVELS.index(notice.level) >= self._least and not notice.closed
            if before is not None and not (loud and before.level == notice.level):
                self._over.append((before, notice.at))
            if loud:
                self._open[notice.incident_id] = notice
            while len(self._open) > ALERTS_MAX:
                del self._open[next(iter(self._open))]
            del self._over[:-ALERTS_MAX]
        self._wake.set()

    def close(self, seconds_max: float) -> None:
        """One more round. Open alerts are not resolved by our end: they lapse, unless we come back."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds_max)

    def send(self) -> None:
        """One round. Raises Undelivered."""
        now = self._clock.now()
        with self._lock:
            for incident_id, notice in list(self._open.items()):
                if notice.state in ("stopped", "gave_up") and now - notice.at >= STAYS_SECONDS:
                    self._over.append((self._open.pop(incident_id), now))
            over = list(self._over)
            lapses_at = now + LAPSE_ROUNDS * self._resend_seconds
            alerts = [_alert(notice, ended_at) for notice, ended_at in over]
            alerts += [_alert(notice, lapses_at) for notice in self._open.values()]
        if self._watching():
            labels, words = {"alertname": WATCHING, "severity": "none"}, {"summary": "Recovery watches and acts."}
            alerts.append(Alert(labels, words, _text(now), _text(lapses_at)))
        if alerts:
            post(self._url, msgspec.json.encode(alerts), self._headers)
        with self._lock:
            self._over = [one for one in self._over if one not in over]

    def _keep(self) -> None:
        while True:
            closing = self._closing
            self._wake.clear()
            try:
                self.send()
                said = "takes our alerts"
            except Undelivered as error:
                said = str(error)
            if said != self._told and (self._told or said != "takes our alerts"):
                self._tell(f"notify: alertmanager {said}")
            self._told = said
            if closing:
                return
            self._wake.wait(self._resend_seconds)


def _alert(notice: Notice, ends_at: float) -> Alert:
    labels = {
        "alertname": "TransomIncident", "incident": notice.incident_id, "training_job": notice.job,
        "fault_class": notice.fault_class, "severity": notice.level,
    }  # fmt: skip
    words = {"summary": notice.title, "description": notice.text, "state": notice.state, "link": notice.link}
    return Alert(labels, words, _text(notice.opened_at), _text(ends_at), notice.link)


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
