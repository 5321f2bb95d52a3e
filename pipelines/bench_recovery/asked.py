"""What is asked of recovery: one line for each figure of `transom bench recovery`, and one for what measures it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pipelines.asked import Asked
from pipelines.bench_recovery.outcome import Outcome, Task, Tell

ASKED = (
    Asked("recovery.schedules", "random: replays, storms, crashes, two controllers, lies", "≥", 10_000, "schedules"),
    Asked("recovery.duplicates", "restarts in them beyond one for each incident", "=", 0, "schedules"),
    Asked("recovery.lost", "incidents in them that were not brought to their end", "=", 0, "schedules"),
    Asked("recovery.replayed_restarts", "after 1,000 deliveries of one verdict and four kill -9", "=", 1, "replays"),
    Asked("recovery.decide_p99_ms", "a decision with what it reads, 100 jobs, one floods", "<", 1, "decisions"),
    Asked("recovery.verdicts_per_second", "verdicts taken in, filed and decided, durable", "≥", 1_000, "decisions"),
    Asked("recovery.flood_delay_ms", "how much longer the other jobs' verdicts wait in a flood", "≤", 50, "decisions"),
    Asked("recovery.spawn_seconds", "settled verdict → first line of every rank's script", "≤", 0.3, "local"),
    Asked("recovery.first_step_seconds", "settled verdict → first step of all ranks", "≤", 1.2, "local"),
    Asked("recovery.kill_to_step_seconds", "SIGKILL of a rank → first new step of all ranks", "≤", 2, "local"),
    Asked("recovery.torchrun_ratio", "the same with torchrun and its script ÷ ours", "≥", 4, "local"),
    Asked("recovery.hang_seconds", "SIGSTOP of a rank → training again", "≤", 15, "local"),
    Asked("recovery.orphans", "ranks left after SIGKILL of their launcher", "=", 0, "local"),
    Asked("recovery.preempt_steps_lost", "SIGTERM with 30 s notice; lost, in save intervals", "≤", 1, "preempt"),
    Asked("recovery.doomed_restarts", "restarts of a job with an import error", "≤", 2, "doomed"),
    Asked("recovery.doomed_seconds", "until such a job is given up", "≤", 90, "doomed"),
    Asked("recovery.controller_back_seconds", "kill -9 of recover → a new verdict decided", "≤", 2, "controller"),
    Asked("recovery.slurm_inalloc_p95_seconds", "Slurm: verdict → running again in the allocation", "≤", 2, "slurm"),
    Asked("recovery.slurm_p95_seconds", "Slurm: verdict → requeued and running on other nodes", "≤", 3, "slurm"),
    Asked("recovery.slurm_bad_node_reused", "Slurm: restarts that used the excluded node", "=", 0, "slurm"),
    Asked("recovery.kube_p95_seconds", "Kubernetes: verdict → all pods running on other nodes", "≤", 2, "kube"),
    Asked("recovery.kube_bad_node_reused", "Kubernetes: restarts that used the excluded node", "=", 0, "kube"),
)  # fmt: skip

MEASURES: Mapping[str, tuple[str, str]] = {  # what measures a group: module and function, imported when it is asked for
    "schedules": ("pipelines.bench_recovery.schedules", "measure_schedules"),
    "replays": ("pipelines.bench_recovery.replays", "measure_replays"),
    "decisions": ("pipelines.bench_recovery.decisions", "measure_decisions"),
    "local": ("pipelines.bench_recovery.local", "measure_local"),
    "preempt": ("pipelines.bench_recovery.preempt", "measure_preempt"),
    "doomed": ("pipelines.bench_recovery.doomed", "measure_doomed"),
    "controller": ("pipelines.bench_recovery.controller_back", "measure_controller_back"),
    "slurm": ("pipelines.bench_recovery_slurm", "measure_slurm"),
    "kube": ("pipelines.bench_recovery_kube", "measure_kube"),
}
NOT_YET = "this bench does not measure it yet"


class Measure(Protocol):
    """Measures one group. What it raises becomes the reason why the group's figures are missing."""

    def __call__(self, task: Task, tell: Tell) -> Outcome: ...


def measured(group: str, task: Task, tell: Tell) -> Outcome:
    """The outcome of one group; every figure that it does not measure has a reason."""
    names = [asked.name for asked in ASKED if asked.group == group]
    module, function = MEASURES[group]
    try:
        measure: Measure = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return Outcome(missing=dict.fromkeys(names, NOT_YET))
    Path(task.folder).mkdir(parents=True, exist_ok=True)
    try:
        outcome = measure(task, tell)
    except Exception as error:  # noqa: BLE001 - it becomes the reason why this group is missing; the others are measured
        outcome = Outcome(missing=dict.fromkeys(names, f"{type(error).__name__}: {error}"[:600]))
    found = {figure.name for figure in outcome.figures}
    for name in names:
        if name not in found:
            outcome.missing.setdefault(name, NOT_YET)
    return outcome
