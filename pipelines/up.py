"""All services of one machine: which they are, how they are started, and how they are kept alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ingest.clock import Clock
from pipelines.children import Child, Children
from pipelines.errors import StatedError
from pipelines.open_bus import own_command
from pipelines.places import Places

SERVICES = ("record", "detect", "recover")
READY_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.5
RESTARTS_MAX = 5  # of one service in a row, each within QUIET_SECONDS of the last
QUIET_SECONDS = 60.0


class NotReady(StatedError):
    """A service did not come up in time."""


def start_services(children: Children, places: Places, arguments: Sequence[str], clock: Clock) -> None:
    """Start record, detect and recover; returns when they answer. Raises NotReady or ChildFailed."""
    wanted = [places.api_socket, places.state / "detect.ready", places.state / "recover.ready"]
    for path in wanted:
        path.unlink(missing_ok=True)  # of an earlier life that had no time to tidy up
    for name in SERVICES:
        children.start(name, own_command(name, *arguments))
    deadline = clock.monotonic() + READY_SECONDS_MAX
    while not all(path.exists() for path in wanted):
        children.check()
        if clock.monotonic() > deadline:
            missing = next(path for path in wanted if not path.exists())
            raise NotReady(f"{missing.name} did not appear in {READY_SECONDS_MAX:.0f} s; see {places.logs}")
        clock.sleep(0.05)


def keep_up(
    children: Children, arguments: Sequence[str], clock: Clock, stop: threading.Event, tell: Callable[[str], None]
) -> None:
    """Until `stop`: a service that ends is told of and started again; one that keeps ending is an error."""
    falls: dict[str, list[float]] = {}
    while not stop.wait(LOOK_SECONDS):
        for child in children.ended():
            now = clock.monotonic()
            recent = [at for at in falls.get(child.name, []) if now - at < QUIET_SECONDS]
            falls[child.name] = [*recent, now]
            if len(recent) >= RESTARTS_MAX:
                raise NotReady(f"{child.name} ended {len(recent) + 1} times in {QUIET_SECONDS:.0f} s; see {child.log}")
            tell(f"{child.name} ended with exit code {child.process.returncode}; starting it again (see {child.log})")
            _again(children, child, arguments)


def _again(children: Children, child: Child, arguments: Sequence[str]) -> None:
    children.forget(child)
    children.start(child.name, own_command(child.name, *arguments))
