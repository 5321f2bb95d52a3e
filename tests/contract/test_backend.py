"""One suite for every backend: what recovery may rely on, whoever runs the ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.clock import ManualClock
from recovery.backend import Backend, Conflict, Rejected, StartRequest
from recovery.backends.in_allocation import told_by
from recovery.backends.local import ranks_of
from recovery.backends.memory import MemoryBackend
from recovery.backends.scheduled import ScheduledBackend
from recovery.backends.simulated import SimulatedBackend
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.launcher.procfs import is_alive
from recovery.launcher.proof import JobKey
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for

TOKEN = "0123456789abcdef0123456789abcdef"
SLEEPER = """
import signal, time
print("up", flush=True)
while True:
    time.sleep(60)
"""


class World:
    """A job of two nodes with two ranks each, and one spare node."""

    def __init__(self, backend: Backend, lose_node: Any, end_rank: Any) -> None:
        self.backend = backend
        self.lose_node = lose_node
        self.end_rank = end_rank

    def start(self, attempt: int, *excluded: str, token: str = "", resume_step: int | None = None) -> Any:
        request = StartRequest(JOB, attempt, token or f"token-{attempt}", tuple(excluded), resume_step)
        return self.backend.start(request)

    def stop(self, attempt: int) -> bool:
        return self.backend.stop(JOB, attempt, grace_seconds=0.0, deadline_seconds=10.0)

    def placement(self) -> dict[int, str]:
        return {rank.rank: rank.node for rank in self.backend.observe(JOB).ranks}

    def living(self) -> set[int]:
        return {rank.pid for rank in self.backend.observe(JOB).ranks if rank.state != "exited"}


def memory_world(backend: MemoryBackend) -> World:
    backend.add_job(JOB, {"node0": 2, "node1": 2, "node2": 2}, nodes_wanted=2, nproc_per_node=2)
    return World(
        backend,
        lose_node=lambda node: backend.lose_node(JOB, node),
        end_rank=lambda rank, signal: backend.end_rank(JOB, rank, signal=signal),
    )


def over_tcp(lab: Lab) -> ScheduledBackend:
    """The lab's launchers, asked over TCP, in the allocation of a simulated scheduler."""
    allocation = SimulatedAllocation(lab.node_names, lab.clock)
    allocation.register(lab.spec)

    def tell(job: str, generation: int, nodes: tuple[str, ...]) -> None:
        for launcher in told_by(list(lab.files.nodes().values()), nodes):
            allocation.tell(job, launcher)

    def lives(job: str, node: str) -> bool:
        file = lab.node_file(node)
        return file is not None and (is_alive(file.pid, file.start_time) or bool(ranks_of(file)))

    allocation.on_nodes, allocation.lives = tell, lives
    backend = ScheduledBackend(allocation, lambda job: JobKey(JOB, TOKEN.encode()), lab.clock, random.Random(1))
    backend.submit(JOB, nodes=len(lab.node_names), command=())
    return backend


