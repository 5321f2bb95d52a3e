"""Jobs on Slurm, real and faked: registered, submitted and looked at as a controller would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingest.clock import Clock, ManualClock, SystemClock
from recovery.backends.slurm import SlurmAllocation
from recovery.backends.slurm_cli import SlurmTimes
from recovery.backends.slurm_script import SlurmOptions
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import JobSpec
from tests.allocation_world import AllocationWorld
from tests.fake_slurm import FakeSlurm
from tests.slurm_lab import SlurmLab, slurm_lab

_numbers = itertools.count(1)


class SlurmJobs:
    """Jobs of their own on one Slurm, and their folder."""

    def __init__(self, slurm: SlurmLab | FakeSlurm, folder: Path) -> None:
        self.slurm = slurm
        # What a fake does takes no time, so that nobody needs to wait.
        self.clock: Clock = SystemClock() if isinstance(slurm, SlurmLab) else ManualClock(1_790_000_000.0)
        self.folder = folder / "jobs"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def register(self, *, nodes: int = 2) -> str:
        job = f"job-{next(_numbers)}"
        JobFiles(self.folder, job).write_spec(JobSpec(job=job, script="x.py", nodes=nodes, backend="slurm"))
        return job

    def allocation(self, times: SlurmTimes | None = None, **options: Any) -> SlurmAllocation:
        """As a controller sees it that was started just now."""
        commands = self.slurm.commands_within(times or SlurmTimes())
        return SlurmAllocation(self.folder, commands, self.clock, SlurmOptions(end_seconds_max=0.5, **options))

    @contextmanager
    def world(self) -> Iterator[AllocationWorld]:
        """For two nodes, not submitted; whatever was done to the nodes is undone afterwards."""
        job = self.register()
        yield AllocationWorld(job, self.allocation(), self.allocation, self.slurm.take_down, self.slurm.bring_up)
        self.slurm.clear()


@contextmanager
def real_slurm_jobs(folder: Path) -> Iterator[SlurmJobs]:
    with slurm_lab(folder / "slurm") as lab:
        yield SlurmJobs(lab, folder)


@contextmanager
def fake_slurm_jobs(folder: Path) -> Iterator[SlurmJobs]:
    slurm = FakeSlurm(folder / "slurm")
    try:
        yield SlurmJobs(slurm, folder)
    finally:
        slurm.close()
