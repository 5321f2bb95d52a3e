"""Placing, environment, files and processes: the pure parts around a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.events import RankPlace
from recovery.backends.placing import choose_nodes
from recovery.launcher.config import LauncherConfig
from recovery.launcher.environment import cpus_of
from recovery.launcher.job_files import BrokenJobFile, JobFiles, read_file, write_file
from recovery.launcher.procfs import catches, is_alive, kill_exactly, start_time_of
from recovery.launcher.protocol import JobSpec, Placement, StartRanks, decode_reply, decode_request
from tests.launcher_lab import wait_for

NODES = st.lists(st.sampled_from("abcdef"), unique=True)


@given(last=NODES, usable=NODES, wanted=st.integers(1, 6))
def test_placing_uses_usable_nodes_once_and_moves_no_survivor(last: list[str], usable: list[str], wanted: int) -> None:
    chosen = choose_nodes(last, usable, wanted)
    survivors = [node for node in last[:wanted] if node in usable]
    fresh = [node for node in usable if node not in last]
    if chosen is None:
        assert len(survivors) + len(fresh) < wanted
        return
    assert len(set(chosen)) == wanted
    assert set(chosen) <= set(usable)
    for node in survivors:
        assert chosen.index(node) == last.index(node)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\0b"])
def test_a_job_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a job's name"):
        JobFiles(tmp_path, name)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "job.json"
    assert read_file(path, JobSpec) is None
    spec = JobSpec(job="j", script="train.py", nodes=2, nproc_per_node=4)
    write_file(path, spec)
    assert read_file(path, JobSpec) == spec
    assert spec.world_size == 8
    assert [entry.name for entry in path.parent.iterdir()] == ["job.json"]
    path.write_text("{")
    with pytest.raises(BrokenJobFile, match=r"job\.json is not what it should be"):
        read_file(path, JobSpec)


def test_a_socket_path_that_is_too_long_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use a short folder"):
        LauncherConfig(
            job="j", node="n", slots=1, script="t.py", base_env={}, control_socket=tmp_path / ("x" * 120),
            telemetry_socket=tmp_path / "t", node_file=tmp_path / "n.json",
        )  # fmt: skip


def test_pinned_ranks_of_a_node_are_side_by_side() -> None:
    places = tuple(RankPlace(rank=n, local_rank=n % 2, node=f"n{n // 2}") for n in range(4))
    order = StartRanks(attempt=1, token="t", places=places, master_addr="a", master_port=1)
    allowed = sorted(os.sched_getaffinity(0))
    assert cpus_of(0, order, pin=False) == ()
    assert cpus_of(0, order, pin=True) == (allowed[0],)
    assert cpus_of(3, order, pin=True) == (allowed[3 * len(allowed) // 4],)


def test_a_placement_names_its_nodes_in_group_order() -> None:
    places = tuple(RankPlace(rank=n, local_rank=0, node=node) for n, node in enumerate(("b", "a", "b")))
    assert Placement(attempt=1, token="t", places=places, master_port=1).nodes == ("b", "a")


def test_only_that_very_process_is_killed() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        started = start_time_of(process.pid)
        kill_exactly(process.pid, started + 1)
        assert is_alive(process.pid, started)
        kill_exactly(process.pid, started)
        wait_for(lambda: not is_alive(process.pid, started), "it is gone")
        kill_exactly(process.pid, started)
    finally:
        process.kill()
        process.wait()


def test_a_signal_that_would_end_a_process_is_seen() -> None:
    assert not catches(os.getpid(), signal.SIGRTMIN + 5)
    assert catches(os.getpid(), signal.SIGINT)
    assert not catches(0x3FFFFFF, signal.SIGINT)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(line: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            decode(line)
        except ValueError:
            continue


def test_the_zygote_imports_nothing_of_ours() -> None:
    zygote = Path(sys.modules[choose_nodes.__module__].__file__ or "").parents[1] / "torch_side" / "zygote.py"
    program = (
        "import runpy, sys\n"
        f"runpy.run_path({str(zygote)!r}, run_name='not_main')\n"
        "ours = {'ingest', 'detectors', 'recovery', 'pipelines', 'ckpt_engine', 'transom', 'msgspec', 'torch'}\n"
        "sys.exit(f'imported: {ours & set(sys.modules)}' if ours & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
