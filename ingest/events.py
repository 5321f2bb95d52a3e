"""What a job tells us: every message a rank or its launcher can send, and the identities they carry.

Each message is stamped (job, attempt, rank, node, sequence). The launcher hands the first four to the rank;
the producer counts the last, one counter for each (job, attempt, rank, node, topic). `rank` is -1 where the
launcher of a node speaks for the node. `at` is the producer's wall time, UTC seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

LAUNCHER_RANK = -1
RANK_MAX = 999_999
STEP_MAX = 2**53  # what every JSON reader can carry
AT_MAX = 253_402_300_799.0  # the last second of the year 9999: later ones are no dates

# What the wire may carry; checked on decoding, so that no reader meets a rank that would be a matrix of a terabyte.
Rank = Annotated[int, msgspec.Meta(ge=LAUNCHER_RANK, le=RANK_MAX)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Step = Annotated[int, msgspec.Meta(ge=-1, le=STEP_MAX)]
At = Annotated[float, msgspec.Meta(ge=0.0, le=AT_MAX)]

Phase = Literal["init", "warmup", "train", "checkpoint", "eval", "collective", "idle", "finished"]
Stream = Literal["stdout", "stderr", "logging", "kernel"]
NonFiniteName = Literal["nan", "inf", "-inf"]
Topic = Literal["metrics", "logs", "events", "verdicts", "actions", "commands", "dead-letters"]

TOPICS: tuple[Topic, ...] = ("metrics", "logs", "events", "verdicts", "actions", "commands", "dead-letters")
JOB_TOPICS: tuple[Topic, ...] = ("metrics", "logs", "events")  # must have equal partition counts


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The stamp that every message of a job carries."""

    job: str
    attempt: Attempt
    rank: Rank
    node: str
    sequence: Count
    at: At


class NonFinite(msgspec.Struct, frozen=True, array_like=True):
    """One sample that JSON has no number for."""

    metric: str
    index: Count
    value: NonFiniteName


class Metrics(Message, frozen=True, kw_only=True, gc=False):
    """A rank's steps since its last flush, columnar, and its heartbeat: where it is now.

    `columns[name][i]` belongs to `steps[i]`; None where the rank has no such sample for that step. NaN and
    infinities stand as None in `columns` and by name in `non_finite`; `column()` puts them back.
    """

    phase: Phase
    step: Step  # the step the rank is in now; -1 before the first
    steps: tuple[Step, ...] = ()
    ended_at: tuple[At, ...] = ()
    columns: dict[str, tuple[float | None, ...]] = {}
    non_finite: tuple[NonFinite, ...] = ()
    dropped: Count = 0  # messages this rank has dropped so far because nobody took them

    def __post_init__(self) -> None:
        """Columns that do not fit the steps are no message; on decoding, msgspec makes an error of this."""
        rows = len(self.steps)
        fits = len(self.ended_at) == rows
        for values in self.columns.values():  # for each message on the bus: nothing shorter is quicker
            if len(values) != rows:
                fits = False
        if not fits:
            raise ValueError(f"ended_at and each column must have one entry for each of the {rows} steps")
        for entry in self.non_finite:
            if entry.metric not in self.columns or not 0 <= entry.index < rows:
                raise ValueError(f"non_finite names a sample that is not there: {entry.metric}[{entry.index}]")

    def column(self, name: str) -> list[float | None]:
        """Samples of one metric, in the order of `steps`, NaN and infinities restored."""
        values = list(self.columns[name])
        for entry in self.non_finite:
            if entry.metric == name:
                values[entry.index] = float(entry.value)
        return values


class DeviceMetrics(Message, frozen=True, kw_only=True):
    """What a process, a host or one of its devices measured, by time and not by step.

    `device` is `process` (of the rank), `host`, `gpu:0`, `ib:mlx5_0` …; `rank` is whose process or GPU it is, -1 for
    what all ranks of the node share. `columns[name][i]` was measured at `sampled_at[i]`; counters count up.
    """

    device: str
    sampled_at: tuple[At, ...] = ()
    columns: dict[str, tuple[float | None, ...]] = {}
    collector: str = ""  # who says it and counts `sequence`, where that is neither the rank nor its launcher

    def __post_init__(self) -> None:
        """Columns that do not fit the times are no message; on decoding, msgspec makes an error of this."""
        rows = len(self.sampled_at)
        if any(len(values) != rows for values in self.columns.values()):
            raise ValueError(f"each column must have one entry for each of the {rows} times in sampled_at")


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a rank's output; a traceback or other multi-line record is one `text` with newlines."""

    at: At
    stream: Stream
    text: str


