"""Jobs whose nodes a scheduler gives: ranks through the launchers of the living allocation, else other nodes.

    start ─► enough usable nodes answer? ── yes ─► first rung: place, write it down, tell the launchers
                        │ no
                        └─► second rung: allocation.replace ─► "starting" … asked again: its launchers are up ─► place

Each step is written before it is done, in the records (the placement) or on the allocation (attempt and token), so
that whoever asks again, after a crash too, goes on where it stands. An older rank is gone when its launcher says
so, or when the scheduler vouches for its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from ingest.clock import Clock
from recovery.action import CheckResult
from recovery.allocation import Allocation, AllocationView, Grouped, LauncherAddress, Scripted
from recovery.backend import (
    BackendError,
    Conflict,
    NodeView,
    Observation,
    Rejected,
    StartRequest,
    TooFewNodes,
    Unavailable,
)
from recovery.launcher.protocol import CheckName, JobEnd, Observe

from .asking import ask_all
from .in_allocation import InAllocation, KeyOf
from .launchers import OBSERVE_SECONDS_MAX, JobOutcome, Launchers, excluded_with
from .view import Answer, Written, view_of

GROUPS_SECONDS = 600.0  # racks do not move often; asked again sooner for a node that was not known
GROUPS_AGAIN_SECONDS = 30.0  # but no more often than that
LAUNCHERS_SECONDS_MAX = 60.0  # nodes of a generation that was met just now may have launchers that come up


@dataclass(frozen=True, slots=True)
class GroupsTold:
    """What fails together, as the scheduler told it of these nodes, and when (monotonic)."""

    at: float = float("-inf")
    nodes: frozenset[str] = frozenset()
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What was known of a job when its scheduler answered last."""

    written: Written
    launchers: tuple[LauncherAddress, ...]


