"""Budgets by class, the ladder, strikes and the breaker: what a cause that comes back is answered with."""

from dataclasses import replace
from typing import Any

import pytest

from detectors.verdict import Culprit, Verdict
from recovery.backend import NodeView, Observation, RankView
from recovery.plan import Counters, Exclusion, JobSnapshot, Plan, Restart
from recovery.policy import decide, quarantine_seconds
from recovery.policy_config import PolicyConfig
from recovery.policy_rows import Budget
from tests.recovery_world import JOB, verdict

NOW = 1001.0
DAY = 86_400.0
GROUPS = {"n0": "rack-1", "n1": "rack-2", "n2": "rack-1", "n3": "rack-2"}
ACTS = PolicyConfig(quarantine_mode="auto")


def observation(*, spares: int = 1, groups: bool = True, nodes: int = 2, **fields: Any) -> Observation:
    ranks = tuple(RankView(rank, f"n{rank // 2}", 100 + rank, "running", 12) for rank in range(2 * nodes))
    names = [f"n{number}" for number in range(nodes + spares)]
    views = tuple(
        NodeView(name, "active" if number < nodes else "spare", 2, GROUPS.get(name, "") if groups else "")
        for number, name in enumerate(names)
    )
    return replace(Observation(JOB, 1, "token", "failed", ranks, views), **fields)


def snapshot(**fields: Any) -> JobSnapshot:
    return replace(JobSnapshot(JOB, 1, observation(), restarted=True, resume_step=8), **fields)


def plan_for(
    one: Verdict,
    counters: Counters | None = None,
    job: JobSnapshot | None = None,
    config: PolicyConfig = ACTS,
    approved_hash: str = "",
    now: float = NOW,
) -> Plan:
    return decide((one,), job or snapshot(), counters or Counters(), config, now, approved_hash)


def spent(budget: Budget, number: int, age_seconds: float = 7200.0) -> Counters:
    return Counters(restarts=tuple(Restart(NOW - age_seconds, f"cause {one}", budget) for one in range(number)))


def wasted(number: int, cause: str = "rank_lost rank 1") -> Counters:
    return Counters(no_progress={cause: number}, furthest_step=12)


@pytest.mark.parametrize(
    ("fault_class", "budget", "most"),
    [("rank_lost", "infra", 10), ("hang", "hang", 3), ("unknown", "unknown", 3)],
)
def test_each_class_is_paid_from_its_own_budget(fault_class: str, budget: Budget, most: int) -> None:
    assert plan_for(verdict(fault_class), spent(budget, most - 1)).verb == "restart"
    over = plan_for(verdict(fault_class), spent(budget, most))
    assert (over.verb, over.budget_spent) == ("hold", True)
    assert f"the budget of restarts for {budget} is spent" in over.reason
    assert f"{most} of {most} for {budget}" in over.rule


def test_what_others_have_spent_is_only_counted_in_the_total() -> None:
    assert plan_for(verdict("hang"), spent("infra", 19)).verb == "restart"
    assert plan_for(verdict("hang"), spent("infra", 20)).verb == "hold"


def test_a_user_error_that_is_configured_to_restart_does_so_once_a_day() -> None:
    config = ACTS.with_verbs({"user_error": "restart"})
    assert plan_for(verdict("user_error"), config=config).verb == "restart"
    assert plan_for(verdict("user_error"), spent("user", 1), config=config).verb == "hold"


def test_a_class_that_detection_only_advises_to_tell_is_acted_on_where_a_person_says_so() -> None:
    spike = verdict("loss_spike", advice="notify", first_bad_step=9)
    assert plan_for(spike).verb == "notify"
    plan = plan_for(spike, config=replace(ACTS.with_verbs({"loss_spike": "restart"}), rollback_margin_steps=2))
    assert (plan.verb, plan.before_step) == ("restart", 7)


def test_a_larger_job_may_fail_more_often_by_its_machines_but_not_by_its_user() -> None:
    large = snapshot(nodes=128)
    assert plan_for(verdict("rank_lost"), spent("infra", 11), large).verb == "restart"
    assert plan_for(verdict("rank_lost"), spent("infra", 12), large).verb == "hold"
    config = ACTS.with_verbs({"user_error": "restart"})
    assert plan_for(verdict("user_error"), spent("user", 1), large, config).verb == "hold"


def test_what_is_planned_costs_no_budget_and_is_no_failure() -> None:
    used = replace(spent("infra", 50), no_progress={"preempted": 9}, startup_failures=1, furthest_step=12)
    plan = plan_for(verdict("preempted"), used)
    assert (plan.verb, plan.budget, plan.no_progress, plan.repeats) == ("restart", "planned", {"preempted": 9}, 0)
    assert "no budget pays for it" in plan.rule
    planned = Counters(restarts=tuple(Restart(NOW, "preempted", "planned") for _ in range(50)))
    assert plan_for(verdict("rank_lost"), planned).verb == "restart"


