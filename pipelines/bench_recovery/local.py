"""How long a real job of four ranks on this machine is away: kills, hangs and a lost launcher, beside torchrun's.

The same script, the same saves, the same log of steps under both launchers; torchrun's trials are in the same run.
"""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path

from ingest.clock import Clock, SystemClock
from pipelines.bench_job.step_log import StepLog
from pipelines.bench_job.under_torchrun import Torchrun
from pipelines.bench_job.under_transom import SCRIPT, BenchFailed, Services
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.children import Child
from pipelines.figures import Figure
from recovery.launcher.procfs import is_alive

JOB = "kills"
RANKS = 4
SAVE_EVERY = 5
STEADY_STEPS = 60  # of the first attempt, so that detection knows the job
SETTLE_STEPS = 25  # of each later one, before the next fault
START_SECONDS_MAX = 400.0  # a machine that others use, too
BACK_SECONDS_MAX = 400.0
ORPHAN_SECONDS = 3.0  # after the launcher's end: the kernel needs no time, torchrun's ranks are there for ever
SCRIPT_ARGUMENTS = ("--save-every", str(SAVE_EVERY), "--pause", "0.05")


def measure_local(task: Task, tell: Tell) -> Outcome:
    """Our trials, then torchrun's."""
    clock = SystemClock()
    outcome = Outcome()
    ours = _LocalTrials(task, clock, tell)
    ours.run()
    outcome.rounds = dict(ours.rounds)
    for name in ("spawn", "first_step", "kill_to_step", "hang"):
        taken = ours.rounds[name]
        outcome.figures.append(
            Figure(f"recovery.{name}_seconds", round(statistics.median(taken), 3), "s", n=len(taken))
        )
        outcome.notes.append(f"[local] {name}: median {statistics.median(taken):.3f} s, worst {max(taken):.3f} s")
    outcome.figures.append(Figure("recovery.orphans", ours.orphans, "ranks", n=RANKS))
    try:
        theirs = _torchrun_trials(task, clock, tell)
    except BenchFailed as error:
        outcome.missing["recovery.torchrun_ratio"] = str(error)
        return outcome
    outcome.rounds["torchrun_kill_to_step"] = theirs.kill_to_step
    kill, torchrun_kill = statistics.median(ours.rounds["kill_to_step"]), statistics.median(theirs.kill_to_step)
    ratio = Figure("recovery.torchrun_ratio", round(torchrun_kill / kill, 2), "ratio", n=len(theirs.kill_to_step))
    outcome.figures.append(ratio)
    outcome.notes += [
        f"[local] torchrun, the same script: kill to step {torchrun_kill:.2f} s (median of {len(theirs.kill_to_step)})",
        f"[local] torchrun: {theirs.orphans} of {RANKS} ranks live {ORPHAN_SECONDS:.0f} s after SIGKILL of its agent",
    ]
    return outcome


class _LocalTrials:
    """One job under Transom, broken again and again."""

    def __init__(self, task: Task, clock: Clock, tell: Tell) -> None:
        self._task = task
        self._clock = clock
        self._tell = tell
        self._folder = task.folder / "t"
        self._log = StepLog(self._folder, RANKS)
        self.rounds: dict[str, list[float]] = {"spawn": [], "first_step": [], "kill_to_step": [], "hang": []}
        self.orphans = 0

    def run(self) -> None:
        self._folder.mkdir(parents=True)
        arguments = ["--folder", str(self._folder), "--saver", "transom", *SCRIPT_ARGUMENTS]
        self._tell("starting Transom's services and job")
        with Services(self._task.folder / "services", self._clock) as services:
            job = services.run(JOB, SCRIPT, arguments, "--nproc-per-node", str(RANKS))
            services.wait_for_steps(self._log, 1, STEADY_STEPS, job, START_SECONDS_MAX)
            for trial in range(self._task.trials):
                self._tell(f"kill {trial + 1} of {self._task.trials}")
                self._one(services, job, trial % RANKS, signal.SIGKILL)
            hangs = max(1, self._task.trials // 2)
            for trial in range(hangs):
                self._tell(f"hang {trial + 1} of {hangs}")
                self._one(services, job, (trial + 1) % RANKS, signal.SIGSTOP)
            self._tell("SIGKILL of the launcher")
            self.orphans = self._kill_launcher(services)

    def _one(self, services: Services, job: Child, rank: int, number: int) -> None:
        """Break a rank, wait until all train again, and until the incident is over."""
        log, attempt = self._log, self._log.attempt
        at = self._clock.now()
        os.kill(log.pids(attempt)[rank], number)
        services.wait_for_steps(log, attempt + 1, SETTLE_STEPS, job, BACK_SECONDS_MAX)
        services.wait_for(lambda: services.is_over(JOB, attempt), "the end of the incident", BACK_SECONDS_MAX, job)
        began, first = log.began_at(attempt + 1), log.first_step_at(attempt + 1)
        settled = services.settled_at(JOB, attempt)
        assert began is not None
        assert first is not None
        if settled is None:
            raise BenchFailed(f"attempt {attempt} was replaced without a settled verdict")
        if number == signal.SIGSTOP:
            self.rounds["hang"].append(first - at)
            return
        self.rounds["spawn"].append(began - settled)
        self.rounds["first_step"].append(first - settled)
        self.rounds["kill_to_step"].append(first - at)

    def _kill_launcher(self, services: Services) -> int:
        """How many ranks live a while after their launcher was killed."""
        (launcher,) = services.launchers(JOB).values()
        os.kill(launcher.pid, signal.SIGKILL)
        self._clock.sleep(ORPHAN_SECONDS)
        return sum(is_alive(rank.pid, rank.start_time) for rank in launcher.ranks)


class _TorchrunTimes:
    def __init__(self) -> None:
        self.kill_to_step: list[float] = []
        self.orphans = 0


def _torchrun_trials(task: Task, clock: Clock, tell: Tell) -> _TorchrunTimes:
    """The same kills under torchrun, then SIGKILL of its agent."""
    times = _TorchrunTimes()
    folder = Path(task.folder / "r")
    folder.mkdir(parents=True)
    tell("starting torchrun")
    with Torchrun(folder, RANKS, ["--folder", str(folder), "--saver", "torch", *SCRIPT_ARGUMENTS], clock) as run:
        run.wait_for(lambda: run.log.steps_made(1) >= STEADY_STEPS, "steps", START_SECONDS_MAX)
        for trial in range(task.trials):
            tell(f"torchrun: kill {trial + 1} of {task.trials}")
            attempt = run.log.attempt
            at = clock.now()
            os.kill(run.log.pids(attempt)[trial % RANKS], signal.SIGKILL)
            wanted = attempt + 1
            run.wait_for(lambda: run.log.steps_made(wanted) >= SETTLE_STEPS, "steps again", BACK_SECONDS_MAX)  # noqa: B023  awaited in this round
            first = run.log.first_step_at(wanted)
            assert first is not None
            times.kill_to_step.append(first - at)
        tell("SIGKILL of torchrun's agent")
        run.process.kill()
        run.process.wait()
        clock.sleep(ORPHAN_SECONDS)
        times.orphans = run.living_ranks()
    return times
