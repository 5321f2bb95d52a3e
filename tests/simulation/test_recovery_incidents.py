"""Recovery from verdict to the steady new attempt, over a simulated job: one story per rule."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from detectors.verdict import Culprit
from recovery.action import Command
from recovery.backend import Ambiguous, BackendError, Rejected, StartRequest, Unavailable
from recovery.backends.memory import MemoryBackend
from recovery.controller import Controller
from recovery.workers import InlineWorkers
from tests.recovery_world import JOB, QUICK, World, verdict

AUTO = QUICK.with_modes({"gpu_lost": "auto", "node_lost": "auto"})


def command(verb: str, incident_id: str = "v", plan_hash: str = "", command_id: str = "c1") -> Command:
    return Command(
        command_id=command_id, job=JOB, at=1.0, verb=verb, incident_id=incident_id, author="ada", plan_hash=plan_hash
    )


def test_a_lost_rank_is_restarted_in_place_from_memory(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.end_rank(JOB, 1, signal=9)
    world.send(verdict("rank_lost", onset_step=12))
    world.run()
    assert world.attempts() == [1, 2]
    action = world.actions()["job/1/restart"]
    assert (action.next_attempt, action.resume_step, action.resume_tier) == (2, 10, "memory")
    assert (action.verb, action.mode, action.excluded_nodes) == ("restart", "auto", ())
    assert world.receipts()["job/1/restart"].outcome == "done"
    assert world.states() == {"v": "resolved"}
    assert world.catalog.asked == [(None, [(0, "n0"), (1, "n0"), (2, "n1"), (3, "n1")])]


def test_the_action_is_told_before_the_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    world.backend.fault = lambda method: (Unavailable("down"), False) if method == "start" else None
    world.run(10)
    assert world.attempts() == [1]
    assert world.actions()["job/1/restart"].next_attempt == 2


def test_a_thousand_replays_are_one_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(*[verdict("rank_lost")] * 500)
    world.run()
    world.send(*[verdict("rank_lost")] * 500)
    world.run()
    assert world.attempts() == [1, 2]
    assert world.store.outcomes() == [("v", 1, "opened", 999)]


def test_a_storm_of_verdicts_about_one_attempt_is_one_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(
        *[verdict("collective_timeout", f"v{rank}", onset_at=1000.0 + rank) for rank in range(64)],
        verdict("rank_lost", "root", onset_at=999.0),
    )
    world.run()
    assert world.attempts() == [1, 2]
    assert world.states()["v0"] == "resolved"
    assert len(world.states()) == 1


def test_only_an_unsettled_verdict_is_waited_for_and_at_most_three_seconds(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost", settled=False))
    world.run(9)
    assert world.attempts() == [1]
    world.run(10)
    assert world.attempts() == [1, 2]


def test_a_settled_revision_ends_the_wait_and_decides(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.send(verdict("rank_lost", settled=False))
    world.run(2)
    world.send(verdict("gpu_lost", revision=2))
    world.run(6)
    assert world.attempts() == [1, 2]
    assert world.actions()["job/1/exclude_and_restart"].excluded_nodes == ("n0",)


def test_the_spare_takes_the_place_of_an_excluded_node(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.send(verdict("gpu_lost"))
    world.run()
    assert world.catalog.asked == [(None, [(0, "spare"), (1, "spare"), (2, "n1"), (3, "n1")])]
    placed = {rank.rank: rank.node for rank in world.backend.observe(JOB).ranks}
    assert sorted(placed.items()) == world.catalog.asked[0][1]
    world.send(verdict("rank_lost", "w", attempt=2, onset_step=30, onset_at=1100.0))
    world.run()
    assert world.backend.starts[-1].excluded_nodes == ("n0",), "an exclusion outlives its incident"


def test_nan_rejects_and_resumes_before_the_first_bad_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("nan", first_bad_step=10))
    world.run()
    assert world.backend.starts[-1].resume_step == 5
    assert [(step, attempt) for step, attempt, _ in world.catalog.rejected] == [(10, 1)]
    assert world.catalog.asked[0][0] == 10, "the catalog is told, even if the rejection should be lost"
    action = world.actions()["job/1/restart"]
    assert (action.reject_from_step, action.resume_step) == (10, 5)


def test_evidence_is_collected_before_a_hang_is_stopped(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.evidence = {0: "in all_reduce", 2: "in all_reduce", 3: "in forward"}
    world.backend.stall_rank(JOB, 1)
    world.send(verdict("hang", onset_step=12))
    world.run()
    calls = world.backend.calls
    assert calls.index("collect_evidence") < calls.index("stop")
    assert world.store.stacks(JOB, 1) == {0: "in all_reduce", 2: "in all_reduce", 3: "in forward"}
    assert "stacks of ranks: 0, 2, 3" in world.receipts()["job/1/restart"].text
    assert world.attempts() == [1, 2]


def test_evidence_that_cannot_be_had_does_not_keep_the_job_down(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.fault = lambda method: (Unavailable("x"), False) if method == "collect_evidence" else None
    world.send(verdict("hang"))
    world.run()
    assert world.attempts() == [1, 2]


def test_a_user_error_ends_the_job_and_later_verdicts_find_it_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("user_error", summary="ValueError: bad label"))
    world.run()
    world.send(verdict("rank_lost", "w"), verdict("hang", "x", attempt=2))
    world.run()
    assert world.attempts() == [1]
    assert world.backend._jobs[JOB].outcome == "failed"
    assert "ValueError: bad label" in world.backend._jobs[JOB].reason
    assert world.states() == {"v": "stopped", "w": "ignored", "x": "ignored"}
    assert "terminal" in world.actions()["job/1/ignore/w"].rule


def test_a_job_that_finishes_while_it_is_stopped_is_not_restarted(tmp_path: Path) -> None:
    world = World(tmp_path)

    def finish_first(method: str) -> None:
        if method == "stop":
            for rank in range(4):
                world.backend.end_rank(JOB, rank, exit_code=0)

    world.backend.fault = finish_first
    world.send(verdict("hang"))
    world.run()
    assert world.attempts() == [1]
    assert world.states() == {"v": "resolved"}
    assert "finished by itself" in world.receipts()["job/1/restart"].text


def test_what_touches_a_node_is_observed_until_a_person_approves_that_plan(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("gpu_lost"))
    world.run()
    assert world.attempts() == [1]
    (action,) = world.actions().values()
    assert (action.verb, action.mode, action.excluded_nodes) == ("exclude_and_restart", "observe", ("n0",))
    assert world.receipts()[action.action_id].outcome == "observed"
    world.controller.accept_command(command("approve", plan_hash="another"), 1.0)
    world.run()
    assert world.attempts() == [1]
    world.controller.accept_command(command("approve", plan_hash=action.plan_hash, command_id="c2"), 1.0)
    world.run()
    assert world.attempts() == [1, 2]
    assert "approved by a person" in world.actions()["job/1/exclude_and_restart"].rule


def test_a_class_in_mode_approve_waits_for_its_plan_and_a_rejection_holds(tmp_path: Path) -> None:
    world = World(tmp_path, QUICK.with_modes({"rank_lost": "approve"}))
    world.send(verdict("rank_lost"))
    world.run(6)
    (action,) = world.actions().values()
    assert world.receipts()[action.action_id].outcome == "awaiting_approval"
    assert world.states() == {"v": "awaiting_approval"}
    world.controller.accept_command(command("reject"), 1.0)
    world.run()
    assert world.states() == {"v": "held"}
    world.controller.accept_command(command("approve", plan_hash=action.plan_hash, command_id="c2"), 1.0)
    world.run()
    assert world.attempts() == [1, 2]


def test_an_approval_that_nobody_gives_is_held(tmp_path: Path) -> None:
    world = World(tmp_path, replace(QUICK.with_modes({"rank_lost": "approve"}), approval_seconds_max=2.0))
    world.send(verdict("rank_lost"))
    world.run(20)
    assert world.states() == {"v": "held"}
    assert world.attempts() == [1]


def test_a_straggler_is_only_told_and_closes_by_itself(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("straggler"))
    world.run()
    assert world.states() == {"v": "notified"}
    assert "observe" not in world.backend.calls
    world.send(verdict("straggler", revision=2, status="closed"))
    world.run()
    assert world.states() == {"v": "resolved"}
    assert world.attempts() == [1]


def test_a_straggler_that_turns_out_to_hang_is_restarted(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("straggler"))
    world.run()
    world.send(verdict("hang", revision=2))
    world.run()
    assert world.attempts() == [1, 2]


def test_a_verdict_closed_before_the_decision_restarts_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("hang", settled=False))
    world.run(2)
    world.send(verdict("hang", revision=2, status="closed"))
    world.run()
    assert world.states() == {"v": "resolved"}
    assert world.attempts() == [1]


def test_a_stale_verdict_excludes_and_rejects_but_restarts_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.send(verdict("rank_lost"))
    world.run()
    world.send(verdict("gpu_lost", "late", culprits=(Culprit(node="n1"),)), verdict("nan", "bad", first_bad_step=7))
    world.run()
    world.run(3)
    assert world.attempts() == [1, 2]
    assert world.states()["late"] == world.states()["bad"] == "ignored"
    assert "stale attempt" in world.actions()["job/1/ignore/late"].rule
    assert world.store.excluded(JOB, world.clock.now()) == ("n1",)
    assert [(step, attempt) for step, attempt, _ in world.catalog.rejected] == [(7, 1)]  # attempt 2 trains step 7 anew
    assert world.store.open_rejections() == []


def test_evidence_that_comes_while_the_old_attempt_is_stopped_widens_the_restart(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.backend.fault = lambda method: (Unavailable("x"), False) if method == "stop" else None
    world.send(verdict("rank_lost"))
    world.run(4)
    world.send(verdict("gpu_lost", "w"))
    world.run(2)
    world.backend.fault = lambda method: None
    world.run()
    assert world.attempts() == [1, 2]
    assert world.backend.starts[-1].excluded_nodes == ("n0",)
    assert world.states() == {"v": "resolved"}


def test_a_failure_in_probation_is_a_new_incident_that_counts_against_its_cause(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost", onset_step=12))
    world.run(6, steps=False)
    assert world.states() == {"v": "probation"}
    world.send(verdict("rank_lost", "w", attempt=2, onset_step=11))
    world.run(60)
    assert world.states() == {"v": "relapsed", "w": "resolved"}
    assert "1 of 3 for rank_lost rank 1" in world.actions()["job/2/restart"].rule
    assert any(getattr(one, "state", "") == "backing_off" for one in world.published)


def test_restarts_that_bring_nothing_end_with_a_person(tmp_path: Path) -> None:
    world = World(tmp_path)
    for attempt in range(1, 5):
        world.send(verdict("rank_lost", f"v{attempt}", attempt=attempt, onset_step=12))
        world.run(60, steps=False, then=lambda: True)
    assert world.attempts() == [1, 2, 3, 4]
    assert world.states()["v4"] == "held"
    assert next(one for one in world.actions().values() if one.verb == "hold").verdict_id == "v4"


def test_failures_at_start_up_stop_the_job(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.set_step(JOB, -1)
    world.send(verdict("start_failure", "v1"))
    world.run(8, steps=False)
    world.send(verdict("start_failure", "v2", attempt=2, summary="ImportError: no module named x"))
    world.run(20, steps=False)
    assert world.attempts() == [1, 2]
    assert world.states()["v2"] == "gave_up"
    assert "ImportError" in world.backend._jobs[JOB].reason


def test_a_backend_that_cannot_be_reached_proves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.fault = lambda method: (Unavailable("no route to host"), False)
    world.send(verdict("hang"))
    world.run(2000)
    assert world.attempts() == [1]
    assert world.states() == {"v": "deciding"}
    assert sum("no route to host" in getattr(one, "cause", "") for one in world.published) == 1
    world.backend.fault = lambda method: None
    world.run(200)
    assert world.attempts() == [1, 2]


def test_an_ambiguous_start_is_observed_before_it_is_asked_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.fail_next("start", Ambiguous("timed out"), after_effect=True)
    world.send(verdict("rank_lost"))
    world.run()
    assert world.attempts() == [1, 2]
    assert world.backend.calls.count("start") == 1, "the second look found it running"
    assert world.receipts()["job/1/restart"].outcome == "done"


def test_nothing_starts_while_ranks_of_the_old_attempt_may_live(tmp_path: Path) -> None:
    world = World(tmp_path, replace(QUICK, stop_seconds_max=5.0, fence_seconds_max=5.0))
    world.backend.refuse_to_die(JOB, 2)
    world.send(verdict("hang"))
    world.run(60, steps=False)
    assert world.attempts() == [1]
    assert "start" not in world.backend.calls
    assert [one.state for one in world.published if hasattr(one, "sequence")][-2:] == ["fence_failed", "held"]
    assert world.receipts()["job/1/restart"].outcome == "failed"
    assert "nothing is started beside them" in world.receipts()["job/1/restart"].text


def test_somebody_elses_newer_attempt_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))

    def overtake(method: str) -> None:
        if method == "start" and world.backend.starts[-1].attempt == 1:
            MemoryBackend.start(world.backend, StartRequest(JOB, 9, "theirs"))

    world.backend.fault = overtake
    world.run()
    assert world.attempts() == [1, 9]
    assert world.states() == {"v": "superseded"}


def test_without_a_checkpoint_the_configuration_decides(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    scratch, careful = World(tmp_path / "a"), World(tmp_path / "b", replace(QUICK, without_checkpoint="hold"))
    for world in (scratch, careful):
        world.catalog.steps = set()
        world.send(verdict("rank_lost"))
        world.run()
    assert scratch.attempts() == [1, 2]
    assert scratch.backend.starts[-1].resume_step is None
    assert careful.states() == {"v": "held"}


def test_a_catalog_that_fails_is_asked_again_and_nothing_starts_meanwhile(tmp_path: Path) -> None:
    world = World(tmp_path)
    working, broken = world.catalog.reject_from, [True]

    def reject(job: str, step: int, up_to_attempt: int, reason: str) -> None:
        if broken[0]:
            raise OSError("engine of n0 does not answer")
        working(job, step, up_to_attempt, reason)

    world.catalog.reject_from = reject  # type: ignore[method-assign]
    world.send(verdict("nan", first_bad_step=10))
    world.run(30)
    assert world.attempts() == [1]
    broken[0] = False
    world.run(40)
    assert world.backend.starts[-1].resume_step == 5


@pytest.mark.parametrize("fault_class", ["rank_lost", "user_error", "gpu_lost"])
def test_a_job_nobody_knows_is_ignored_with_the_reason(tmp_path: Path, fault_class: str) -> None:
    world = World(tmp_path, AUTO)
    world.send(verdict(fault_class, job="elsewhere"))
    world.run()
    assert world.states() == {"v": "ignored"}
    assert "unknown job" in world.actions()["elsewhere/1/ignore/v"].rule


def test_a_verdict_about_the_future_is_ignored(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost", attempt=5))
    world.run()
    assert world.states() == {"v": "ignored"}
    assert world.attempts() == [1]


def test_a_new_start_ends_what_was_told_about_older_attempts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("straggler", "s"))
    world.run()
    world.send(verdict("rank_lost"))
    world.run()
    assert world.states() == {"s": "resolved", "v": "resolved"}


def test_a_refused_finish_still_ends_the_job(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.fail_next("finish", Rejected("no such job"))
    world.send(verdict("user_error"))
    world.run()
    assert world.states() == {"v": "stopped"}


def test_a_lost_store_does_not_bring_old_verdicts_back_to_life(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    world.run()
    world.store.close()
    for file in tmp_path.iterdir():
        file.unlink()
    world.begin_life()
    world.offset = 0
    world.run()
    assert world.attempts() == [1, 2]
    assert "stale attempt" in world.actions()["job/1/ignore/v"].rule


def test_a_stop_that_says_gone_too_early_is_found_out_before_the_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    lies = [True]

    def stop(job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        if lies[0]:
            return True
        return MemoryBackend.stop(
            world.backend, job, attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds
        )

    world.backend.stop = stop  # type: ignore[method-assign]
    world.send(verdict("hang"))
    world.run(20, steps=False)
    assert "start" not in world.backend.calls
    lies[0] = False
    world.run()
    assert world.attempts() == [1, 2]


def test_a_verdict_about_the_new_attempt_waits_until_its_start_is_certain(tmp_path: Path) -> None:
    world = World(tmp_path)
    silent = [False]

    def fault(method: str) -> tuple[BackendError, bool] | None:
        silent[0] = silent[0] or method == "start"
        return (Ambiguous("timed out"), True) if silent[0] else None

    world.backend.fault = fault
    world.send(verdict("rank_lost", onset_step=12))
    world.run(8, steps=False)
    world.send(verdict("hang", "w", attempt=2, onset_step=13))
    world.run(8, steps=False)
    assert world.states() == {"v": "starting", "w": "coalescing"}
    world.backend.fault = lambda method: None
    world.run(60)
    assert world.attempts() == [1, 2, 3]
    assert world.states() == {"v": "relapsed", "w": "resolved"}


def test_watching_a_probation_never_keeps_a_new_incident_waiting(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("rank_lost"))
    world.run(6, steps=False)
    assert world.states() == {"v": "probation"}
    world.send(verdict("user_error", "w", attempt=2))
    for _ in range(6):
        world.round(QUICK.probation_poll_seconds * 2)
    assert world.states() == {"v": "relapsed", "w": "stopped"}


def test_a_verdict_that_comes_while_the_catalog_is_asked_makes_it_be_asked_again(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.send(verdict("rank_lost"))
    while world.states() != {"v": "selecting"}:
        world.round(0.1)
    incident = world.store.incident("v")
    assert incident is not None
    steps, now = world.controller._steps, world.clock.now()
    answer = steps.call(incident)()
    world.controller.accept(verdict("gpu_lost", "w"), now)
    with world.store.transaction():
        world.controller._router.file(world.store.new_verdicts(1)[0], now)
        steps.answer(incident, answer, now)
    assert world.store.attempts(JOB) == [], "a plan without the lost GPU's node is not carried out"
    world.run()
    assert world.backend.starts[-1].excluded_nodes == ("n0",)


def test_a_lost_gpu_seen_during_the_start_is_avoided_by_the_next_one(tmp_path: Path) -> None:
    world = World(tmp_path, AUTO)
    world.backend.fault = lambda method: (Unavailable("x"), False) if method == "start" else None
    world.send(verdict("rank_lost"))
    world.run(8)
    world.send(verdict("gpu_lost", "w"))
    world.run(2)
    world.backend.fault = lambda method: None
    world.run(60)
    assert world.backend.starts[-1].excluded_nodes == (), "that start was already promised to everybody"
    assert world.store.excluded(JOB, world.clock.now()) == ("n0",)


def test_stacks_are_kept_though_the_stop_after_them_fails(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.evidence = {0: "in all_reduce"}
    world.backend.fail_next("stop", Ambiguous("timed out"), after_effect=True)
    world.send(verdict("hang"))
    world.run()
    assert world.store.stacks(JOB, 1) == {0: "in all_reduce"}
    assert world.attempts() == [1, 2]


def test_an_observed_plan_is_told_once_however_often_it_is_decided(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send(verdict("gpu_lost"))
    world.run()
    world.send(verdict("gpu_lost", revision=2, advice="restart_exclude_node"))
    world.run()
    assert len([one for one in world.published if getattr(one, "verb", "") == "exclude_and_restart"]) == 1
    assert world.states() == {"v": "notified"}


def test_a_stop_that_is_not_done_yet_is_asked_for_again_after_a_while(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.refuse_to_die(JOB, 2)
    world.send(verdict("rank_lost"))
    for _ in range(50):
        world.round(0.001)
    assert world.backend.calls.count("stop") == 1


class LateWorkers(InlineWorkers[Any]):
    """Answers are in, but nobody hears them while `late` holds: what threads do to us at any time."""

    late = False

    def take(self) -> list[Any]:
        return [] if self.late else super().take()


def test_an_answer_to_a_question_nobody_asks_any_more_is_dropped(tmp_path: Path) -> None:
    world = World(tmp_path)
    workers = LateWorkers()
    world.controller = Controller(world.store, world.backend, world.catalog, QUICK, random.Random(1), workers)
    workers.late = True
    world.send(verdict("hang"))
    world.run(2)
    assert world.backend.calls == ["observe"]
    world.send(verdict("hang", revision=2, status="closed"))
    world.run(2)
    workers.late = False
    world.run()
    assert world.states() == {"v": "resolved"}
    assert world.attempts() == [1]
