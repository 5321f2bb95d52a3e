"""Every call that recovery makes to a backend or a checkpoint catalog: blocking, repeatable, never raising.

Each looks before it acts, so that it may be made again after a crash or an ambiguous answer: a start first
asks whether its attempt runs already under its token, whether somebody newer was here, and whether old ranks
live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .backend import (
    Backend,
    BackendError,
    CheckpointCatalog,
    CheckpointChoice,
    Observation,
    Rejected,
    StartRequest,
)
from .backends.placing import choose_nodes
from .policy import Plan
from .policy_config import PolicyConfig
from .store_schema import Rejection

STACK_CHARACTERS_MAX = 65_536


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


Result = Seen | Stopped | Chosen | Started | JobOver | Overtaken | OlderAlive | Done | Refused | Unanswered
Call = Callable[[], Result]


def guarded(call: Call) -> Call:
    """The same call with its errors as values."""

    def guarded_call() -> Result:
        try:
            return call()
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


def stop_attempt(backend: Backend, job: str, attempt: int, *, evidence: bool, config: PolicyConfig) -> Result:
    """Stacks first, where they are wanted: a rank that is gone tells nothing. No answer is evidence too."""
    stacks: dict[int, str] = {}
    note = ""
    if evidence:
        try:
            stacks = backend.collect_evidence(job, attempt, deadline_seconds=config.evidence_seconds_max)
        except BackendError as error:
            note = f"no stacks: {error}"  # evidence is welcome, the stop is needed
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


def choose_checkpoint(
    backend: Backend,
    catalog: CheckpointCatalog,
    *,
    job: str,
    attempt: int,
    plan: Plan,
    excluded: Sequence[str],
    last_places: Sequence[tuple[int, str]],
) -> Result:
    """Reject what is bad, then the newest step that every rank can load where it is going to run."""
    observation = backend.observe(job)
    obstacle = _obstacle(observation, attempt)
    if obstacle is not None:
        return obstacle
    if plan.before_step is not None:
        catalog.reject_from(job, plan.before_step, attempt, f"{plan.fault_class}, verdict {plan.verdict_id}")
    places = predicted_places(observation, excluded, last_places)
    return Chosen(plan, observation, catalog.newest_complete(job, before_step=plan.before_step, places=places))


def start_attempt(backend: Backend, request: StartRequest, old_attempt: int) -> Result:
    """Start it unless it runs already; exactly one set of ranks whatever happened to an earlier try."""
    observation = backend.observe(request.job)
    if (observation.attempt, observation.token) == (request.attempt, request.token):
        return Started(observation)
    obstacle = _obstacle(observation, old_attempt)
    return obstacle if obstacle is not None else Started(backend.start(request))


def finish_job(backend: Backend, job: str, outcome: Literal["finished", "failed", "stopped"], reason: str) -> Result:
    backend.finish(job, outcome, reason)
    return Done()


def reject_checkpoints(catalog: CheckpointCatalog, rejection: Rejection) -> Result:
    catalog.reject_from(rejection.job, rejection.step, rejection.attempt, rejection.reason)
    return Done()


def predicted_places(
    observation: Observation, excluded: Sequence[str], last_places: Sequence[tuple[int, str]]
) -> list[tuple[int, str]]:
    """(rank, node) as the backend will place them: survivors keep their ranks, spares fill the gaps."""
    pairs = [(rank.rank, rank.node) for rank in observation.ranks] or list(last_places)
    last: list[str] = []
    for _, node in sorted(pairs):
        if node not in last:
            last.append(node)
    usable = [
        node.name for node in observation.nodes if node.state in ("active", "spare") and node.name not in excluded
    ]
    chosen = choose_nodes(last, usable, len(last))
    if chosen is None:
        return sorted(pairs)  # too few nodes: the start will say so
    moved = dict(zip(last, chosen, strict=True))
    return sorted((rank, moved[node]) for rank, node in pairs)


def _obstacle(observation: Observation, old_attempt: int) -> Result | None:
    """Why the successor of `old_attempt` must not be started now."""
    if observation.phase == "finished":
        return JobOver()
    if observation.attempt > old_attempt:
        return Overtaken(observation.attempt)
    if any(rank.state != "exited" for rank in observation.ranks):
        return OlderAlive()
    return None
