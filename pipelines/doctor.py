"""`transom doctor`: what is missing on this machine, what it costs, and the command that mends it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ingest.bus import BusError
from ingest.clock import Clock
from pipelines.doctor_ckpt import examine_checkpoints
from pipelines.extras import EXTRAS, is_there
from pipelines.finding import Finding
from pipelines.open_bus import open_bus
from pipelines.settings import Settings, SettingsError

FREE_BYTES_MIN = 2 * 2**30


def examine(settings: Settings, clock: Clock) -> list[Finding]:
    """All findings, in the order in which a person would mend them."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _extras,
        _kernel,
        lambda: _state_folder(settings),
        lambda: _bus(settings, clock),
        lambda: _services(settings),
        lambda: examine_checkpoints(settings),
        _tools,
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("Python", "ok" if good else "missing", version, "" if good else "use Python 3.11 or newer")


def _extras() -> Iterator[Finding]:
    for extra, (module, use) in EXTRAS.items():
        if is_there(module):
            yield Finding(f"extra {extra}", "ok", use)
        else:
            yield Finding(f"extra {extra}", "note", f"without it: no {use}", f"pip install 'transom[{extra}]'")


def _kernel() -> Iterator[Finding]:
    if not hasattr(os, "memfd_create"):
        yield Finding(
            "memfd", "missing", "this system has no memfd_create; checkpoints cannot live in memory", "use Linux"
        )
    else:
        yield Finding("memfd", "ok", "checkpoints can live in memory")
    if hasattr(os, "pidfd_open"):
        yield Finding("pidfd", "ok", "exits of ranks are seen at once")
    else:
        yield Finding("pidfd", "note", "no pidfd_open (kernel before 5.3); exits are polled")
    if Path("/proc/self/schedstat").exists():
        yield Finding("run-queue delay", "ok", "stragglers are told from crowded hosts")
    else:
        yield Finding(
            "run-queue delay", "note", "no /proc/self/schedstat: own compute time is not known, wall time is used"
        )
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if Path("/proc/driver/nvidia").exists() else []
    yield Finding(
        "GPU", "ok" if gpus else "note", f"{len(gpus)} NVIDIA GPU(s)" if gpus else "none: jobs run on the CPU (gloo)"
    )


def _state_folder(settings: Settings) -> Iterator[Finding]:
    try:
        folder = settings.make_state_dir()
        settings.socket_folder()
    except SettingsError as error:
        yield Finding("state folder", "missing", str(error), "set state_dir in transom.toml or TRANSOM_STATE_DIR")
        return
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_MIN:
        yield Finding(
            "state folder", "note", f"{folder}: only {free // 2**20} MiB free", "free some room, or set state_dir"
        )
    else:
        yield Finding("state folder", "ok", f"{folder}, {free // 2**30} GiB free")


def _bus(settings: Settings, clock: Clock) -> Iterator[Finding]:
    try:
        open_bus(settings, clock, client="doctor").close()
    except (BusError, SettingsError) as error:
        yield Finding(
            f"bus ({settings.bus.kind})", "missing", str(error), 'start the broker, or set bus.kind = "sqlite"'
        )
    else:
        yield Finding(f"bus ({settings.bus.kind})", "ok", "answers")


def _services(settings: Settings) -> Iterator[Finding]:
    try:
        path = settings.socket_folder() / "record.sock"
    except SettingsError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            yield Finding("transom record", "note", "does not run here", "transom up")
        else:
            yield Finding("transom record", "ok", f"serves {path}")


def _tools() -> Iterator[Finding]:
    for tool, use in (
        ("java", "transom demo --broker"),
        ("mvn", "transom demo --broker, the first time"),
        ("chromium", "browser tests"),
    ):
        found = shutil.which(tool)
        yield Finding(tool, "ok" if found else "note", found or f"not found; only {use} needs it")
    if Path(tempfile.gettempdir()).stat().st_mode & 0o1000 == 0:
        yield Finding(
            "temporary folder", "note", f"{tempfile.gettempdir()} has no sticky bit; others can remove our sockets"
        )
