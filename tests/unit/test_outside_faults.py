"""What a launcher does to a rank from outside: which requests it refuses, and that nothing of it stays."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import recovery.launcher.outside_faults as outside_faults
from ingest.clock import ManualClock
from pipelines.cli.jobs import inject
from pipelines.injectable import FAULTS
from recovery.launcher.outside_faults import FILLER, PARAMETERS, OutsideFaults, worker_of
from recovery.launcher.procfs import stat_of
from recovery.launcher.rank import LocalRank

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
print(child.wait(), flush=True)
sys.stdin.read()
"""


def rank_of(pid: int) -> LocalRank:
    return cast(LocalRank, SimpleNamespace(pid=pid, rank=1))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., OutsideFaults]]:
    made: list[OutsideFaults] = []

    def make(checkpoints: Path | None = tmp_path) -> OutsideFaults:
        made.append(OutsideFaults(ManualClock(), checkpoints))
        return made[-1]

    yield make
    for faults in made:
        faults.close()


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is said to be small: a test must not fill a real one."""
    monkeypatch.setattr(
        outside_faults.os, "statvfs", lambda _: SimpleNamespace(f_blocks=100, f_bavail=2, f_frsize=4096)
    )


def test_what_is_done_from_outside_is_what_the_command_line_says() -> None:
    assert {name for name, fault in FAULTS.items() if not fault.by_rank} == set(PARAMETERS)
    assert all(set(FAULTS[name].parameters) == set(PARAMETERS[name]) for name in PARAMETERS)


@pytest.mark.parametrize(
    ("fault", "given", "reason"),
    [
        ("kill", {"factor": 2.0}, "parameters of kill are none, not factor"),
        ("cpu_hog", {"processes": 65.0}, "between 1 and 64"),
        ("cpu_hog", {"seconds": 0.0}, "above 0"),
        ("kill_worker", {}, "no worker of a data loader"),
        ("disk_full", {}, "only one of at most 2 GiB is filled"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(
    make: Callable[..., OutsideFaults],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    given: dict[str, float],
    reason: str,
) -> None:
    monkeypatch.setattr(outside_faults.os, "statvfs", lambda _: SimpleNamespace(f_blocks=2**20, f_frsize=4096))
    monkeypatch.setattr(outside_faults, "all_processes", lambda: [])
    assert reason in make().problem(fault, rank_of(os.getpid()), given)


def test_without_checkpoints_there_is_no_disk_to_fill(make: Callable[..., OutsideFaults]) -> None:
    assert "saves no checkpoints" in make(None).problem("disk_full", rank_of(1), {})


def test_busy_neighbours_run_on_the_ranks_processors_and_go_with_the_launcher(
    make: Callable[..., OutsideFaults],
) -> None:
    faults = make()
    assert not faults.problem("cpu_hog", rank_of(os.getpid()), {"processes": 2.0})
    faults.do("cpu_hog", rank_of(os.getpid()), {"processes": 2.0, "seconds": 600.0})
    pids = [hog.pid for hog in faults._hogs]
    stats = [stat_of(pid) for pid in pids]
    assert [stat.session if stat else 0 for stat in stats] == pids  # each a session of its own
    faults.close()
    assert [stat_of(pid) for pid in pids] == [None, None]


def test_a_worker_is_the_ranks_own_child_and_it_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    found = worker_of(parent.pid)
    assert found is not None
    assert found[0] == child
    OutsideFaults(ManualClock(), None).do("kill_worker", rank_of(parent.pid), {})
    assert parent.stdout.readline() == "-9\n"
    parent.communicate("")
    assert worker_of(parent.pid) is None


def test_a_disk_is_filled_to_its_end_for_a_while(
    make: Callable[..., OutsideFaults], small_disk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_faults, "WRITE_BYTES", 4096)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    faults = make()
    assert not faults.problem("disk_full", rank_of(1), {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, limits[1]))  # stands for the end of the disk
    try:
        faults.do("disk_full", rank_of(1), {"seconds": 5.0})
        assert faults._filling is not None
        faults._filling.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILLER).stat().st_size == 3 * 4096
    faults.tick()
    assert (tmp_path / FILLER).exists()
    faults._clock.sleep(5.0)
    faults.tick()
    assert not (tmp_path / FILLER).exists()


def test_every_fault_is_in_the_help_of_inject() -> None:
    assert all(f"{name}: {fault.text}" in (inject.__doc__ or "") for name, fault in FAULTS.items())
