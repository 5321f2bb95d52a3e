"""All services of one machine: which they are, how they are started, and how they are kept alive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ingest.clock import Clock
from pipelines.children import Children
from pipelines.errors import StatedError
from pipelines.open_bus import own_command
from pipelines.places import Places
from recovery.lease import is_held

SERVICES = ("record", "detect", "recover")
READY_SECONDS_MAX = 180.0  # on a machine that is full, services at the lowest priority take long to import
LOOK_SECONDS = 0.1  # a service that fell is away no longer than it has to be


class NotReady(StatedError):
    """A service did not come up in time."""


class AlreadyUp(StatedError):
    """A service that there may be only once runs here already."""


def refuse_second(places: Places) -> None:
    """Raise AlreadyUp where record or recover of this state folder run: nothing of theirs may be touched."""
    running = [
        *(["record"] if _is_served(places.api_socket) else []),
        *(["recover"] if is_held(places.recovery_lease) else []),
    ]
    if running:
        raise AlreadyUp(
            f"{' and '.join(running)} already run on {places.state}; use them, stop them first, "
            "or choose another state folder with --state-dir"
        )


def start_services(
    children: Children,
    places: Places,
    arguments: Sequence[str],
    clock: Clock,
    stop: threading.Event | None = None,
) -> None:
    """Start record, detect and recover; returns when they answer, or at `stop`. Raises NotReady or ChildFailed."""
    wanted = [places.api_socket, places.state / "detect.ready", places.state / "recover.ready"]
    for path in wanted:
        path.unlink(missing_ok=True)  # of an earlier life that had no time to tidy up
    for name in SERVICES:
        children.start(name, own_command(name, *arguments))
    deadline = clock.monotonic() + READY_SECONDS_MAX
    while not all(path.exists() for path in wanted):
        if stop is not None and stop.is_set():
            return
        children.check()
        if clock.monotonic() > deadline:
            missing = next(path for path in wanted if not path.exists())
            raise NotReady(f"{missing.name} did not appear in {READY_SECONDS_MAX:.0f} s; see {places.logs}")
        clock.sleep(0.05)


def keep_up(children: Children, stop: threading.Event, tell: Callable[[str], None]) -> None:
    """Until `stop`: a service that ends is told of and started again, however often; the others go on meanwhile."""
    while not stop.wait(LOOK_SECONDS):
        children.revive(tell)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
