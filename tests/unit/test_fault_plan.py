"""Plans of corpora: balanced, the same for the same words, and parts that share neither a seed nor a size."""

from __future__ import annotations

from collections import Counter

import pytest

from pipelines.errors import StatedError
from pipelines.evaluate.expectations import RIGHT
from pipelines.fault_corpus.kinds import KINDS, SEVERITY_OF, SIZES, parameters_of
from pipelines.fault_corpus.plan import CLEAN, PlannedRun, Wanted, make_plan
from pipelines.injectable import FAULTS

FULL = make_plan(Wanted())


def faults_of(part: str) -> list[PlannedRun]:
    return [run for run in FULL if run.part == part and run.kind != CLEAN]


def test_the_full_plan_is_large_enough_for_the_published_figures() -> None:
    held_out = faults_of("held-out")
    must = [run for run in held_out if RIGHT[run.kind].must_be_found]
    assert len(must) >= 60
    assert len({run.kind for run in must}) >= 10
    assert len({run.size for run in held_out}) >= 3
    assert set(KINDS) == {run.kind for run in held_out} == {run.kind for run in faults_of("tuning")}
    assert sum(run.clean_steps for run in FULL) >= 30_000
    assert min(Counter(run.rank for run in held_out).values()) >= 8


def test_the_parts_share_neither_seeds_nor_sizes() -> None:
    tuning, held_out = ([run for run in FULL if run.part == part] for part in ("tuning", "held-out"))
    assert not {run.seed for run in tuning} & {run.seed for run in held_out}
    assert not {run.size for run in tuning} & {run.size for run in held_out}
    assert all(run.name.startswith(f"{run.part}/") for run in FULL)
    assert all(SIZES[run.size].part == run.part for run in FULL)


def test_a_plan_is_the_same_for_the_same_words_and_no_run_comes_twice() -> None:
    assert make_plan(Wanted()) == FULL
    assert len({run.name for run in FULL}) == len(FULL)
    seeds = Counter((run.part, run.seed) for run in FULL)
    assert set(seeds.values()) == {1}


def test_the_small_plan_has_twelve_runs_most_of_them_held_out() -> None:
    small = make_plan(Wanted(plan="small"))
    assert len(small) == 12
    assert len({run.kind for run in small}) >= 10
    assert sum(run.part == "tuning" for run in small) == 1


def test_what_is_named_is_combined_with_everything_else_that_is_named() -> None:
    runs = make_plan(
        Wanted(kinds=("slow", "kill"), sizes=("w64x3",), ranks=(0, 3), seeds=2, severities=("strong",), clean_steps=0)
    )
    assert Counter((run.kind, run.rank) for run in runs) == {
        ("slow", 0): 2, ("slow", 3): 2, ("kill", 0): 2, ("kill", 3): 2,
    }  # fmt: skip
    assert len({run.name for run in runs}) == 8


def test_kinds_and_severities_alone_choose_from_the_plan() -> None:
    runs = make_plan(Wanted(kinds=("slow_data",), severities=("mild",)))
    assert {(run.kind, run.level) for run in runs} == {("slow_data", "mild")}
    assert make_plan(Wanted(kinds=(CLEAN,), clean_steps=100))[-1].clean_steps == 85


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Wanted(kinds=("melt",)), "no kind 'melt'"),
        (Wanted(sizes=("w1x1",)), "no size 'w1x1'"),
        (Wanted(severities=("awful",)), "no severity 'awful'"),
        (Wanted(ranks=(4,)), "ranks of the job are 0 to 3"),
        (Wanted(seeds=0), "number of seeds is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_name_is_refused(wanted: Wanted, reason: str) -> None:
    with pytest.raises(StatedError, match=reason):
        make_plan(wanted)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_a_plan_injects_is_something_that_inject_reads(kind: str) -> None:
    fault = FAULTS[KINDS[kind].inject]
    for level in KINDS[kind].levels:
        assert set(parameters_of(kind, level, 0.1)) <= set(fault.parameters)
    assert kind in RIGHT


def test_delays_are_a_part_of_what_a_step_takes() -> None:
    assert parameters_of("sleep", "strong", 0.2)["delay_seconds"] == pytest.approx(0.08)
    assert parameters_of("slow_data", "middle", 0.2)["delay_seconds"] == pytest.approx(0.1)
    assert parameters_of("slow_data", "mild", 0.02)["delay_seconds"] == 0.015
    assert list(SEVERITY_OF.values()) == [0.25, 0.5, 1.0]