@pytest.fixture(params=["memory", "simulated", "local", "scheduled"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "memory":
        yield memory_world(MemoryBackend(ManualClock()))
        return
    if request.param == "simulated":
        yield memory_world(SimulatedBackend(tmp_path / "jobs", ManualClock()))
        return
    with lab_in_short_folder(nodes=2, per_node=2, spares=1) as lab:
        backend: Backend = lab.backend
        if request.param == "local":
            lab.launch_all(lab.script(SLEEPER))
        else:
            lab.launch_all(lab.script(SLEEPER), tcp_token=TOKEN)
            backend = over_tcp(lab)

        def lose_node(node: str) -> None:
            lab.processes[node].kill()
            lab.processes[node].wait()
            file = lab.node_file(node)
            wait_for(lambda: file is None or not ranks_of(file), "its ranks went with it")

        def end_rank(rank: int, signal: int) -> None:
            def living() -> dict[int, int]:
                return {view.rank: view.pid for view in backend.observe(JOB).ranks if view.state != "exited"}

            os.kill(living()[rank], signal)
            wait_for(lambda: rank not in living(), f"rank {rank} is seen to be gone")

        yield World(backend, lose_node, end_rank)


def test_a_job_that_never_ran_is_stopped_and_its_nodes_are_spare(world: World) -> None:
    seen = world.backend.observe(JOB)
    assert (seen.attempt, seen.phase, seen.ranks) == (0, "stopped", ())
    assert {node.name: node.state for node in seen.nodes} == dict.fromkeys(("node0", "node1", "node2"), "spare")


def test_ranks_are_placed_node_by_node(world: World) -> None:
    seen = world.start(1)
    assert (seen.attempt, seen.token, seen.phase) == (1, "token-1", "running")
    assert world.placement() == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}
    assert {node.name: node.state for node in seen.nodes} == {
        "node0": "active", "node1": "active", "node2": "spare",
    }  # fmt: skip


def test_started_twice_there_is_one_set_of_ranks(world: World) -> None:
    world.start(1)
    before = world.living()
    world.start(1)
    assert world.living() == before
    assert len(before) == 4


def test_an_attempt_that_is_not_newer_is_a_conflict_without_effect(world: World) -> None:
    world.start(2)
    before = world.living()
    for attempt, token in ((2, "another"), (1, "token-1")):
        with pytest.raises(Conflict):
            world.start(attempt, token=token)
    assert world.living() == before


def test_while_older_ranks_live_a_newer_attempt_is_a_conflict(world: World) -> None:
    world.start(1)
    before = world.living()
    with pytest.raises(Conflict):
        world.start(2)
    assert world.living() == before
    assert world.backend.observe(JOB).attempt == 1


def test_stop_is_true_when_no_rank_lives_and_again(world: World) -> None:
    world.start(1)
    assert world.stop(1)
    assert world.living() == set()
    assert world.backend.observe(JOB).phase == "stopped"
    assert world.stop(1)


def test_stopping_an_older_attempt_leaves_a_newer_one_alone(world: World) -> None:
    world.start(1)
    world.stop(1)
    world.start(2)
    before = world.living()
    world.stop(1)
    assert world.living() == before


def test_a_restart_in_place_keeps_every_rank_on_its_node(world: World) -> None:
    world.start(1)
    before = world.placement()
    world.end_rank(3, 9)
    assert world.backend.observe(JOB).phase == "failed"
    world.stop(1)
    world.start(2)
    assert world.placement() == before


def test_an_excluded_node_never_comes_back_and_the_spare_takes_its_place(world: World) -> None:
    world.start(1)
    world.stop(1)
    seen = world.start(2, "node0")
    assert world.placement() == {0: "node2", 1: "node2", 2: "node1", 3: "node1"}
    assert {node.name: node.state for node in seen.nodes}["node0"] == "excluded"
    world.stop(2)
    world.start(3)
    assert "node0" not in world.placement().values()


def test_too_few_nodes_is_rejected_in_a_sentence_and_starts_nothing(world: World) -> None:
    with pytest.raises(Rejected, match=r"needs 2 nodes.*1 can be used"):
        world.start(1, "node0", "node1")
    assert world.living() == set()
    assert world.backend.observe(JOB).attempt == 0


def test_a_lost_node_is_lost_and_the_spare_takes_its_place(world: World) -> None:
    world.start(1)
    world.lose_node("node1")
    seen = world.backend.observe(JOB)
    assert {node.name: node.state for node in seen.nodes}["node1"] == "lost"
    assert seen.phase == "failed"
    assert world.stop(1)
    world.start(2)
    assert world.placement() == {0: "node0", 1: "node0", 2: "node2", 3: "node2"}


def test_terminal_stays_terminal(world: World) -> None:
    world.start(1)
    world.backend.finish(JOB, "failed", "user error")
    assert world.living() == set()
    assert world.backend.observe(JOB).phase == "failed"
    world.backend.finish(JOB, "finished", "no")
    assert world.backend.observe(JOB).phase == "failed"
    with pytest.raises(Rejected, match="terminal stays terminal"):
        world.start(2)


def test_evidence_of_an_attempt_that_does_not_run_is_empty(world: World) -> None:
    world.start(1)
    assert world.backend.collect_evidence(JOB, 7, deadline_seconds=1.0) == {}


def test_an_unknown_job_is_rejected(world: World) -> None:
    with pytest.raises(Rejected):
        world.backend.observe("other")