class Logs(Message, frozen=True, kw_only=True):
    """Log records of one rank, or (rank -1) of its node's kernel, oldest first."""

    lines: tuple[LogLine, ...]
    collector: str = ""  # as in DeviceMetrics


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank of an attempt runs."""

    rank: Rank
    local_rank: Count
    node: str


class AttemptStarted(Message, frozen=True, kw_only=True):
    """A new attempt is started with these ranks on these nodes, from this checkpoint step (None: scratch)."""

    world_size: Annotated[int, msgspec.Meta(ge=0, le=RANK_MAX + 1)]
    places: tuple[RankPlace, ...]
    spares: tuple[str, ...] = ()
    resume_step: Step | None = None
    restarts_by: str = ""  # who restarts this job, where it is not Transom: torchrun, slurm, …


class RankStarted(Message, frozen=True, kw_only=True):
    """A rank's process exists; with what is known of the device it uses."""

    pid: int
    local_rank: int
    gpu_uuid: str | None = None
    pci_address: str | None = None
    scheduler_ids: dict[str, str] = {}
    role: str = ""  # what work it does, where the job says so: equal words are compared with each other


class RankStalled(Message, frozen=True, kw_only=True):
    """The launcher sees the process of a rank stopped (T or t), in uninterruptible sleep (D), or awake again.

    `state` is the letter of /proc/PID/stat, `since` when the launcher first saw it.
    """

    state: str
    since: float


class RankStacks(Message, frozen=True, kw_only=True):
    """Where a rank stands while it should move: its Python stacks (as faulthandler writes them) and its process.

    Empty `stacks`: it did not answer in time, which is evidence too. `state` and `wchan` are /proc's. The sequence
    numbers are those of the newest collective it has enqueued and completed, where torch's flight recorder tells.
    """

    stacks: str = ""
    state: str = ""
    wchan: str = ""
    collective: str = ""
    enqueued: Step | None = None
    completed: Step | None = None


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Python exception that ended a rank, as the rank itself or its last traceback tells it."""

    type: str
    text: str
    traceback: str = ""


class RankExited(Message, frozen=True, kw_only=True):
    """A rank's process is gone. Sent only after that rank's last log batch, so nothing more of it will come.

    Exactly one of `exit_code` and `signal` is set. `stopped_by_launcher`: we sent the signal.
    """

    exit_code: int | None = None
    signal: int | None = None
    stopped_by_launcher: bool = False
    error: ErrorRecord | None = None
    last_lines: tuple[str, ...] = ()


class AttemptEnded(Message, frozen=True, kw_only=True):
    """All ranks of this node's share of an attempt are gone."""

    outcome: Literal["finished", "failed", "stopped"]


class StopNotice(Message, frozen=True, kw_only=True):
    """A node is taken away on purpose (SIGTERM to its launcher: walltime, preemption, maintenance); its ranks have
    `grace_seconds` to end. What their peers say afterwards is its consequence."""

    reason: str = ""
    grace_seconds: float = 0.0


class NodeHeartbeat(Message, frozen=True, kw_only=True):
    """The launcher lives, and everything it received before `at` has been published: its watermark."""

    ranks_alive: tuple[Rank, ...] = ()
    dropped: Count = 0  # messages of its ranks that the launcher has dropped so far


class CheckpointEvent(Message, frozen=True, kw_only=True):
    """The checkpoint engine's story of one shard (or, with rank -1, of a whole step)."""

    state: Literal[
        "registered", "sealed", "backed_up", "durable", "complete", "verified", "rejected", "evicted", "damaged",
        "fallback", "loaded", "failed",
    ]  # fmt: skip
    step: Step
    tier: Literal["memory", "peer", "disk", "object"]
    size_bytes: Count = 0
    seconds: float = 0.0
    reason: str = ""


class FaultInjected(Message, frozen=True, kw_only=True):
    """Somebody broke this job on purpose. Detection never reads it; to demo and golden runs it is the label."""

    fault: str
    parameters: dict[str, float] = {}


MESSAGE_TYPES: Mapping[str, tuple[Topic, type[Message]]] = {
    "metrics.v1": ("metrics", Metrics),
    "device_metrics.v1": ("metrics", DeviceMetrics),
    "logs.v1": ("logs", Logs),
    "attempt_started.v1": ("events", AttemptStarted),
    "rank_started.v1": ("events", RankStarted),
    "rank_stalled.v1": ("events", RankStalled),
    "rank_stacks.v1": ("events", RankStacks),
    "rank_exited.v1": ("events", RankExited),
    "attempt_ended.v1": ("events", AttemptEnded),
    "stop_notice.v1": ("events", StopNotice),
    "node_heartbeat.v1": ("events", NodeHeartbeat),
    "checkpoint.v1": ("events", CheckpointEvent),
    "fault_injected.v1": ("events", FaultInjected),
}


def split_non_finite(
    columns: Mapping[str, Sequence[float | None]],
) -> tuple[dict[str, tuple[float | None, ...]], tuple[NonFinite, ...]]:
    """Columns that JSON can carry, and the samples it cannot: the arguments of `Metrics`."""
    finite: dict[str, tuple[float | None, ...]] = {}
    rest: list[NonFinite] = []
    for name, values in columns.items():
        kept: list[float | None] = []
        for index, value in enumerate(values):
            if value is None or math.isfinite(value):
                kept.append(value)
                continue
            kept.append(None)
            spelled: NonFiniteName = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
            rest.append(NonFinite(name, index, spelled))
        finite[name] = tuple(kept)
    return finite, tuple(rest)


def newest_at(messages: Iterable[Message]) -> float:
    """The latest producer time among `messages`; 0.0 when there are none."""
    return max((message.at for message in messages), default=0.0)
