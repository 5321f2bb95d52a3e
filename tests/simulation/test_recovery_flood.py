"""27 of docs/recovery.md: one job floods, and the others do not wait."""

from pathlib import Path

from recovery.backend import StartRequest
from tests.recovery_world import World, verdict


def test_27_a_job_that_floods_does_not_keep_the_verdict_of_another_waiting(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.add_job("other", {"m0": 2, "m1": 2}, nodes_wanted=2, nproc_per_node=2)
    world.backend.start(StartRequest("other", 1, "first"))
    now = world.clock.now()
    flood = [verdict("straggler", f"s{number}", severity="warning", advice="notify") for number in range(1500)]
    world.controller.accept_all([*flood, verdict("rank_lost", "theirs", job="other")], now)
    world.round()
    assert world.store.incident_of_verdict("theirs") == "theirs", "taken up in the first round"
    assert world.store.new_verdicts(1), "and the flood is not read yet"
