"""What is said to a launcher over its control socket, and the files by which backend and launchers meet.

A request is one line of JSON with its kind in `type`, a reply is one line of JSON. Sockets are Unix, 0600, or TCP
for other machines, where each line carries its proof (proof.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ingest.events import RankPlace

REQUEST_BYTES_MAX = 1024 * 1024
REPLY_BYTES_MAX = 16 * 1024 * 1024

JobOutcome = Literal["finished", "failed", "stopped"]
CheckName = Literal["gpu_memory", "matmul", "disk", "network", "all_reduce"]
CheckVerdict = Literal["passed", "failed", "skipped"]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """jobs/<job>/job.json, what to run: `nodes` launchers of `nproc_per_node` ranks are in use at a time."""

    job: str
    script: str  # a path, or a module's name where `module` is set
    argv: tuple[str, ...] = ()
    module: bool = False
    nodes: int = 1
    nproc_per_node: int = 1
    min_nodes: int = 0  # it may run on so few where there are no more; 0: only on `nodes`
    master_addr: str = "127.0.0.1"
    backend: str = "local"  # who runs it: local, slurm, kubernetes, or one that was installed beside them

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process, told from a later one of the same id by its start time (clock ticks since boot)."""

    rank: int
    pid: int
    start_time: int


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """jobs/<job>/nodes/<node>.json: a launcher that lives, or was killed and could not take its file away."""

    job: str
    node: str
    slots: int
    pid: int
    start_time: int
    zygote: RankProcess | None = None  # rank -1: the parent of all ranks
    control_socket: str
    telemetry_socket: str
    host: str = ""  # how other nodes reach this one: MASTER_ADDR where group rank 0 runs here
    address: str = ""  # `tcp:host:port` where it listens for other machines
    attempt: int = 0
    token: str = ""
    ranks: tuple[RankProcess, ...] = ()


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """jobs/<job>/placement.json: where the newest attempt runs, written before any launcher is told."""

    attempt: int
    token: str
    places: tuple[RankPlace, ...]
    spares: tuple[str, ...] = ()
    master_addr: str = ""  # empty: the spec's
    master_port: int
    resume_step: int | None = None
    generation: int = 0  # of the scheduler's allocation that these nodes belong to

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes in group-rank order."""
        return tuple(dict.fromkeys(place.node for place in self.places))


class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """jobs/<job>/excluded.json: nodes that never get a rank of this job again."""

    nodes: tuple[str, ...] = ()


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """jobs/<job>/outcome.json: the job is over, and stays so."""

    outcome: JobOutcome
    reason: str
    at: float


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Start this node's share of an attempt. Asked again with the same attempt and token, it does nothing."""

    attempt: int
    token: str
    places: tuple[RankPlace, ...]  # of the whole attempt, in rank order
    spares: tuple[str, ...] = ()
    master_addr: str
    master_port: int
    resume_step: int | None = None


class StopRanks(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """SIGTERM, after the grace SIGKILL; answered when no rank of `attempt` or older lives, or too late."""

    attempt: int
    grace_seconds: float
    deadline_seconds: float


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag="observe"):
    """Say what runs here."""


class FindPort(msgspec.Struct, frozen=True, kw_only=True, tag="port"):
    """Say which of these ports is free here, for the ranks' rendezvous."""

    candidates: tuple[int, ...]


class AskEngine(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """Ask this node's checkpoint engine, whose socket only reaches this machine; one packet of its own protocol."""

    packet: str
    timeout_seconds: float


class CollectStacks(msgspec.Struct, frozen=True, kw_only=True, tag="stacks"):
    """Ask each rank for the Python stacks of all its threads."""

    attempt: int
    deadline_seconds: float


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a node; for a group's: its place in it, and where the first of the group listens."""

    check: CheckName
    rank: int = 0
    world: int = 1
    host: str = ""
    port: int = 0


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one check. `seconds`: of what it measures, without getting there; `text`: of what it found."""

    check: CheckName
    outcome: CheckVerdict
    seconds: float = 0.0
    text: str = ""


class Preflight(msgspec.Struct, frozen=True, kw_only=True, tag="preflight"):
    """Try this node out between two attempts, each check in a process of its own; answered at the latest after
    `seconds`, and a check that is not done by then has failed. Refused while ranks live here."""

    attempt: int  # the one that was stopped
    checks: tuple[CheckOrder, ...]
    seconds: float


class InjectFault(msgspec.Struct, frozen=True, kw_only=True, tag="inject"):
    """Break one rank on purpose: kill, stop and cont by signal, everything else by asking the rank itself."""

    rank: int
    fault: str
    parameters: dict[str, float] = {}


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The job is over: stop what is left, say so, and go."""

    outcome: JobOutcome
    reason: str


Request = StartRanks | StopRanks | Observe | FindPort | AskEngine | CollectStacks | Preflight | InjectFault | Finish
Refusal = Literal["", "conflict", "rejected", "failed", "undecodable"]


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as its launcher sees it; `step` and `phase` are of its last telemetry."""

    rank: int
    local_rank: int
    pid: int
    state: Literal["running", "stopped", "exited"]
    step: int = -1
    phase: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stopped_by_launcher: bool = False
    error: str = ""  # "Type: text" of the exception that ended it
    ended_at: float | None = None  # UTC seconds


class LauncherState(msgspec.Struct, frozen=True, kw_only=True):
    """What one launcher has: `attempt` 0 before the first. `leaving`: it takes no attempt any more."""

    job: str
    node: str
    slots: int
    host: str = ""  # how other nodes reach it
    fenced_attempt: int = 0  # it starts nothing of this attempt or an older one
    attempt: int = 0
    token: str = ""
    stop_requested: bool = False
    leaving: bool = False
    ranks: tuple[RankState, ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request; `refusal` is empty where it was done. `gone`: no rank asked about lives.

    `port`: of those asked for, the first that is free; 0: none. `engine`: the engine's own answer.
    """

    refusal: Refusal = ""
    text: str = ""
    state: LauncherState | None = None
    stacks: dict[int, str] = {}
    gone: bool = False
    port: int = 0
    engine: str = ""
    checks: tuple[CheckOutcome, ...] = ()


_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_REPLIES = msgspec.json.Decoder(Reply)


def encode_line(value: Request | Reply) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(value) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises ValueError (msgspec's and UTF-8's errors are ValueErrors) where the line is not a request."""
    return _REQUESTS.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Raises ValueError where the line is not a reply."""
    return _REPLIES.decode(line)
