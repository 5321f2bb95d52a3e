"""Slurm at its worst, on a fake: lost answers, cut answers, missing rights, crashes between any two commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.allocation import AllocationView
from recovery.backend import Ambiguous, Conflict, Rejected, TooFewNodes, Unavailable
from recovery.backends.slurm_cli import SlurmCommands, SlurmTimes
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import JobEnd
from tests.fake_slurm import FakeSlurm
from tests.slurm_worlds import SlurmJobs, fake_slurm_jobs

COMMAND = ("true",)
QUICK = SlurmTimes(read_seconds_max=0.5, write_seconds_max=0.5)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmJobs]:
    with fake_slurm_jobs(tmp_path_factory.mktemp("fake")) as jobs:
        yield jobs


@pytest.fixture
def slurm(jobs: SlurmJobs) -> Iterator[FakeSlurm]:
    assert isinstance(jobs.slurm, FakeSlurm)
    jobs.slurm.clear()
    yield jobs.slurm
    jobs.slurm.clear()


def submitted(jobs: SlurmJobs, *, nodes: int = 2) -> tuple[str, AllocationView]:
    job = jobs.register(nodes=nodes)
    return job, jobs.allocation().submit(job, nodes=nodes, command=COMMAND)


def record_of(jobs: SlurmJobs, job: str) -> dict[str, Any]:
    assert isinstance(jobs.slurm, FakeSlurm)
    return next(one for one in jobs.slurm.controller.jobs.values() if one["name"] == job)


def replace(jobs: SlurmJobs, job: str, *excluded: str, attempt: int = 2, **more: Any) -> AllocationView:
    return jobs.allocation(**more).replace(job, attempt=attempt, token="t", excluded_nodes=excluded)


@pytest.mark.parametrize("command", ["scontrol update", "scontrol requeuehold", "scontrol release"])
@pytest.mark.parametrize("kind", ["lost answer", "connect"])
def test_whatever_answer_is_lost_there_is_one_requeue(
    jobs: SlurmJobs, slurm: FakeSlurm, command: str, kind: Any
) -> None:
    job, first = submitted(jobs)
    slurm.fault(command, kind)
    with pytest.raises(Ambiguous if kind == "lost answer" else Unavailable):
        replace(jobs, job, first.nodes[0])
    view = replace(jobs, job, first.nodes[0])
    assert (view.phase, view.attempt, view.generation) == ("running", 2, first.generation + 1)
    assert first.nodes[0] not in view.nodes
    assert replace(jobs, job, first.nodes[0]).generation == view.generation


def test_a_command_that_is_answered_too_late_may_have_been_done(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    slurm.fault("scontrol requeuehold", "late answer")
    with pytest.raises(Ambiguous, match=r"did not end within 0\.5 s"):
        replace(jobs, job, first.nodes[0], times=QUICK)
    assert record_of(jobs, job)["restarts"] == 1, "it was done all the same"
    assert replace(jobs, job, first.nodes[0]).generation == first.generation + 1


def test_a_look_that_is_not_answered_or_cut_off_says_nothing(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, _ = submitted(jobs)
    for command, kind in (
        ("scontrol show job", "connect"), ("scontrol show job", "cut"), ("scontrol show job", "slow"),
        ("squeue", "connect"), ("squeue", "slow"), ("sinfo", "connect"),
    ):  # fmt: skip
        slurm.fault(command, kind)  # type: ignore[arg-type]
        with pytest.raises(Unavailable):
            jobs.allocation(times=QUICK).look(job)
    assert jobs.allocation().look(job).phase == "running"


class PowerCut(BaseException):
    """Not an Exception, so that nothing can mistake it for another error."""


class CuttableCommands(SlurmCommands):
    """The power goes right before or right after the n-th command that changes something."""

    cut_at = 0
    seen = 0

    def _write(self, *command: str, given: str | None = None) -> str:
        self._point()
        out = super()._write(*command, given=given)
        self._point()
        return out

    def _point(self) -> None:
        self.seen += 1
        if self.seen == self.cut_at:
            raise PowerCut


@pytest.mark.parametrize("cut_at", range(1, 11))
def test_killed_between_any_two_commands_the_next_controller_goes_on_where_it_stands(
    jobs: SlurmJobs, slurm: FakeSlurm, cut_at: int
) -> None:
    job, first = submitted(jobs)
    allocation = jobs.allocation()
    commands = CuttableCommands(slurm.environ)
    commands.cut_at = cut_at
    allocation._commands = commands
    with pytest.raises(PowerCut):
        allocation.replace(job, attempt=2, token="t", excluded_nodes=(first.nodes[0],))
    view = replace(jobs, job, first.nodes[0])
    assert (view.phase, view.attempt, view.token) == ("running", 2, "t")
    assert view.generation == first.generation + 1
    assert first.nodes[0] not in view.nodes
    assert record_of(jobs, job)["comment"] == f"t:{job}:2:t:requeued:1"


def test_there_are_no_more_places_to_be_killed_at(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    allocation = jobs.allocation()
    commands = CuttableCommands(slurm.environ)
    allocation._commands = commands
    allocation.replace(job, attempt=2, token="t", excluded_nodes=(first.nodes[0],))
    assert commands.seen == 10


def test_a_newer_attempt_that_came_in_between_stops_the_older_one(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    slurm.fault("scontrol requeuehold", "connect")
    with pytest.raises(Unavailable):
        replace(jobs, job, attempt=2)
    view = jobs.allocation().replace(job, attempt=3, token="u", excluded_nodes=())
    assert (view.attempt, view.generation) == (3, first.generation + 1)
    with pytest.raises(Conflict):
        replace(jobs, job, attempt=2)
    assert record_of(jobs, job)["restarts"] == 1


def test_what_this_user_may_not_do_is_said_before_anything_is_stopped(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    slurm.fault("scontrol update", "denied", times=9)
    with pytest.raises(Rejected, match="the job's owner or an operator"):
        replace(jobs, job, first.nodes[0])
    assert jobs.allocation().look(job).generation == first.generation
    assert not slurm.calls("scontrol requeuehold")


def test_a_job_that_may_not_be_requeued_is_left_alone_in_one_sentence(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    record_of(jobs, job)["requeue"] = False
    with pytest.raises(Rejected, match=r"may not be requeued.*Requeue=1"):
        replace(jobs, job, first.nodes[0])
    assert jobs.allocation().look(job).nodes == first.nodes
    assert record_of(jobs, job)["comment"] == f"t:{job}:0:"


def test_a_node_that_the_job_asks_for_by_name_cannot_be_excluded(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    record_of(jobs, job)["requested"] = [first.nodes[0]]
    with pytest.raises(Rejected, match="by name"):
        replace(jobs, job, first.nodes[0])


def test_nodes_that_a_person_has_excluded_stay_so_and_ours_come_back(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, _ = submitted(jobs)
    record_of(jobs, job)["excluded"] = ["n4"]
    assert set(replace(jobs, job, "n1", attempt=2).excluded_nodes) == {"n1", "n4"}
    assert set(replace(jobs, job, "n2", attempt=3).excluded_nodes) == {"n2", "n4"}
    assert set(replace(jobs, job, attempt=4).excluded_nodes) == {"n4"}
    with pytest.raises(TooFewNodes) as refused:
        replace(jobs, job, "n1", "n2", attempt=5)
    assert refused.value.usable == 1


def test_a_job_that_a_person_holds_is_not_let_go(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    record_of(jobs, job).update(state="PENDING", nodes=[], held=True, reason="JobHeldUser")
    view = jobs.allocation().look(job)
    assert "scontrol release" in view.held
    assert replace(jobs, job, first.nodes[0]).held
    assert record_of(jobs, job)["held"]
    record_of(jobs, job).update(held=False, reason="")
    assert jobs.allocation().look(job).held == ""


def test_a_hold_that_a_person_puts_on_while_we_requeue_is_theirs(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    slurm.fault("scontrol release", "connect")
    with pytest.raises(Unavailable):
        replace(jobs, job, first.nodes[0])
    record_of(jobs, job).update(reason="JobHeldAdmin")
    assert replace(jobs, job, first.nodes[0]).held
    assert record_of(jobs, job)["held"]


def test_a_running_job_that_a_person_has_put_on_hold_is_not_requeued(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    record_of(jobs, job)["held"] = True
    with pytest.raises(Rejected, match="is held"):
        replace(jobs, job, first.nodes[0])
    assert jobs.allocation().look(job).phase == "running"


def test_a_job_that_a_person_has_requeued_is_adopted_and_does_not_wait_two_minutes(
    jobs: SlurmJobs, slurm: FakeSlurm
) -> None:
    job, first = submitted(jobs)
    slurm.controller.requeue(record_of(jobs, job))
    seen = jobs.allocation().look(job)
    assert (seen.phase, seen.generation, seen.reason) == ("pending", first.generation + 1, "BeginTime")
    view = replace(jobs, job, first.nodes[0])
    assert (view.phase, view.generation, view.attempt) == ("running", first.generation + 1, 2)


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED"])
def test_a_job_that_is_over_is_not_requeued_although_slurm_would(jobs: SlurmJobs, slurm: FakeSlurm, state: str) -> None:
    job, _ = submitted(jobs)
    record_of(jobs, job).update(state=state, nodes=[], reason="NonZeroExitCode" if state == "FAILED" else "")
    with pytest.raises(Rejected, match="terminal stays terminal"):
        replace(jobs, job)
    assert record_of(jobs, job)["restarts"] == 0


def test_a_job_that_slurm_has_ended_for_a_dead_node_comes_back(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    record_of(jobs, job).update(state="FAILED", nodes=[], reason="JobLaunchFailure")
    assert jobs.allocation().look(job).phase == "ended"
    view = replace(jobs, job, first.nodes[0])
    assert (view.phase, view.generation) == ("running", first.generation + 1)


def test_a_launch_that_a_slurmd_refused_is_asked_for_again(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    replace(jobs, job, first.nodes[0])
    record_of(jobs, job).update(state="FAILED", nodes=[], reason="JobLaunchFailure")
    view = replace(jobs, job, first.nodes[0])
    assert (view.phase, view.attempt, view.generation) == ("running", 2, first.generation + 2)


def test_a_bad_node_is_drained_once_where_that_is_wanted(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    bad = first.nodes[0]
    replace(jobs, job, bad)
    assert not slurm.controller.nodes[bad]["drain"], "nobody has asked for it"
    replace(jobs, job, bad, attempt=3, drain=True)
    assert slurm.controller.nodes[bad] == {"state": "IDLE", "drain": True, "reason": f"transom {job}"}
    slurm.bring_up(bad)  # a person knows better
    replace(jobs, job, bad, attempt=4, drain=True)
    assert not slurm.controller.nodes[bad]["drain"]


def test_a_missing_right_to_drain_is_said_and_stops_nothing(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    slurm.fault("scontrol update NodeName", "denied")
    view = replace(jobs, job, first.nodes[0], drain=True)
    assert view.phase == "running"
    assert "is not drained" in view.reason
    assert "operator" in view.reason


def test_two_jobs_of_one_name_are_told_apart(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    """The next link of a chain waits for the first to be over (singleton), and is then the one."""
    job, first = submitted(jobs)
    allocation = jobs.allocation()
    slurm.commands.submit(allocation.script(job, nodes=2, command=COMMAND))
    assert jobs.allocation().look(job).generation == first.generation
    record_of(jobs, job)["state"] = "TIMEOUT"
    slurm.controller.schedule()
    assert allocation.look(job).generation > first.generation
    assert jobs.allocation().look(job).phase == "running"


def test_a_name_whose_slurm_job_has_ended_may_be_taken_anew_but_not_one_that_is_over(
    jobs: SlurmJobs, slurm: FakeSlurm
) -> None:
    job, first = submitted(jobs)
    record_of(jobs, job)["state"] = "CANCELLED"
    again = jobs.allocation().submit(job, nodes=2, command=COMMAND)
    assert (again.phase, again.generation > first.generation) == ("running", True)
    JobFiles(jobs.folder, job).write_end(JobEnd(outcome="finished", reason="all ended well", at=1.0))
    with pytest.raises(Rejected, match="take another job name"):
        jobs.allocation().submit(job, nodes=2, command=COMMAND)


def test_somebody_elses_job_of_that_name_is_not_ours(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job = jobs.register()
    slurm.commands.submit(f"#!/bin/bash\n#SBATCH --job-name={job}\n#SBATCH --comment=mine\nsleep 9\n")
    assert jobs.allocation().look(job).phase == "absent"


def test_without_slurms_commands_it_is_said_what_to_install(jobs: SlurmJobs, tmp_path: Path) -> None:
    job = jobs.register()
    allocation = jobs.allocation()
    allocation._commands = SlurmCommands({"PATH": str(tmp_path)})
    with pytest.raises(Rejected, match="install Slurm's client commands"):
        allocation.look(job)


def test_what_a_person_has_set_for_their_own_eyes_changes_nothing(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    environ = {**slurm.environ, "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative", "SCONTROL_ALL": "1"}
    kept = SlurmCommands(environ)._environ
    assert not {"SQUEUE_FORMAT", "SCONTROL_ALL"} & set(kept)
    assert (kept["LC_ALL"], kept["SLURM_TIME_FORMAT"]) == ("C", "standard")


def test_launchers_are_those_of_the_nodes_it_has_now(jobs: SlurmJobs, slurm: FakeSlurm) -> None:
    job, first = submitted(jobs)
    files = JobFiles(jobs.folder, job)
    for node in ("n1", "n2", "n3"):
        files.nodes_folder.mkdir(exist_ok=True)
        files.node_file(node).write_text(
            f'{{"job": "{job}", "node": "{node}", "slots": 2, "pid": 1, "start_time": 1, "control_socket": "c",'
            f' "telemetry_socket": "t", "address": "tcp:{node}:1"}}'
        )
    allocation = jobs.allocation()
    assert [launcher.node for launcher in allocation.launchers(job)] == list(first.nodes)
    view = allocation.replace(job, attempt=2, token="t", excluded_nodes=("n1",))
    assert [launcher.node for launcher in allocation.launchers(job)] == [
        node for node in view.nodes if node in ("n1", "n2", "n3")
    ]
    slurm.fault("scontrol", "connect", times=99)
    slurm.fault("squeue", "connect", times=99)
    assert [launcher.address for launcher in jobs.allocation().launchers(job)] == [
        "tcp:n1:1", "tcp:n2:1", "tcp:n3:1",
    ], "whom a controller knows that was started while slurmctld was away"  # fmt: skip
