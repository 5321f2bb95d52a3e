"""The same job with the same faults under Transom and under torchrun, and what each took from start to end."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ingest.clock import Clock
from pipelines.bench_job.planned_faults import FaultKind, PlannedFault, poisson_faults, write_faults
from pipelines.bench_job.step_log import StepLog
from pipelines.bench_job.under_torchrun import Torchrun
from pipelines.bench_job.under_transom import SCRIPT, BenchFailed, Services
from pipelines.bench_recovery.outcome import Outcome, Tell
from pipelines.figures import Figure

RANKS = 4
WATCHDOG_SECONDS = 60.0  # how long torchrun's hung job would wait for somebody's watchdog
TAIL_STEPS = 40  # after the last fault
RUN_SECONDS_MAX = 1_800.0
SHARES: Mapping[str, Mapping[FaultKind, float]] = {
    "crashes": {"kill": 0.7, "slow": 0.3},
    "hangs": {"kill": 0.5, "slow": 0.2, "hang": 0.3},
}


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, and how often it breaks. The model is the demo's: 1.85 million parameters."""

    faults: int = 12
    mean_steps: float = 60.0
    save_every: int = 10
    width: int = 192
    layers: int = 4
    context: int = 128
    batch: int = 4
    seed: int = 0
    wait_for_watchdog: bool = False  # really wait, instead of charging the time

    def faults_of(self, kind: str) -> tuple[PlannedFault, ...]:
        return poisson_faults(self.seed, self.faults, self.mean_steps, RANKS, SHARES[kind])

    def steps(self, kind: str) -> int:
        return self.faults_of(kind)[-1].step + TAIL_STEPS

    def arguments(self, folder: Path, saver: str, kind: str) -> list[str]:
        return [
            "--folder", str(folder), "--saver", saver, "--steps", str(self.steps(kind)),
            "--save-every", str(self.save_every), "--width", str(self.width), "--layers", str(self.layers),
            "--context", str(self.context), "--batch", str(self.batch),
        ]  # fmt: skip


@dataclass(slots=True)
class Run:
    """One whole run. `wall_seconds` is from the start of its command to the end, `charged_seconds` comes on top."""

    launcher: str
    kind: str
    wall_seconds: float
    charged_seconds: float
    attempts: int
    steps: int
    steps_trained: int
    loss: float
    parameters: str  # SHA-256
    step_seconds: float  # median

    @property
    def seconds(self) -> float:
        return self.wall_seconds + self.charged_seconds

    @property
    def goodput(self) -> float:
        """Steps that counted × median step time ÷ wall time."""
        return self.steps * self.step_seconds / self.seconds


@dataclass(slots=True)
class Compared:
    """All runs of a bench."""

    runs: list[Run] = field(default_factory=list)

    def run(self, launcher: str, kind: str) -> Run:
        return next(run for run in self.runs if (run.launcher, run.kind) == (launcher, kind))

    def saved(self, kind: str) -> float:
        return 1.0 - self.run("transom", kind).seconds / self.run("torchrun", kind).seconds


def compare(kinds: Sequence[str], size: Size, folder: Path, clock: Clock, tell: Tell) -> Compared:
    """Each kind of schedule under both launchers, one after another."""
    compared = Compared()
    for kind in kinds:
        faults = size.faults_of(kind)
        words = ", ".join(f"{sum(one.kind == name for one in faults)} {name}" for name in SHARES[kind])
        tell(f"{kind}: Transom, {size.steps(kind)} steps with {words}")
        compared.runs.append(under_transom(kind, size, folder / f"{kind}-transom", clock))
        tell(f"{kind}: torchrun, the same")
        compared.runs.append(under_torchrun(kind, size, folder / f"{kind}-torchrun", clock))
    return compared


