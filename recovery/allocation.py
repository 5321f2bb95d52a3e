"""What recovery needs of a scheduler: the nodes that a job has, where its launchers listen, and other nodes.

A backend on a scheduler has two rungs. The launchers of the living allocation start and stop ranks, the same
way everywhere; only where they cannot (too few nodes are left) does the scheduler give the job others, on which
new launchers come up. So a scheduler's own file answers these few questions, and `ScheduledBackend`
(backends/scheduled.py) is built of them. Errors are those of `recovery.backend`: "cannot reach" is Unavailable,
never an answer.

A backend's file has `make_allocation(site: BackendSite) -> Allocation` for whoever joins it up; an entry point of
the group `transom.recovery.backends` is such a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from ingest.clock import Clock

from .backend import Backend
from .launcher.protocol import JobEnd, JobSpec, Placement

AllocationPhase = Literal["pending", "running", "ending", "ended", "absent"]
Options = TypeVar("Options")


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
    phase: AllocationPhase
    generation: int = 0
    nodes: tuple[str, ...] = ()
    attempt: int = 0  # the newest attempt that anybody has written on it, with its token
    token: str = ""
    excluded_nodes: tuple[str, ...] = ()
    down_nodes: tuple[str, ...] = ()  # of `nodes` and of those it had before: the scheduler itself has given them up
    reason: str = ""  # why it waits or has ended, in the scheduler's words
    held: str = ""  # an operator holds or has suspended it, and how that was told: nothing of ours acts against that


class JobRecords(Protocol):
    """What outlives launchers and controllers: `JobFiles` where a folder is shared, else the scheduler's own store.

    Reading and writing raise Unavailable where the store cannot be reached.
    """

    def spec(self) -> JobSpec | None: ...

    def placement(self) -> Placement | None: ...

    def write_placement(self, placement: Placement) -> None:
        """Before any launcher is told. Raises Conflict where a newer attempt, or this one of another, stands there."""
        ...

    def excluded(self) -> frozenset[str]: ...

    def write_excluded(self, nodes: frozenset[str]) -> None: ...

    def end(self) -> JobEnd | None: ...

    def write_end(self, end: JobEnd) -> None:
        """The first end stays: a second one is not written."""
        ...


@runtime_checkable
class Allocation(Protocol):
    """One scheduler. One contract suite: tests/contract/test_allocation.py."""

    name: str

    def submit(self, job: str, *, nodes: int, command: Sequence[str]) -> AllocationView:
        """Take the job's first nodes (its spares among them) and run `command` once on each; returns at once.

        The spec is in `records` by then. Idempotent: a job that has an allocation keeps it. Raises Rejected.
        """
        ...

    def look(self, job: str) -> AllocationView: ...

    def records(self, job: str) -> JobRecords: ...

    def launchers(self, job: str) -> tuple[LauncherAddress, ...]:
        """Those of the newest generation that are known; whether they answer is another question."""
        ...

    def replace(self, job: str, *, attempt: int, token: str, excluded_nodes: Sequence[str]) -> AllocationView:
        """Give all nodes back and take others, never the excluded ones; returns at once, `look` says when it runs.

        Asked only when no rank of an older attempt lives. Idempotent for (attempt, token): asked again it goes on
        where it stands. Raises Conflict for an attempt that is not newer than `look` says, Rejected where it can
        never be (too few nodes, no right, requeueing switched off, an end that stays), Ambiguous where it may have
        happened.
        """
        ...

    def nothing_runs_on(self, job: str, node: str) -> bool:
        """The scheduler itself vouches that no process of this job's older generations lives on that node.

        Asked of nodes whose launcher does not answer. A node that is down may still run processes: it counts only
        once it stands in `records(job).excluded()`, so that nothing is ever started beside them.
        """
        ...

    def release(self, job: str, end: JobEnd) -> None:
        """The job is over: its nodes go back. Idempotent."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """An allocation whose scheduler knows what fails together: nodes of one rack, switch or block."""

    def groups(self, job: str, nodes: Sequence[str]) -> Mapping[str, str]:
        """By node the name of its group; a node that is in none, or of which none is told, is left out."""
        ...


@runtime_checkable
class Scripted(Protocol):
    """An allocation that is asked for by a script, which a person may submit as well."""

    def script(self, job: str, *, nodes: int, command: Sequence[str]) -> str:
        """What `submit` would hand over."""
        ...


@dataclass(frozen=True, slots=True)
class BackendSite:
    """What a backend is made of: where jobs are registered, the clock, dice, and its part of `recover.backends`."""

    jobs_folder: Path  # jobs/<job>/job.json, token and the like; shared between nodes where the backend needs that
    clock: Clock
    random: Random
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def read_options(self, type_: type[Options]) -> Options:
        """The options as the backend's own frozen struct. Raises ValueError, in a sentence, for what does not fit."""
        return msgspec.convert(dict(self.options), type_)


BackendFactory = Callable[[BackendSite], "Backend | Allocation"]
