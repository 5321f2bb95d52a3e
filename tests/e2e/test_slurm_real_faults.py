"""Failures that recovery must survive, on real Slurm: its controller frozen or away, dead slurmds, other users."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from pipelines.bench_recovery_slurm import POLICY, STEPS, SlurmTrial
from recovery.backend import Ambiguous, Rejected, TooFewNodes, Unavailable
from recovery.backends.left_behind import NOTHING, SOMETHING, UNKNOWN, left_behind
from recovery.backends.slurm import SlurmAllocation
from recovery.backends.slurm_cli import SlurmCommands, SlurmTimes
from tests.launcher_lab import wait_for
from tests.slurm_lab import SlurmLab
from tests.slurm_worlds import SlurmJobs

SLEEP = ("sleep", "600")
QUICK = SlurmTimes(read_seconds_max=1.0, write_seconds_max=1.0)
WAIT_SECONDS_MAX = 120.0


@pytest.fixture
def jobs(slurm: SlurmLab, tmp_path: Path) -> SlurmJobs:
    return SlurmJobs(slurm, tmp_path)


@pytest.fixture
def trial(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmTrial]:
    """A job with launchers on two nodes, under a controller of this process."""
    with trial_of(slurm, monkeypatch, STEPS) as trial:
        yield trial


@contextmanager
def trial_of(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch, script: str) -> Iterator[SlurmTrial]:
    """A trial of the bench in a short folder, whose launchers do not import torch; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="trial-", ignore_cleanup_errors=True) as name:
        without_torch = Path(name) / "without" / "torch"
        without_torch.mkdir(parents=True)
        (without_torch / "__init__.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')")
        monkeypatch.setenv("PYTHONPATH", str(without_torch.parent))
        monkeypatch.setenv("SLURM_CONF", str(slurm.config))
        monkeypatch.setenv("TRANSOM_HOST", "127.0.0.1")
        times = {"read_seconds_max": 2.0, "write_seconds_max": 2.0}
        with SlurmTrial(Path(name), SystemClock(), script=script, policy=POLICY, options=times) as trial:
            yield trial
        slurm.clear()  # before the folder goes


def sleepers(slurm: SlurmLab) -> list[int]:
    """Processes that `SLEEP` has become."""
    found = []
    for pid in slurm._ours():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"sleep\x00600\x00"):
                found += [pid] if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def submitted(jobs: SlurmJobs) -> tuple[str, SlurmAllocation, int]:
    """A job that sleeps on two nodes; its name, its allocation, and Slurm's number of it."""
    job, allocation = jobs.register(), jobs.allocation()
    allocation.submit(job, nodes=2, command=SLEEP)
    slurm = jobs.slurm
    assert isinstance(slurm, SlurmLab)
    wait_for(
        lambda: len(sleepers(slurm)) == 2, "its step runs on both nodes"
    )  # whoever is earlier meets srun's own races
    (number, _, _), *_ = jobs.slurm.commands.jobs_named(job)
    return job, allocation, number


# Failure injections of the design, those that a scheduler takes part in


def test_a_frozen_controller_is_ambiguous_and_there_is_one_restart(slurm: SlurmLab, jobs: SlurmJobs) -> None:
    job, allocation, number = submitted(jobs)
    bad = allocation.look(job).nodes[0]
    commands = FrozenBefore(slurm, "requeuehold")
    frozen = SlurmAllocation(jobs.folder, commands, SystemClock())
    with pytest.raises(Ambiguous):
        frozen.replace(job, attempt=2, token="t", excluded_nodes=(bad,))
    with pytest.raises(Unavailable):
        jobs.allocation(times=QUICK).look(job)
    slurm.thaw_controller()
    wait_for(lambda: slurm.job(number).restarts == 1, "it was done all the same, once the controller woke")
    allocation.replace(job, attempt=2, token="t", excluded_nodes=(bad,))
    view = jobs.allocation().look(job)
    wait_for(lambda: allocation.look(job).phase == "running", "it runs elsewhere")
    assert slurm.job(number).restarts == 1
    assert bad not in allocation.look(job).nodes
    assert (view.attempt, view.token) == (2, "t")


