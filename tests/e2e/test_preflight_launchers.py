"""Pre-flight checks on real launchers of this machine: the one bad node is named, whatever is wrong with it.

Nodes are virtual. What is wrong with one is real: a zygote that is stopped, a processor that others use, a full file
system, an interface that is not there.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.action import Action, CheckResult
from recovery.backend import Conflict, NoCheckpoints, StartRequest
from recovery.calls import Result
from recovery.checking import ALONE, Rounds, blamed, check_nodes
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for
from tests.machine import small_disk
from tests.recovery_world import verdict

LONG_SECONDS = 60.0  # for a check that is awaited
HANGING_SECONDS = 4.0  # for one that never answers


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_in_short_folder(nodes=3) as lab:
        yield lab


def try_out(lab: Lab, nodes: list[str], *, seconds: float = LONG_SECONDS) -> list[CheckResult]:
    rounds = Rounds(lambda checks, groups: lab.backend.probe(JOB, 1, checks, groups, seconds=seconds), 8)
    results, complete = check_nodes(rounds, nodes, slow_ratio=2.0)
    assert complete
    return results


def failures(results: list[CheckResult]) -> list[tuple[str, str]]:
    return sorted((one.node, one.check) for one in results if one.outcome == "failed")


def test_good_nodes_pass_and_what_they_cannot_do_is_skipped(lab: Lab, tmp_path: Path) -> None:
    lab.launch_all(lab.script("pass"), env={"TRANSOM_CKPT_DIR": str(tmp_path)})
    results = try_out(lab, lab.node_names)
    assert failures(results) == []
    outcomes = {(one.check, one.outcome) for one in results}
    assert ("disk", "passed") in outcomes
    assert ("network", "passed") in outcomes
    assert ("gpu_memory", "skipped") in outcomes
    assert ("all_reduce", "skipped") in outcomes, "torch was not preloaded"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_check_that_hangs_is_a_failed_check_of_that_node_alone(lab: Lab) -> None:
    lab.launch_all(lab.script("pass"))
    file = lab.node_file("node1")
    assert file is not None
    assert file.zygote is not None
    os.kill(file.zygote.pid, signal.SIGSTOP)
    results = try_out(lab, lab.node_names, seconds=HANGING_SECONDS)
    assert blamed(results) == {"node1"}
    told = {one.text for one in results if one.node == "node1"}
    assert told == {f"it could not be forked in {HANGING_SECONDS:.0f} s"}
    assert {one.check for one in results if one.node == "node0"} > {"matmul", "network"}, "the others were checked on"


def test_a_processor_that_others_use_is_slow(lab: Lab) -> None:
    one, other = sorted(os.sched_getaffinity(0))[:2]
    for node in lab.node_names:
        with on_processor(other if node == "node2" else one):
            lab.launch(lab.script("pass"), node)
    with hogs(other, 40):
        results = try_out(lab, ["node0", "node2"])
    assert failures(results) == [("node2", "matmul")]
    assert any("ms where the others take" in one.text for one in results)


def test_a_full_file_system_is_its_nodes_and_said(lab: Lab, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as small:
        for node in lab.node_names:
            lab.launch(lab.script("pass"), node, env={"TRANSOM_CKPT_DIR": str(small if node == "node0" else tmp_path)})
        results = try_out(lab, lab.node_names)
    assert failures(results) == [("node0", "disk")]
    assert [one.text for one in results if one.outcome == "failed"] == [
        "the checkpoint folder cannot be written (No space left on device)"
    ]


def test_a_node_that_cannot_reduce_with_others_is_told_apart_by_pairs(lab: Lab) -> None:
    script = lab.script("pass")
    for node in lab.node_names:
        interface = "none0" if node == "node1" else "lo"
        base = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
        lab.launch(script, node, wait=False, preload_torch=True, base_env=base)
    for node in lab.node_names:
        lab.await_launcher(node)
    warm = lab.backend.probe(JOB, 1, ALONE, [[node] for node in lab.node_names], seconds=LONG_SECONDS)
    assert failures(warm) == []
    asked: list[list[list[str]]] = []

    def probe(checks: object, groups: list[list[str]]) -> list[CheckResult]:
        asked.append([list(group) for group in groups])
        return lab.backend.probe(JOB, 1, checks, groups, seconds=LONG_SECONDS / 6)  # type: ignore[arg-type]

    results, _ = check_nodes(probe, lab.node_names, slow_ratio=100.0)  # type: ignore[arg-type]
    assert failures(results) == [("node1", "all_reduce")]
    assert blamed(results) == {"node1"}
    assert [["node0", "node1", "node2"]] in asked, "all together first"


def test_nothing_is_tried_out_beside_ranks_and_a_start_ends_what_is(lab: Lab) -> None:
    lab.launch_all(lab.script("import time; time.sleep(600)"))
    lab.backend.start(StartRequest(JOB, 1, "t1"))
    with pytest.raises(Conflict, match="attempt 1 has ranks on"):
        lab.backend.probe(JOB, 1, ("matmul",), [["node0"]], seconds=5.0)
    assert lab.backend.stop(JOB, 1, grace_seconds=0.0, deadline_seconds=20.0)
    assert [one.outcome for one in lab.backend.probe(JOB, 1, ("matmul",), [["node0"]], seconds=LONG_SECONDS)] == [
        "passed"
    ]
    lab.backend.start(StartRequest(JOB, 2, "t2"))
    wait_for(lambda: len(lab.pids()) == 3, "ranks run after checks")


def test_a_hang_is_restarted_without_the_node_that_fails_a_check(lab: Lab, tmp_path: Path) -> None:
    lab.node_names.append("node3")
    config = replace(PolicyConfig(), quarantine_mode="auto", stop_grace_seconds=0.0)
    store = RecoveryStore(tmp_path / "recovery.sqlite", durable=False)
    workers: ThreadWorkers[Result] = ThreadWorkers()
    controller = Controller(store, lab.backend, NoCheckpoints(), config, random.Random(1), workers)

    def runs_again() -> bool:
        controller.tick(lab.clock.now())
        return lab.backend.observe(JOB).attempt == 2 and len(lab.pids()) == 3

    with small_disk(tmp_path / "small", "1m") as small:
        for node in lab.node_names:
            folder = small if node == "node2" else tmp_path
            lab.launch(lab.script("import time; time.sleep(600)"), node, env={"TRANSOM_CKPT_DIR": str(folder)})
        lab.backend.start(StartRequest(JOB, 1, "t1"))
        assert "node2" in {rank.node for rank in lab.backend.observe(JOB).ranks}
        controller.accept(verdict("hang", job=JOB, culprits=(), at=lab.clock.now()), lab.clock.now())
        wait_for(runs_again, "attempt 2 on the other nodes", LONG_SECONDS)
    assert {rank.node for rank in lab.backend.observe(JOB).ranks} == {"node0", "node1", "node3"}
    (action,) = [one.message for one in controller.pending_messages() if isinstance(one.message, Action)]
    assert {(one.node, one.check) for one in action.checks if one.outcome == "failed"} == {("node2", "disk")}
    assert {one.check for one in action.checks if one.outcome == "passed"} == {"matmul", "disk", "network"}
    store.close()


@contextmanager
def on_processor(number: int) -> Iterator[None]:
    """What is started here may only use that processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


HOGS = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getpid()
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == parent:
            for _ in range(100_000): pass
        os._exit(0)
print("all run", flush=True)
time.sleep(600)
"""


@contextmanager
def hogs(processor: int, number: int) -> Iterator[None]:
    """Processes that never rest, each in a session (and so a scheduling group) of its own, until their parent ends."""
    command = [sys.executable, "-c", HOGS, str(processor), str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == b"all run\n"
            yield
        finally:
            running.kill()
