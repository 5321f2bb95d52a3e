"""The policy: what is decided about verdicts, and why, as a pure function."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from detectors.verdict import Culprit, Evidence, FaultClass, Verdict
from recovery.backend import NodeView, Observation, RankView
from recovery.plan import Counters, JobSnapshot, Plan, Restart
from recovery.policy import backoff_seconds, decide, retry_seconds, stale_effects, strengthen
from recovery.policy_config import PolicyConfig
from tests.recovery_world import JOB, verdict

NOW = 1001.0
CONFIG = PolicyConfig().with_modes({"gpu_lost": "auto"})
SPENT = Counters(restarts=tuple(Restart(NOW - 7200.0, f"cause {number}", "hang") for number in range(20)))


def observation(attempt: int = 1, phase: Any = "failed", step: int = 12) -> Observation:
    ranks = tuple(RankView(rank, f"n{rank // 2}", 100 + rank, "running", step) for rank in range(4))
    nodes = tuple(NodeView(name, "active", 2) for name in ("n0", "n1"))
    return Observation(JOB, attempt, "token", phase, ranks, nodes)


def snapshot(**fields: Any) -> JobSnapshot:
    return replace(JobSnapshot(JOB, 1, observation()), **fields)


def plan_for(
    *verdicts: Verdict,
    job: JobSnapshot | None = None,
    counters: Counters | None = None,
    config: PolicyConfig = CONFIG,
    approved_hash: str = "",
    now: float = NOW,
) -> Plan:
    return decide(verdicts, job or snapshot(), counters or Counters(), config, now, approved_hash)


def test_every_fault_class_has_exactly_one_row() -> None:
    assert sorted(row.fault_class for row in PolicyConfig().rows) == sorted(get_args(FaultClass))


def test_whatever_touches_a_node_is_only_observed_by_default() -> None:
    touching = [row for row in PolicyConfig().rows if row.verb == "exclude_and_restart"]
    assert touching
    assert {row.mode for row in touching} == {"observe"}


@pytest.mark.parametrize(
    ("fault_class", "verb"),
    [
        ("straggler", "notify"),
        ("contended_node", "notify"),
        ("rank_lost", "restart"),
        ("hang", "restart"),
        ("nan", "restart"),
        ("gpu_lost", "exclude_and_restart"),
        ("node_lost", "exclude_and_restart"),
        ("user_error", "stop"),
        ("disk_full", "hold"),
    ],
)
def test_each_class_is_answered_by_its_row(fault_class: str, verb: str) -> None:
    plan = plan_for(verdict(fault_class))
    assert plan.verb == verb
    assert fault_class in plan.rule


def test_a_hang_is_looked_at_before_it_is_stopped() -> None:
    assert plan_for(verdict("hang")).collect_evidence
    assert not plan_for(verdict("rank_lost")).collect_evidence


def test_detection_that_advises_only_to_notify_is_obeyed() -> None:
    assert plan_for(verdict("gpu_ecc", advice="notify")).verb == "notify"


@pytest.mark.parametrize("fault_class", get_args(FaultClass))
def test_a_job_that_somebody_else_restarts_is_only_told_of(fault_class: FaultClass) -> None:
    ours = plan_for(verdict(fault_class))
    plan = plan_for(verdict(fault_class, restarts_by="torchrun"))
    assert (plan.verb, plan.excluded_nodes, plan.before_step) == ("notify", (), None)
    if ours.verb != "notify":
        assert "torchrun restarts this job" in plan.rule
    assert stale_effects(verdict(fault_class, restarts_by="torchrun"), CONFIG) == ((), None)


def test_an_older_attempt_s_lost_gpu_is_excluded_only_where_recovery_restarts_the_job() -> None:
    assert stale_effects(verdict("gpu_lost"), CONFIG)[0] == ("n0",)
    assert stale_effects(verdict("gpu_lost", restarts_by="torchrun"), CONFIG) == ((), None)


def test_a_user_error_stops_the_job_with_its_text() -> None:
    text = 'ValueError: "labels" must be 0 or 1'
    plan = plan_for(verdict("user_error", evidence=(Evidence(kind="log", text=text, at=1.0),)))
    assert (plan.verb, plan.mode) == ("stop", "auto")
    assert text in plan.reason


def test_what_victims_say_of_their_lost_peers_is_not_told_to_the_job() -> None:
    said = (
        Evidence(kind="log", text="its own", at=1.0, rank=1),
        Evidence(kind="log", text="Connection closed", at=1.1, rank=2),
    )
    reason = plan_for(verdict("user_error", evidence=said)).reason
    assert "its own" in reason
    assert "Connection closed" not in reason


def test_nan_resumes_before_the_first_bad_step() -> None:
    plan = plan_for(verdict("nan", first_bad_step=9, onset_step=10))
    assert (plan.verb, plan.before_step) == ("restart", 9)


def test_nan_without_a_first_bad_step_counts_from_its_onset() -> None:
    assert plan_for(verdict("nan", onset_step=10)).before_step == 10


def test_nan_that_comes_back_at_the_same_place_goes_back_behind_the_checkpoint_it_resumed_from() -> None:
    job = snapshot(restarted=True, resume_step=8, started_at=0.0)
    again = Counters(no_progress={"nan": 1}, furthest_step=12)
    other = Counters(no_progress={"rank_lost rank 1": 1}, furthest_step=12)
    assert plan_for(verdict("nan", first_bad_step=11), job=job, counters=again).before_step == 8
    assert plan_for(verdict("nan", first_bad_step=11), job=job, counters=other).before_step == 11


def test_gpu_lost_excludes_the_culprits_node() -> None:
    plan = plan_for(verdict("gpu_lost"))
    assert (plan.verb, plan.mode, plan.excluded_nodes) == ("exclude_and_restart", "auto", ("n0",))


def test_a_culprit_without_a_node_is_found_where_its_rank_runs() -> None:
    assert plan_for(verdict("gpu_lost", culprits=(Culprit(rank=3),))).excluded_nodes == ("n1",)


def test_an_unknown_culprit_excludes_nobody() -> None:
    plan = plan_for(verdict("gpu_lost", culprits=()))
    assert (plan.verb, plan.excluded_nodes) == ("restart", ())


def test_the_earliest_verdict_leads_and_the_others_add_their_nodes() -> None:
    early = verdict("rank_lost", "a", onset_at=990.0)
    late = verdict("gpu_lost", "b", onset_at=995.0, culprits=(Culprit(node="n1"),))
    plan = plan_for(late, early)
    assert plan.verdict_id == "a"
    assert (plan.verb, plan.excluded_nodes) == ("exclude_and_restart", ("n1",))


def test_a_node_that_may_only_be_observed_is_not_slipped_in_with_another_restart() -> None:
    early = verdict("rank_lost", "a", onset_at=990.0)
    late = verdict("node_lost", "b", onset_at=995.0)
    plan = plan_for(early, late)
    assert (plan.verb, plan.mode, plan.excluded_nodes) == ("restart", "auto", ())


def test_a_user_error_beside_an_infrastructure_fault_is_its_echo() -> None:
    root = verdict("gpu_lost", "a", onset_at=990.5)
    assert plan_for(verdict("user_error", "b", onset_at=990.0), root).verb == "exclude_and_restart"
    assert plan_for(verdict("user_error", "b", onset_at=900.0), root).verb == "stop"


def test_a_stale_verdict_restarts_nothing() -> None:
    plan = plan_for(verdict("rank_lost"), job=snapshot(attempt=2, observation=observation(2)))
    assert plan.verb == "ignore"
    assert "stale attempt" in plan.rule


def test_a_verdict_about_an_attempt_nobody_knows_is_ignored() -> None:
    plan = plan_for(verdict("rank_lost", attempt=7))
    assert plan.verb == "ignore"
    assert "unknown attempt" in plan.rule


@pytest.mark.parametrize("job", [snapshot(outcome="failed"), snapshot(observation=observation(phase="finished"))])
def test_terminal_stays_terminal(job: JobSnapshot) -> None:
    plan = plan_for(verdict("rank_lost"), job=job)
    assert plan.verb == "ignore"
    assert "terminal" in plan.rule


def test_the_window_of_restarts_is_a_budget() -> None:
    plan = plan_for(verdict("rank_lost"), counters=SPENT)
    assert (plan.verb, plan.budget_spent) == ("hold", True)
    assert "20 of 20" in plan.rule


def test_a_spent_budget_can_stop_the_job_instead() -> None:
    config = replace(CONFIG, spent_budget="stop")
    plan = plan_for(verdict("rank_lost"), counters=SPENT, config=config)
    assert plan.verb == "stop"


def test_three_restarts_for_one_cause_that_bring_nothing_are_enough() -> None:
    counters, verbs = Counters(), []
    for _ in range(4):
        plan = plan_for(verdict("rank_lost"), job=snapshot(restarted=bool(verbs)), counters=counters)
        verbs.append(plan.verb)
        counters = Counters(no_progress=plan.no_progress, furthest_step=12)
    assert verbs == ["restart", "restart", "restart", "hold"]


def test_other_causes_without_progress_share_a_larger_budget() -> None:
    counters = Counters(no_progress={"hang rank 3": 2, "rank_lost rank 2": 3}, furthest_step=12)
    plan = plan_for(verdict("rank_lost"), job=snapshot(restarted=True), counters=counters)
    assert plan.verb == "hold"
    assert "5 of 5 for all causes" in plan.rule


def test_progress_forgives_what_went_before() -> None:
    counters = Counters(no_progress={"rank_lost rank 1": 2}, furthest_step=11)
    plan = plan_for(verdict("rank_lost"), job=snapshot(restarted=True), counters=counters)
    assert (plan.verb, plan.no_progress, plan.repeats) == ("restart", {"rank_lost rank 1": 1}, 0)


def test_another_cause_right_after_a_restart_does_not_wait() -> None:
    counters = Counters(no_progress={"rank_lost rank 1": 1}, furthest_step=12)
    plan = plan_for(verdict("hang"), job=snapshot(restarted=True), counters=counters)
    assert (plan.verb, plan.repeats, backoff_seconds(plan, CONFIG, 0.5)) == ("restart", 0, 0.0)
    assert plan.no_progress == {"rank_lost rank 1": 1, "hang rank 1": 1}


def test_a_job_that_reports_no_steps_is_judged_by_how_long_it_ran() -> None:
    counters = Counters(no_progress={"rank_lost rank 1": 3})
    mute = observation(step=-1)
    young = snapshot(observation=mute, restarted=True, started_at=NOW - 100.0)
    old = snapshot(observation=mute, restarted=True, started_at=NOW - 4000.0)
    assert plan_for(verdict("rank_lost"), job=young, counters=counters).verb == "hold"
    assert plan_for(verdict("rank_lost"), job=old, counters=counters).verb == "restart"


def test_the_second_failure_at_start_up_stops_the_job() -> None:
    mute = snapshot(observation=observation(step=-1))
    first = plan_for(verdict("start_failure"), job=mute)
    second = plan_for(verdict("start_failure"), job=mute, counters=Counters(startup_failures=1))
    assert (first.verb, first.startup_failures) == ("restart", 1)
    assert second.verb == "stop"
    assert "start_failure of rank 1" in second.reason


def test_a_young_attempt_without_a_step_failed_at_start_up_whatever_killed_it() -> None:
    job = snapshot(observation=observation(step=-1), restarted=True, started_at=NOW - 5.0)
    assert plan_for(verdict("rank_lost"), job=job, counters=Counters(startup_failures=1)).verb == "stop"
    assert plan_for(verdict("gpu_lost"), job=job, counters=Counters(startup_failures=1)).verb != "stop"


def test_an_old_verdict_about_a_job_that_runs_is_held() -> None:
    running = snapshot(observation=observation(phase="running"))
    assert plan_for(verdict("hang"), job=running, now=3000.0).verb == "hold"
    assert plan_for(verdict("hang"), job=snapshot(), now=3000.0).verb == "restart"


def test_an_approval_overrides_mode_and_budget_but_only_for_its_own_plan() -> None:
    spent = SPENT
    held = plan_for(verdict("rank_lost"), counters=spent)
    assert plan_for(verdict("rank_lost"), counters=spent, approved_hash=held.plan_hash).verb == "restart"
    other = verdict("rank_lost", culprits=(Culprit(rank=2, node="n1"),))
    assert plan_for(other, counters=spent, approved_hash=held.plan_hash).verb == "hold"
    observed = plan_for(verdict("node_lost"))
    assert observed.mode == "observe"
    assert plan_for(verdict("node_lost"), approved_hash=observed.plan_hash).mode == "auto"
    full = plan_for(verdict("disk_full"))
    assert plan_for(verdict("disk_full"), approved_hash=full.plan_hash).verb == "restart"


def test_the_same_arguments_give_the_same_plan_and_hash() -> None:
    assert plan_for(verdict("gpu_lost")) == plan_for(verdict("gpu_lost"))
    assert plan_for(verdict("gpu_lost")).plan_hash != plan_for(verdict("rank_lost")).plan_hash


def test_later_evidence_widens_a_restart_and_never_narrows_it() -> None:
    plan = plan_for(verdict("nan", first_bad_step=9))
    wider = strengthen(plan, [verdict("gpu_lost", "b"), verdict("nan", first_bad_step=7)], CONFIG)
    assert (wider.verb, wider.excluded_nodes, wider.before_step) == ("exclude_and_restart", ("n0",), 7)
    assert strengthen(wider, [verdict("rank_lost")], CONFIG) == wider


def test_the_first_restart_does_not_wait_and_later_ones_wait_longer() -> None:
    waits = [
        backoff_seconds(replace(plan_for(verdict("hang")), repeats=count), CONFIG, dice=0.5) for count in range(12)
    ]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] <= CONFIG.backoff_seconds_max
    assert retry_seconds(1, CONFIG, 0.0) < retry_seconds(20, CONFIG, 0.0) <= CONFIG.retry_seconds_max


def test_modes_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="no policy row for class 'gpu_gone'"):
        PolicyConfig().with_modes({"gpu_gone": "auto"})
    with pytest.raises(ValueError, match="mode 'always' of class 'hang' is none of observe, approve, auto"):
        PolicyConfig().with_modes({"hang": "always"})


def test_the_rule_explains_row_culprit_and_budgets() -> None:
    rule = plan_for(verdict("rank_lost"), counters=Counters(restarts=SPENT.restarts[:4])).rule
    for part in ("row rank_lost: restart, auto", "rank 1 on n0", "4 of 20", "0 of 3 for rank_lost rank 1"):
        assert part in rule
