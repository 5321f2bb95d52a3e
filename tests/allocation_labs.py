"""Every scheduler that the contract suite of allocations runs against; a new one enters LABS by one line.

A lab is up for all tests of its schedulers and gives each test a job of its own: registered, for two nodes, not
submitted; four nodes are free. Its command sleeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ingest.clock import SystemClock
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.launcher.protocol import JobSpec
from tests.allocation_world import AllocationWorld, Lab
from tests.kube_lab.allocation_lab import kubernetes_lab
from tests.slurm_worlds import fake_slurm_jobs, real_slurm_jobs


@dataclass
class SimulatedLab:
    """The simulated scheduler."""

    names: Iterator[str] = field(default_factory=lambda: (f"job-{number}" for number in itertools.count()))

    @contextmanager
    def world(self) -> Iterator[AllocationWorld]:
        allocation = SimulatedAllocation(("n1", "n2", "n3", "n4"), SystemClock(), pending_seconds=0.01)
        job = next(self.names)
        allocation.register(JobSpec(job=job, script="x.py", nodes=2, backend="simulated"))
        running: set[str] = set()
        allocation.on_nodes = lambda job, generation, nodes: running.update(nodes)
        allocation.on_back = lambda job, generation, nodes: running.difference_update(nodes)
        allocation.lives = lambda job, node: node in running
        yield AllocationWorld(job, allocation, lambda: allocation, allocation.take_down)


@contextmanager
def simulated_lab(folder: Path) -> Iterator[SimulatedLab]:
    yield SimulatedLab()


# name: folder → a lab with `world()`; the suite enters both
LABS: dict[str, Callable[[Path], AbstractContextManager[Lab]]] = {
    "simulated": simulated_lab,
    "kubernetes": kubernetes_lab,
    "slurm": real_slurm_jobs,
    "slurm-fake": fake_slurm_jobs,
}
