"""How much memory this process may still take: the tightest of its memory cgroups (v1 or v2) and of the host.

Functions of the files below a root folder, so that every kind of host can be tried on any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED_BYTES_MIN = 1 << 60  # v1 says "no limit" with a number near 2**63
LEVELS_MAX = 64
_ROOT = Path("/")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_RECLAIMED = {  # what the kernel gives back before it kills: file cache, which slots (shared memory) are not in
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """One limit. `used_bytes` counts against it and is not given back by the kernel when memory gets short."""

    where: str
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    folder: PurePosixPath
    root: PurePosixPath  # the cgroup that is seen at `folder`


def tightest_room(root: Path = _ROOT) -> MemoryRoom | None:
    """The limit that leaves the least; None where no file tells of any."""
    host = host_room(root)
    rooms = [*cgroup_rooms(root), *([] if host is None else [host])]
    return min(rooms, key=lambda room: room.free_bytes, default=None)


def host_room(root: Path = _ROOT) -> MemoryRoom | None:
    """The host's memory as its kernel judges it."""
    sizes = _table(root / "proc" / "meminfo")
    total, available = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
    if total is None or available is None:
        return None
    return MemoryRoom("the host", total << 10, max(total - available, 0) << 10)


def cgroup_rooms(root: Path = _ROOT) -> list[MemoryRoom]:
    """Every memory limit on the process, from its own cgroup upwards."""
    rooms = []
    for mount, path in _places(root):
        for folder, name in _upwards(mount, path):
            room = _room(root / str(folder).lstrip("/"), mount.version, name)
            if room is not None:
                rooms.append(room)
    return rooms


def _room(folder: Path, version: int, name: str) -> MemoryRoom | None:
    if version == 1:
        limits = [_number(folder / "memory.limit_in_bytes")]
        used = _number(folder / "memory.usage_in_bytes")
    else:  # above `high` the kernel throttles to a standstill, since nothing of ours can be reclaimed
        limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
        used = _number(folder / "memory.current")
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None or used is None or limit >= UNLIMITED_BYTES_MIN:
        return None
    sizes = _table(folder / "memory.stat")
    reclaimed = sum(sizes.get(key, 0) for key in _RECLAIMED[version])
    return MemoryRoom(f"the memory cgroup {name} (v{version})", limit, max(used - reclaimed, 0))


def _places(root: Path) -> Iterator[tuple[_Mount, PurePosixPath]]:
    """Each mounted hierarchy that can limit memory, and the process's cgroup in it."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version = 1
        elif number == "0" and not controllers:
            version = 2
        else:
            continue
        for mount in mounts:
            if mount.version == version and path.startswith("/"):
                yield mount, PurePosixPath(path)


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc" / "self" / "mountinfo"):
        ours, _, theirs = line.partition(" - ")
        left, right = ours.split(), theirs.split()
        if len(left) < 5 or len(right) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(right[0])
        if version is None or (version == 1 and "memory" not in right[2].split(",")):
            continue
        yield _Mount(version, PurePosixPath(_unescaped(left[4])), PurePosixPath(_unescaped(left[3])))


def _upwards(mount: _Mount, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    """The folders from the process's cgroup to the mount's own, with the cgroup's name each.

    A container may see another path than the one it is mounted by: then what is mounted is its own cgroup.
    """
    relative = PurePosixPath()
    if path.is_relative_to(mount.root) and ".." not in path.parts:
        relative = path.relative_to(mount.root)
    for _ in range(LEVELS_MAX):
        yield mount.folder / relative, str(mount.root / relative)
        if not relative.parts:
            return
        relative = relative.parent


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal() and row[1].isascii()}


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() and text.isascii() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
