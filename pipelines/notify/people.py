"""Who is told by recovery: nobody where no receiver is set, and then nothing is loaded for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ingest.clock import Clock
from pipelines.settings import NotifySettings, Settings
from recovery.store import RecoveryStore


class People(Protocol):
    """What recovery's loop calls; every call returns at once, but `close`, which takes some seconds at most."""

    def begin(self) -> None: ...

    def turn(self, sees_bus: bool) -> None:
        """The loop has turned once; without `sees_bus` the bus did not answer."""
        ...

    def hear(self, messages: Iterable[object]) -> None:
        """What recovery has written down; what was heard before is passed over."""
        ...

    def close(self) -> None: ...


class Nobody:
    """No receiver is set."""

    def begin(self) -> None:
        return None

    def turn(self, sees_bus: bool) -> None:
        return None

    def hear(self, messages: Iterable[object]) -> None:
        return None

    def close(self) -> None:
        return None


def told_people(settings: Settings, store: RecoveryStore, clock: Clock, tell: Callable[[str], object]) -> People:
    """Raises NotAnAddress, TokenRefused, MissingExtra for a receiver that cannot be told."""
    if not has_receiver(settings.notify):
        return Nobody()
    from pipelines.notify.notifications import Notifications

    return Notifications(settings, store, clock, tell)


def has_receiver(chosen: NotifySettings) -> bool:
    """Whether anybody is told at all."""
    ways = (
        chosen.webhook_url, chosen.webhook_url_file, chosen.command, chosen.alertmanager_url,
        chosen.heartbeat_url, chosen.heartbeat_url_file,
    )  # fmt: skip
    return any(ways)
