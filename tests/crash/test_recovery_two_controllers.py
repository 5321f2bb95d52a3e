"""Two controllers over one file: the older one, whatever it still has in flight, does nothing twice."""

from pathlib import Path

import pytest

from recovery.controller import Controller
from recovery.store import Fenced
from tests.recovery_world import World, verdict


def go_on(controller: Controller, now: float) -> None:
    for _ in range(50):
        controller.tick(now)
        controller.accept(verdict("hang", "other"), now)


@pytest.mark.parametrize("rounds", range(1, 7))
def test_an_old_controller_that_wakes_up_is_fenced_at_every_stage(tmp_path: Path, rounds: int) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    for _ in range(rounds):
        world.round()
    old = world.controller
    world.path.with_name(world.path.name + ".lock").unlink()  # it lost its lease and does not know
    world.begin_life()
    world.offset = 0
    with pytest.raises(Fenced):
        go_on(old, world.clock.now())
    world.run()
    assert world.attempts() == [1, 2]
    assert world.states() == {"v": "resolved"}


def test_a_start_that_the_old_controller_has_in_flight_is_the_same_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    world.round()
    while "starting" not in {one.state for one in world.store.unfinished()}:
        world.round(0.1)
    (incident,) = world.store.unfinished()
    late_call = world.controller._steps.call(incident)
    world.path.with_name(world.path.name + ".lock").unlink()
    world.begin_life()
    world.run()
    late_call()
    assert world.attempts() == [1, 2]
