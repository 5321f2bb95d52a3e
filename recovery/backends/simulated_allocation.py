"""A simulated scheduler in memory: it keeps every promise of `Allocation`, and does to its nodes what it is told.

`on_nodes` is called with each set of nodes that a job gets, for whoever runs launchers there and tells where they
listen (`tell`); `on_back` when a job gives nodes back. Time comes from the clock: nodes are there `pending_seconds`
after they were asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ingest.clock import Clock
from recovery.allocation import AllocationPhase, AllocationView, LauncherAddress
from recovery.backend import Conflict, Rejected, TooFewNodes
from recovery.launcher.protocol import JobEnd, JobSpec, Placement

Method = Literal["submit", "look", "records", "launchers", "replace", "nothing_runs_on", "release"]
Given = Callable[[str, int, tuple[str, ...]], None]  # job, generation, nodes


class MemoryRecords:
    """`JobRecords` in memory, with the compare-and-swap that they promise."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._placement: Placement | None = None
        self._excluded: frozenset[str] = frozenset()
        self._end: JobEnd | None = None
        self._lock = threading.Lock()

    def spec(self) -> JobSpec | None:
        return self._spec

    def placement(self) -> Placement | None:
        return self._placement

    def write_placement(self, placement: Placement) -> None:
        with self._lock:
            last = self._placement
            again = last is not None and (last.attempt, last.token) == (placement.attempt, placement.token)
            if last is not None and not again and last.attempt >= placement.attempt:
                raise Conflict(f"attempt {last.attempt} stands there; {placement.attempt} is not newer")
            self._placement = placement

    def excluded(self) -> frozenset[str]:
        return self._excluded

    def write_excluded(self, nodes: frozenset[str]) -> None:
        self._excluded = nodes

    def end(self) -> JobEnd | None:
        return self._end

    def write_end(self, end: JobEnd) -> None:
        with self._lock:
            self._end = self._end or end


@dataclass(slots=True)
class SimulatedJob:
    """What the simulated scheduler knows of one job."""

    records: MemoryRecords
    nodes_wanted: int = 0
    generation: int = 0
    nodes: tuple[str, ...] = ()
    old_nodes: frozenset[str] = frozenset()
    running_at: float = 0.0
    attempt: int = 0
    token: str = ""
    excluded: tuple[str, ...] = ()
    ended: str = ""
    held: str = ""
    launchers: dict[str, LauncherAddress] = field(default_factory=dict)


