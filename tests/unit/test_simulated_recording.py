"""Simulated runs: the noise they take from a recording, what is written of them, and the standard suite of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pipelines.__main__ import app
from pipelines.recording import read_recording, read_run
from pipelines.simulation.noise import FORWARD_SHARE, OWN, PARTS, NoiseStream, recorded_noise
from pipelines.simulation.recorded import read_labels, write_simulated_recording
from pipelines.simulation.scenario import FAULT_KINDS, BadScenario, Scenario, SimulatedFault, parse_fault
from pipelines.simulation.simulation import simulated_messages
from pipelines.simulation.suite import SEVERITIES, standard_suite

CLEAN = Path(__file__).parents[2] / "data" / "clean"
PLAIN = Scenario(ranks=16, steps=20, recording=CLEAN, checkpoint_steps=0)
SLOW = SimulatedFault("straggler", 10, 5, 0.5, (3,))


def test_the_noise_has_the_quantiles_of_the_recording_at_every_level() -> None:
    noise = recorded_noise(CLEAN)
    stream = NoiseStream(noise, np.arange(64) // 8, 1.0, np.random.default_rng(0))
    drawn = np.log(np.stack([stream.next() for _ in range(3000)]))
    quantiles = (0.05, 0.25, 0.5, 0.75, 0.95)
    for index, part in enumerate(PARTS):
        recorded = np.quantile(noise.residuals[..., index], quantiles)
        apart = np.abs(np.quantile(drawn[..., index], quantiles) - recorded)
        spread = recorded[-1] - recorded[0]
        assert (apart < 0.12 * max(spread, 0.1)).all(), (part, apart, recorded)
    timings = slice(OWN, FORWARD_SHARE + 1)
    assert np.allclose(drawn.std(axis=(0, 1))[timings], noise.residuals.std(axis=(0, 1))[timings], rtol=0.1)
    own = drawn[..., OWN] - drawn[..., OWN].mean(axis=1, keepdims=True)
    together = np.corrcoef(own.T)
    assert together[0, 1] > 0.6, "ranks of a node share its bursts"
    assert abs(together[0, 8]) < 0.35, "ranks of two nodes do not"
    assert np.corrcoef(own[:-1, 0], own[1:, 0])[0, 1] > 0.3, "bursts last for steps"


def test_noise_is_taken_from_a_clean_run_only() -> None:
    with pytest.raises(BadScenario, match="clean run"):
        recorded_noise(CLEAN.parent / "six-faults")


def test_a_written_recording_reads_back_with_its_labels(tmp_path: Path) -> None:
    scenario = replace(PLAIN, faults=(SLOW,))
    labels = write_simulated_recording(scenario, tmp_path / "run")
    records = list(read_recording(tmp_path / "run"))
    assert len(records) == len(list(simulated_messages(scenario)))
    assert [record.appended_at for record in records] == sorted(record.appended_at for record in records)
    assert [label.fault for label in read_run(tmp_path / "run").labels] == ["straggler"]
    assert read_labels(tmp_path / "run") == labels
    assert labels.steps == 20
    with pytest.raises(BadScenario, match="another folder"):
        write_simulated_recording(scenario, tmp_path / "run")


def test_the_command_writes_a_recording_and_refuses_in_one_sentence(tmp_path: Path) -> None:
    told = tmp_path / "labels.json"
    arguments = ["simulate", "telemetry", str(tmp_path / "run"), "--ranks", "8", "--steps", "12", "--stages", "1"]
    arguments += ["--seed", "1"]
    arguments += ["--noise", str(CLEAN), "--fault", "straggler:rank=5,at=5,steps=3,severity=0.2", "--json", str(told)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "straggler (rank 5) from step 5" in result.output
    assert read_labels(tmp_path / "run").labels[0].ranks == (5,)
    assert told.read_bytes() == (tmp_path / "run" / "labels.json").read_bytes()
    for text, word in (("bla:at=1", "no simulated fault"), ("nan:rank=1", "at="), ("nan:at=x", "not name=number")):
        with pytest.raises(BadScenario, match=word):
            parse_fault(text)
    for scenario in ({"faults": (replace(SLOW, onset_step=99),)}, {"stages": 3}, {"ranks": 20_000}, {"late": 1.0}):
        with pytest.raises(BadScenario):
            replace(PLAIN, **scenario)
    assert parse_fault("slow_node:node=1,at=7") == SimulatedFault("slow_node", 7, 60, 0.2, (), 1)


def test_the_suite_has_every_kind_at_every_severity_and_enough_clean_steps() -> None:
    small = standard_suite(64, recording=CLEAN)
    had = {(f.kind, f.severity) for run in small if run.part == "faults" for f in run.scenario.faults}
    kinds = {kind for kind, _ in had}
    assert kinds == set(FAULT_KINDS)
    for kind in ("straggler", "throttle", "slow_node", "slow_link", "data_stall", "job_slow", "contended_node"):
        assert {severity for of, severity in had if of == kind} == set(SEVERITIES)
    assert sum(run.scenario.steps for run in small if run.part == "clean") >= 20_000
    assert {run.part for run in standard_suite(4096, recording=CLEAN)} == {"faults", "curve", "clean"}
    names = [run.name for run in small]
    assert len(set(names)) == len(names)
    assert standard_suite(64, recording=CLEAN) == small
    assert standard_suite(64, seed=1, recording=CLEAN) != small
    for run in small:
        for one, other in zip(run.scenario.faults, run.scenario.faults[1:], strict=False):
            assert one.end_step + 40 <= other.onset_step, "faults do not overlap"
