"""Every scheduler that the contract suite of allocations runs against; a new one enters LABS by one line.

A lab is up for all tests of its schedulers and gives each test a job of its own: registered, for two nodes, not
submitted; four nodes are free. Its command sleeps.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ingest.clock import SystemClock
from recovery.allocation import Allocation, AllocationView
from recovery.backends.simulated_allocation import SimulatedAllocation
from recovery.launcher.protocol import JobSpec

WAIT_SECONDS_MAX = 60.0  # only catches a dead test
SLEEP_COMMAND = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


@dataclass
class AllocationWorld:
    """One job on one scheduler."""

    job: str
    allocation: Allocation
    anew: Callable[[], Allocation]  # as a controller sees it that was started just now
    take_down: Callable[[str], None] | None = None  # the scheduler gives a node up; None: cannot be done here
    bring_up: Callable[[str], None] = lambda node: None
    nodes: int = 2
    command: tuple[str, ...] = SLEEP_COMMAND

    def submit(self) -> AllocationView:
        self.allocation.submit(self.job, nodes=self.nodes, command=self.command)
        return self.running()

    def replace(self, attempt: int, *excluded: str, token: str = "") -> AllocationView:
        """Replace, and go on until other nodes are there."""
        token = token or f"token-{attempt}"
        return self.wait(
            lambda view: view.phase == "running" and view.attempt == attempt,
            lambda: self.allocation.replace(self.job, attempt=attempt, token=token, excluded_nodes=excluded),
        )

    def running(self) -> AllocationView:
        return self.wait(lambda view: view.phase == "running" and len(view.nodes) == self.nodes)

    def wait(
        self, condition: Callable[[AllocationView], bool], do: Callable[[], object] = lambda: None
    ) -> AllocationView:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            do()
            view = self.allocation.look(self.job)
            if condition(view):
                return view
            assert time.monotonic() < deadline, view
            time.sleep(0.02)


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
LABS: dict[str, Callable[[Path], AbstractContextManager[SimulatedLab]]] = {"simulated": simulated_lab}
