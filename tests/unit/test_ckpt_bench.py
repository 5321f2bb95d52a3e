"""`transom bench ckpt`: the arithmetic of every figure, on made-up times; and which figure is whose."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.asked import chosen_groups
from pipelines.bench_ckpt.asked import ASKED, GROUPS
from pipelines.bench_ckpt.fenced_saves import fenced_figures
from pipelines.bench_ckpt.flips import flip_figure
from pipelines.bench_ckpt.growth import growth_figure
from pipelines.bench_ckpt.loads import load_figures
from pipelines.bench_ckpt.outcome import Outcome, Task, Value, headlines, merged
from pipelines.bench_ckpt.peers import Peer
from pipelines.bench_ckpt.persisting import persist_figures
from pipelines.bench_ckpt.rounds import Method, Rounds, Unsteady, interval, measure, measure_steady, spread
from pipelines.bench_ckpt.running import planned
from pipelines.bench_ckpt.saves import save_figures

TASK = Task(group="save", folder="/nowhere", case="many", threads=1)


def quickly() -> None:
    """In the place of a garbage collection."""


def values_of(outcome: Outcome) -> dict[str, float]:
    return {value.name: value.value for value in outcome.values}


def clock_of(*durations: float) -> Callable[[], float]:
    """A clock that lets each of the calls between two looks take the next of these durations, over and over."""
    ticks = itertools.chain.from_iterable((0.0, duration) for duration in itertools.cycle(durations))
    total = itertools.accumulate(ticks)
    return lambda: next(total)


def test_methods_take_turns_and_each_round_begins_with_another() -> None:
    called: list[str] = []
    methods = [Method(name, lambda number, name=name: called.append(f"{name}{number}")) for name in "abc"]
    taken = measure(methods, 2, clock_of(1.0), tidy=quickly)
    assert called == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]
    assert taken.count == 2
    assert set(taken.first) == {"a", "b", "c"}


def test_what_a_method_leaves_to_be_awaited_is_awaited_before_the_next_and_not_timed() -> None:
    order: list[str] = []

    def call(number: int) -> Callable[[], None]:
        order.append("call")
        return lambda: order.append("settled")

    taken = measure([Method("one", call, before=lambda number: order.append("before"))], 1, clock_of(2.0), tidy=quickly)
    assert order == ["before", "call", "settled"] * 2
    assert taken.seconds == {"one": [2.0]}


def test_ratios_are_of_one_round_each() -> None:
    rounds = Rounds({"memcpy": [1.0, 2.0, 4.0], "ours": [1.5, 2.0, 8.0], "other": [3.0, 2.0, 4.0]}, {})
    assert rounds.ratios("ours") == [1.5, 1.0, 2.0]
    assert rounds.ratio("ours") == 1.5
    assert rounds.ratio("other", "ours") == 1.0


def test_a_machine_that_wanders_is_measured_again_and_then_said_to_be_too_busy() -> None:
    quiet = measure_steady([Method("memcpy", lambda number: None)], 8, clock_of(1.0, 1.1), tidy=quickly)
    assert quiet.count == 8
    with pytest.raises(Unsteady, match=r"memcpy of the same rounds wandered by 6\d%, 6\d%, 6\d%"):
        measure_steady([Method("memcpy", lambda number: None)], 8, clock_of(1.0, 3.0, 2.0), tidy=quickly)


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([7.0]) == 0.0


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (5, 0), (7, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_is_that_of_the_sign_test(count: int, cut: int) -> None:
    values = [float(value) for value in range(count)]
    assert interval(values) == (cut, count - 1 - cut)


def test_slower_is_only_who_is_so_by_the_whole_interval() -> None:
    rounds = Rounds({"ours": [1.0] * 9, "even": [0.9] * 4 + [1.1] * 5, "faster": [0.9] * 9}, {})
    assert rounds.not_slower("ours", "even")
    assert not rounds.not_slower("ours", "faster")


def test_the_figures_of_saves() -> None:
    times = {
        "memcpy": [1.0] * 9, "transom": [1.2] * 9, "torch.save+fsync": [12.0] * 9, "dcp.async_save": [3.0] * 9,
        "quick": [1.0] * 9,
    }  # fmt: skip
    peers = [Peer(name, lambda number: None) for name in ("torch.save+fsync", "dcp.async_save", "quick")]
    outcome = save_figures(TASK, Rounds(times, {}), [2.0, 1.8, 9.9], peers, {"dlrover": "not installed"})
    found = values_of(outcome)
    assert found["ckpt.save_ratio"] == pytest.approx(1.2)
    assert found["ckpt.first_save_ratio"] == pytest.approx(2.0 / 1.2)
    assert found["ckpt.slower_than_peers"] == 1
    assert found["ckpt.vs_torch_save_fsync"] == pytest.approx(10)
    assert found["ckpt.vs_dcp_async"] == pytest.approx(2.5)
    assert "[many, 1 thread] dlrover: not installed" in outcome.notes


def test_a_peer_that_was_not_measured_has_no_figure_but_a_reason() -> None:
    rounds = Rounds({"memcpy": [1.0] * 7, "transom": [1.2] * 7}, {})
    outcome = save_figures(TASK, rounds, [2.0], [], {"dcp.async_save": "does not work here: KeyError: 3"})
    assert "ckpt.vs_dcp_async" not in values_of(outcome)
    assert outcome.missing["ckpt.vs_dcp_async"] == "does not work here: KeyError: 3"
    assert outcome.missing["ckpt.vs_torch_save_fsync"] == "torch.save+fsync was not measured"


def test_the_figures_of_fenced_saves() -> None:
    times = {"memcpy": [1.0] * 3, "step with a fenced save": [5.5] * 3, "step without a save": [5.0] * 3}
    outcome = fenced_figures(TASK, Rounds(times, {}), [9.0, 0.05, 0.05, 0.05], [9.0, 0.01, 0.01, 0.01], [4.0] * 4)
    assert values_of(outcome) == pytest.approx(
        {"ckpt.fenced_ratio": 0.05, "ckpt.fence_wait_ratio": 0.01, "ckpt.fenced_step_ratio": 1.1}
    )
    short = fenced_figures(TASK, Rounds(times, {}), [0.05] * 3, [0.01] * 3, [2.0] * 3)
    assert short.missing["ckpt.fence_wait_ratio"] == "compute took only 2.0 memcpy"


def test_the_figures_of_loads() -> None:
    times = {
        "memcpy": [1.0] * 7, "views, verified later": [0.05] * 7, "views, verified first": [0.5] * 7,
        "in place": [1.5] * 7, "torch.load, cached": [6.0] * 7, "torch.load, not cached": [15.0] * 7,
    }  # fmt: skip
    assert values_of(load_figures(TASK, Rounds(times, {}))) == pytest.approx(
        {
            "ckpt.load_views_ratio": 0.05, "ckpt.load_views_verified_ratio": 0.5, "ckpt.load_inplace_ratio": 1.5,
            "ckpt.vs_torch_load_hot": 4.0, "ckpt.vs_torch_load_cold": 10.0,
        }
    )  # fmt: skip


def test_the_figures_of_persisting_growth_and_flips() -> None:
    persisted = persist_figures(TASK, [0.9, 1.0, 1.1], [0.1, 0.2, 0.0], [0.3, 0.3, 0.3])
    assert values_of(persisted) == {"ckpt.persist_ratio": 1.0, "ckpt.persist_step_inflation": 0.1}
    assert "no training step" in persist_figures(TASK, [1.0], [], [0.3]).missing["ckpt.persist_step_inflation"]
    grown = growth_figure({"rank": 100, "engine": 300}, {"rank": 101, "engine": 301})
    assert values_of(grown)["ckpt.growth_100_saves"] == pytest.approx(0.005)
    flipped = flip_figure({"memory": 10, "disk": 9}, 10)
    assert (flipped.values[0].value, flipped.values[0].n) == (0.95, 20)


def test_of_several_cases_the_headline_is_the_one_furthest_from_what_is_asked() -> None:
    values = [Value("ckpt.save_ratio", ratio, case=str(ratio)) for ratio in (1.1, 1.4, 1.2)]
    values += [Value("ckpt.vs_dcp_async", ratio) for ratio in (3.0, 2.0)]
    found = headlines(values)
    assert found["ckpt.save_ratio"].case == "1.4"
    assert found["ckpt.vs_dcp_async"].value == 2.0


def test_every_figure_is_asked_for_once_and_has_a_group() -> None:
    assert len({asked.name for asked in ASKED}) == len(ASKED)
    assert not {asked.relation for asked in ASKED} - {"≤", "<", "≥", "="}
    by_name = {asked.name: asked for asked in ASKED}
    assert by_name["ckpt.save_ratio"].met_by(1.25)
    assert not by_name["ckpt.save_ratio"].met_by(1.26)
    assert not by_name["ckpt.growth_100_saves"].met_by(0.01)
    assert by_name["ckpt.kills"].text == "≥ 200"


def test_figures_are_chosen_by_name_with_or_without_the_room_and_by_group() -> None:
    assert chosen_groups(ASKED, (), "bench") == list(GROUPS)
    assert chosen_groups(ASKED, ("ckpt.torn", "save_ratio", "flips"), "bench") == ["save", "kills", "flips"]
    with pytest.raises(ValueError, match="nothing_such is not measured"):
        chosen_groups(ASKED, ("nothing_such",), "bench")


def test_timed_groups_are_measured_in_each_case_with_one_thread_and_the_default(tmp_path: Path) -> None:
    tasks = list(planned(["save", "load", "kills"], tmp_path, mb=1))
    assert [(task.group, task.case, task.threads) for task in tasks[:6]] == [
        ("save", case, threads) for case in ("transformer", "many", "few") for threads in (1, 0)
    ]
    assert [task.group for task in tasks[6:]] == ["load", "load", "kills"]
    assert len({task.folder for task in tasks}) == len(tasks)


def test_outcomes_are_joined() -> None:
    one = Outcome(values=[Value("a", 1.0)], missing={"b": "why"}, notes=["first"], rounds={"x": {}})
    other = Outcome(values=[Value("c", 2.0)], missing={}, notes=["second"], rounds={"y": {}})
    whole = merged([one, other])
    assert [value.name for value in whole.values] == ["a", "c"]
    assert (whole.missing, whole.notes, set(whole.rounds)) == ({"b": "why"}, ["first", "second"], {"x", "y"})
