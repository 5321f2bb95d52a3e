"""One job on one scheduler, as the contract suite of allocations uses it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from recovery.allocation import Allocation, AllocationView

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


class Lab(Protocol):
    """One scheduler that is up."""

    def world(self) -> AbstractContextManager[AllocationWorld]: ...
