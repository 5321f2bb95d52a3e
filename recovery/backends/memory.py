"""A backend without processes, for simulation and tests; `end_rank` and its like do what a job would."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ingest.clock import Clock
from recovery.backend import (
    BackendError,
    Conflict,
    NodeView,
    Observation,
    RankView,
    Rejected,
    StartRequest,
    TooFewNodes,
    Unavailable,
)
from recovery.backends.placing import choose_nodes

Method = Literal["observe", "start", "stop", "finish", "collect_evidence"]
Outcome = Literal["finished", "failed", "stopped"]


@dataclass(slots=True)
class MemoryJob:
    """One job: its nodes, and what runs."""

    name: str
    nodes: dict[str, int]  # slots by name
    nodes_wanted: int
    nproc_per_node: int
    lost: set[str] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)
    attempt: int = 0
    token: str = ""
    placed: tuple[str, ...] = ()
    ranks: dict[int, RankView] = field(default_factory=dict)
    stop_requested: bool = False
    outcome: Outcome | None = None
    reason: str = ""
    next_pid: int = 1000
    nodes_min: int = 0
    groups: dict[str, str] = field(default_factory=dict)  # by node: what fails together with it
    ended_by: str = ""  # the scheduler's word for why it ended
    held: str = ""  # by an operator, in the scheduler's words

    @property
    def living(self) -> list[RankView]:
        return [rank for rank in self.ranks.values() if rank.state != "exited"]


class MemoryBackend:
    """Keeps every promise of `Backend`; `starts` lists the requests that started ranks, once each."""

    name = "memory"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[str, MemoryJob] = {}
        self._failures: dict[Method, deque[tuple[BackendError, bool]]] = {}
        self._immortal: set[tuple[str, int]] = set()
        self.starts: list[StartRequest] = []
        self.evidence: dict[int, str] = {}  # what collect_evidence finds; ranks not in it do not answer

    # What the world does

    def add_job(self, job: str, nodes: Mapping[str, int], *, nodes_wanted: int, nproc_per_node: int) -> None:
        """A job whose launchers are up and run nothing yet; `nodes` are slots by name, in order."""
        self._jobs[job] = MemoryJob(job, dict(nodes), nodes_wanted, nproc_per_node)

    def may_shrink(self, job: str, nodes_min: int) -> None:
        """The job may run on so few nodes."""
        self._jobs[job].nodes_min = nodes_min

    def group(self, job: str, groups: Mapping[str, str]) -> None:
        """What fails together, by node."""
        self._jobs[job].groups = dict(groups)

    def give_node(self, job: str, node: str, slots: int = 2) -> None:
        """A launcher comes up, anew or for the first time; an operator's release of an exclusion looks the same."""
        state = self._jobs[job]
        state.nodes[node] = slots
        state.lost.discard(node)
        state.excluded.discard(node)

    def hold_there(self, job: str, words: str) -> None:
        """An operator puts the job on hold at the scheduler, or (empty) lets it go."""
        self._jobs[job].held = words

    def set_step(self, job: str, step: int, rank: int | None = None) -> None:
        """Living ranks (or that one) report this step."""
        for view in self._jobs[job].living:
            if rank is None or view.rank == rank:
                self._jobs[job].ranks[view.rank] = replace(view, step=step)

    def end_rank(
        self, job: str, rank: int, *, exit_code: int | None = None, signal: int | None = None, error: str = ""
    ) -> None:
        """The process of a rank is gone; `error` is what its error file says."""
        view = self._jobs[job].ranks[rank]
        self._jobs[job].ranks[rank] = replace(
            view, state="exited", exit_code=exit_code, signal=signal, error=error, ended_at=self._clock.now()
        )

    def end_by_scheduler(self, job: str, words: str) -> None:
        """The scheduler ends the job, and says why in a word."""
        self._jobs[job].ended_by = words
        for view in self._jobs[job].living:
            self.end_rank(job, view.rank, signal=15)

    def stall_rank(self, job: str, rank: int) -> None:
        """The process of a rank is stopped."""
        self._jobs[job].ranks[rank] = replace(self._jobs[job].ranks[rank], state="stopped")

    def lose_node(self, job: str, node: str) -> None:
        """A launcher is killed, and its ranks with it."""
        self._jobs[job].lost.add(node)
        for view in self._jobs[job].living:
            if view.node == node:
                self.end_rank(job, view.rank, signal=9)

    def refuse_to_die(self, job: str, rank: int) -> None:
        """The process of a rank outlives SIGKILL (state D): `stop` answers False."""
        self._immortal.add((job, rank))

    def fail_next(self, method: Method, error: BackendError, *, after_effect: bool = False) -> None:
        """The next call of `method` raises `error`, before or (an ambiguous answer) after its effect."""
        self._failures.setdefault(method, deque()).append((error, after_effect))

    # Backend

    def observe(self, job: str) -> Observation:
        self._maybe_fail("observe", after_effect=False)
        return self._view(self._job(job))

    def start(self, request: StartRequest) -> Observation:
        self._maybe_fail("start", after_effect=False)
        job = self._job(request.job)
        if job.outcome is not None:
            raise Rejected(f"job {job.name} is over ({job.outcome}); terminal stays terminal")
        if (request.attempt, request.token) != (job.attempt, job.token):
            self._start_new(job, request)
        self._maybe_fail("start", after_effect=True)
        return self._view(job)

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        self._maybe_fail("stop", after_effect=False)
        state = self._job(job)
        if state.attempt <= attempt:
            state.stop_requested = True
            self._stop_all(state)
        self._maybe_fail("stop", after_effect=True)
        return state.attempt > attempt or not state.living

    def finish(self, job: str, outcome: Outcome, reason: str) -> None:
        self._maybe_fail("finish", after_effect=False)
        state = self._job(job)
        if state.outcome is None:
            state.outcome, state.reason = outcome, reason
            self._stop_all(state)
        self._maybe_fail("finish", after_effect=True)

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        self._maybe_fail("collect_evidence", after_effect=False)
        state = self._job(job)
        living = {view.rank for view in state.living if view.state == "running"}
        return {rank: text for rank, text in self.evidence.items() if rank in living and attempt == state.attempt}

    def _job(self, job: str) -> MemoryJob:
        if job not in self._jobs:
            raise Rejected(f"there is no job {job} here")
        return self._jobs[job]

    def _maybe_fail(self, method: Method, *, after_effect: bool) -> None:
        waiting = self._failures.get(method)
        if waiting and waiting[0][1] is after_effect:
            raise waiting.popleft()[0]

    def _start_new(self, job: MemoryJob, request: StartRequest) -> None:
        if request.attempt <= job.attempt:
            raise Conflict(f"attempt {job.attempt} of {job.name} was here, {request.attempt} is not newer")
        if job.living:
            raise Conflict(f"ranks of attempt {job.attempt} of {job.name} still live; stop them first")
        excluded = (job.excluded - set(request.released_nodes)) | set(request.excluded_nodes)
        wanted = request.nodes or job.nodes_wanted
        usable = [
            name for name, slots in job.nodes.items() if name not in excluded | job.lost and slots >= job.nproc_per_node
        ]
        chosen = choose_nodes(job.placed, usable, wanted)
        if chosen is None:
            raise TooFewNodes(f"job {job.name} needs {wanted} nodes, {len(usable)} can be used", len(usable))
        job.ended_by = ""
        job.excluded, job.placed, job.stop_requested = excluded, chosen, False
        job.attempt, job.token, job.ranks = request.attempt, request.token, {}
        for rank in range(wanted * job.nproc_per_node):
            node = chosen[rank // job.nproc_per_node]
            job.ranks[rank] = RankView(rank, node, job.next_pid, "running")
            job.next_pid += 1
        self.starts.append(request)

    def _stop_all(self, job: MemoryJob) -> None:
        for view in job.living:
            if (job.name, view.rank) not in self._immortal:
                self.end_rank(job.name, view.rank, signal=15)

    def _view(self, job: MemoryJob) -> Observation:
        nodes = tuple(
            NodeView(name, self._node_state(job, name), slots, job.groups.get(name, ""))
            for name, slots in job.nodes.items()
        )
        return Observation(
            job.name, job.attempt, job.token, self._phase(job), tuple(job.ranks.values()), nodes,
            reason=job.ended_by, held=job.held, nodes_wanted=job.nodes_wanted, nodes_min=job.nodes_min,
            ended=job.outcome is not None,
        )  # fmt: skip

    def _node_state(self, job: MemoryJob, node: str) -> Literal["active", "spare", "excluded", "lost"]:
        if node in job.excluded:
            return "excluded"
        if node in job.lost:
            return "lost"
        return "active" if any(view.node == node for view in job.ranks.values()) else "spare"

    def _phase(self, job: MemoryJob) -> Literal["starting", "running", "failed", "stopped", "finished"]:
        if job.outcome is not None:
            return job.outcome
        if job.ranks and all(view.exit_code == 0 for view in job.ranks.values()):
            return "finished"
        if not job.ranks or (job.stop_requested and not job.living):
            return "stopped"
        return (
            "failed"
            if any(view.state == "exited" and view.exit_code != 0 for view in job.ranks.values())
            else "running"
        )


__all__ = ["MemoryBackend", "MemoryJob", "Unavailable"]
