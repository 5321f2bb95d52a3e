"""`transom bench recovery` and `bench e2e`: the arithmetic, the counting, and what a broken guard would look like."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.__main__ import app
from pipelines.asked import REPORTED, Asked, chosen_groups
from pipelines.bench_e2e.compare import Compared, Run, Size, outcome_of
from pipelines.bench_job.planned_faults import SLOW_STEPS, FaultPlan, PlannedFault, poisson_faults, write_faults
from pipelines.bench_job.step_log import StepLog, StepWriter
from pipelines.bench_recovery import asked as table
from pipelines.bench_recovery.outcome import Outcome, Task
from pipelines.bench_recovery.schedule_world import LyingBackend
from pipelines.bench_recovery.schedules import run_schedules
from pipelines.figures import Figure
from recovery.backend import StartRequest
from recovery.calls import Started
from recovery.store import RecoveryStore

SCHEDULES = 40


def test_schedules_bring_about_one_restart_for_each_incident() -> None:
    counted = run_schedules(range(SCHEDULES))
    assert (counted.schedules, counted.duplicates, counted.lost) == (SCHEDULES, 0, 0), counted.failures
    assert counted.incidents > SCHEDULES
    assert counted.lives > counted.schedules, "power was cut, or another controller took over"


def test_the_same_seeds_are_the_same_schedules() -> None:
    assert run_schedules(range(5)) == run_schedules(range(5))


def test_a_controller_that_starts_whenever_it_is_unsure_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither looking first nor the attempt's fence: what a plain "again, it failed" does."""

    def again(backend: LyingBackend, request: StartRequest, old_attempt: int) -> Started:
        job = backend._jobs[request.job]
        job.attempt, job.ranks = min(job.attempt, request.attempt - 1), {}
        return Started(backend.start(request))

    monkeypatch.setattr("recovery.steps.start_attempt", again)
    assert run_schedules(range(15)).duplicates > 0


def test_a_verdict_that_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.bench_recovery.schedules.ROUNDS_MAX", 30)
    monkeypatch.setattr(RecoveryStore, "insert_verdict", lambda self, verdict, now: False)
    assert run_schedules(range(3)).lost > 0


TABLE = (
    Asked("recovery.one", "the first", "≤", 2.0, "fast"),
    Asked("recovery.two", "the second", "=", 0.0, "slow"),
    Asked("recovery.three", "the third", REPORTED, 0.0, "slow"),
)


def test_groups_are_chosen_by_figure_short_name_or_group() -> None:
    assert chosen_groups(TABLE, (), "bench") == ["fast", "slow"]
    assert chosen_groups(TABLE, ("recovery.two",), "bench") == ["slow"]
    assert chosen_groups(TABLE, ("three", "fast"), "bench") == ["fast", "slow"]
    with pytest.raises(ValueError, match=r"nothing is not measured by `bench`; choose of fast, slow"):
        chosen_groups(TABLE, ("nothing",), "bench")


def test_what_is_asked_is_met_or_not() -> None:
    assert TABLE[0].met_by(2.0)
    assert not TABLE[1].met_by(1.0)
    assert TABLE[2].met_by(1e9)
    assert [one.text for one in TABLE] == ["≤ 2", "= 0", "reported"]


def test_every_figure_has_something_that_measures_it() -> None:
    assert {asked.group for asked in table.ASKED} == set(table.MEASURES)
    assert len({asked.name for asked in table.ASKED}) == len(table.ASKED)


def test_a_group_that_fails_leaves_its_reason_and_one_that_is_not_there_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(task: Task, tell: object) -> Outcome:
        raise RuntimeError("no launcher")

    monkeypatch.setattr("pipelines.bench_recovery.doomed.measure_doomed", broken)
    outcome = table.measured("doomed", Task(tmp_path / "x"), lambda text: None)
    assert set(outcome.missing.values()) == {"RuntimeError: no launcher"}
    monkeypatch.setitem(table.MEASURES, "doomed", ("pipelines.bench_recovery.nowhere", "measure"))
    outcome = table.measured("doomed", Task(tmp_path / "x"), lambda text: None)
    assert outcome.missing == dict.fromkeys(("recovery.doomed_restarts", "recovery.doomed_seconds"), table.NOT_YET)


def test_the_command_says_what_was_asked_measured_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(task: Task, tell: object) -> Outcome:
        return Outcome([Figure("recovery.doomed_restarts", 3, "restarts")], notes=["a note"])

    monkeypatch.setattr("pipelines.bench_recovery.doomed.measure_doomed", measure)
    file = tmp_path / "f.json"
    result = CliRunner().invoke(app, ["bench", "recovery", "--only", "doomed", "--json", str(file)])
    assert result.exit_code == 0, result.output
    tree = json.loads(file.read_text())
    assert {one["name"]: one["value"] for one in tree["figures"]} == {"recovery.doomed_restarts": 3}
    assert tree["missing"] == {"recovery.doomed_seconds": table.NOT_YET}
    assert "missed" in result.output
    assert "a note" in result.output
    assert "not measured" in str(CliRunner().invoke(app, ["bench", "recovery", "--only", "no"]).exception)