class FrozenBefore(SlurmCommands):
    """The controller freezes right before one command, which is handed over and not answered."""

    def __init__(self, slurm: SlurmLab, verb: str) -> None:
        super().__init__(slurm.environ, QUICK)
        self._slurm = slurm
        self._verb = verb

    def _write(self, *command: str, given: str | None = None) -> str:
        if command[1] == self._verb:
            self._slurm.freeze_controller()
        return super()._write(*command, given=given)


def test_while_the_controller_is_away_a_job_is_seen_restarted_inside_and_never_given_up(
    trial: SlurmTrial, slurm: SlurmLab
) -> None:
    first = trial.start()
    slurm.stop_controller()
    seen = trial.observe()
    assert (seen.phase, seen.attempt) == ("running", 1)
    assert "does not answer" in seen.note
    trial.deliver("rank_lost", 1, first.nodes[0])
    trial.wait(lambda: trial.ranks_run(2), "a restart without a scheduler", WAIT_SECONDS_MAX)
    slurm.start_controller()
    wait_for(lambda: trial.observe().note == "" and trial.observe().phase == "running", "all is as it was", 60.0)
    assert trial.allocation.look(trial.job).generation == first.generation


def test_nothing_is_done_while_nobody_answers_at_all(trial: SlurmTrial, slurm: SlurmLab) -> None:
    """Blind: neither the controller nor a launcher. What cannot be reached is not gone."""
    first = trial.start()
    pids = [file.pid for file in trial.files.nodes().values()]
    try:
        slurm.stop_controller()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable):
            trial.observe()
        trial.deliver("rank_lost", 1, first.nodes[0])
        with pytest.raises(Exception, match="not within"):
            trial.wait(lambda: not trial.ranks_run(1), "anything", 3.0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        slurm.start_controller()
    trial.wait(lambda: trial.ranks_run(2), "one restart, afterwards", WAIT_SECONDS_MAX)
    assert trial.allocation.look(trial.job).generation == first.generation


def test_a_job_that_has_finished_meanwhile_is_not_restarted(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    with trial_of(slurm, monkeypatch, "import time; time.sleep(1.5)") as trial:
        first = trial.start()
        wait_for(lambda: trial.observe().phase == "finished", "every rank has ended well")
        trial.deliver("rank_lost", 1, first.nodes[0])
        trial.wait(trial.is_quiet, "an answer", WAIT_SECONDS_MAX)
        assert trial.states()[-1].startswith("ignored")
        assert trial.observe().attempt == 1
        trial.backend.finish(trial.job, "finished", "every rank ended with exit code 0")
        (number, _, _), *_ = slurm.commands.jobs_named(trial.job)
        assert slurm.wait_for_phase(number, "ended").state == "COMPLETED"


def test_excluded_nodes_that_leave_too_few_are_waited_for_and_nothing_is_given_back(
    trial: SlurmTrial, slurm: SlurmLab
) -> None:
    first = trial.start()
    with pytest.raises(TooFewNodes) as refused:
        trial.allocation.replace(trial.job, attempt=2, token="t", excluded_nodes=("n1", "n2", "n3"))
    assert refused.value.usable == 1
    assert trial.allocation.look(trial.job).generation == first.generation
    assert trial.observe().phase == "running"


# What Slurm does not do for us


def test_a_step_outlives_its_slurmd_so_a_dead_node_is_vouched_for_only_once_it_is_excluded(
    trial: SlurmTrial, slurm: SlurmLab
) -> None:
    first = trial.start()
    bad = first.nodes[1]  # the batch script runs on the first one
    launcher = trial.files.nodes()[bad].pid
    slurm.take_down(bad)
    assert Path(f"/proc/{launcher}").exists(), "that is the zombie"
    assert not trial.allocation.nothing_runs_on(trial.job, bad)
    trial.files.write_excluded(frozenset({bad}))
    assert "down, and excluded" in trial.allocation.why_nothing_runs_on(trial.job, bad)
    view = trial.allocation.look(trial.job)
    assert (view.nodes, view.down_nodes) == ((first.nodes[0],), (bad,)), "the job lives on (--no-kill)"
    slurm.start_slurmd(bad)
    slurm.bring_up(bad)
    wait_for(lambda: not Path(f"/proc/{launcher}").exists(), "a slurmd that comes back ends what it finds")


def test_a_dead_launcher_on_a_living_node_is_vouched_for_by_the_node_itself(trial: SlurmTrial) -> None:
    first = trial.start()
    bad = first.nodes[1]
    assert left_behind(trial.places.jobs, trial.job, bad) == SOMETHING
    assert left_behind(trial.places.jobs, trial.job, "n9") == UNKNOWN
    assert not trial.allocation.nothing_runs_on(trial.job, bad)
    file = trial.files.nodes()[bad]
    os.kill(file.pid, signal.SIGKILL)
    wait_for(lambda: left_behind(trial.places.jobs, trial.job, bad) == NOTHING, "its ranks have gone with it")
    trial.allocation._probed.clear()  # it was asked a moment ago
    assert "itself says" in trial.allocation.why_nothing_runs_on(trial.job, bad)


def test_what_a_person_does_to_the_job_is_taken_as_it_is(slurm: SlurmLab, jobs: SlurmJobs) -> None:
    job, allocation, number = submitted(jobs)
    slurm.run("scontrol", "suspend", str(number))
    assert "scontrol resume" in allocation.look(job).held
    slurm.run("scontrol", "resume", str(number))
    assert allocation.look(job).held == ""
    slurm.run("scontrol", "requeuehold", str(number))
    slurm.wait_for_phase(number, "pending")
    assert "scontrol release" in allocation.look(job).held
    assert allocation.replace(job, attempt=2, token="t", excluded_nodes=()).held
    assert slurm.job(number).held, "it is not ours to release"
    slurm.run("scontrol", "release", str(number))
    allocation.replace(job, attempt=2, token="t", excluded_nodes=("n1",))
    wait_for(lambda: allocation.look(job).phase == "running", "it runs, and did not wait for two minutes")
    assert "n1" not in allocation.look(job).nodes
    slurm.run("scancel", str(number))
    slurm.wait_for_phase(number, "ended")
    with pytest.raises(Rejected, match="terminal stays terminal"):
        allocation.replace(job, attempt=3, token="u", excluded_nodes=())
    assert slurm.state(number) == "CANCELLED"


def test_a_job_of_another_user_and_one_that_may_not_be_requeued_are_refused_before_anything_is_stopped(
    slurm: SlurmLab, jobs: SlurmJobs
) -> None:
    job, allocation, number = submitted(jobs)
    slurm.run("scontrol", "update", f"JobId={number}", "Requeue=0")
    with pytest.raises(Rejected, match="Requeue=1"):
        allocation.replace(job, attempt=2, token="t", excluded_nodes=())
    slurm.run("scontrol", "update", f"JobId={number}", "Requeue=1")
    stranger = SlurmAllocation(jobs.folder, AsNobody(slurm), SystemClock())
    with pytest.raises(Rejected, match="the job's owner or an operator"):
        stranger.replace(job, attempt=2, token="t", excluded_nodes=())
    assert (slurm.job(number).restarts, slurm.job(number).phase) == (0, "running")
    assert slurm.job(number).comment == f"t:{job}:0:"


class AsNobody(SlurmCommands):
    """The same commands, typed by a user who owns nothing."""

    def __init__(self, slurm: SlurmLab) -> None:
        super().__init__(slurm.environ)
        if os.geteuid() != 0:
            pytest.skip("only root can ask as another user: run as root to run this test")

    def _write(self, *command: str, given: str | None = None) -> str:
        become = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        return super()._write(*become, *command, given=given)


def test_the_lab_leaves_nothing_behind(slurm: SlurmLab, jobs: SlurmJobs) -> None:
    """What a lab starts is found by it, steps too: the end of a session ends them."""
    submitted(jobs)
    assert len(sleepers(slurm)) == 2
