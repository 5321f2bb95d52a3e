"""Every call that recovery makes to a backend or a checkpoint catalog: blocking, repeatable, never raising.

Each looks before it acts, so that it may be made again after a crash or an ambiguous answer: a start first
asks whether its attempt runs already under its token, whether somebody newer was here, and whether old ranks
live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .action import CheckResult
from .backend import (
    Backend,
    BackendError,
    CheckpointCatalog,
    CheckpointChoice,
    Observation,
    PersistingCatalog,
    ProbingBackend,
    Rejected,
    StartRequest,
    TooFewNodes,
)
from .backends.placing import choose_nodes
from .checking import Rounds, check_nodes
from .launcher.protocol import CheckName
from .lease import ControllerLease
from .plan import Plan
from .policy_config import PolicyConfig
from .store_schema import Rejection

STACK_CHARACTERS_MAX = 65_536
NOWHERE = ""  # the node of a rank of which nobody knows where it will run
ROUND_SECONDS = 4.0  # of a round of checks, beside what the checks themselves may take


@dataclass(frozen=True, slots=True)
class Seen:
    """The job as it is."""

    observation: Observation


@dataclass(frozen=True, slots=True)
class Stopped:
    """What came of a stop: whether every rank of the old attempt is gone, and the stacks collected before."""

    gone: bool
    stacks: dict[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """What pre-flight checks found; `complete`: there was time for all of them. `why_none`: there were none."""

    results: tuple[CheckResult, ...] = ()
    complete: bool = True
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the new attempt will resume from (None: from scratch), under this plan."""

    plan: Plan
    observation: Observation
    choice: CheckpointChoice | None


@dataclass(frozen=True, slots=True)
class Started:
    """The new attempt runs, whether this call started it or an earlier one."""

    observation: Observation


@dataclass(frozen=True, slots=True)
class Starting:
    """The new attempt is on its way: its scheduler takes its time, or launchers come up. Ask again."""

    observation: Observation


@dataclass(frozen=True, slots=True)
class Short:
    """Too few nodes can be used now, and nothing was started. `wanted`, `least`: as the job's spec says; 0: unknown."""

    text: str
    usable: int = 0
    wanted: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Grown:
    """A job that runs on fewer nodes than it wants, and the newest step it could be restarted from."""

    observation: Observation
    choice: CheckpointChoice | None


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job has finished by itself."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Somebody else has started a newer attempt."""

    attempt: int


@dataclass(frozen=True, slots=True)
class OlderAlive:
    """Ranks of the old attempt live: nothing may be started."""


