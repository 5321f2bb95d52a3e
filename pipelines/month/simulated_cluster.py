"""A simulated cluster of thousands of nodes: keeps the promises of `Backend`, and says how far its job is.

One rank stands for a whole node. So that an observation costs little however many nodes there are, only rank 0 carries
the step; the others are as they were started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from recovery.backend import (
    CheckpointChoice,
    Conflict,
    NodeView,
    Observation,
    RankView,
    Rejected,
    StartRequest,
    TooFewNodes,
)
from recovery.backends.placing import choose_nodes

Outcome = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class ClusterObservation(Observation):
    """What was observed; the step is the job's, which rank 0 alone carries."""

    @property
    def step(self) -> int:
        return self.ranks[0].step if self.ranks and self.ranks[0].state != "exited" else -1


@dataclass(slots=True)
class ClusterJob:
    """One job of one rank on each of its nodes."""

    nodes_wanted: int
    attempt: int = 0
    token: str = ""
    placed: tuple[str, ...] = ()
    ranks: tuple[RankView, ...] = ()
    alive: bool = False
    failed: bool = False  # a rank has died
    stopped: bool = False
    outcome: Outcome | None = None
    excluded: frozenset[str] = frozenset()
    views: tuple[NodeView, ...] = ()  # of all nodes, as they were at the last start


@dataclass(slots=True)
class SimulatedCluster:
    """See the module. `started` is told of each start that took effect, `step_of` says how far the job is."""

    nodes: dict[str, bool]  # by name: whether it is broken, which nobody can see
    step_of: Callable[[str], int]
    started: Callable[[str, StartRequest], None]
    name: str = "simulated cluster"
    jobs: dict[str, ClusterJob] = field(default_factory=dict)
    _views: dict[tuple[str, str], NodeView] = field(default_factory=dict)

    # What the world does

    def add_job(self, job: str, nodes_wanted: int) -> None:
        self.jobs[job] = ClusterJob(nodes_wanted)

    def add_node(self, node: str) -> None:
        """Another machine, ready to be used."""
        self.nodes[node] = False
        self._look_again()

    def take_node(self, node: str) -> None:
        """A machine is carried away."""
        del self.nodes[node]
        self._look_again()

    def _look_again(self) -> None:
        for state in self.jobs.values():
            state.views = ()

    def break_rank(self, job: str, node: str, kind: Literal["exited", "stopped"]) -> None:
        """The rank on `node` dies, or stands still."""
        state = self.jobs[job]
        at = state.placed.index(node)
        broken = replace(state.ranks[at], state=kind, signal=9 if kind == "exited" else None)
        state.ranks = (*state.ranks[:at], broken, *state.ranks[at + 1 :])
        state.failed = state.failed or kind == "exited"

    def broken_nodes(self, job: str) -> list[str]:
        """The broken ones among those that the job runs on."""
        return [node for node in self.jobs[job].placed if self.nodes[node]]

    # Backend

    def observe(self, job: str) -> Observation:
        return self._view(job, self._job(job))

    def start(self, request: StartRequest) -> Observation:
        state = self._job(request.job)
        if state.outcome is not None:
            raise Rejected(f"job {request.job} is over ({state.outcome}); terminal stays terminal")
        if (request.attempt, request.token) != (state.attempt, state.token):
            self._start_new(state, request)
        return self._view(request.job, state)

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        state = self._job(job)
        if state.attempt <= attempt:
            state.stopped, state.alive = True, False
        return True

    def finish(self, job: str, outcome: Outcome, reason: str) -> None:
        state = self._job(job)
        state.outcome, state.alive = state.outcome or outcome, False

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        return {}

    def _job(self, job: str) -> ClusterJob:
        if job not in self.jobs:
            raise Rejected(f"there is no job {job} here")
        return self.jobs[job]

    def _start_new(self, state: ClusterJob, request: StartRequest) -> None:
        if request.attempt <= state.attempt:
            raise Conflict(f"attempt {state.attempt} of {request.job} was here, {request.attempt} is not newer")
        if state.alive:
            raise Conflict(f"ranks of attempt {state.attempt} of {request.job} still live; stop them first")
        excluded = (state.excluded - set(request.released_nodes)) | set(request.excluded_nodes)
        usable = [node for node in self.nodes if node not in excluded]
        wanted = request.nodes or state.nodes_wanted
        chosen = choose_nodes(state.placed, usable, wanted)
        if chosen is None:
            raise TooFewNodes(f"{request.job} needs {wanted} nodes, {len(usable)} can be used", len(usable))
        before = dict(zip(state.placed, state.ranks, strict=True))
        state.ranks = tuple(
            known
            if (known := before.get(node)) is not None
            and (known.rank, known.state, known.step) == (rank, "running", -1)
            else RankView(rank, node, 1 + rank, "running")
            for rank, node in enumerate(chosen)
        )
        state.attempt, state.token, state.placed, state.excluded = request.attempt, request.token, chosen, excluded
        state.alive, state.stopped, state.failed, state.views = True, False, False, ()
        self.started(request.job, request)

    def _view(self, job: str, state: ClusterJob) -> Observation:
        ranks = state.ranks if state.alive or not state.stopped else ()
        if ranks:
            step = self.step_of(job)
            ranks = (replace(ranks[0], step=step), *ranks[1:])
        phase: Literal["starting", "running", "failed", "stopped", "finished"] = "running"
        if state.outcome is not None:
            phase = state.outcome
        elif not ranks:
            phase = "stopped"
        elif state.failed:
            phase = "failed"
        if not state.views:
            placed = set(state.placed)
            state.views = tuple(
                self._node(node, "excluded" if node in state.excluded else "active" if node in placed else "spare")
                for node in self.nodes
            )
        return ClusterObservation(job, state.attempt, state.token, phase, ranks, state.views)

    def _node(self, node: str, state: Literal["active", "spare", "excluded"]) -> NodeView:
        """The view of a node, made once for each state that it is ever in."""
        known = self._views.get((node, state))
        if known is None:
            known = self._views[node, state] = NodeView(node, state, 1)
        return known


@dataclass(slots=True)
class SimulatedCheckpoints:
    """Every so many steps a checkpoint that all ranks can load, except those that were rejected."""

    every_steps: int
    step_of: Callable[[str], int]
    rejected: dict[str, int] = field(default_factory=dict)

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        step = self.step_of(job)
        for bound in (before_step, self.rejected.get(job)):
            if bound is not None:
                step = min(step, bound - 1)
        newest = step // self.every_steps * self.every_steps
        return CheckpointChoice(newest, "memory") if newest > 0 else None

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        self.rejected[job] = min(step, self.rejected.get(job, step))
