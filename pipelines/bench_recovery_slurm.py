"""How long a job on Slurm is away: from a settled verdict to ranks that run again in its allocation, or to other nodes.

The Slurm is the one that `squeue` finds (SLURM_CONF); `make bench-slurm` brings one up. Jobs, launchers, policy, store
and backend are the real ones; the job's script steps and trains nothing, so that the times are recovery's and Slurm's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from detectors.verdict import Culprit, FaultClass, Verdict
from ingest.clock import Clock, SystemClock
from pipelines.backends import make_backend
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure
from pipelines.open_bus import open_bus, own_command
from pipelines.places import Places
from pipelines.run import RunOptions, register_job
from pipelines.settings import Settings
from recovery.allocation import AllocationView
from recovery.backend import NoCheckpoints, Observation, StartRequest
from recovery.backends.scheduled import ScheduledBackend
from recovery.backends.slurm import SlurmAllocation, make_allocation
from recovery.calls import Result
from recovery.controller import Controller
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import JobEnd, JobSpec
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers

NODES, RANKS_PER_NODE = 2, 2
STEPS = """
import os, sys, time, transom
run = transom.init()
first = int(os.environ["TRANSOM_ATTEMPT"]) * 1_000_000  # further than the attempt before: progress
for step in range(first, first + 1_000_000):
    time.sleep(0.05)
    run.log(step=step, loss=1.0)
"""
START_SECONDS_MAX = 120.0
BACK_SECONDS_MAX = 120.0
TICK_SECONDS = 0.01  # as the recover service, while a call is out
# The policy as it is, with budgets that a bench which breaks one job twenty times in minutes does not spend.
POLICY = replace(
    PolicyConfig(),
    rows=PolicyConfig().with_modes({"gpu_lost": "auto"}).rows,
    probation_steps=1,
    probation_seconds=0.1,
    restarts_max=1000,
    flap_restarts_max=1000,
    no_progress_max=1000,
    no_progress_any_cause_max=1000,
).with_budgets(dict.fromkeys(("user", "unknown", "hang", "infra"), 1000))
_numbers = count(1)


class TrialFailed(Exception):
    """What was to be measured did not happen; the text says what."""


class SlurmTrial:
    """One job on Slurm under a controller of its own. Ends with the context: the job is cancelled."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        script: str = STEPS,
        nodes: int = NODES,
        spares: int = 0,
        policy: PolicyConfig = POLICY,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.job = f"trial-{next(_numbers)}"
        self.clock = clock
        recover = {"backends": {"slurm": options or {}}}
        settings = Settings.model_validate({"state_dir": folder / "s", "recover": recover})
        self.places = Places.of(settings)
        open_bus(settings, clock, client="bench").close()
        path = folder / f"{self.job}.py"
        path.write_text(script, encoding="utf-8")
        spec = JobSpec(job=self.job, script=str(path), nodes=nodes, nproc_per_node=RANKS_PER_NODE, backend="slurm")
        register_job(self.places, spec, RunOptions(spares=spares, checkpoints=False, show_output=False))
        self.files = JobFiles(self.places.jobs, self.job)
        made = make_backend("slurm", settings, self.places, clock, Random(1))
        assert isinstance(made, ScheduledBackend)
        self.backend = made
        self.allocation = self._allocation(settings)
        self._store = RecoveryStore(folder / f"{self.job}.sqlite")
        workers: ThreadWorkers[Result] = ThreadWorkers()
        self.controller = Controller(self._store, self.backend, NoCheckpoints(), policy, Random(2), workers)
        self._nodes = nodes + spares
        self._ids = count(1)

    def _allocation(self, settings: Settings) -> SlurmAllocation:
        from recovery.allocation import BackendSite

        options = settings.recover.backends["slurm"]
        return make_allocation(BackendSite(self.places.jobs, self.clock, Random(3), options))

    def __enter__(self) -> SlurmTrial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.files.write_end(JobEnd(outcome="stopped", reason="the trial is over", at=self.clock.now()))
        self.allocation.cancel(self.job)
        self._store.close()

    # The job

    def start(self) -> AllocationView:
        """Submit it, and start its first attempt once its launchers are there."""
        command = own_command(
            "launcher", "--job", self.job, "--listen", "auto", "--state-dir", str(self.places.state)
        )  # fmt: skip
        self.backend.submit(self.job, nodes=self._nodes, command=command)
        self.wait(lambda: self._spares() >= self._nodes, "launchers", START_SECONDS_MAX)
        self.backend.start(StartRequest(self.job, 1, "first"))
        self.wait(lambda: self.ranks_run(1), "the first attempt", START_SECONDS_MAX)
        return self.allocation.look(self.job)

    def _spares(self) -> int:
        view = self.backend.observe(self.job)
        return sum(node.state == "spare" for node in view.nodes)

    def observe(self) -> Observation:
        return self.backend.observe(self.job)

    def ranks_run(self, attempt: int) -> bool:
        """Every rank of that attempt is a process, as its launcher has written down."""
        placement = self.files.placement()
        if placement is None or placement.attempt != attempt:
            return False
        files = self.files.nodes()
        running = {
            rank.rank
            for node in placement.nodes
            if node in files and files[node].attempt == attempt
            for rank in files[node].ranks
        }
        return running == {place.rank for place in placement.places}

    # Recovery

    def deliver(self, fault_class: FaultClass, attempt: int, node: str = "", rank: int | None = 0) -> Verdict:
        """A settled verdict about an attempt, taken in as the service would."""
        now = self.clock.now()
        verdict = Verdict(
            verdict_id=f"{self.job}/{attempt}/{next(self._ids)}",
            revision=1,
            job=self.job,
            attempt=attempt,
            fault_class=fault_class,
            severity="critical",
            settled=True,
            culprits=(Culprit(rank=rank, node=node),),
            onset_at=now,
            at=now,
            advice="restart_exclude_node" if fault_class == "gpu_lost" else "restart_in_place",
            summary=f"{fault_class} on {node}",
        )
        self.controller.accept(verdict, now)
        return verdict

    def wait(self, condition: Callable[[], bool], what: str, seconds_max: float, every_seconds: float = 0.0) -> float:
        """Tick until it holds; the seconds it took. `every_seconds`: between two looks, for what costs a command."""
        began = self.clock.monotonic()
        look_at = began
        while True:
            self.controller.tick(self.clock.now())
            now = self.clock.monotonic()
            if now >= look_at:
                if condition():
                    return self.clock.monotonic() - began
                look_at = now + every_seconds
            if now - began > seconds_max:
                raise TrialFailed(f"{what} of {self.job}: not within {seconds_max:.0f} s ({self.states()})")
            if not self.controller.wait(TICK_SECONDS):
                self.clock.sleep(TICK_SECONDS)

    def states(self) -> list[str]:
        """The states of the job's incidents, with the cause of the last change."""
        return [f"{one.state}: {one.cause}" for one in self._incidents()]

    def is_quiet(self) -> bool:
        """No incident is open any more."""
        return not self._store.unfinished(self.job)

    def _incidents(self) -> Sequence[Any]:
        return [one.message for one in self._store.waiting(1000) if hasattr(one.message, "incident_id") and
                hasattr(one.message, "state")]  # fmt: skip