@dataclass(frozen=True, slots=True)
class Done:
    """The backend, or the catalog, has been told."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Asking again will not help."""

    text: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer, or one that does not say what happened: never a reason to conclude anything."""

    text: str


Result = (
    Seen | Stopped | Checked | Chosen | Started | Starting | Short | Grown
    | JobOver | Overtaken | OlderAlive | Done | Refused | Unanswered
)  # fmt: skip
Call = Callable[[], Result]


def guarded(call: Call, lease: ControllerLease) -> Call:
    """The same call with its errors as values; not made by a controller that has lost its lease meanwhile."""

    def guarded_call() -> Result:
        if not lease.is_ours():
            return Unanswered("the lease of this controller has run out, so nothing was asked")
        try:
            return call()
        except TooFewNodes as error:
            return Short(str(error), error.usable)
        except Rejected as error:
            return Refused(str(error))
        except BackendError as error:
            return Unanswered(str(error))
        # A mistake inside one backend must not stop the recovery of other jobs, and its effect is not known.
        except Exception as error:  # noqa: BLE001  an unforeseen fault is "no answer": nothing is concluded from it
            return Unanswered(f"unexpected {type(error).__name__}: {error}")

    return guarded_call


def look(backend: Backend, job: str) -> Result:
    return Seen(backend.observe(job))


def look_to_grow(backend: Backend, catalog: CheckpointCatalog, job: str) -> Result:
    """The job, and what its ranks could resume from where they are now."""
    observation = backend.observe(job)
    places = sorted((rank.rank, rank.node) for rank in observation.ranks)
    return Grown(observation, catalog.newest_complete(job, before_step=None, places=places) if places else None)


def look_for_nodes(backend: Backend, job: str, old_attempt: int) -> Result:
    """The job and its nodes while it waits for capacity, or why its successor must not be started any more."""
    observation = backend.observe(job)
    obstacle = _obstacle(observation, old_attempt)
    return obstacle if obstacle is not None else Seen(observation)


def stop_attempt(
    backend: Backend,
    job: str,
    attempt: int,
    *,
    evidence: bool,
    config: PolicyConfig,
    persist: PersistingCatalog | None = None,
) -> Result:
    """Stacks first, where they are wanted: a rank that is gone tells nothing. No answer is evidence too.

    `persist`: before a planned stop what memory holds is brought to disk; that it was not is a note, no obstacle.
    """
    stacks: dict[int, str] = {}
    note = ""
    if persist is not None:
        note = _persisted(persist, job, config)
    if evidence:
        try:
            stacks = backend.collect_evidence(job, attempt, deadline_seconds=config.evidence_seconds_max)
        except BackendError as error:
            note = f"{note}no stacks: {error}"  # evidence is welcome, the stop is needed
    stacks = {rank: text[:STACK_CHARACTERS_MAX] for rank, text in stacks.items()}
    try:
        gone = backend.stop(
            job,
            attempt,
            grace_seconds=config.stop_grace_seconds,
            deadline_seconds=config.stop_call_seconds_max,
        )
    except BackendError as error:
        if not stacks or isinstance(error, Rejected):
            raise
        return Stopped(False, stacks, f"stop: {error}")  # the stacks cannot be collected a second time
    return Stopped(gone, stacks, note)


def _persisted(catalog: PersistingCatalog, job: str, config: PolicyConfig) -> str:
    try:
        missing = catalog.persist_newest(job, deadline_seconds=config.persist_seconds_max)
    except BackendError as error:
        missing = str(error)
    return f"memory is not all on disk: {missing}; " if missing else "memory is on disk; "


def preflight(backend: Backend, job: str, attempt: int, excluded: Sequence[str], config: PolicyConfig) -> Result:
    """Try out the nodes that the next attempt could use; a backend without checks has none to do."""
    observation = backend.observe(job)
    obstacle = _obstacle(observation, attempt)
    if obstacle is not None:
        return obstacle
    if not isinstance(backend, ProbingBackend):
        return Checked(why_none=f"the backend {backend.name} has no checks")
    usable = [one.name for one in observation.nodes if one.state in ("active", "spare") and one.name not in excluded]
    seconds = config.check_seconds_max

    def probe(checks: Sequence[CheckName], groups: Sequence[Sequence[str]]) -> list[CheckResult]:
        return backend.probe(job, attempt, checks, groups, seconds=seconds)

    rounds = Rounds(probe, max(1, int(config.preflight_seconds_max / (seconds + ROUND_SECONDS))))
    try:
        results, complete = check_nodes(rounds, usable, slow_ratio=config.slow_ratio)
    except Rejected as error:
        return Checked(why_none=str(error))
    return Checked(tuple(results), complete)


def choose_checkpoint(
    backend: Backend,
    catalog: CheckpointCatalog,
    *,
    job: str,
    attempt: int,
    plan: Plan,
    excluded: Sequence[str],
    last_places: Sequence[tuple[int, str]],
    nodes: int | None = None,
) -> Result:
    """Reject what is bad, then the newest step that every rank can load where it is going to run.

    `nodes`: how many it runs on, where that are fewer than it wants.
    """
    observation = backend.observe(job)
    obstacle = _obstacle(observation, attempt)
    if obstacle is not None:
        return obstacle
    if plan.before_step is not None:
        catalog.reject_from(job, plan.before_step, attempt, f"{plan.fault_class}, verdict {plan.verdict_id}")
    places = predicted_places(observation, excluded, last_places, nodes)
    return Chosen(plan, observation, catalog.newest_complete(job, before_step=plan.resumes_below, places=places))


def start_attempt(backend: Backend, request: StartRequest, old_attempt: int) -> Result:
    """Start it unless it runs already; exactly one set of ranks whatever happened to an earlier try."""
    observation = backend.observe(request.job)
    if (observation.attempt, observation.token) == (request.attempt, request.token):
        if observation.phase != "starting":
            return Started(observation)
    else:
        obstacle = _obstacle(observation, old_attempt)
        if obstacle is not None:
            return obstacle
    try:
        after = backend.start(request)
    except TooFewNodes as error:
        return Short(str(error), error.usable, observation.nodes_wanted, observation.nodes_min)
    return Starting(after) if after.phase == "starting" else Started(after)


def finish_job(backend: Backend, job: str, outcome: Literal["finished", "failed", "stopped"], reason: str) -> Result:
    backend.finish(job, outcome, reason)
    return Done()


def reject_checkpoints(catalog: CheckpointCatalog, rejection: Rejection) -> Result:
    catalog.reject_from(rejection.job, rejection.step, rejection.attempt, rejection.reason)
    return Done()


def predicted_places(
    observation: Observation,
    excluded: Sequence[str],
    last_places: Sequence[tuple[int, str]],
    nodes: int | None = None,
) -> list[tuple[int, str]]:
    """(rank, node) as the backend will place them: survivors keep their ranks, spares fill the gaps.

    Where there are too few nodes, survivors keep theirs all the same, and the others are at `NOWHERE`, which holds
    nothing in memory: whatever node they come to, they can load what is on disk.
    """
    pairs = [(rank.rank, rank.node) for rank in observation.ranks] or list(last_places)
    last = list(dict.fromkeys(node for _, node in sorted(pairs)))
    out = frozenset(excluded)
    usable = [node.name for node in observation.nodes if node.state in ("active", "spare") and node.name not in out]
    wanted = nodes or observation.nodes_wanted or len(last)
    chosen = choose_nodes(last, usable, wanted)
    if not last:
        return []
    if chosen is None:
        return sorted((rank, node if node in usable else NOWHERE) for rank, node in pairs)
    per_node = len(pairs) // len(last)
    return [(rank, chosen[rank // per_node]) for rank in range(per_node * wanted)]


def _obstacle(observation: Observation, old_attempt: int) -> Result | None:
    """Why the successor of `old_attempt` must not be started now."""
    if observation.phase == "finished" or observation.ended:
        return JobOver()
    if observation.attempt > old_attempt:
        return Overtaken(observation.attempt)
    if any(rank.state != "exited" for rank in observation.ranks):
        return OlderAlive()
    return None
