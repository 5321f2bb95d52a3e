"""What recovery needs of whoever runs the ranks, and the errors that say what a caller may conclude.

BackendError
├── Rejected      permanent: asking again will not help
│   └── TooFewNodes   until there are more: capacity is waited for
├── Conflict      somebody with a newer attempt was here; nothing was done
├── Unavailable   certainly no effect; ask again later. "Cannot reach" is never "gone"
└── Ambiguous     may have had an effect: observe before asking again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from .action import CheckResult
from .launcher.protocol import CheckName


class BackendError(Exception):
    """Base; the text is one sentence."""


class Rejected(BackendError):
    pass


class TooFewNodes(Rejected):
    """Fewer nodes than the attempt needs can be used now; nothing was started. `usable`: how many can."""

    def __init__(self, text: str, usable: int = 0) -> None:
        super().__init__(text)
        self.usable = usable


class Conflict(BackendError):
    pass


class Unavailable(BackendError):
    pass


class Ambiguous(BackendError):
    pass


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as its launcher sees it. `state`: running, stopped (SIGSTOP), exited.

    `error`: the exception that ended it ("Type: text"), from its error file. `ended_at`: UTC seconds.
    """

    rank: int
    node: str
    pid: int
    state: Literal["running", "stopped", "exited"]
    step: int = -1
    exit_code: int | None = None
    signal: int | None = None
    stopped_by_us: bool = False
    error: str = ""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the job: in use, spare, lost (its launcher does not answer), or about to go.

    `group`: what fails together with it (rack, switch, power), where the backend knows; empty where it does not.
    """

    name: str
    state: Literal["active", "spare", "excluded", "lost", "leaving"]
    slots: int
    group: str = ""


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
    reason: str = ""  # why it ended, in the scheduler's words: NODE_FAIL, OUT_OF_MEMORY, PREEMPTED, TIMEOUT …
    held: str = ""  # an operator has put it on hold there, and who or why: nothing of ours is started against that
    nodes_wanted: int = 0  # as its spec says; 0: not known
    nodes_min: int = 0  # it may run on so few, where there are no more; 0: not
    ended: bool = False  # its end is written down (`finish`): whatever its ranks did, nothing starts any more

    @property
    def step(self) -> int:
        """The lowest step of the ranks that run; -1 before the first."""
        return min((rank.step for rank in self.ranks if rank.state != "exited"), default=-1)


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Start `attempt` of `job`, not on `excluded_nodes`, resuming from `resume_step` (None: from scratch).

    A node stays excluded for later attempts too, until it stands in `released_nodes`.
    """

    job: str
    attempt: int
    token: str
    excluded_nodes: tuple[str, ...] = ()
    resume_step: int | None = None
    nodes: int | None = None  # None: as many as the job's spec says
    released_nodes: tuple[str, ...] = ()  # excluded for an earlier attempt, and no more


class Backend(Protocol):
    """Starts, stops and observes the ranks of jobs. One contract suite: tests/contract/test_backend.py.

    * `start` twice with the same (job, attempt, token): one set of ranks; with an attempt that is not newer: Conflict;
      while ranks of an older attempt live: Conflict. Too few nodes: TooFewNodes.
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


@runtime_checkable
class ProbingBackend(Protocol):
    """A backend that can also try its nodes out between two attempts (recovery/checking.py)."""

    def probe(
        self,
        job: str,
        attempt: int,
        checks: Sequence[CheckName],
        groups: Sequence[Sequence[str]],
        *,
        seconds: float,
    ) -> list[CheckResult]:
        """Do these checks on the nodes of all groups at once, those of a group with each other; one result for each
        node and check. A node that does not answer within `seconds` has failed. `attempt`: the one that was stopped.

        Raises Conflict where ranks live, Rejected where the job's backend has no checks, Unavailable.
        """
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


@runtime_checkable
class PersistingCatalog(Protocol):
    """A catalog that can also have what memory holds written to disk, before nodes go away on purpose."""

    def persist_newest(self, job: str, *, deadline_seconds: float) -> str:
        """Wait until what is sealed in memory is on disk; empty, or in a sentence what is not and why."""
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
