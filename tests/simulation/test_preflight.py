"""Pre-flight checks: the culprits of simulated nodes are found in few rounds, and what recovery makes of them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.action import CheckResult
from recovery.backend import Rejected, Unavailable
from recovery.checking import Rounds, blamed, check_nodes, kept, slow_too, together
from recovery.policy_config import PolicyConfig
from tests.recovery_world import JOB, QUICK, CuttableBackend, World, verdict

AUTO = replace(QUICK, quarantine_mode="auto")


class SimulatedNodes:
    """Nodes of which some fail alone (`bad`: by node and check), and some with everybody else (`mute`)."""

    def __init__(self, bad: dict[str, str] | None = None, mute: Sequence[str] = ()) -> None:
        self.bad = bad or {}
        self.mute = set(mute)
        self.rounds: list[Sequence[Sequence[str]]] = []
        self.seconds: dict[str, float] = {}

    def __call__(self, checks: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[CheckResult]:
        self.rounds.append(groups)
        assert len({node for group in groups for node in group}) == sum(map(len, groups)), "a node twice at once"
        return [self._one(node, check, group) for group in groups for node in group for check in checks]

    def _one(self, node: str, check: Any, group: Sequence[str]) -> CheckResult:
        hangs = len(group) > 1 and bool(self.mute & set(group))
        failed = self.bad.get(node) == check or hangs
        outcome: Any = "failed" if failed else "passed"
        return CheckResult(node=node, check=check, outcome=outcome, seconds=self.seconds.get(node, 0.01))


def names(number: int) -> list[str]:
    return [f"n{index}" for index in range(number)]


def test_good_nodes_are_asked_once_alone_and_once_for_each_check_together() -> None:
    nodes = SimulatedNodes()
    results, complete = check_nodes(nodes, names(40), slow_ratio=2.0)
    assert complete
    assert {one.outcome for one in results} == {"passed"}
    assert len(results) == 40 * 5
    assert len(nodes.rounds) == 3


@pytest.mark.parametrize("number", [3, 4, 5, 7, 16, 64, 200])
def test_every_set_of_less_than_a_quarter_is_found_in_three_rounds_and_nobody_else(number: int) -> None:
    dice = random.Random(number)
    for _ in range(60):
        culprits = dice.sample(names(number), dice.randint(1, max(1, (number - 1) // 4)))
        nodes = SimulatedNodes(mute=culprits)
        results = together(nodes, "all_reduce", names(number))
        assert {one.node for one in results if one.outcome == "failed"} == set(culprits)
        assert len(results) == number
        assert len(nodes.rounds) <= {3: 5, 5: 4}.get(number, 3)


def test_two_nodes_that_fail_together_are_not_told_apart_and_neither_is_blamed() -> None:
    results = together(SimulatedNodes(mute=["n1"]), "network", names(2))
    assert [one.outcome for one in results] == ["failed", "failed"]
    assert blamed(results) == set()


def test_what_more_than_half_of_the_nodes_show_is_nobodys() -> None:
    full = SimulatedNodes(bad={"n0": "disk", "n1": "disk", "n2": "disk"})
    results, _ = check_nodes(full, names(4), slow_ratio=2.0)
    assert blamed(results) == set()
    assert blamed(check_nodes(SimulatedNodes(bad={"n1": "disk"}), names(2), slow_ratio=2.0)[0]) == {"n1"}


def test_a_node_that_fails_alone_does_not_take_part_and_the_others_are_checked() -> None:
    nodes = SimulatedNodes(bad={"n2": "matmul"}, mute=["n2"])
    results, _ = check_nodes(nodes, names(4), slow_ratio=2.0)
    assert blamed(results) == {"n2"}
    assert [(one.check, one.outcome) for one in results if one.node == "n2"][-1] == ("disk", "passed")


def test_slow_is_who_is_slow_twice() -> None:
    nodes = SimulatedNodes()
    nodes.seconds = {"n1": 0.2}
    results, _ = check_nodes(nodes, names(4), slow_ratio=2.0)
    assert blamed(results) == {"n1"}
    assert "200 ms where the others take 10 ms" in next(one.text for one in results if one.outcome == "failed")
    first = SimulatedNodes()
    first.seconds = {"n1": 0.2}
    once = slow_too(SimulatedNodes(), first(("matmul",), [[node] for node in names(4)]), 2.0)
    assert {one.outcome for one in once} == {"passed"}, "it was a moment's"


def test_checks_end_when_their_rounds_are_used_up() -> None:
    nodes = SimulatedNodes(mute=["n1"])
    results, complete = check_nodes(Rounds(nodes, 2), names(8), slow_ratio=2.0)
    assert not complete
    assert {one.check for one in results} == {"gpu_memory", "matmul", "disk"}
    assert len(nodes.rounds) == 2


def test_of_many_results_those_that_failed_are_kept() -> None:
    results, _ = check_nodes(SimulatedNodes(bad={"n399": "disk"}), names(400), slow_ratio=2.0)
    assert len(results) == 400 * 5 - 2
    assert len(kept(results)) == 200
    assert kept(results)[0].node == "n399"


# What recovery makes of it


class ProbedBackend(CuttableBackend):
    """The memory backend with nodes that can be tried out."""

    nodes = SimulatedNodes()
    error: Exception | None = None

    def probe(self, job: str, attempt: int, checks: Any, groups: Any, *, seconds: float) -> list[CheckResult]:
        self.calls.append("probe")
        if self.error is not None:
            raise self.error
        return self.nodes(checks, groups)


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tests.recovery_world.CuttableBackend", ProbedBackend)

    def make(config: PolicyConfig, nodes: SimulatedNodes | None = None) -> World:
        world = World(tmp_path, config)
        assert isinstance(world.backend, ProbedBackend)
        world.backend.nodes = nodes or SimulatedNodes()
        return world

    return make


def tried(world: World) -> bool:
    return "probe" in world.backend.calls


def went_through(world: World) -> list[str]:
    return [one.state for one in world.published if hasattr(one, "sequence")]


def restart_of(world: World) -> Any:
    return next(one for one in world.actions().values() if one.next_attempt is not None)


def test_a_crash_is_restarted_without_checks_and_a_hang_with_them(worlds: Any) -> None:
    world = worlds(AUTO)
    world.send(verdict("rank_lost"))
    world.run()
    assert not tried(world)
    world.send(verdict("hang", "h", attempt=2, at=world.clock.now()))
    world.run()
    assert tried(world)
    assert world.attempts() == [1, 2, 3]
    assert "checking" in went_through(world)


def test_a_crash_that_comes_back_has_its_nodes_tried_out(worlds: Any) -> None:
    world = worlds(AUTO)
    world.send(verdict("rank_lost"))
    world.run(steps=False)
    world.send(verdict("rank_lost", "again", attempt=2, at=world.clock.now()))
    world.run(60, steps=False)
    assert tried(world)
    assert went_through(world).index("checking") < went_through(world).index("backing_off"), "and it still waits"
    assert world.attempts() == [1, 2, 3]


def test_a_node_that_fails_is_excluded_and_struck_and_the_audit_row_says_by_which_check(worlds: Any) -> None:
    world = worlds(AUTO, SimulatedNodes(bad={"n1": "disk"}))
    world.send(verdict("hang"))
    world.run()
    assert world.backend.starts[-1].excluded_nodes == ("n1",)
    action = restart_of(world)
    assert action.excluded_nodes == ("n1",)
    assert [(one.node, one.check) for one in action.checks if one.outcome == "failed"] == [("n1", "disk")]
    assert "n1 failed disk" in action.rule
    assert "without n1" in action.rule
    assert world.store.counters(JOB, world.clock.now(), 1e6, 1e6).strikes["n1"] == 1


def test_in_mode_observe_it_is_only_told_of_and_struck(worlds: Any) -> None:
    world = worlds(QUICK, SimulatedNodes(bad={"n1": "matmul"}))
    world.send(verdict("hang"))
    world.run()
    assert world.backend.starts[-1].excluded_nodes == ()
    assert "n1 is only told of" in restart_of(world).rule
    assert world.store.counters(JOB, world.clock.now(), 1e6, 1e6).strikes["n1"] == 1
    assert any("n1 failed matmul" in one.text for one in world.receipts().values())


def test_the_breaker_holds_for_checks_too(worlds: Any) -> None:
    config = replace(AUTO, breaker_nodes_max=0, breaker_share=0.0)
    world = worlds(config, SimulatedNodes(bad={"n1": "matmul"}))
    world.send(verdict("hang"))
    world.run()
    assert world.backend.starts[-1].excluded_nodes == ()
    assert "n1 stays in use: the breaker is open" in restart_of(world).rule


def test_26_checks_that_nobody_answers_are_given_up_after_their_time_and_that_is_written_down(worlds: Any) -> None:
    world = worlds(replace(AUTO, preflight_seconds_max=30.0))
    world.backend.error = Unavailable("no launcher answers")
    world.send(verdict("hang"))
    world.let_pass(25.0)
    assert world.attempts() == [1], "not yet"
    world.let_pass(20.0)
    assert world.attempts() == [1, 2]
    assert any("they were not done in 30 s" in one.text for one in world.receipts().values())


def test_a_backend_without_checks_is_no_obstacle(worlds: Any) -> None:
    world = worlds(AUTO)
    world.backend.error = Rejected("the backend hosts has no checks")
    world.send(verdict("hang"))
    world.run()
    assert world.attempts() == [1, 2]
    assert restart_of(world).checks == ()


def test_checks_can_be_switched_off_and_chosen_by_class(worlds: Any) -> None:
    world = worlds(replace(AUTO, preflight=False).with_checks(("rank_lost",)))
    world.send(verdict("rank_lost"))
    world.run()
    assert not tried(world)
    chosen = PolicyConfig().with_checks(("rank_lost",))
    assert [row.fault_class for row in chosen.rows if row.checks] == ["rank_lost"]
    with pytest.raises(ValueError, match="there is no policy row for class 'rank_lots'"):
        PolicyConfig().with_checks(("rank_lots",))


def test_a_power_cut_in_the_middle_of_checks_repeats_them_and_starts_once(worlds: Any) -> None:
    world = worlds(AUTO, SimulatedNodes(bad={"n1": "disk"}))
    world.send(verdict("hang"))
    while "probe" not in world.backend.calls:
        world.round()
    world.store.close()
    world.begin_life()
    world.run()
    assert world.attempts() == [1, 2]
    assert world.backend.starts[-1].excluded_nodes == ("n1",)
    assert world.store.counters(JOB, world.clock.now(), 1e6, 1e6).strikes["n1"] == 1


def test_a_hold_takes_effect_while_nodes_are_tried_out(worlds: Any) -> None:
    world = worlds(AUTO)
    world.backend.error = Unavailable("no launcher answers")
    world.send(verdict("hang"))
    world.let_pass(5.0)
    assert went_through(world)[-1] == "checking"
    world.order("hold", note="let me look")
    world.let_pass(5.0)
    assert went_through(world)[-1] == "held"
    assert world.attempts() == [1]