def test_budgets_are_checked_by_name() -> None:
    assert PolicyConfig().with_budgets({"hang": 7}).class_restarts_max["hang"] == 7
    for wrong in ({"hangs": 1}, {"planned": 1}, {"hang": -1}):
        with pytest.raises(ValueError, match="budget"):
            PolicyConfig().with_budgets(wrong)
    with pytest.raises(ValueError, match="action 'reboot' of class 'hang' is none of notify, restart"):
        PolicyConfig().with_verbs({"hang": "reboot"})


def test_the_ladder_goes_one_rung_further_each_time_that_nothing_was_gained() -> None:
    plans = [plan_for(verdict("rank_lost"), wasted(number)) for number in range(5)]
    assert [plan.rung for plan in plans] == ["in_place", "spare", "exclude", "exclude_group", "older_checkpoint"]
    assert [plan.verb for plan in plans] == ["restart", "restart", *["exclude_and_restart"] * 2, "restart"]
    assert [plan.excluded_nodes for plan in plans] == [(), (), ("n0",), ("n0", "n2"), ()]
    assert [plan.spared_nodes for plan in plans] == [(), ("n0",), (), (), ()]
    assert [plan.resume_below for plan in plans] == [None, None, None, None, 8]
    assert all("rung" in plan.rule for plan in plans)


def test_behind_the_last_rung_stands_a_person() -> None:
    config = replace(ACTS, no_progress_any_cause_max=100)
    assert plan_for(verdict("rank_lost"), wasted(5), config=config).verb == "hold"


def test_a_rung_may_be_tried_more_than_once() -> None:
    config = replace(ACTS, rung_repeats_max=2)
    assert [plan_for(verdict("rank_lost"), wasted(n), config=config).rung for n in range(4)] == [
        "in_place", "in_place", "spare", "spare",
    ]  # fmt: skip


def test_rungs_that_are_not_there_or_not_allowed_are_left_out() -> None:
    alone = snapshot(observation=observation(spares=0, groups=False))
    assert plan_for(verdict("rank_lost"), wasted(1), alone).rung == "exclude"
    assert plan_for(verdict("rank_lost"), wasted(1), alone, PolicyConfig()).rung == "older_checkpoint"
    bare = replace(alone, resume_step=None)
    assert plan_for(verdict("rank_lost"), wasted(2), bare, PolicyConfig()).rung == "in_place"
    nobody = verdict("hang", culprits=())
    assert plan_for(nobody, wasted(1, "hang"), snapshot()).rung == "older_checkpoint"


def test_excluding_in_mode_approve_is_proposed() -> None:
    plan = plan_for(verdict("rank_lost"), wasted(2), config=replace(ACTS, quarantine_mode="approve"))
    assert (plan.rung, plan.mode, plan.excluded_nodes) == ("exclude", "approve", ("n0",))


def test_a_class_with_a_stricter_limit_of_its_own_climbs_no_ladder() -> None:
    assert plan_for(verdict("oom"), wasted(1, "oom")).verb == "hold"


def test_a_cause_that_flaps_climbs_though_the_job_gets_further_between() -> None:
    often = Counters(restarts=tuple(Restart(NOW - 600.0 * n, "rank_lost rank 1") for n in range(3)), furthest_step=5)
    plan = plan_for(verdict("rank_lost"), often)
    assert (plan.verb, plan.rung, plan.repeats) == ("restart", "spare", 0)
    assert "it flaps: 3 restarts for this cause in 60 min" in plan.rule
    old = replace(often, restarts=tuple(replace(one, at=one.at - 4000.0) for one in often.restarts))
    assert plan_for(verdict("rank_lost"), old).rung == "in_place"


def test_the_second_strike_in_a_day_puts_a_node_into_quarantine() -> None:
    struck = Counters(strikes={"n0": 1})
    assert plan_for(verdict("rank_lost")).struck_nodes == ("n0",)
    plan = plan_for(verdict("rank_lost"), struck)
    assert (plan.verb, plan.rung, plan.excluded_nodes) == ("exclude_and_restart", "in_place", ("n0",))
    assert "n0 blamed 2 times in 24 h: quarantine" in plan.rule
    told = plan_for(verdict("rank_lost"), struck, config=PolicyConfig())
    assert (told.verb, told.excluded_nodes) == ("restart", ())
    assert "recover.quarantine_mode is observe" in told.rule


def test_what_says_nothing_about_a_node_strikes_none() -> None:
    for fault_class in ("nan", "oom", "preempted", "unknown"):
        assert plan_for(verdict(fault_class)).struck_nodes == ()


