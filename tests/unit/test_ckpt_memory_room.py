"""How much memory is left, as cgroups (v1, v2, nested, in containers) and the host tell it; on fake trees and here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_engine.memory_room import MemoryRoom, cgroup_rooms, host_room, tightest_room

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_MOUNTS = V1_MOUNT + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
NO_LIMIT_V1 = "9223372036854771712"
MIB = 1 << 20


def tree(root: Path, own: str, mounts: str, files: dict[str, str]) -> Path:
    """A fake root folder."""
    for name, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, used: int, cache: int = 0, high: str = "max") -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{at}/memory.max": f"{limit}\n", f"{at}/memory.high": f"{high}\n", f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": f"anon 5\nfile {cache}\nshmem 7\ninactive_file {cache}\nactive_file 0\n",
    }  # fmt: skip


def v1(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n", f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": f"cache {cache}\ntotal_inactive_file 1\ntotal_active_file {max(cache - 1, 0)}\n",
    }  # fmt: skip


def test_v2_with_file_cache_left_out(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/job/a\n", V2_MOUNT, v2("job/a", str(100 * MIB), 70 * MIB, cache=20 * MIB))
    (room,) = cgroup_rooms(root)
    assert room == MemoryRoom("the memory cgroup /job/a (v2)", 100 * MIB, 50 * MIB)
    assert room.free_bytes == 50 * MIB


def test_v2_is_slowed_down_above_high_and_that_is_no_room_either(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", V2_MOUNT, v2("a", str(100 * MIB), 70 * MIB, high=str(80 * MIB)))
    assert [room.limit_bytes for room in cgroup_rooms(root)] == [80 * MIB]


def test_v1_with_file_cache_left_out(tmp_path: Path) -> None:
    own = "9:name=systemd:/\n4:memory:/job/a\n3:cpuset:/\n0::/\n"
    root = tree(tmp_path, own, HYBRID_MOUNTS, v1("job/a", str(100 * MIB), 70 * MIB, cache=21 * MIB))
    assert cgroup_rooms(root) == [MemoryRoom("the memory cgroup /job/a (v1)", 100 * MIB, 49 * MIB)]


def test_the_limit_of_a_parent_counts_too(tmp_path: Path) -> None:
    files = v2("job", str(200 * MIB), 190 * MIB) | v2("job/a", str(100 * MIB), 10 * MIB)
    root = tree(tmp_path, "0::/job/a\n", V2_MOUNT, files)
    assert [room.where for room in cgroup_rooms(root)] == [
        "the memory cgroup /job/a (v2)", "the memory cgroup /job (v2)",
    ]  # fmt: skip
    room = tightest_room(root)
    assert room is not None
    assert (room.where, room.free_bytes) == ("the memory cgroup /job (v2)", 10 * MIB)


@pytest.mark.parametrize("limit", ["max", NO_LIMIT_V1])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    files = v2("a", "max", 1) if limit == "max" else v1("a", limit, 1)
    own, mounts = ("0::/a\n", V2_MOUNT) if limit == "max" else ("4:memory:/a\n", V1_MOUNT)
    assert cgroup_rooms(tree(tmp_path, own, mounts, files)) == []
    assert tightest_room(tmp_path) is None, "and no host either"


def test_a_container_of_v1_sees_its_own_cgroup_at_the_mount(tmp_path: Path) -> None:
    """The path is the host's, of which only the container's end is mounted."""
    mounts = "35 31 0:32 /docker/4f2a /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
    root = tree(tmp_path, "4:memory:/docker/4f2a\n", mounts, v1("", str(50 * MIB), 10 * MIB))
    assert [room.limit_bytes for room in cgroup_rooms(root)] == [50 * MIB]
    nested = tree(tmp_path / "n", "4:memory:/docker/4f2a/job\n", mounts, v1("job", str(20 * MIB), MIB))
    assert [room.where for room in cgroup_rooms(nested)] == ["the memory cgroup /docker/4f2a/job (v1)"]


@pytest.mark.parametrize("path", ["/../../other", "/elsewhere"])
def test_a_path_outside_of_what_is_mounted_means_the_mount(tmp_path: Path, path: str) -> None:
    mounts = V2_MOUNT.replace(" / /sys", " /pod /sys")
    root = tree(tmp_path, f"0::{path}\n", mounts, v2("", str(50 * MIB), 10 * MIB))
    assert [room.limit_bytes for room in cgroup_rooms(root)] == [50 * MIB]


def test_a_mount_point_with_a_blank_in_its_name(tmp_path: Path) -> None:
    mounts = "41 31 0:38 / /sys/fs/cgroup/my\\040own rw - cgroup2 cgroup2 rw\n"
    root = tree(tmp_path, "0::/\n", mounts, v2("my own", str(50 * MIB), 10 * MIB))
    assert len(cgroup_rooms(root)) == 1


@pytest.mark.parametrize(
    ("own", "mounts"),
    [("", ""), ("0::/a\n", ""), ("garbage\n::\n0::\n4:memory:\n", V1_MOUNT + "x - y\n"), ("0::a\n", V2_MOUNT)],
)
def test_files_that_say_nothing_are_no_limit(tmp_path: Path, own: str, mounts: str) -> None:
    assert cgroup_rooms(tree(tmp_path, own, mounts, {})) == []
    assert cgroup_rooms(tmp_path / "nowhere") == []


@pytest.mark.parametrize("limit", ["-1", "1e9", "", "٣", "max max"])
def test_a_limit_that_is_no_number_is_none(tmp_path: Path, limit: str) -> None:
    assert cgroup_rooms(tree(tmp_path, "0::/a\n", V2_MOUNT, v2("a", limit, 1))) == []


def test_the_host_is_a_limit_like_others(tmp_path: Path) -> None:
    meminfo = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    400 kB\n"
    root = tree(tmp_path, "0::/a\n", V2_MOUNT, {**v2("a", str(500 << 10), 1 << 10), "proc/meminfo": meminfo})
    assert host_room(root) == MemoryRoom("the host", 1000 << 10, 600 << 10)
    room = tightest_room(root)
    assert room is not None
    assert room.where == "the host"


def test_this_machine_tells_as_much_as_its_kernel() -> None:
    room = tightest_room()
    assert room is not None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < room.free_bytes <= room.limit_bytes <= total + (1 << 30)
    host = host_room()
    assert host is not None
    assert abs(host.limit_bytes - total) < 64 * MIB
