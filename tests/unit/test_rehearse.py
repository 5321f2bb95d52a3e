"""A dry run decides as recovery would, and does nothing; explain reads beside a controller that runs."""

from pathlib import Path

import msgspec
import pytest

from detectors.verdict import Verdict
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.memory_bus import MemoryBus
from pipelines.explain import explain_from, lines_of
from pipelines.rehearse import as_json, in_words, rehearsal, rehearse_bus, rehearse_recording
from recovery.action import RECOVERY_TYPES, Action
from recovery.policy_config import PolicyConfig
from tests.recovery_world import JOB, QUICK, World, verdict

ROOT = Path(__file__).resolve().parents[2]
CONFIG = PolicyConfig().with_modes({"gpu_lost": "approve"})


def heard(*verdicts: Verdict, config: PolicyConfig = CONFIG) -> list[Action]:
    with rehearsal(config) as one:
        actions = [action for verdict in verdicts for action in one.hear(verdict)]
        return actions + list(one.end())


def test_every_decision_is_told_with_its_plan_and_nothing_is_waited_for() -> None:
    actions = heard(
        verdict("rank_lost", "a", onset_step=12),
        verdict("gpu_lost", "b", attempt=2, onset_step=30, onset_at=1100.0, at=1100.0),
        verdict("straggler", "c", attempt=2, at=1101.0),
    )
    assert [(one.verdict_id, one.verb, one.mode) for one in actions] == [
        ("a", "restart", "auto"), ("b", "exclude_and_restart", "approve"), ("c", "notify", "auto"),
    ]  # fmt: skip
    assert f"plan {actions[1].plan_hash}" in in_words(actions[1])
    assert "without n0" in in_words(actions[1])
    assert [one["verb"] for one in msgspec.json.decode(as_json(actions))] == [one.verb for one in actions]


def test_budgets_are_charged_as_they_would_be() -> None:
    verdicts = [
        verdict("hang", f"v{n}", attempt=n, onset_step=20 * n, onset_at=1000.0 * n, at=1000.0 * n) for n in range(1, 6)
    ]
    assert [one.verb for one in heard(*verdicts)] == ["restart", "restart", "restart", "hold", "hold"]


def test_an_unsettled_verdict_is_decided_when_its_time_is_over() -> None:
    first = verdict("rank_lost", "a", settled=False)
    assert [one.verb for one in heard(first)] == ["restart"]
    both = heard(first, verdict("gpu_lost", "a", revision=2, at=1001.0))
    assert [one.verb for one in both] == ["exclude_and_restart"]


def test_a_user_error_ends_the_job_for_what_comes_after() -> None:
    actions = heard(verdict("user_error", "a"), verdict("rank_lost", "b", attempt=2, at=1010.0))
    assert [one.verb for one in actions] == ["stop", "ignore"]
    assert "terminal" in actions[1].rule


def test_the_verdicts_of_a_recorded_run_are_rehearsed() -> None:
    told: list[Action] = []
    assert rehearse_recording(ROOT / "data" / "six-faults", PolicyConfig(), told.append) > 5
    assert {"restart", "stop", "notify"} <= {one.verb for one in told}
    again: list[Action] = []
    rehearse_recording(ROOT / "data" / "six-faults", PolicyConfig(), again.append)
    assert told == again


def test_what_lies_on_the_bus_is_rehearsed_and_stays_there() -> None:
    bus, codec = MemoryBus(clock=ManualClock(1000.0)), Codec(RECOVERY_TYPES)
    bus.create_topics(1)
    producer = bus.producer()
    encoded = codec.encode(verdict("hang"))
    producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
    producer.send("verdicts", JOB, (), b"no message")
    producer.flush(1.0)
    for group in ("one", "two"):
        told: list[Action] = []
        assert rehearse_bus(bus, group, PolicyConfig(), told.append, None) == 1
        assert [one.verb for one in told] == ["restart"]
    consumer = bus.consumer("after", ("actions",))
    assert consumer.poll(10, 0.0) == []


def test_explain_tells_state_budgets_and_what_would_be_done_beside_a_controller_that_runs(tmp_path: Path) -> None:
    world = World(tmp_path, QUICK)
    world.send(verdict("rank_lost", "a"), verdict("collective_timeout", "b"), verdict("rank_lost", "a"))
    world.run()
    now = world.clock.now()
    for name in ("a", "b"):
        explained = explain_from(world.path, name, QUICK, now)
        assert explained is not None
        assert (explained.incident_id, explained.state) == ("a", "resolved")
        assert explained.restarts["infra"] == explained.restarts["all"] == 1
        assert explained.strikes == {"n0": 1}
        assert explained.now is not None
        assert "stale attempt" in explained.now.rule
        assert any("delivered 2 times" in outcome for outcome in explained.outcomes)
        assert any("1 of 10 infra" in line for line in lines_of(explained, now))
    world.send(verdict("gpu_lost", "c", attempt=2))
    world.run()
    observed = explain_from(world.path, "c", QUICK, now)
    assert observed is not None
    assert observed.now is not None
    assert (observed.now.verb, observed.now.mode) == ("exclude_and_restart", "observe")
    assert len(observed.now.plan_hash) == 64
    world.round()  # the controller has not lost its lease over this


def test_what_recovery_does_not_know_is_not_explained(tmp_path: Path) -> None:
    assert explain_from(tmp_path / "recovery.sqlite", "a", QUICK, 1.0) is None
    world = World(tmp_path)
    assert explain_from(world.path, "nobody", QUICK, 1.0) is None
    world.store.close()


@pytest.mark.parametrize("fault_class", ["rank_lost", "user_error", "gpu_lost", "straggler"])
def test_the_same_stream_gives_the_same_decisions(fault_class: str) -> None:
    assert heard(verdict(fault_class)) == heard(verdict(fault_class))
