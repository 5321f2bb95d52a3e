"""What people ask for: each command once, each with an answer that stands in the record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from detectors.verdict import Culprit
from recovery.backend import Unavailable
from recovery.backends.memory import MemoryBackend
from tests.recovery_world import JOB, QUICK, World, verdict

AUTO = QUICK.with_modes({"gpu_lost": "auto"})


def answers(world: World, verb: str) -> list[Any]:
    """Receipts of the audit rows of a job command, oldest first."""
    ids = {one.action_id for one in world.published if getattr(one, "verb", "") == verb and not one.verdict_id}
    return [one for one in world.published if hasattr(one, "outcome") and one.action_id in ids]


def test_a_held_job_is_left_alone_and_resumed_it_is_recovered(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.order("hold", note="maintenance until noon")
    world.run()
    world.send(verdict("rank_lost"))
    world.run()
    assert world.attempts() == [1]
    assert world.states() == {"v": "held"}
    held = next(one for one in world.actions().values() if one.verdict_id == "v")
    assert "hold by ada: maintenance until noon" in held.rule
    world.order("resume")
    world.run()
    assert world.attempts() == [1, 2]
    assert [one.outcome for one in answers(world, "hold") + answers(world, "resume")] == ["done", "done"]
    assert all("ada" in one.rule for one in world.actions().values() if one.verb in ("hold", "resume"))


def test_a_command_that_is_delivered_again_is_obeyed_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(3):
        world.order("hold", command_id="the same")
    world.run()
    assert len(answers(world, "hold")) == 1


def test_a_hold_stops_a_restart_at_its_next_safe_point(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.fault = lambda method: (Unavailable("x"), False) if method == "stop" else None
    world.send(verdict("rank_lost"))
    world.run(4)
    world.order("hold")
    world.run(2)
    world.backend.fault = lambda method: None
    world.run(20)
    assert world.attempts() == [1]
    assert "start" not in world.backend.calls
    assert world.states() == {"v": "held"}
    world.order("resume")
    world.run()
    assert world.attempts() == [1, 2]


def test_a_held_plan_may_be_approved_while_everything_else_stays_held(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.order("hold")
    world.send(verdict("rank_lost"))
    world.run()
    plan = next(one.plan_hash for one in world.actions().values() if one.verdict_id == "v")
    world.order("approve", "v", plan_hash=plan)
    world.run()
    assert world.attempts() == [1, 2]
    world.send(verdict("hang", "w", attempt=2, onset_step=40, onset_at=1100.0))
    world.run()
    assert world.attempts() == [1, 2]
    assert world.states()["w"] == "held"


def test_an_aborted_job_is_over_whatever_was_under_way(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.fault = lambda method: (Unavailable("x"), False) if method == "start" else None
    world.send(verdict("rank_lost"))
    world.run(8)
    world.order("abort", note="wrong data", command_id="end")
    world.run(20)
    world.backend.fault = lambda method: None
    world.send(verdict("hang", "later", attempt=2))
    world.run(20)
    assert world.attempts() == [1]
    assert (world.backend._jobs[JOB].outcome, world.backend._jobs[JOB].reason) == (
        "stopped", "abort by ada: wrong data",
    )  # fmt: skip
    assert world.states() == {"v": "resolved", "job/2/abort/end": "stopped", "later": "ignored"}
    assert world.receipts()["job/2/stop"].outcome == "done"
    world.order("abort")
    world.run()
    assert answers(world, "stop")[-1].outcome == "failed"


def test_a_healthy_job_can_be_ended(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.order("abort")
    world.run()
    assert MemoryBackend.observe(world.backend, JOB).ended
    assert world.store.job(JOB).outcome == "stopped"


def test_a_node_is_given_back_by_a_person_and_keeps_its_strikes(tmp_path: Path) -> None:
    world = World(tmp_path, replace(AUTO, quarantine_mode="auto"))
    world.send(verdict("gpu_lost", onset_step=12))
    world.run()
    assert world.store.excluded(JOB, world.clock.now()) == ("n0",)
    world.order("unexclude", node="n0")
    world.order("unexclude", node="n7")
    world.run()
    assert [one.outcome for one in answers(world, "unexclude")] == ["done", "done"]
    assert "n7 is not excluded by recovery" in answers(world, "unexclude")[1].text
    assert world.store.excluded(JOB, world.clock.now()) == ()
    other = (Culprit(rank=2, node="n1"),)
    world.send(verdict("rank_lost", "w", attempt=2, onset_step=40, onset_at=1100.0, culprits=other))
    world.run()
    assert world.backend.starts[-1].released_nodes == ("n0", "n7")
    assert world.store.released(JOB, world.clock.now()) == (), "the backend has been told"
    assert world.store.counters(JOB, world.clock.now(), 1e6, 1e6).strikes == {"n0": 1, "n1": 1}


def test_resume_closes_the_breaker_and_fresh_exclusions_count_again(tmp_path: Path) -> None:
    world = World(tmp_path, replace(AUTO, breaker_nodes_max=0, breaker_share=0.0))
    world.send(verdict("gpu_lost"))
    world.run()
    assert world.states() == {"v": "held"}
    assert "the breaker is open: 1 of 3 nodes" in next(iter(world.actions().values())).rule
    world.order("resume")
    world.run()
    assert world.states() == {"v": "held"}, "one more would open it again, so it stays a person's decision"
    plan = world.store.incident("v").plan.plan_hash  # type: ignore[union-attr]
    world.order("approve", "v", plan_hash=plan)
    world.run()
    assert world.attempts() == [1, 2]


def test_what_is_only_noted_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("straggler"))
    world.order("mute", "v", until=2000.0)
    world.order("acknowledge", "v")
    world.run()
    assert [outcome for _, outcome in world.store.command_outcomes()] == ["noted", "noted"]
    assert world.states() == {"v": "notified"}
