"""What recovery needs of whoever runs the ranks, and the errors that say what a caller may conclude.

BackendError
├── Rejected      permanent: asking again will not help
├── Conflict      somebody with a newer attempt was here; nothing was done
├── Unavailable   certainly no effect; ask again later. "Cannot reach" is never "gone"
└── Ambiguous     may have had an effect: observe before asking again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


class BackendError(Exception):
    """Base; the text is one sentence."""


class Rejected(BackendError):
    pass


class Conflict(BackendError):
    pass


class Unavailable(BackendError):
    pass


class Ambiguous(BackendError):
    pass


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as its launcher sees it. `state`: running, stopped (SIGSTOP), exited."""

    rank: int
    node: str
    pid: int
    state: Literal["running", "stopped", "exited"]
    step: int = -1
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the job: in use, spare, or lost (its launcher does not answer)."""

    name: str
    state: Literal["active", "spare", "excluded", "lost"]
    slots: int


@dataclass(frozen=True, slots=True)
class Observation:
    """A job as it is now: `failed` when a rank has ended badly, `stopped` when no rank lives."""

    job: str
    attempt: int
    token: str
    phase: Literal["starting", "running", "failed", "stopped", "finished"]
    ranks: tuple[RankView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    note: str = ""  # what it waits for while it is starting, in the scheduler's words

    @property
    def step(self) -> int:
        """The lowest step of the ranks that run; -1 before the first."""
        return min((rank.step for rank in self.ranks if rank.state != "exited"), default=-1)


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Start `attempt` of `job`, not on `excluded_nodes`, resuming from `resume_step` (None: from scratch)."""

    job: str
    attempt: int
    token: str
    excluded_nodes: tuple[str, ...] = ()
    resume_step: int | None = None
    nodes: int | None = None  # None: as many as the job's spec says


class Backend(Protocol):
    """Starts, stops and observes the ranks of jobs. One contract suite: tests/contract/test_backend.py.

    * `start` twice with the same (job, attempt, token): one set of ranks; with an attempt that is not newer: Conflict;
      while ranks of an older attempt live: Conflict. Too few nodes: Rejected.
    * `start` may return while the attempt is still "starting" (a scheduler takes its time): asked again with the
      same (job, attempt, token) it goes on where it stands.
    * `stop` is idempotent; True only when no rank of that attempt (or an older one) lives any more.
    * an excluded node never appears in a placement.
    """

    name: str

    def observe(self, job: str) -> Observation: ...

    def start(self, request: StartRequest) -> Observation: ...

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool: ...

    def finish(self, job: str, outcome: Literal["finished", "failed", "stopped"], reason: str) -> None:
        """Say that the job is over: its launchers stop what is left and go. Terminal stays terminal."""
        ...

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        """Python stacks by rank, of those that answer in time."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """The step that every rank can load, and where from: memory, disk, or memory+disk."""

    step: int
    tier: str


class CheckpointCatalog(Protocol):
    """What recovery asks of the checkpoint engines; pipelines wires the real ones in."""

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        """The newest step below `before_step`, complete and not rejected, that each (rank, node) can load."""
        ...

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        """Reject `step` and later as attempts up to `up_to_attempt` saved them, in every tier. Idempotent.

        A later attempt trains the same steps anew, and what it saves of them is good.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoCheckpoints:
    """A catalog for jobs without a checkpoint engine."""

    reason: str = field(default="this job has no checkpoint engine")

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        return None

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        return None