class SimulatedAllocation:
    """`Allocation` over nodes that exist by name only. `lives` says whether anything of a job runs on a node."""

    name = "simulated"

    def __init__(self, nodes: Sequence[str], clock: Clock, *, pending_seconds: float = 0.0) -> None:
        self._nodes = tuple(nodes)
        self._clock = clock
        self._pending_seconds = pending_seconds
        self._jobs: dict[str, SimulatedJob] = {}
        self._down: set[str] = set()
        self._failures: dict[Method, deque[tuple[BaseException, bool]]] = {}
        self.on_nodes: Given = lambda job, generation, nodes: None
        self.on_back: Given = lambda job, generation, nodes: None
        self.lives: Callable[[str, str], bool] = lambda job, node: False
        self.replaced: list[tuple[str, int, str]] = []  # job, attempt, token: once for each that took effect

    # What the world does

    def register(self, spec: JobSpec) -> MemoryRecords:
        """A job that may be submitted."""
        records = MemoryRecords(spec)
        self._jobs[spec.job] = SimulatedJob(records)
        return records

    def tell(self, job: str, launcher: LauncherAddress) -> None:
        """A launcher of the newest generation has come up."""
        self._jobs[job].launchers[launcher.node] = launcher

    def take_down(self, node: str) -> None:
        """The scheduler gives a node up; what runs there may live on."""
        self._down.add(node)

    def hold(self, job: str, why: str) -> None:
        """An operator holds the job; the empty string lets it go."""
        self._jobs[job].held = why

    def requeue(self, job: str) -> None:
        """An operator gives the job other nodes, or the same ones anew."""
        self._give(self._jobs[job], job, ())

    def fail_next(self, method: Method, error: BaseException, *, after_effect: bool = False) -> None:
        """The next call of `method` raises `error`, before or (an ambiguous answer, a crash) after its effect."""
        self._failures.setdefault(method, deque()).append((error, after_effect))

    # Allocation

    def submit(self, job: str, *, nodes: int, command: Sequence[str]) -> AllocationView:
        self._maybe_fail("submit", after_effect=False)
        one = self._job(job)
        if one.generation == 0:
            one.nodes_wanted = nodes
            self._need(job, nodes, self._free(()))
            self._give(one, job, ())
        self._maybe_fail("submit", after_effect=True)
        return self._view(job)

    def look(self, job: str) -> AllocationView:
        self._maybe_fail("look", after_effect=False)
        return self._view(job)

    def records(self, job: str) -> MemoryRecords:
        self._maybe_fail("records", after_effect=False)
        return self._job(job).records

    def launchers(self, job: str) -> tuple[LauncherAddress, ...]:
        self._maybe_fail("launchers", after_effect=False)
        one = self._job(job)
        return tuple(one.launchers.values()) if self._view(job).phase == "running" else ()

    def replace(self, job: str, *, attempt: int, token: str, excluded_nodes: Sequence[str]) -> AllocationView:
        self._maybe_fail("replace", after_effect=False)
        one = self._job(job)
        if (one.attempt, one.token) == (attempt, token):
            return self._view(job)
        if one.ended or one.records.end() is not None:
            raise Rejected(f"job {job} is over ({one.ended or 'its end is written'}); terminal stays terminal")
        if attempt <= one.attempt:
            raise Conflict(f"attempt {one.attempt} of {job} stands on the allocation; {attempt} is not newer")
        spec = one.records.spec()
        assert spec is not None
        self._need(job, spec.nodes, self._free(excluded_nodes))
        one.attempt, one.token, one.excluded = attempt, token, tuple(sorted(excluded_nodes))
        self.replaced.append((job, attempt, token))
        self._give(one, job, excluded_nodes)
        self._maybe_fail("replace", after_effect=True)
        return self._view(job)

    def nothing_runs_on(self, job: str, node: str) -> bool:
        self._maybe_fail("nothing_runs_on", after_effect=False)
        if node in self._down:
            return node in self._job(job).records.excluded()
        return not self.lives(job, node)

    def release(self, job: str, end: JobEnd) -> None:
        self._maybe_fail("release", after_effect=False)
        one = self._job(job)
        if not one.ended:
            one.ended = end.outcome
            self.on_back(job, one.generation, one.nodes)
            one.launchers.clear()
        self._maybe_fail("release", after_effect=True)

    # Inside

    def _job(self, job: str) -> SimulatedJob:
        try:
            return self._jobs[job]
        except KeyError as error:
            raise Rejected(f"there is no job {job}") from error

    def _view(self, job: str) -> AllocationView:
        one = self._jobs.get(job)
        if one is None or one.generation == 0:
            return AllocationView(job, "absent")
        phase: AllocationPhase = "running"
        if one.ended:
            phase = "ended"
        elif self._clock.monotonic() < one.running_at:
            phase = "pending"
        return AllocationView(
            job,
            phase,
            one.generation,
            one.nodes if phase == "running" else (),
            one.attempt,
            one.token,
            one.excluded,
            tuple(sorted(self._down & (one.old_nodes | set(one.nodes)))),
            one.ended or ("Resources" if phase == "pending" else ""),
            one.held,
        )

    def _free(self, excluded: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in self._nodes if node not in self._down and node not in excluded)

    def _need(self, job: str, nodes: int, free: Sequence[str]) -> None:
        if len(free) < nodes:
            raise TooFewNodes(f"job {job} needs {nodes} nodes and {len(free)} can be used", len(free))

    def _give(self, one: SimulatedJob, job: str, excluded: Sequence[str]) -> None:
        """All nodes back, others instead: as many as were asked for first, or what is left."""
        if one.nodes:
            self.on_back(job, one.generation, one.nodes)
        one.old_nodes |= set(one.nodes)
        one.launchers.clear()
        one.nodes = self._free(excluded)[: one.nodes_wanted]
        one.generation += 1
        one.running_at = self._clock.monotonic() + self._pending_seconds
        self.on_nodes(job, one.generation, one.nodes)

    def _maybe_fail(self, method: Method, *, after_effect: bool) -> None:
        queue = self._failures.get(method)
        if queue and queue[0][1] == after_effect:
            raise queue.popleft()[0]