# The job of the benches


def test_the_step_log_tells_when_all_ranks_were_there(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 2)
    assert log.read() == []
    writers = [StepWriter(tmp_path, 2, rank) for rank in range(2)]
    writers[0].write("began", 0, 10.0)
    writers[0].write("step", 6, 12.0)
    log.read()
    assert (log.attempt, log.began_at(2), log.first_step_at(2), log.step(2)) == (2, None, None, 0)
    writers[1].write("began", 0, 10.5)
    writers[1].write("step", 6, 12.5)
    for step in (7, 8):
        for writer in writers:
            writer.write("step", step, 12.5 + step)
    writers[1].write("fault", 9, 30.0)
    with (tmp_path / "steps.log").open("a") as stream:
        stream.write("step 2 1 9")  # a line that is still being written
    assert len(log.read()) == 7
    assert (log.began_at(2), log.first_step_at(2), log.step(2), log.steps_made(2)) == (10.5, 12.5, 8, 3)
    assert log.pids(2) == {0: os.getpid(), 1: os.getpid()}
    assert [fault.at for fault in log.faults] == [30.0]
    assert log.ended_at == [12.0, 19.5, 20.5]


def test_faults_come_as_often_as_they_should_and_the_same_for_a_seed() -> None:
    shares = {"kill": 0.5, "slow": 0.2, "hang": 0.3}
    faults = poisson_faults(1, 400, 60.0, 4, shares)  # type: ignore[arg-type]
    assert faults == poisson_faults(1, 400, 60.0, 4, shares)  # type: ignore[arg-type]
    assert faults[-1].step / 400 == pytest.approx(60.0, rel=0.15)
    assert sum(fault.kind == "hang" for fault in faults) / 400 == pytest.approx(0.3, abs=0.07)
    assert all(later.step > earlier.step for earlier, later in pairwise(faults))


def test_a_fault_happens_once_and_slowness_each_time(tmp_path: Path) -> None:
    write_faults(
        tmp_path, [PlannedFault(0, 5, "kill", 1), PlannedFault(1, 7, "slow", 1), PlannedFault(2, 5, "hang", 0)]
    )
    plan = FaultPlan(tmp_path, 1)
    assert plan.due(4) is None
    assert plan.due(5) == PlannedFault(0, 5, "kill", 1)
    assert FaultPlan(tmp_path, 1).due(5) is None, "the step is trained again, and the rank lives"
    assert [plan.seconds_more(step) > 0 for step in (6, 7, 6 + SLOW_STEPS, 7 + SLOW_STEPS)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.fixture
def compared() -> Compared:
    def run(launcher: str, kind: str, wall: float, charged: float = 0.0, parameters: str = "same") -> Run:
        return Run(launcher, kind, wall, charged, 5, 100, 120, 1.0, parameters, 0.5)

    return Compared([
        run("transom", "crashes", 80.0), run("torchrun", "crashes", 100.0),
        run("transom", "hangs", 90.0), run("torchrun", "hangs", 100.0, 80.0, "other"),
    ])  # fmt: skip


def test_what_is_saved_is_of_torchruns_time_with_what_it_is_charged(compared: Compared) -> None:
    outcome = outcome_of(compared, ["crashes", "hangs"])
    assert {figure.name: figure.value for figure in outcome.figures} == {
        "e2e.time_saved_crashes": pytest.approx(0.2), "e2e.time_saved": 0.5, "e2e.goodput": pytest.approx(0.5556),
        "e2e.same_parameters": 0.5,
    }  # fmt: skip
    assert "+ 80 s of watchdog" in outcome.notes[3]


def test_both_launchers_are_given_the_same_job_and_the_same_faults(tmp_path: Path) -> None:
    size = Size(faults=3)
    ours, theirs = (size.arguments(tmp_path, saver, "hangs") for saver in ("transom", "torch"))
    assert [one for one, other in zip(ours, theirs, strict=True) if one != other] == ["transom"]
    assert size.steps("hangs") > size.faults_of("hangs")[-1].step


def test_a_rank_breaks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.bench_job import planned_faults

    sent: list[int] = []
    monkeypatch.setattr(planned_faults.os, "kill", lambda pid, number: sent.append(number))
    for kind in ("kill", "hang"):
        planned_faults.break_self(PlannedFault(0, 1, kind, 0))  # type: ignore[arg-type]
    assert sent == [signal.SIGKILL, signal.SIGSTOP]
