"""A job that no restart can help: its script cannot be imported. How often it is restarted, and when it is given up."""

from __future__ import annotations

from ingest.clock import SystemClock
from pipelines.bench_job.under_transom import Services
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure

JOB = "doomed"
SCRIPT = "import torch\nimport a_module_that_nobody_has_written\n"
GIVEN_UP_SECONDS_MAX = 300.0


def measure_doomed(task: Task, tell: Tell) -> Outcome:
    """Four ranks, the same import error in each."""
    clock = SystemClock()
    task.folder.mkdir(parents=True, exist_ok=True)
    script = task.folder / "train.py"
    script.write_text(SCRIPT, encoding="ascii")
    tell("a job with an import error")
    with Services(task.folder / "services", clock) as services:
        job = services.run(JOB, script, [], "--nproc-per-node", "4", "--no-checkpoints")
        services.wait_for(lambda: job.process.poll() is not None, "the end of the job", GIVEN_UP_SECONDS_MAX)
        ended_at = clock.now()
        services.poll()
        starts = services.starts(JOB)
        first = min((start.at for start in starts.values()), default=ended_at)
        words = job.last_words()
    figures = [
        Figure("recovery.doomed_restarts", len(starts) - 1, "restarts"),
        Figure("recovery.doomed_seconds", round(ended_at - first, 2), "s"),
    ]
    return Outcome(figures, notes=[f"[doomed] {words.splitlines()[-1] if words else 'it said nothing'}"])