def test_quarantine_doubles_and_has_a_bound() -> None:
    days = [quarantine_seconds(times, PolicyConfig()) / DAY for times in range(4)]
    assert days == [1.0, 2.0, 4.0, 8.0]
    assert quarantine_seconds(50, PolicyConfig()) == PolicyConfig().quarantine_seconds_max


def away(*nodes: str, at: float = NOW - 60.0, rest: bool = False) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(node, at, NOW + DAY, "v", "gpu_lost", rest=rest) for node in nodes)


def test_the_breaker_leaves_a_rash_of_exclusions_to_a_person() -> None:
    config = PolicyConfig().with_modes({"gpu_lost": "auto"})
    lost = verdict("gpu_lost", culprits=(Culprit(node="n9"),))
    assert plan_for(lost, Counters(exclusions=away("n7")), config=config).verb == "exclude_and_restart"
    open_ = plan_for(lost, Counters(exclusions=away("n7", "n8")), config=config)
    assert (open_.verb, open_.mode) == ("hold", "auto")
    assert "the breaker is open: 3 of 3 nodes excluded in 10 min, 2 at most" in open_.rule
    for harmless in (away("n7", "n8", at=NOW - 700.0), away("n7", "n8", rest=True)):
        assert plan_for(lost, Counters(exclusions=harmless), config=config).verb == "exclude_and_restart"
    large = snapshot(observation=observation(nodes=20, spares=0))
    assert plan_for(lost, Counters(exclusions=away("n7", "n8")), large, config).verb == "exclude_and_restart"
    closed = Counters(exclusions=away("n7", "n8"), breaker_reset_at=NOW - 1.0)
    assert plan_for(lost, closed, config=config).verb == "exclude_and_restart"
    assert plan_for(verdict("rank_lost"), Counters(exclusions=away("n7", "n8"))).verb == "restart"


def test_an_approval_overrides_the_breaker() -> None:
    config = PolicyConfig().with_modes({"gpu_lost": "auto"})
    counters = Counters(exclusions=away("n7", "n8"))
    held = plan_for(verdict("gpu_lost"), counters, config=config)
    assert held.verb == "hold"
    approved = plan_for(verdict("gpu_lost"), counters, config=config, approved_hash=held.plan_hash)
    assert approved.verb == "exclude_and_restart"


def test_a_job_that_a_person_holds_is_left_alone_until_that_plan_is_approved() -> None:
    held = snapshot(held="hold by ada: maintenance")
    for fault_class in ("rank_lost", "user_error"):
        plan = plan_for(verdict(fault_class), job=held)
        assert plan.verb == "hold"
        assert "hold by ada: maintenance; `transom resume`" in plan.rule
    plan = plan_for(verdict("rank_lost"), job=held)
    assert plan_for(verdict("rank_lost"), job=held, approved_hash=plan.plan_hash).verb == "restart"


def test_a_job_that_its_backend_holds_is_not_started_against_that() -> None:
    there = snapshot(observation=observation(held="JobHeldAdmin"))
    plan = plan_for(verdict("rank_lost"), job=there)
    assert plan.verb == "hold"
    assert "JobHeldAdmin" in plan.rule


def test_a_verdict_that_is_not_sure_of_itself_is_only_told_while_all_ranks_run() -> None:
    unsure = verdict("hang", culprits=(Culprit(rank=1, node="n0", confidence=0.2),))
    healthy = snapshot(observation=observation(phase="running"))
    plan = plan_for(unsure, job=healthy)
    assert plan.verb == "notify"
    assert "its confidence is 0.20" in plan.rule
    assert plan_for(unsure).verb == "restart", "a job that is down needs no certainty about who did it"


def test_a_job_whose_end_is_written_down_is_over_whatever_its_ranks_did() -> None:
    plan = plan_for(verdict("rank_lost"), job=snapshot(observation=observation(ended=True)))
    assert plan.verb == "ignore"
    assert "terminal" in plan.rule


def test_a_class_that_excludes_its_culprit_begins_there_in_its_own_mode() -> None:
    config = PolicyConfig().with_modes({"gpu_lost": "auto"})
    plan = plan_for(verdict("gpu_lost"), config=config)
    assert (plan.rung, plan.mode, plan.excluded_nodes) == ("exclude", "auto", ("n0",))
    again = plan_for(verdict("gpu_lost"), wasted(1, "gpu_lost n0"), config=replace(config, quarantine_mode="auto"))
    assert (again.rung, again.excluded_nodes) == ("exclude_group", ("n0", "n2"))
    assert plan_for(verdict("gpu_lost", culprits=()), config=config).rung == "in_place"
