"""What /proc tells of processes; the start time tells one from a later one of the same id."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that we use. `start_time` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_time: int


def stat_of(pid: int) -> ProcessStat | None:
    """The process as it is now; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:  # noqa: PTH123  (ten times a second for each rank)
            text = stream.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def wchan_of(pid: int) -> str:
    """The kernel function in which the process's main thread sleeps; empty where it runs or that is not told."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
        return "" if text == "0" else text
    return ""


def is_alive(pid: int, start_time: int) -> bool:
    """Whether that very process still runs; a zombie does not."""
    stat = stat_of(pid)
    return stat is not None and stat.start_time == start_time and stat.state not in ("Z", "X")


def start_time_of(pid: int) -> int:
    """Start time of a process, 0 where it is gone."""
    stat = stat_of(pid)
    return stat.start_time if stat else 0


def catches(pid: int, number: int) -> bool:
    """Whether the process has its own answer to this signal; where it has none, most signals end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def all_processes() -> list[ProcessStat]:
    """Every process there is now."""
    stats = (stat_of(int(name)) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names only)
    return [stat for stat in stats if stat is not None]


def kill_session(session: int, not_before: int) -> None:
    """SIGKILL to every process of a session that started at `not_before` ticks or later."""
    for stat in all_processes():
        if stat.session == session and stat.start_time >= not_before:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(stat.pid, signal.SIGKILL)


def kill_exactly(pid: int, start_time: int) -> None:
    """SIGKILL to that very process, however soon its id may be reused."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(pid, start_time):  # checked after the descriptor holds it
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
