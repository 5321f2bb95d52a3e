"""What a launcher can measure without any library: memory of its ranks, its host and its container, free disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ingest.clock import Clock
from ingest.events import LAUNCHER_RANK, DeviceMetrics, Message

from .procfs import all_processes
from .rank import LocalRank
from .share import Share

MEASURE_SECONDS = 2.0
CHILDREN_EVERY = 5  # measurements: looking through all processes costs more than the rest together
UNLIMITED_BYTES = 2**60  # how cgroup v1 says that there is no limit: a number near the largest
CGROUP_ROOT = Path("/sys/fs/cgroup")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Publish = Callable[[Message], None]


class Measures:
    """Called from the launcher's loop every `MEASURE_SECONDS`; a file that is not there is a column that is not."""

    def __init__(self, clock: Clock, publish: Publish, disk: Path | None, cgroup: Path = CGROUP_ROOT) -> None:
        self._clock = clock
        self._publish = publish
        self._disk = disk
        self._container = container_files(cgroup, Path("/proc/self/cgroup"))
        self._children: dict[int, tuple[int, ...]] = {}
        self._count = 0

    def measure(self, share: Share) -> None:
        """One sample of every living rank, and one of the host."""
        if self._count % CHILDREN_EVERY == 0:
            self._children = _by_session(share.alive)
        self._count += 1
        for rank in share.alive:
            used = memory_of(rank.pid)
            if used is None:
                continue
            used += sum(memory_of(child) or 0.0 for child in self._children.get(rank.pid, ()))
            self._say(share, rank.rank, "process", {"process.memory.usage": used})
        host = host_memory()
        for name, path in self._container.items():
            value = _number(path)
            if value is not None and value < UNLIMITED_BYTES:
                host[name] = value
        usage = self._container.get("container.memory.usage")
        if usage is not None and "container.memory.usage" in host:
            cached = file_cache(usage.with_name("memory.stat"))  # grows up to the limit, and is given back at need
            host["container.memory.usage"] = max(0.0, host["container.memory.usage"] - cached)
        if self._disk is not None:
            with suppress(OSError):
                space = os.statvfs(self._disk)
                host["system.disk.free"] = float(space.f_bavail * space.f_frsize)
        if host:
            self._say(share, LAUNCHER_RANK, "host", host)

    def _say(self, share: Share, rank: int, device: str, values: dict[str, float]) -> None:
        now = self._clock.now()
        columns: dict[str, tuple[float | None, ...]] = {name: (value,) for name, value in values.items()}
        self._publish(
            DeviceMetrics(device=device, sampled_at=(now,), columns=columns, **share.stamp(rank, "metrics", now))
        )


def memory_of(pid: int) -> float | None:
    """Resident bytes of a process, shared pages included; None where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as stream:  # noqa: PTH123  (every two seconds for each rank)
            return float(int(stream.read().split()[1]) * PAGE_BYTES)
    except (OSError, IndexError, ValueError):
        return None


def host_memory(path: str = "/proc/meminfo") -> dict[str, float]:
    """Bytes the host has, and those that are in use and cannot be had back at once."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = float(rest.split()[0]) * 1024.0
    if len(found) < 2:
        return {}
    total = found["MemTotal"]
    return {"system.memory.usage": total - found["MemAvailable"], "system.memory.limit": total}


def container_files(root: Path, membership: Path) -> dict[str, Path]:
    """The files of our memory cgroup, version 1 or 2; none where we are in none, or it is the root."""
    with suppress(OSError):
        for line in membership.read_text(encoding="utf-8", errors="replace").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and (root / path.lstrip("/") / "memory.current").exists():
                return _pair(root / path.lstrip("/"), "memory.current", "memory.max")
            if "memory" in controllers.split(","):
                for folder in (root / "memory" / path.lstrip("/"), root / "memory"):  # a container sees its own as root
                    if (folder / "memory.usage_in_bytes").exists():
                        return _pair(folder, "memory.usage_in_bytes", "memory.limit_in_bytes")
    if (root / "memory.current").exists():  # a cgroup namespace
        return _pair(root, "memory.current", "memory.max")
    return {}


def file_cache(stat: Path) -> float:
    """Bytes of a memory cgroup that are files' pages, of its children too; 0.0 where that is not told."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError):
        for line in stat.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name.removeprefix("total_") in ("inactive_file", "active_file"):
                found[name] = float(value)
    total = [value for name, value in found.items() if name.startswith("total_")]  # version 1 tells both
    return sum(total or found.values())


def _pair(folder: Path, usage: str, limit: str) -> dict[str, Path]:
    return {"container.memory.usage": folder / usage, "container.memory.limit": folder / limit}


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # gone, or "max"
        return None


def _by_session(ranks: Iterable[LocalRank]) -> dict[int, tuple[int, ...]]:
    """Every rank leads its session: the other processes in it are its data loader's workers and the like."""
    found: dict[int, list[int]] = {rank.pid: [] for rank in ranks}
    for stat in all_processes():
        if stat.session in found and stat.pid != stat.session:
            found[stat.session].append(stat.pid)
    return {pid: tuple(children) for pid, children in found.items()}