def under_transom(kind: str, size: Size, folder: Path, clock: Clock) -> Run:
    """The services run already, as they do beside all jobs; the job's own start counts."""
    train = _prepared(folder, kind, size)
    log = StepLog(train, RANKS)
    with Services(folder / "services", clock) as services:
        began = clock.monotonic()
        flags = ["--nproc-per-node", str(RANKS // 2), "--virtual-nodes", "2"]
        job = services.run(kind, SCRIPT, size.arguments(train, "transom", kind), *flags)
        services.wait_for(lambda: job.process.poll() is not None, f"the end of {kind}", RUN_SECONDS_MAX)
        wall = clock.monotonic() - began
        if job.process.returncode != 0:
            raise BenchFailed(f"the job under Transom ended with {job.process.returncode}: {job.last_words()}")
    return _run("transom", kind, train, log, wall, 0.0)


def under_torchrun(kind: str, size: Size, folder: Path, clock: Clock) -> Run:
    """A rank that is stopped is killed by a watchdog: at once, and the time it would have waited is charged."""
    train = _prepared(folder, kind, size)
    began, charged = clock.monotonic(), 0.0
    with Torchrun(train, RANKS, size.arguments(train, "torch", kind), clock) as run:
        while run.process.poll() is None:
            run.read()
            for pid in run.stopped_ranks():
                at = run.log.faults[-1].at
                while size.wait_for_watchdog and clock.now() - at < WATCHDOG_SECONDS:
                    clock.sleep(0.5)
                charged += max(0.0, WATCHDOG_SECONDS - (clock.now() - at))
                os.kill(pid, signal.SIGKILL)
                _until_gone(pid, run, clock)
            if clock.monotonic() - began > RUN_SECONDS_MAX:
                raise BenchFailed(f"the job under torchrun was not over after {RUN_SECONDS_MAX:.0f} s")
            clock.sleep(0.05)
        wall = clock.monotonic() - began
        if run.process.returncode != 0:
            raise BenchFailed(f"torchrun ended with {run.process.returncode}; see {train}")
    return _run("torchrun", kind, train, run.log, wall, charged)


def _until_gone(pid: int, run: Torchrun, clock: Clock) -> None:
    """One stopped rank is charged once."""
    while pid in run.stopped_ranks():
        clock.sleep(0.01)


def _prepared(folder: Path, kind: str, size: Size) -> Path:
    train = folder / "t"
    train.mkdir(parents=True)
    write_faults(train, size.faults_of(kind))
    return train


def _run(launcher: str, kind: str, train: Path, log: StepLog, wall: float, charged: float) -> Run:
    log.read()
    result = json.loads((train / "result.json").read_text(encoding="ascii"))
    gaps = [later - earlier for earlier, later in pairwise(log.ended_at)]
    return Run(
        launcher, kind, wall, charged, log.attempt, int(result["steps"]), len(log.ended_at), float(result["loss"]),
        str(result["parameters"]), statistics.median(gaps),
    )  # fmt: skip


def outcome_of(compared: Compared, kinds: Sequence[str]) -> Outcome:
    """The figures, and a line for each run."""
    outcome = Outcome()
    names = {"crashes": "e2e.time_saved_crashes", "hangs": "e2e.time_saved"}
    for kind in kinds:
        outcome.figures.append(Figure(names[kind], round(compared.saved(kind), 4), "ratio", n=2))
    if "hangs" in kinds:
        outcome.figures.append(Figure("e2e.goodput", round(compared.run("transom", "hangs").goodput, 4), "ratio"))
    same = [compared.run("transom", kind).parameters == compared.run("torchrun", kind).parameters for kind in kinds]
    outcome.figures.append(Figure("e2e.same_parameters", sum(same) / len(same), "share", n=len(compared.runs)))
    for run in compared.runs:
        more = f" + {run.charged_seconds:.0f} s of watchdog" if run.charged_seconds else ""
        outcome.notes.append(
            f"[{run.kind}] {run.launcher}: {run.wall_seconds:.1f} s{more}, {run.attempts} attempts, {run.steps} steps"
            f" ({run.steps_trained} trained, median {1000 * run.step_seconds:.0f} ms), loss {run.loss:.6f}, "
            f"goodput {run.goodput:.0%}"
        )
        outcome.rounds[f"{run.kind}_{run.launcher}_seconds"] = [run.wall_seconds, run.charged_seconds]
    return outcome
