"""`transom bench ckpt` measured for real, at sizes that say nothing: its parts run, and each checks what it timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.__main__ import app
from pipelines.bench_ckpt.asked import ASKED
from pipelines.bench_ckpt.dedup import measure_dedup
from pipelines.bench_ckpt.fenced_saves import measure_fenced
from pipelines.bench_ckpt.flips import measure_flips
from pipelines.bench_ckpt.loads import measure_loads
from pipelines.bench_ckpt.outcome import Measure, Task
from pipelines.bench_ckpt.roundtrips import measure_roundtrips
from pipelines.bench_ckpt.running import run_task
from pipelines.bench_ckpt.saves import measure_saves


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what dcp says on one rank
@pytest.mark.parametrize(
    ("group", "measure"),
    [
        ("save", measure_saves),
        ("fenced", measure_fenced),
        ("load", measure_loads),
        ("flips", measure_flips),
        ("dedup", measure_dedup),
        ("roundtrips", measure_roundtrips),
    ],
)
def test_a_group_measures_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, measure: Callable[..., object]
) -> None:
    monkeypatch.setattr("pipelines.bench_ckpt.rounds.SPREAD_MAX", 1e9)  # one round of a few milliseconds says nothing
    monkeypatch.setattr("pipelines.bench_ckpt.saves.FIRST_SAVES", 1)
    task = Task(group=group, folder=str(tmp_path), case="few", mb=1, rounds=1, flips=6, roundtrips=10)
    run: Measure = measure  # type: ignore[assignment]
    outcome = run(task, lambda text: None)
    found = {value.name: value.value for value in outcome.values}
    wanted = {asked.name for asked in ASKED if asked.group == group} - set(outcome.missing)
    assert set(found) == wanted
    assert found.get("ckpt.flips_found", 1.0) == 1.0, outcome.notes
    assert found.get("ckpt.dedup_ratio", 1.0) < 1.05, outcome.notes
    assert found.get("ckpt.roundtrips", 10) == 10, outcome.notes


def test_a_process_that_fails_leaves_its_reason_with_the_figures(tmp_path: Path) -> None:
    outcome = run_task(Task(group="kills", folder=str(tmp_path / ("x" * 100)), kills=1), lambda text: None)
    assert "did not start" in outcome.missing["ckpt.torn"]  # its socket's path would be too long
    assert set(outcome.missing) == {asked.name for asked in ASKED if asked.group == "kills"}


def test_the_command_shows_what_was_asked_and_measured_and_writes_both(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["bench", "ckpt", "--only", "kills", "--only", "gpu_save_ratio", "--kills", "2", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert {figure["name"]: figure["value"] for figure in written["figures"]} == {
        "ckpt.kills": 2, "ckpt.torn": 0, "ckpt.saves_lost_max": 0, "ckpt.engine_kill_lost": 0,
    }  # fmt: skip
    assert written["missing"]["ckpt.gpu_save_ratio"] == "there is no GPU here"
    assert "not measured" in result.output
