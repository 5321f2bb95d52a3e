"""Too few nodes, fewer nodes, nodes that come back: a job waits, shrinks and grows, and nobody loops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_engine.manifest import StepRecord
from ckpt_engine.status import AgreedStep, EngineStatus, ShardStatus, newest_agreed
from ingest.clock import ManualClock
from recovery.backend import StartRequest
from recovery.backends.memory import MemoryBackend
from recovery.calls import NOWHERE, predicted_places
from tests.recovery_world import JOB, QUICK, World, verdict

AUTO = replace(QUICK.with_modes({"gpu_lost": "auto"}), capacity_seconds=30.0, quarantine_seconds=3600.0)


def placed(world: World) -> set[str]:
    return {rank.node for rank in MemoryBackend.observe(world.backend, JOB).ranks if rank.state != "exited"}


def short_world(folder: Path, **fields: Any) -> World:
    """Its spare is lost, and one of its two nodes has to be excluded."""
    world = World(folder, replace(AUTO, **fields), watched=True)
    world.backend.lose_node(JOB, "spare")
    world.send(verdict("gpu_lost", onset_step=12))
    return world


def test_too_few_nodes_are_waited_for_and_people_are_told_what_would_help(tmp_path: Path) -> None:
    world = short_world(tmp_path)
    world.let_pass(300.0)
    assert world.states() == {"v": "waiting_capacity"}
    receipt = world.receipts()["job/1/exclude_and_restart"]
    assert receipt.outcome == "waiting"
    assert "needs 2 nodes, 1 can be used" in receipt.text
    assert "`transom unexclude n0 --job job` ends it" in receipt.text
    assert world.backend.calls.count("start") == 1, "it looks, and does not try again and again"
    assert world.backend.calls.count("observe") < 30
    world.backend.give_node(JOB, "fresh")
    world.let_pass(60.0)
    assert world.attempts() == [1, 3], "the start that started nothing had a number too"
    assert placed(world) == {"fresh", "n1"}
    assert "n0" in world.backend.starts[-1].excluded_nodes


def test_a_start_that_started_nothing_is_charged_to_no_budget(tmp_path: Path) -> None:
    world = short_world(tmp_path, capacity_retry_seconds=60.0)
    world.let_pass(600.0)
    assert world.backend.calls.count("start") > 3
    assert {one.budget for one in world.store.attempts(JOB)} == {"planned"}


def test_when_a_quarantine_ends_the_node_is_tried_again_and_the_backend_is_told(tmp_path: Path) -> None:
    world = short_world(tmp_path)
    world.let_pass(3700.0, step=10.0)
    assert world.attempts()[-1] > 1
    assert placed(world) == {"n0", "n1"}
    world.let_pass(60.0)
    assert world.store.exclusions(JOB, world.clock.now()) == []


def test_a_backend_that_was_told_of_an_exclusion_is_told_of_its_end(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.send(verdict("gpu_lost", onset_step=12))
    world.run()
    assert world.store.exclusions(JOB, world.clock.now())[0].told
    world.clock.advance(4000.0)
    world.send(verdict("rank_lost", "w", attempt=2, onset_step=40, onset_at=5000.0, at=world.clock.now()))
    world.run()
    start = world.backend.starts[-1]
    assert (start.attempt, start.excluded_nodes, start.released_nodes) == (3, (), ("n0",))
    assert world.backend._jobs[JOB].excluded == set()


def test_people_who_are_waited_for_are_told_again_after_an_hour(tmp_path: Path) -> None:
    world = short_world(tmp_path, quarantine_seconds=1e6, capacity_retry_seconds=1e6)
    world.let_pass(4 * 3600.0, step=20.0)
    told = [one for one in world.published if getattr(one, "cause", "").startswith("waiting capacity for")]
    assert 1 <= len(told) <= 4


def test_a_job_that_may_runs_on_fewer_nodes_and_takes_them_back_at_a_checkpoint(tmp_path: Path) -> None:
    world = short_world(tmp_path)
    world.backend.may_shrink(JOB, 1)
    world.catalog.steps = {10}
    world.run(60)
    start = world.backend.starts[-1]
    assert (start.nodes, start.resume_step) == (1, 10)
    assert placed(world) == {"n1"}
    assert "on 1 of 2 nodes" in world.receipts()["job/1/exclude_and_restart"].text
    assert world.store.job(JOB).nodes_wanted == 2
    world.backend.give_node(JOB, "fresh")
    for _ in range(30):
        world.round(1.0)
        world.make_steps()
    assert placed(world) == {"n1"}, "what was trained since the last checkpoint is not thrown away"
    world.catalog.steps.add(40)
    for _ in range(60):
        world.round(1.0)
        world.make_steps()
    assert placed(world) == {"fresh", "n1"}
    assert (world.backend.starts[-1].nodes, world.backend.starts[-1].resume_step) == (None, 40)
    grown = next(one for one in world.published if getattr(one, "fault_class", "") == "planned")
    assert "the job grows to 2 nodes" in grown.summary
    assert world.store.job(JOB).nodes_wanted == 0
    assert len([one for one in world.store.attempts(JOB) if one.budget != "planned"]) == 1


def test_where_the_ranks_of_a_smaller_attempt_go_is_foretold() -> None:
    backend = MemoryBackend(ManualClock(0.0))
    backend.add_job(JOB, {"n0": 2, "n1": 2, "n2": 2}, nodes_wanted=3, nproc_per_node=2)
    seen = backend.start(StartRequest(JOB, 1, "t"))
    assert predicted_places(seen, ("n0",), (), 2) == [(0, "n2"), (1, "n2"), (2, "n1"), (3, "n1")]


def test_a_rank_whose_new_place_is_unknown_is_not_taken_to_have_memory() -> None:
    backend = MemoryBackend(ManualClock(0.0))
    backend.add_job(JOB, {"n0": 2, "n1": 2}, nodes_wanted=2, nproc_per_node=2)
    seen = backend.start(StartRequest(JOB, 1, "t"))
    without = predicted_places(seen, ("n0",), ())
    assert without == [(0, NOWHERE), (1, NOWHERE), (2, "n1"), (3, "n1")], "a replaced node holds what is on disk"
    shards = [ShardStatus(rank, 20, 1, 4, "sealed", 1, True, durable=False) for rank in range(4)]
    engines = [
        EngineStatus(JOB, node, 1, tuple(held), (), 0, 0) for node, held in (("n0", shards[:2]), ("n1", shards[2:]))
    ]
    disk = [StepRecord(10, 1, 4, tuple(range(4)))]
    assert newest_agreed(engines, disk, sorted((rank.rank, rank.node) for rank in seen.ranks)) == AgreedStep(
        20, 1, "memory"
    )
    assert newest_agreed(engines, disk, without) == AgreedStep(10, 1, "disk")
