"""`transom evaluate sim`: a small simulated job through detection, its labels, and the curve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import pipelines.evaluate.sim as sim
from detectors.config import DetectorConfig
from detectors.logs.rule_book import RuleBook
from pipelines.evaluate.evaluation import EvaluateOptions
from pipelines.evaluate.matching import Tally, tally
from pipelines.evaluate.sim_runs import right_label, run_simulation
from pipelines.simulation.labels import SimulatedLabel
from pipelines.simulation.scenario import Scenario, SimulatedFault
from pipelines.simulation.suite import SuiteRun

CLEAN = Path(__file__).resolve().parents[2] / "data" / "clean"
SMALL = Scenario(
    ranks=8, steps=140, seed=3, stages=1, checkpoint_steps=0, device_seconds=0.0, missing=0.0, late=0.0,
    recording=CLEAN,
    faults=(SimulatedFault("straggler", onset_step=80, length_steps=30, severity=0.5, ranks=(5,)),),
)  # fmt: skip


def test_a_simulated_straggler_is_found_and_its_clean_steps_are_counted() -> None:
    run = run_simulation("small", SMALL, DetectorConfig(), RuleBook.shipped(), arrays=True)
    counts = tally(run.matched, run.clean_steps)
    assert (counts.faults, counts.found, counts.culprits, counts.false) == (1, 1, 1, 0)
    assert 80 <= run.clean_steps <= 110  # not the fault's steps, nor the ten after it
    assert run.arrays is not None
    assert run.arrays.values.shape[1] == 8


def label(**fields: object) -> SimulatedLabel:
    return SimulatedLabel(kind="k", onset_step=1, onset_at=1.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("simulated", "blamed"),
    [
        (label(fault_class="straggler", ranks=(1,), node="node0000"), "rank"),
        (label(fault_class="straggler", node="node0000"), "node"),
        (label(fault_class="job_slow"), "nobody"),
        (label(fault_class="regime_change", is_fault=False), "any"),
    ],
    ids=["rank", "node", "job", "change"],
)
def test_a_label_says_whom_to_blame(simulated: SimulatedLabel, blamed: str) -> None:
    right = right_label(simulated).right
    assert right.culprit == blamed
    assert right.must_be_found == simulated.is_fault
    assert ("regime_change" in right.tolerated) == (simulated.fault_class != "regime_change")


def test_the_suite_is_run_by_size_and_its_curve_told(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = replace(SMALL, faults=(), steps=100)
    runs = (SuiteRun("f", "faults", SMALL), SuiteRun("c", "clean", quiet))
    monkeypatch.setattr(sim, "standard_suite", lambda ranks, seed, recording: runs)
    monkeypatch.setattr(sim, "methods", lambda: (sim_rules(), ["Without models."]))
    evaluation = sim.evaluate(CLEAN, EvaluateOptions(console=Console(quiet=True), ranks=(8,)))
    figures = {figure.name: figure for figure in evaluation.figures}
    assert figures["sim.recall"].value == figures["sim.recall_8"].value == 1.0
    assert figures["sim.false_per_1k_8"].n > 150
    assert evaluation.details["curve"] == {"8": {"0.5": [1, 1]}}
    assert set(evaluation.details["baselines"]) == {"transom", "k × median"}  # type: ignore[call-overload]
    assert "Without models." in evaluation.shown


def sim_rules() -> dict[str, object]:
    from pipelines.evaluate.baselines import rules

    return {"k × median": rules()["k × median"]}


def test_the_curve_is_a_table_of_markdown() -> None:
    text = sim.curve_markdown({64: {0.03: (1, 4), 0.1: (5, 5)}, 512: {0.1: (3, 4)}})
    assert text.splitlines()[0] == "| severity | 64 ranks | 512 ranks |"
    assert "| 3 % | `██········` 0.25 (4) |  |" in text
    assert "| 10 % | `██████████` 1.00 (5) | `████████··` 0.75 (4) |" in text


def test_tallies_of_no_run_are_empty() -> None:
    assert sim._sum([]) == Tally()
