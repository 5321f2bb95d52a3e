"""The failures that recovery must survive, one named test each; the numbers are those of docs/recovery.md.

1, 2, 5, 11, 15 and 17 also run in tests/crash and tests/simulation/test_recovery_*.py, 3, 4, 6, 7 and 18 on a real
Slurm and Kubernetes, 8 in tests/unit/test_ckpt_*.py, 13 in tests/e2e, 20 in tests/e2e and in the demo; 13, 14 and 20
in test_failures_around_recovery.py, 23 in tests/e2e/test_notify_receivers.py, 26 in test_preflight.py, 27 in
test_recovery_flood.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from detectors.verdict import Culprit
from recovery.backend import Ambiguous, BackendError, StartRequest, Unavailable
from recovery.backends.memory import MemoryBackend
from recovery.calls import Unanswered, guarded
from recovery.lease import ControllerLease
from recovery.store import Fenced, RecoveryStore, StoreError
from tests.recovery_world import JOB, QUICK, World, verdict

AUTO = QUICK.with_modes({"gpu_lost": "auto", "node_lost": "auto"})
EXITS = replace(QUICK, exit_grace_seconds=15.0)


def test_1_one_verdict_a_thousand_times_is_one_restart_and_the_rest_are_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(*[verdict("rank_lost")] * 1000)
    world.run()
    world.offset = 0
    world.run()
    assert world.attempts() == [1, 2]
    assert world.store.outcomes() == [("v", 1, "opened", 1999)]


def test_2_a_storm_of_time_outs_is_one_incident_and_excludes_nobody_but_the_first(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    storm = [
        verdict(
            "collective_timeout", f"r{n}", onset_at=1000.0 + n / 300, culprits=(Culprit(rank=n, node=f"n{n // 8}"),)
        )
        for n in range(512)
    ]
    world.send(verdict("gpu_lost", "root", onset_at=999.9), *storm)
    world.run(60)
    assert world.attempts() == [1, 2]
    assert world.backend.starts[-1].excluded_nodes == ("n0",)
    assert set(world.states().values()) == {"resolved"}


@pytest.mark.parametrize("method", ["stop", "start"])
def test_3_a_call_that_times_out_after_its_effect_is_observed_and_not_repeated(tmp_path: Path, method: str) -> None:
    world = World(tmp_path)
    world.backend.fail_next(method, Ambiguous("timed out"), after_effect=True)  # type: ignore[arg-type]
    world.send(verdict("rank_lost"))
    world.run()
    assert world.attempts() == [1, 2]


def test_4_a_backend_that_is_away_for_ten_minutes_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    world = World(tmp_path, watched=True)
    world.let_pass(10.0)
    world.backend.fault = lambda method: (Unavailable("connection refused"), False)
    world.let_pass(590.0)
    assert world.published == [], "not yet"
    world.let_pass(60.0)
    (state,) = world.states().values()
    assert state == "blind"
    (action,) = world.actions().values()
    assert (action.verb, action.mode) == ("notify", "auto")
    assert "has not answered about job for 10 min" in action.rule
    world.backend.fault = lambda method: None
    world.let_pass(10.0)
    assert set(world.states().values()) == {"resolved"}
    assert world.attempts() == [1]
    assert not {"stop", "start", "finish"} & set(world.backend.calls)


def test_6_a_job_that_finishes_between_verdict_and_action_is_finished(tmp_path: Path) -> None:
    world = World(tmp_path)
    for rank in range(4):
        world.backend.end_rank(JOB, rank, exit_code=0)
    world.send(verdict("hang"))
    world.run()
    assert world.attempts() == [1]
    assert world.states() == {"v": "ignored"}
    assert "terminal" in world.actions()["job/1/ignore/v"].rule


def test_7_a_job_with_an_import_error_is_stopped_with_its_text_though_detection_says_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS, watched=True)
    world.let_pass(4.0)
    world.backend.end_rank(JOB, 2, exit_code=1, error="ModuleNotFoundError: No module named 'flash'")
    world.let_pass(14.0)
    assert world.published == [], "a verdict of detection may still come"
    world.let_pass(30.0)
    assert world.attempts() == [1]
    assert world.backend._jobs[JOB].outcome == "failed"
    assert "No module named 'flash'" in world.backend._jobs[JOB].reason
    ours = next(one for one in world.published if hasattr(one, "fault_class") and hasattr(one, "revision"))
    assert (ours.fault_class, ours.detector, ours.culprits[0].rank) == ("user_error", "recovery", 2)


def test_7_a_job_that_dies_at_once_again_and_again_is_started_twice_and_then_given_up(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS, watched=True)
    world.backend.set_step(JOB, -1)
    for _ in range(6):
        world.let_pass(4.0)
        if not MemoryBackend.observe(world.backend, JOB).ended:
            world.backend.set_step(JOB, -1)
            world.backend.end_rank(JOB, 0, exit_code=139, signal=None)
        world.let_pass(40.0)
    assert len(world.attempts()) <= 3
    assert world.backend._jobs[JOB].outcome == "failed"


def test_8_without_a_checkpoint_that_loads_the_next_older_is_taken_or_none_as_configured(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.catalog.steps = {5}  # the engine has quarantined step 10
    world.send(verdict("rank_lost", onset_step=12))
    world.run()
    assert world.backend.starts[-1].resume_step == 5


def test_9_a_loss_spike_resumes_before_it_and_taints_what_was_saved_since(tmp_path: Path) -> None:
    config = replace(QUICK.with_verbs({"loss_spike": "restart"}), rollback_margin_steps=5)
    world = World(tmp_path, config)
    world.catalog.steps = {900, 990, 1000}
    world.send(verdict("loss_spike", first_bad_step=1000, onset_step=1003, advice="notify"))
    world.run(200)
    assert world.backend.starts[-1].resume_step == 990
    assert [step for step, _, _ in world.catalog.rejected] == [995]


def test_10_a_checkpoint_that_gives_nan_twice_is_gone_behind_and_then_it_is_a_persons_turn(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.catalog.steps = {4, 6, 8, 10}
    for attempt in range(1, 6):
        world.send(verdict("nan", f"v{attempt}", attempt=attempt, first_bad_step=12, onset_step=12))
        world.run(60, steps=False, then=lambda: True)
    resumed = [start.resume_step for start in world.backend.starts[1:]]
    assert resumed == [10, 8, 6]
    assert world.states()["v4"] == "held"


def test_11_a_controller_that_was_replaced_does_nothing_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    world.round()
    old = world.controller
    world.path.with_name(world.path.name + ".lock").unlink()
    world.begin_life()
    with pytest.raises(Fenced):
        old.accept(verdict("hang", "other"), 1.0)
    world.run()
    assert world.attempts() == [1, 2]


class SimulatedLease:
    """A lease that runs out while nobody renews it."""

    def __init__(self) -> None:
        self.epoch = 1
        self.ours = True

    def take(self) -> bool:
        return self.ours

    def renew(self) -> None:
        return None

    def is_ours(self) -> bool:
        return self.ours

    def release(self) -> None:
        self.ours = False


def test_12_a_controller_whose_lease_ran_out_asks_nobody_and_keeps_what_comes(tmp_path: Path) -> None:
    world, lease = World(tmp_path), SimulatedLease()
    contract: ControllerLease = lease
    world.controller._lease = contract
    world.send(verdict("rank_lost"))
    world.round()
    calls = len(world.backend.calls)
    lease.ours = False
    world.run(20)
    assert len(world.backend.calls) == calls
    lease.ours = True
    world.run()
    assert world.attempts() == [1, 2]


def test_12_a_call_that_starts_after_the_lease_ran_out_is_not_made(tmp_path: Path) -> None:
    world, lease = World(tmp_path), SimulatedLease()
    world.controller._lease = lease
    world.send(verdict("rank_lost"))
    while "starting" not in {one.state for one in world.store.unfinished()}:
        world.round(0.1)
    (incident,) = world.store.unfinished()
    lease.ours = False
    calls = len(world.backend.calls)
    assert isinstance(guarded(world.controller._steps.call(incident), lease)(), Unanswered)
    assert len(world.backend.calls) == calls


def test_13_what_nobody_takes_waits_and_recovery_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.controller.accept(verdict("rank_lost"), world.clock.now())
    for _ in range(20):  # the bus is away: nothing is published, and so nothing is marked
        world.controller.tick(world.clock.now())
        world.clock.advance(0.3)
    assert world.attempts() == [1, 2]
    assert [one.message.action_id for one in world.store.waiting(99) if hasattr(one.message, "verb")]


def test_15_and_16_verdicts_about_other_attempts_restart_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    world.run()
    world.send(verdict("hang", "past"), verdict("hang", "future", attempt=9), verdict("hang", "where", job="nowhere"))
    world.run()
    assert world.attempts() == [1, 2]
    rules = {one.verdict_id: one.rule for one in world.actions().values() if one.verb == "ignore"}
    assert "stale attempt" in rules["past"]
    assert "unknown attempt" in rules["future"]
    assert "unknown job" in rules["where"]


def test_18_excluded_nodes_that_leave_too_few_are_waited_for_without_a_loop(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.backend.lose_node(JOB, "spare")
    world.send(verdict("gpu_lost"))
    world.let_pass(120.0)
    assert world.states() == {"v": "waiting_capacity"}
    assert world.backend.calls.count("start") == 1
    assert "the oldest exclusion is n0" in world.receipts()["job/1/exclude_and_restart"].text


def test_19_a_process_that_nothing_kills_is_told_asked_for_on_and_never_run_beside(tmp_path: Path) -> None:
    world = World(tmp_path, replace(QUICK, stop_seconds_max=5.0, fence_seconds_max=600.0))
    world.backend.refuse_to_die(JOB, 2)
    world.send(verdict("hang"))
    world.let_pass(60.0)
    assert world.states() == {"v": "fence_failed"}
    assert world.receipts()["job/1/restart"].outcome == "failed"
    world.backend._immortal.clear()
    world.run()
    assert world.attempts() == [1, 2]


def test_21_a_node_that_an_operator_gives_back_is_used_and_its_strikes_stay(tmp_path: Path) -> None:
    world = World(tmp_path, replace(AUTO, quarantine_mode="auto"), watched=True)
    world.send(verdict("gpu_lost", onset_step=12))
    world.run()
    assert world.store.excluded(JOB, world.clock.now()) == ("n0",)
    world.backend.give_node(JOB, "n0")
    world.let_pass(5.0)
    assert world.store.excluded(JOB, world.clock.now()) == ()
    assert world.store.counters(JOB, world.clock.now(), 1e6, 1e6).strikes == {"n0": 1}


def test_21_an_attempt_that_an_operator_starts_is_the_jobs_attempt(tmp_path: Path) -> None:
    world = World(tmp_path, watched=True)
    world.send(verdict("rank_lost"))
    world.run()
    MemoryBackend.stop(world.backend, JOB, 2, grace_seconds=0.0, deadline_seconds=1.0)
    MemoryBackend.start(world.backend, StartRequest(JOB, 7, "theirs"))
    world.backend.set_step(JOB, 50)
    world.let_pass(5.0)
    world.send(verdict("hang", "old", attempt=2), verdict("rank_lost", "new", attempt=7, onset_step=50))
    world.run()
    assert world.attempts() == [1, 2, 7, 8]
    assert world.states()["old"] == "ignored"


def test_22_a_masked_exit_code_is_told_by_the_error_file(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS, watched=True)
    world.let_pass(4.0)
    world.backend.end_rank(JOB, 3, exit_code=42, error="SystemExit: 42")
    for rank in range(3):
        world.backend.end_rank(JOB, rank, exit_code=143)
    world.let_pass(60.0)
    assert world.backend._jobs[JOB].outcome == "failed"
    assert "Rank 3 on n1 ended with exit code 42" in world.backend._jobs[JOB].reason


def test_24_a_damaged_state_file_is_refused_and_nothing_is_done(tmp_path: Path) -> None:
    path = tmp_path / "recovery.sqlite"
    RecoveryStore(path).close()
    path.write_bytes(b"\0" * 4096)
    with pytest.raises(StoreError, match="nothing is done"):
        RecoveryStore(path)


def test_25_a_verdict_that_is_not_sure_is_only_told_while_the_job_is_well(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("hang", culprits=(Culprit(rank=1, node="n0", confidence=0.1),)))
    world.run()
    assert world.states() == {"v": "notified"}
    assert world.attempts() == [1]


# What the watch must leave alone


def test_a_verdict_that_comes_in_time_knows_more_than_exits_do(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS, watched=True)
    world.let_pass(4.0)
    world.backend.end_rank(JOB, 1, exit_code=1)
    world.let_pass(5.0)
    world.send(verdict("gpu_lost", onset_step=12))
    world.let_pass(60.0)
    assert world.attempts() == [1], "gpu_lost is only observed, and the watch does not go behind that"
    assert world.states() == {"v": "notified"}


def test_a_job_that_somebody_left_behind_last_week_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS)
    for rank in range(4):
        world.backend.end_rank(JOB, rank, signal=9)
    world.watched = True
    world.store.close()
    world.begin_life()
    world.let_pass(120.0)
    assert world.published == []


def test_an_end_that_an_operator_wants_is_nobodys_to_undo(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS, watched=True)
    world.let_pass(4.0)
    world.backend.hold_there(JOB, "JobHeldAdmin")
    world.backend.end_by_scheduler(JOB, "CANCELLED")
    world.let_pass(120.0)
    assert world.attempts() == [1]
    assert world.published == []


def test_a_preempted_job_goes_on_and_pays_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, replace(EXITS, restarts_max=0), watched=True)
    world.let_pass(4.0)
    world.backend.end_by_scheduler(JOB, "PREEMPTED")
    world.let_pass(40.0)
    assert world.attempts() == [1, 2]
    assert [one.budget for one in world.store.attempts(JOB)] == ["planned"]


def test_before_a_planned_stop_memory_is_brought_to_disk(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked: list[tuple[str, float]] = []

    def persist_newest(job: str, *, deadline_seconds: float) -> str:
        assert "stop" not in world.backend.calls
        asked.append((job, deadline_seconds))
        return ""

    world.catalog.persist_newest = persist_newest  # type: ignore[attr-defined]
    world.send(verdict("preempted", culprits=(Culprit(node="n0"),)))
    world.run()
    assert asked == [(JOB, QUICK.persist_seconds_max)]
    assert world.attempts() == [1, 2]
    assert "memory is on disk" in world.receipts()["job/1/restart"].text


def test_a_script_that_does_not_load_what_it_is_told_is_told_of_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost", onset_step=12))
    world.run(8, steps=False)
    world.backend.set_step(JOB, 1)
    for _ in range(5):
        world.round(1.0)
    told = [one for one in world.published if getattr(one, "outcome", "") == "failed"]
    assert len(told) == 1
    assert "was to resume from step 10 and is at step 1" in told[0].text


def test_a_fault_of_the_backend_in_any_call_ends_no_tick(tmp_path: Path) -> None:
    world = World(tmp_path, EXITS, watched=True)
    world.backend.fault = lambda method: (BackendError("?"), False)
    world.let_pass(20.0)
    world.backend.fault = lambda method: None
    world.let_pass(20.0)
    assert world.published == []
