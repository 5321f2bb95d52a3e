"""One suite for every scheduler: what a backend may rely on when it asks for other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ingest.events import RankPlace
from recovery.backend import Conflict, Rejected
from recovery.launcher.protocol import JobEnd, Placement
from tests.allocation_labs import LABS
from tests.allocation_world import AllocationWorld

END = JobEnd(outcome="failed", reason="for the test", at=1_790_000_000.0)


@pytest.fixture(scope="module", params=sorted(LABS))
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with LABS[request.param](tmp_path_factory.mktemp(request.param)) as lab:
        yield lab


@pytest.fixture
def world(lab: Any) -> Iterator[AllocationWorld]:
    with lab.world() as world:
        yield world


def placement(attempt: int, token: str) -> Placement:
    places = (RankPlace(rank=0, local_rank=0, node="n1"), RankPlace(rank=1, local_rank=0, node="n2"))
    return Placement(attempt=attempt, token=token, places=places, master_addr="n1", master_port=20_001, resume_step=7)


def test_a_job_that_nobody_has_submitted_is_absent(world: AllocationWorld) -> None:
    assert world.allocation.look(world.job).phase == "absent"
    assert world.allocation.launchers(world.job) == ()


def test_submitted_it_gets_its_nodes_and_nobody_has_written_an_attempt_on_it(world: AllocationWorld) -> None:
    view = world.submit()
    assert len(set(view.nodes)) == 2
    assert (view.attempt, view.token, view.held, view.down_nodes) == (0, "", "", ())


def test_submitted_twice_it_keeps_its_allocation(world: AllocationWorld) -> None:
    first = world.submit()
    again = world.submit()
    assert (again.generation, again.nodes) == (first.generation, first.nodes)


def test_other_nodes_come_without_the_excluded_one_and_carry_attempt_and_token(world: AllocationWorld) -> None:
    first = world.submit()
    bad = first.nodes[0]
    view = world.replace(2, bad)
    assert bad not in view.nodes
    assert len(set(view.nodes)) >= 2
    assert view.generation > first.generation
    assert (view.attempt, view.token) == (2, "token-2")
    assert bad in view.excluded_nodes


def test_a_controller_that_was_started_just_now_reads_the_same(world: AllocationWorld) -> None:
    world.submit()
    view = world.replace(2)
    seen = world.anew().look(world.job)
    assert (seen.phase, seen.generation, seen.nodes) == (view.phase, view.generation, view.nodes)
    assert (seen.attempt, seen.token) == (2, "token-2")


def test_replaced_twice_for_one_attempt_there_is_one_set_of_nodes(world: AllocationWorld) -> None:
    first = world.submit()
    world.allocation.replace(world.job, attempt=2, token="t", excluded_nodes=(first.nodes[1],))
    world.anew().replace(world.job, attempt=2, token="t", excluded_nodes=(first.nodes[1],))
    view = world.replace(2, first.nodes[1], token="t")
    again = world.allocation.replace(world.job, attempt=2, token="t", excluded_nodes=(first.nodes[1],))
    assert (again.generation, again.nodes) == (view.generation, view.nodes)
    assert view.generation == first.generation + 1


def test_an_attempt_that_is_not_newer_is_a_conflict_without_effect(world: AllocationWorld) -> None:
    world.submit()
    view = world.replace(3)
    for attempt, token in ((3, "another"), (2, "token-2")):
        with pytest.raises(Conflict):
            world.allocation.replace(world.job, attempt=attempt, token=token, excluded_nodes=())
    seen = world.allocation.look(world.job)
    assert (seen.generation, seen.nodes, seen.token) == (view.generation, view.nodes, "token-3")


def test_too_few_nodes_is_rejected_before_anything_is_given_back(world: AllocationWorld) -> None:
    first = world.submit()
    others = [node for node in ("n1", "n2", "n3", "n4") if node not in first.nodes]
    with pytest.raises(Rejected):
        world.allocation.replace(world.job, attempt=2, token="t", excluded_nodes=(*others[:2], first.nodes[0]))
    seen = world.allocation.look(world.job)
    assert (seen.phase, seen.generation, seen.nodes) == ("running", first.generation, first.nodes)
    assert seen.attempt == 0


def test_what_runs_on_a_node_is_vouched_for_only_when_it_is_gone(world: AllocationWorld) -> None:
    first = world.submit()
    bad = first.nodes[0]
    assert not world.allocation.nothing_runs_on(world.job, bad)
    world.replace(2, bad)
    world.wait(lambda view: world.allocation.nothing_runs_on(world.job, bad))


def test_a_node_that_is_down_is_vouched_for_only_once_it_is_excluded(world: AllocationWorld) -> None:
    if world.take_down is None:
        pytest.fail(f"the lab of {world.allocation.name} cannot take a node down")
    first = world.submit()
    bad = first.nodes[0]
    world.take_down(bad)
    try:
        world.wait(lambda view: bad in view.down_nodes)
        assert not world.allocation.nothing_runs_on(world.job, bad)
        world.allocation.records(world.job).write_excluded(frozenset({bad}))
        assert world.allocation.nothing_runs_on(world.job, bad)
    finally:
        world.bring_up(bad)


def test_records_are_kept_and_a_placement_is_never_overtaken(world: AllocationWorld) -> None:
    records = world.allocation.records(world.job)
    assert (records.placement(), records.excluded(), records.end()) == (None, frozenset(), None)
    spec = records.spec()
    assert spec is not None
    assert (spec.job, spec.nodes) == (world.job, 2)
    records.write_placement(placement(2, "t"))
    records.write_placement(placement(2, "t"))
    for attempt, token in ((2, "another"), (1, "t")):
        with pytest.raises(Conflict):
            records.write_placement(placement(attempt, token))
    records.write_excluded(frozenset({"n1", "n3"}))
    anew = world.anew().records(world.job)
    assert anew.placement() == placement(2, "t")
    assert anew.excluded() == {"n1", "n3"}
    anew.write_placement(placement(3, "u"))
    assert records.placement() == placement(3, "u")


def test_the_first_end_of_a_job_stays(world: AllocationWorld) -> None:
    records = world.allocation.records(world.job)
    records.write_end(END)
    records.write_end(JobEnd(outcome="finished", reason="no", at=1.0))
    assert world.anew().records(world.job).end() == END


def test_released_its_nodes_go_back_and_terminal_stays_terminal(world: AllocationWorld) -> None:
    first = world.submit()
    world.allocation.records(world.job).write_end(END)
    world.allocation.release(world.job, END)
    world.allocation.release(world.job, END)
    world.wait(lambda view: view.phase in ("ended", "absent"))
    for node in first.nodes:
        world.wait(lambda view, node=node: world.allocation.nothing_runs_on(world.job, node))
    with pytest.raises(Rejected):
        world.allocation.replace(world.job, attempt=2, token="t", excluded_nodes=())
    assert world.allocation.look(world.job).phase in ("ended", "absent")