def measure_slurm(task: Task, tell: Tell) -> Outcome:
    """Twenty restarts in the allocation of one job, and twenty jobs that get other nodes."""
    clock = SystemClock()
    outcome = Outcome()
    inside = _inside(task, clock, tell)
    away, ranks, reused = _elsewhere(task, clock, tell)
    outcome.rounds = {"slurm_inalloc": inside, "slurm_requeue": away, "slurm_requeue_ranks": ranks}
    outcome.figures = [
        Figure("recovery.slurm_inalloc_p95_seconds", round(percentile(inside, 0.95), 3), "s", n=len(inside)),
        Figure("recovery.slurm_p95_seconds", round(percentile(away, 0.95), 3), "s", n=len(away)),
        Figure("recovery.slurm_bad_node_reused", reused, "restarts", n=len(away)),
    ]
    outcome.notes = [
        f"[slurm] in the allocation: median {statistics.median(inside):.3f} s, worst {max(inside):.3f} s",
        f"[slurm] on other nodes: median {statistics.median(away):.3f} s, worst {max(away):.3f} s",
        f"[slurm] until ranks run there (new launchers import torch): median {statistics.median(ranks):.2f} s, "
        f"worst {max(ranks):.2f} s",
    ]
    return outcome


def _inside(task: Task, clock: Clock, tell: Tell) -> list[float]:
    """Settled verdict → every rank of the next attempt is a process, in the same allocation."""
    times = []
    with SlurmTrial(task.folder, clock) as trial:
        tell("starting a job for restarts in its allocation")
        first = trial.start()
        for attempt in range(1, task.scheduler_trials + 1):
            tell(f"in the allocation: {attempt} of {task.scheduler_trials}")
            trial.wait(lambda: trial.observe().step > 0, "steps", BACK_SECONDS_MAX, 0.1)
            trial.deliver("rank_lost", attempt, first.nodes[0])
            wanted = attempt + 1
            times.append(trial.wait(lambda: trial.ranks_run(wanted), "a restart", BACK_SECONDS_MAX))  # noqa: B023  awaited in this round
            trial.wait(trial.is_quiet, "the end of the incident", BACK_SECONDS_MAX)
        if trial.allocation.look(trial.job).generation != first.generation:
            raise TrialFailed("the job was given other nodes where its own would have done")
    return times


def _elsewhere(task: Task, clock: Clock, tell: Tell) -> tuple[list[float], list[float], int]:
    """Settled verdict → Slurm runs the job on other nodes; → its ranks run there; how often the bad node was used."""
    away, ranks, reused = [], [], 0
    for number in range(1, task.scheduler_trials + 1):
        tell(f"on other nodes: {number} of {task.scheduler_trials}")
        with SlurmTrial(task.folder, clock) as trial:
            first = trial.start()
            bad = first.nodes[number % len(first.nodes)]
            began = clock.monotonic()
            trial.deliver("gpu_lost", 1, bad)

            def is_elsewhere(trial: SlurmTrial = trial, before: int = first.generation) -> bool:
                view = trial.allocation.look(trial.job)
                return view.phase == "running" and view.generation > before

            away.append(trial.wait(is_elsewhere, "other nodes", BACK_SECONDS_MAX, 0.05))
            trial.wait(lambda: trial.ranks_run(2), "the second attempt", BACK_SECONDS_MAX)
            ranks.append(clock.monotonic() - began)
            placement = trial.files.placement()
            assert placement is not None
            view = trial.allocation.look(trial.job)
            reused += bad in view.nodes or bad in placement.nodes or bad in placement.spares
    return away, ranks, reused


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(len(ordered) * share * 1000) // 1000) - 1))]
