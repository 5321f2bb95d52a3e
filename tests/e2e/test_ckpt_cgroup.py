"""An engine in a real memory cgroup (v1 or v2, whichever this machine has): it refuses in time and is not killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_engine.errors import EngineRefused
from ckpt_engine.memory_room import _places
from tests.ckpt_lab import EngineProcess, RawRank, eventually

LIMIT_BYTES = 200 << 20


@dataclass(frozen=True)
class Cgroup:
    """A child group of ours with a limit."""

    folder: Path
    version: int

    def enter(self) -> tuple[str, ...]:
        """What a command begins with that is to run inside."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def kills(self) -> int:
        """Processes that the kernel has killed here for want of memory."""
        text = (self.folder / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def used_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text())


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    if os.geteuid() != 0:
        pytest.skip("a memory cgroup can only be made by root: run the tests as root to have this one")
    mount, path = next(iter(_places(Path("/"))))
    relative = path.relative_to(mount.root) if path.is_relative_to(mount.root) else Path()
    parent = Path(str(mount.folder)) / relative
    if mount.version == 2:  # a group with processes of its own may not limit its children
        parent = Path(str(mount.folder))
        (parent / "cgroup.subtree_control").write_text("+memory")
    folder = parent / f"transom-test-{os.getpid()}"
    folder.mkdir()
    limit = "memory.limit_in_bytes" if mount.version == 1 else "memory.max"
    (folder / limit).write_text(str(LIMIT_BYTES))
    yield Cgroup(folder, mount.version)
    eventually(lambda: not (folder / "cgroup.procs").read_text(), "its processes are gone")
    folder.rmdir()


def test_a_save_that_the_cgroup_cannot_hold_is_refused_with_the_numbers_and_nobody_is_killed(
    cgroup: Cgroup, tmp_path: Path
) -> None:
    with EngineProcess(tmp_path, *cgroup.enter(), keeper_seconds=30.0) as engine, RawRank(engine.socket) as rank:
        with pytest.raises(EngineRefused) as refusal:
            rank.acquire(1, 90 << 20)  # two of them are below our own cap, and below the limit by themselves
        said = str(refusal.value)
        assert f"{cgroup.folder.name} (v{cgroup.version}) allows {LIMIT_BYTES} bytes" in said
        assert "rank 0 needs two slots of" in said
        assert cgroup.used_bytes() < 90 << 20, "nothing was touched for it"
        rank.save(1, bytes([7]) * (20 << 20))
        assert rank.durable(1) == ""
        assert engine.process.poll() is None
        assert cgroup.kills() == 0
        usage = cgroup.used_bytes()
        assert usage > 20 << 20, "the slots count where the engine is, not where the rank is"
        assert engine.end(15) == 0


def test_memory_that_others_take_meanwhile_is_seen(cgroup: Cgroup, tmp_path: Path) -> None:
    """The first slot was there before the neighbour grew; the larger layout that follows finds no room."""
    with EngineProcess(tmp_path, *cgroup.enter()) as engine, RawRank(engine.socket) as rank:
        rank.save(1, bytes(8 << 20))
        rank.save(2, bytes(8 << 20))
        (tmp_path / "other").mkdir()
        with EngineProcess(tmp_path / "other", *cgroup.enter()) as neighbour, RawRank(neighbour.socket) as other:
            other.save(1, bytes(40 << 20))
            other.save(2, bytes(40 << 20))
            with pytest.raises(EngineRefused, match=r"are in use \(file cache left out\)"):
                rank.acquire(3, 40 << 20)
            assert rank.load(2)["tier"] == "memory"
            rank.link.ask({"op": "return"})
            assert neighbour.end(15) == 0
        assert cgroup.kills() == 0
        eventually(lambda: _takes(rank, 3, 40 << 20), "the room that the neighbour has left")
        assert engine.end(15) == 0


def _takes(rank: RawRank, step: int, payload_bytes: int) -> bool:
    try:
        rank.save(step, bytes(payload_bytes))
    except EngineRefused:  # what a process has held is given back to its cgroup a little after its end
        return False
    return True
