"""What recovery needs of a scheduler: the nodes that a job has, where its launchers listen, and other nodes.

A backend on a scheduler has two rungs. The launchers of the living allocation start and stop ranks, the same
way everywhere; only where they cannot (too few nodes are left) does the scheduler give the job others, on which
new launchers come up. So a scheduler's own file answers these few questions, and `Backend` is built of them.
Errors are those of `recovery.backend`: "cannot reach" is Unavailable, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .launcher.protocol import JobEnd, JobSpec, Placement


@dataclass(frozen=True, slots=True)
class LauncherAddress:
    """Where one launcher listens. `address`: `unix:/path` or `tcp:host:port`; `node`: the scheduler's name of it."""

    node: str
    address: str
    slots: int


@dataclass(frozen=True, slots=True)
class AllocationView:
    """The allocation of a job as its scheduler tells it. `generation` grows with each set of nodes."""

    job: str
    phase: Literal["pending", "running", "ending", "ended", "absent"]
    generation: int = 0
    nodes: tuple[str, ...] = ()
    attempt: int = 0  # the newest attempt that anybody has written on it, with its token
    token: str = ""
    excluded_nodes: tuple[str, ...] = ()
    reason: str = ""  # why it waits or has ended, in the scheduler's words


class JobRecords(Protocol):
    """What outlives launchers and controllers: `JobFiles` where a folder is shared, else the scheduler's own store."""

    def spec(self) -> JobSpec | None: ...

    def placement(self) -> Placement | None: ...

    def write_placement(self, placement: Placement) -> None:
        """Before any launcher is told. Raises Conflict where a newer attempt, or this one of another, stands there."""
        ...

    def excluded(self) -> frozenset[str]: ...

    def write_excluded(self, nodes: frozenset[str]) -> None: ...

    def end(self) -> JobEnd | None: ...

    def write_end(self, end: JobEnd) -> None: ...


class Allocation(Protocol):
    """One scheduler. One contract suite: tests/contract/test_allocation.py."""

    name: str

    def look(self, job: str) -> AllocationView: ...

    def records(self, job: str) -> JobRecords: ...

    def launchers(self, job: str) -> tuple[LauncherAddress, ...]:
        """Those of the newest generation that are known; whether they answer is another question."""
        ...

    def replace(self, job: str, *, attempt: int, token: str, excluded_nodes: Sequence[str]) -> AllocationView:
        """Give all nodes back and take others, never the excluded ones; returns at once, `look` says when it runs.

        Idempotent for (attempt, token). Raises Conflict for an attempt that is not newer, Rejected where it can
        never be (too few nodes, no right, requeueing switched off), Ambiguous where it may have happened.
        """
        ...

    def nothing_runs_on(self, job: str, node: str) -> bool:
        """The scheduler itself vouches that no process of this job's older generations lives on that node."""
        ...

    def release(self, job: str, end: JobEnd) -> None:
        """The job is over: its nodes go back. Idempotent."""
        ...
