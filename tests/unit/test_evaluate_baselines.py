"""What the rules and raw models beside ours do: scores, persistence, and thresholds by a budget."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.steps import TIMINGS
from ingest.events import Metrics
from pipelines.evaluate.baselines import (
    BASE_STEPS,
    WARM_UP_STEPS,
    ScoredRun,
    alarms,
    matched,
    model_scorer,
    rules,
    score_run,
    threshold_of,
    total,
)
from pipelines.evaluate.matching import Label, Right
from pipelines.evaluate.step_arrays import StepArrays, StepCollector

OWN = TIMINGS.index("train.compute.own")
SLOW = slice(80, 100)
LABEL = Label("slow", Right(frozenset(("straggler",))), 80.0, 100.0, (2,), "node1", 0.5)


def arrays(seed: int, *, slow: float = 1.0, steps: int = 140) -> StepArrays:
    dice = np.random.default_rng(seed)
    values = 0.1 * dice.normal(1.0, 0.02, (steps, 4, len(TIMINGS)))
    values[SLOW, 2, OWN] *= slow
    return StepArrays((0, 1, 2, 3), ("node0", "node0", "node1", "node1"), values, np.arange(steps, dtype=float))


@pytest.mark.parametrize("name", sorted(rules()))
def test_a_rule_names_the_slow_rank_at_a_threshold_from_clean_runs(name: str) -> None:
    scorer = rules()[name]
    clean = [score_run(scorer, arrays(seed), (), 140) for seed in (1, 2, 3)]
    threshold = threshold_of(clean, 0.0)
    assert sum(len(alarms(run, threshold)) for run in clean) == 0
    broken = score_run(scorer, arrays(4, slow=1.5), (LABEL,), 115)
    counts = total(matched([broken], threshold))
    assert (counts.recall, counts.culprit, counts.false) == (1.0, 1.0, 0)
    assert counts.delays[0] <= 8.0


def test_a_raw_model_scores_in_units_of_its_own_clean_steps() -> None:
    class Distance:
        def fit(self, rows: np.ndarray) -> None:
            self.middle = rows.mean(axis=0)

        def decision_function(self, rows: np.ndarray) -> np.ndarray:
            return np.abs(rows - self.middle).sum(axis=1)

    scorer = model_scorer(Distance)
    run = score_run(scorer, arrays(5, slow=2.0), (LABEL,), 115)
    assert np.isneginf(run.level[: WARM_UP_STEPS + BASE_STEPS]).all()
    (first, *_) = alarms(run, 5.0)
    assert first.culprits[0].rank == 2


def test_a_larger_budget_gives_a_lower_threshold() -> None:
    scorer = rules()["k × median"]
    runs = [score_run(scorer, arrays(seed), (), 140) for seed in range(4)]
    none, some = threshold_of(runs, 0.0), threshold_of(runs, 20.0)
    assert some < none
    steps = sum(run.clean_steps for run in runs)
    assert 0 < sum(len(alarms(run, some)) for run in runs) <= 0.02 * steps


def test_an_alarm_that_goes_on_is_one_and_one_after_calm_is_another() -> None:
    level = np.full((60, 4), -np.inf)
    level[10:20, 1] = level[25:30, 1] = level[45:50, 1] = 2.0
    run = ScoredRun(arrays(0, steps=60), (), 60, level)
    assert [story.opened_at for story in alarms(run, 1.0)] == [10.0, 45.0]


def test_one_alarm_stands_at_a_time_and_names_the_highest_rank() -> None:
    level = np.full((60, 4), -np.inf)
    level[10:20] = 2.0
    level[10:20, 3] = 3.0
    (alarm,) = alarms(ScoredRun(arrays(0, steps=60), (), 60, level), 1.0)
    assert alarm.culprits[0].rank == 3


def test_without_a_clean_step_there_is_no_threshold_and_no_alarm() -> None:
    assert threshold_of([], 0.1) == float("inf")


def test_steps_are_gathered_by_rank_and_those_of_other_phases_left_out() -> None:
    collector = StepCollector()
    for rank in (1, 0):
        for step in (3, 4, 5):
            collector.take(
                Metrics(
                    job="job", attempt=1, rank=rank, node=f"node{rank}", sequence=step, at=float(step),
                    phase="checkpoint" if (rank, step) == (1, 4) else "train", step=step, steps=(step,),
                    ended_at=(step + 0.1 * rank,),
                    columns={"train.compute.own": (step + 10.0 * rank,)} if (rank, step) != (0, 5) else {},
                )
            )  # fmt: skip
    found = collector.arrays()
    assert (found.ranks, found.nodes) == ((0, 1), ("node0", "node1"))
    assert found.ended_at.tolist() == [3.1, 5.1]
    np.testing.assert_array_equal(found.timing("train.compute.own"), [[3.0, 13.0], [np.nan, 15.0]])