class ScheduledBackend:
    """`Backend` over an `Allocation` and the launchers that run in it."""

    def __init__(self, allocation: Allocation, key_of: KeyOf, clock: Clock, random: Random) -> None:
        self.name = allocation.name
        # Called once before all nodes of a job are given back: what only their memory holds is to be saved elsewhere.
        self.before_nodes_go: Callable[[str], object] = lambda job: None
        self._allocation = allocation
        self._key_of = key_of
        self._clock = clock
        self._random = random
        self._remembered: dict[str, Remembered] = {}
        self._groups: dict[str, GroupsTold] = {}
        self._met: dict[str, tuple[int, float]] = {}  # by job: the newest generation that runs, and since when we know

    @property
    def allocation(self) -> Allocation:
        """For what only its scheduler can be asked."""
        return self._allocation

    # Backend

    def observe(self, job: str) -> Observation:
        """While the scheduler does not answer, what launchers say is enough; Unavailable where nobody does."""
        view, silence = self._look(job)
        try:
            launchers, reach = self._launchers(job)
            written = launchers.written()
            if view is not None:
                self._meet(view)
                self._remembered[job] = Remembered(written, tuple(reach.addresses()))
            answers = launchers.look(written)
        except Unavailable as error:
            return self._observe_remembered(job, silence or error)
        if view is None:
            return self._from_launchers(written, answers, silence)
        return self._seen(view, written, answers)

    def start(self, request: StartRequest) -> Observation:
        """Returns at once; "starting" where the scheduler takes its time: ask again with the same request."""
        launchers, _ = self._launchers(request.job)
        written = launchers.written()
        launchers.refuse_ended(written)
        last = written.placement
        if last is not None and (last.attempt, last.token) == (request.attempt, request.token):
            launchers.start_on(written, last)  # asked again: the same ranks on the same nodes
            return self.observe(request.job)
        view, silence = self._look(request.job)
        replacing = view is not None and (view.attempt, view.token) == (request.attempt, request.token)
        newest = max(last.attempt if last else 0, view.attempt if view and not replacing else 0)
        if request.attempt <= newest:
            raise Conflict(f"attempt {newest} of {request.job} was here, {request.attempt} is not newer")
        if view is not None and view.held:
            raise Unavailable(f"an operator holds {request.job} ({view.held}); it is started when that is over")
        answers = launchers.look(written)
        launchers.confirm_gone(request, answers)
        if view is None or view.phase == "running":
            try:
                generation = view.generation if view is not None else (last.generation if last else 0)
                placement = launchers.place(request, written, answers, generation=generation)
            except TooFewNodes:
                coming = self._coming(view, request, written, answers) if view is not None else []
                if view is None:
                    raise silence or Unavailable(f"the scheduler of {request.job} does not answer") from None
                if coming and not replacing:
                    raise Unavailable(f"launchers of {request.job} come up on {', '.join(coming)}") from None
                if replacing and not coming:
                    raise
            else:
                launchers.start_on(written, placement)
                return self.observe(request.job)
        if view is not None and view.phase == "running" and not replacing:
            self.before_nodes_go(request.job)
        return self._replace(request, written, answers)

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        launchers, _ = self._launchers(job)
        return launchers.stop(attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds)

    def finish(self, job: str, outcome: JobOutcome, reason: str) -> None:
        launchers, _ = self._launchers(job)
        self._allocation.release(job, launchers.finish(outcome, reason))

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        launchers, _ = self._launchers(job)
        return launchers.collect_evidence(attempt, deadline_seconds)

    def probe(
        self,
        job: str,
        attempt: int,
        checks: Sequence[CheckName],
        groups: Sequence[Sequence[str]],
        *,
        seconds: float,
    ) -> list[CheckResult]:
        launchers, _ = self._launchers(job)
        return launchers.probe(attempt, checks, groups, seconds)

    # For the front and the command line

    def submit(self, job: str, *, nodes: int, command: Sequence[str]) -> AllocationView:
        """Take the first nodes of a job that is registered. See `Allocation.submit`."""
        return self._allocation.submit(job, nodes=nodes, command=command)

    def script(self, job: str, *, nodes: int, command: Sequence[str]) -> str:
        """What `submit` would hand to the scheduler. Raises Rejected where that is no script."""
        if not isinstance(self._allocation, Scripted):
            raise Rejected(f"the {self.name} backend is not asked by a script; run the job without --print-script")
        return self._allocation.script(job, nodes=nodes, command=command)

    def inject(self, job: str, rank: int, fault: str, parameters: dict[str, float]) -> str:
        """Break one rank on purpose; the sentence that says why nothing was done, empty where it was."""
        launchers, _ = self._launchers(job)
        return launchers.inject(rank, fault, parameters)

    def nodes(self, job: str) -> list[str]:
        """Nodes whose launchers are known. Raises Unavailable."""
        return sorted(launcher.node for launcher in self._allocation.launchers(job))

    def ask_engine(self, job: str, node: str, packet: str, timeout_seconds: float) -> str:
        """The answer of a node's checkpoint engine, whose socket only its launcher reaches. Raises Unavailable."""
        launchers, _ = self._launchers(job)
        return launchers.ask_engine(node, packet, timeout_seconds)

    def wait_for_launchers(self, job: str, deadline_seconds: float) -> bool:
        """Whether enough launchers for the job answer in time."""
        launchers, _ = self._launchers(job)
        return launchers.wait(deadline_seconds)

    def end(self, job: str) -> JobEnd | None:
        """How the job has ended; None: it has not."""
        return self._allocation.records(job).end()

    # Looking

    def _look(self, job: str) -> tuple[AllocationView | None, Unavailable | None]:
        try:
            return self._allocation.look(job), None
        except Unavailable as error:
            return None, error

    def _launchers(self, job: str) -> tuple[Launchers, InAllocation]:
        records = self._allocation.records(job)
        reach = InAllocation(job, self._allocation, records, self._key_of(job), self._clock, self._random)
        return Launchers(job, records, reach, self._clock), reach

    def _observe_remembered(self, job: str, silence: Unavailable) -> Observation:
        """The scheduler and its records do not answer: ask the launchers that were known last."""
        last = self._remembered.get(job)
        if last is None:
            raise silence
        reach = InAllocation(job, self._allocation, None, self._key_of(job), self._clock, self._random)
        reach.remember(last.launchers)
        answers = ask_all(reach, last.written, Observe(), OBSERVE_SECONDS_MAX)
        return self._from_launchers(last.written, answers, silence)

    def _from_launchers(self, written: Written, answers: Sequence[Answer], silence: Unavailable | None) -> Observation:
        """What launchers alone say: an observation as long as one of them answers, and none knows more than we do."""
        states = [answer.state for answer in answers if answer.state is not None]
        attempt = written.placement.attempt if written.placement is not None else 0
        if not states or any(state.attempt > attempt for state in states):
            raise silence or Unavailable(f"neither the scheduler nor any launcher of {written.spec.job} answers")
        generation = written.placement.generation if written.placement is not None else 0
        seen = view_of(written, answers, generation=generation)
        return replace(seen, note=f"the scheduler does not answer: {silence}" if silence else seen.note)

    def _seen(self, view: AllocationView, written: Written, answers: Sequence[Answer]) -> Observation:
        """Launchers' answers under the scheduler's own view, which may be a step ahead of the records."""
        seen = view_of(written, answers, generation=view.generation)
        here = {node.name for node in seen.nodes}
        without = [
            NodeView(node, "excluded" if node in written.excluded else "lost", written.spec.nproc_per_node)
            for node in view.nodes
            if node not in here
        ]
        groups = self._groups_of(view.job, (*here, *view.nodes))
        reason = "" if view.phase in ("running", "pending") else view.reason
        nodes = tuple(replace(node, group=groups.get(node.name, "")) for node in (*seen.nodes, *without))
        seen = replace(seen, nodes=nodes, held=view.held, reason=reason)
        if view.attempt > seen.attempt and written.end is None:  # other nodes are on their way for it
            note = view.reason or f"the allocation is {view.phase}"
            return replace(seen, attempt=view.attempt, token=view.token, phase="starting", ranks=(), note=note)
        return seen

    def _groups_of(self, job: str, nodes: Sequence[str]) -> Mapping[str, str]:
        """What fails together; a scheduler that does not tell, or not now, is no reason to wait."""
        if not isinstance(self._allocation, Grouped):
            return {}
        told, now = self._groups.get(job, GroupsTold()), self._clock.monotonic()
        age, known = now - told.at, set(nodes) <= told.nodes
        if age < GROUPS_AGAIN_SECONDS or (known and age < GROUPS_SECONDS):
            return told.groups
        known_now = frozenset(nodes)
        try:
            groups = self._allocation.groups(job, nodes)
        except BackendError:
            groups, known_now = told.groups, frozenset()
        self._groups[job] = GroupsTold(now, known_now, groups)
        return groups

    # Other nodes

    def _replace(self, request: StartRequest, written: Written, answers: Sequence[Answer]) -> Observation:
        view = self._allocation.replace(
            request.job,
            attempt=request.attempt,
            token=request.token,
            excluded_nodes=sorted(excluded_with(request, written)),  # written down when the new nodes are placed
        )
        return self._starting(view, written, answers)

    def _starting(self, view: AllocationView, written: Written, answers: Sequence[Answer]) -> Observation:
        answering = sum(answer.reply is not None for answer in answers)
        if view.phase == "running":
            note = f"{answering} of {len(view.nodes)} launchers answer"
        else:
            note = view.reason or f"the allocation is {view.phase}"
        seen = view_of(written, answers)
        return replace(seen, attempt=view.attempt, token=view.token, phase="starting", ranks=(), note=note)

    def _coming(
        self, view: AllocationView, request: StartRequest, written: Written, answers: Sequence[Answer]
    ) -> list[str]:
        """Nodes of the allocation whose launchers may still come up: for a while after we met this generation, and
        always while it is the one that was asked for."""
        replacing = (view.attempt, view.token) == (request.attempt, request.token)
        if not replacing and self._clock.monotonic() - self._meet(view) > LAUNCHERS_SECONDS_MAX:
            return []
        silent = set(view.nodes) - {answer.node for answer in answers if answer.reply is not None}
        return sorted(silent - set(view.down_nodes) - excluded_with(request, written))

    def _meet(self, view: AllocationView) -> float:
        """Since when (monotonic) we have known that this generation runs."""
        now = self._clock.monotonic()
        generation, since = self._met.get(view.job, (-1, now))
        if view.phase != "running" or generation == view.generation:
            return since
        self._met[view.job] = (view.generation, now)
        return now
