"""A node is taken away with notice: SIGTERM to its launcher. What the job loses until it trains on another node."""

from __future__ import annotations

import os
import signal
import statistics

from ingest.clock import SystemClock
from pipelines.bench_job.step_log import StepLog
from pipelines.bench_job.under_transom import SCRIPT, Services
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure

JOB = "preempted"
NODES, RANKS_PER_NODE = 2, 2
SAVE_EVERY = 25  # longer than what a stop takes, so that a stop without a save of its own would be seen
STEADY_STEPS = 60
START_SECONDS_MAX = 400.0
NOTICE_SECONDS = 30.0  # what a scheduler gives between SIGTERM and SIGKILL
BACK_SECONDS_MAX = 200.0


def measure_preempt(task: Task, tell: Tell) -> Outcome:
    """Two nodes and a spare; the launcher of the second is told to go."""
    clock = SystemClock()
    folder = task.folder / "t"
    folder.mkdir(parents=True)
    log = StepLog(folder, NODES * RANKS_PER_NODE)
    arguments = ["--folder", str(folder), "--saver", "transom", "--save-every", str(SAVE_EVERY), "--pause", "0.05"]
    flags = ["--virtual-nodes", str(NODES), "--nproc-per-node", str(RANKS_PER_NODE), "--spares", "1"]
    with Services(task.folder / "services", clock) as services:
        tell("starting the job")
        job = services.run(JOB, SCRIPT, arguments, *flags)
        services.wait_for_steps(log, 1, STEADY_STEPS, job, START_SECONDS_MAX)
        node = services.starts(JOB)[1].places[-1].node
        tell(f"SIGTERM to the launcher of {node}")
        at = clock.now()
        os.kill(services.launchers(JOB)[node].pid, signal.SIGTERM)
        services.wait_for_steps(log, 2, 3, job, NOTICE_SECONDS + BACK_SECONDS_MAX)
        resumed = services.starts(JOB)[2].resume_step or 0
        first = log.first_step_at(2)
    assert first is not None
    lost = max(0, log.step(1) - resumed)
    figure = Figure("recovery.preempt_steps_lost", round(lost / SAVE_EVERY, 3), "save intervals")
    note = f"[preempt] {lost} steps lost of an interval of {SAVE_EVERY}; trains again {first - at:.1f} s after SIGTERM"
    return Outcome([figure], notes=[note], rounds={"preempt_back": [statistics.fmean([first - at])]})
