"""Who is who in one attempt: every rank's phase, step, heartbeat and end, and every node's heartbeat."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from detectors.clock_skew import Clocks
from detectors.clues import Place, Source, source_of
from detectors.gpu_work import GpuWork
from detectors.step_block import StepBlock
from detectors.verdict import Verdict
from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    DeviceMetrics,
    ErrorRecord,
    Logs,
    Message,
    Metrics,
    NodeHeartbeat,
    Phase,
    RankExited,
    RankStalled,
    RankStarted,
)

TIMED_PHASES = ("checkpoint", "eval", "warmup")
PHASES_MAX = 64  # durations remembered of each
GAP_MEMORY_SECONDS = 600.0  # so long the longest gap is remembered
MOVING_SECONDS = 5.0  # a step so short ago, or two usual ones: the job moves


class RankState(msgspec.Struct, kw_only=True):
    """One rank as its last messages show it."""

    rank: int
    node: str
    pid: int | None = None
    pci_address: str = ""
    role: str = ""  # as the job gives it
    phase: Phase = "init"
    phase_since: float | None = None  # None: it began before we listened
    step: int = -1
    heard_at: float | None = None  # its last metrics message
    stalled: str = ""  # state letter while the launcher sees it stopped
    stalled_since: float = 0.0
    exited_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    stopped_by_launcher: bool = False
    error: ErrorRecord | None = None
    last: Source | None = None  # its last message: the identity of a silence
    gpu: GpuWork = msgspec.field(default_factory=GpuWork)

    @property
    def gone(self) -> bool:
        return self.exited_at is not None

    @property
    def finished(self) -> bool:
        return self.phase == "finished"

    @property
    def live(self) -> bool:
        """Its process is there and has work to do."""
        return not self.gone and not self.finished


class NodeState(msgspec.Struct, kw_only=True):
    """One launcher as its last messages show it."""

    node: str
    heard_at: float | None = None  # its last heartbeat
    taken_at: float | None = None  # when the bus took the newest it took of them, by its own clock
    ended: bool = False
    last: Source | None = None


class Roster(msgspec.Struct, kw_only=True, dict=True):
    """All ranks and nodes of one attempt. `known`: `ranks`, for who reads nothing that a block of steps changes."""

    attempt: int
    started_at: float
    known: dict[int, RankState] = msgspec.field(default_factory=dict, name="ranks")
    nodes: dict[str, NodeState] = {}
    world_size: int = 0
    resume_step: int | None = None
    last_exit_at: float | None = None
    moved_at: float | None = None  # when any rank last changed its step
    changed_at: float = 0.0  # when any rank last changed its step or phase
    stalled: set[int] = set()  # ranks whose process stands still
    outcome: str = ""
    restarts_by: str = ""  # not empty: who restarts the job in our place
    roles_told: int = 0  # grows with every role that a rank is given
    newest_step: int = -1
    newest_at: float = 0.0
    step_seconds: list[float] = []  # of the last steps, as the job's progress shows them
    longest_step: float = 0.0  # of those in which no rank checkpointed, evaluated or warmed up
    apart_at: float | None = None  # when a rank last entered or left such a phase
    gap_seconds: float = 0.0  # the longest of late between two messages of a rank: telemetry may be lost, or late
    gap_at: float = 0.0
    trained_since: float | None = None  # when the first step of the attempt was told
    phase_seconds: dict[str, list[float]] = {}  # how long a rank was in a phase, of the last times
    clocks: Clocks = msgspec.field(default_factory=Clocks)
    bus_at: float = 0.0  # when the bus took the newest heartbeat, by its own clock

    def __post_init__(self) -> None:
        self._block: StepBlock | None = None  # the newest that its ranks, and nobody else since, have told of
        self._written = True  # the ranks' states say so
        self._live: set[int] | None = None  # who was live, until somebody comes, ends, or finishes

    @property
    def ranks(self) -> dict[int, RankState]:
        """Every rank as its last messages show it."""
        if not self._written:
            self._write_block()
        return self.known

    def observe(self, message: Message, place: Place | None) -> None:
        """Take in one message of this attempt."""
        if isinstance(message, Metrics) and message.rank >= 0:  # nearly all messages are
            self.heard(message, place)
            return
        if isinstance(message, AttemptStarted):
            self._started(message)
            return
        source = source_of(message, place)
        if isinstance(message, NodeHeartbeat):
            self.beat(message, place)
        elif isinstance(message, AttemptEnded):
            self.node(message.node).ended = True
            self.outcome = self.outcome or message.outcome
        if message.rank < 0:
            return
        rank = self._rank(message.rank, message.node)
        if isinstance(message, DeviceMetrics):
            self._measured(rank, message)
        if isinstance(message, Logs):
            rank.last = source
        if isinstance(message, RankStarted):
            rank.pid, rank.pci_address = message.pid, message.pci_address or ""
            self.roles_told += rank.role != message.role
            rank.role = message.role
        elif isinstance(message, RankStalled):
            rank.stalled = message.state if message.state[:1] in ("T", "t", "D") else ""
            rank.stalled_since = message.since
            (self.stalled.add if rank.stalled else self.stalled.discard)(rank.rank)
            rank.last = source if rank.stalled else rank.last
        elif isinstance(message, RankExited):
            self._live = None
            rank.exited_at, rank.exit_code, rank.signal = message.at, message.exit_code, message.signal
            rank.stopped_by_launcher, rank.error, rank.stalled = message.stopped_by_launcher, message.error, ""
            self.stalled.discard(rank.rank)
            self.last_exit_at = max(self.last_exit_at or message.at, message.at)

    def heard_block(self, block: StepBlock) -> None:
        """Ranks tell where they are, all at once. While the same ones do so again and again, what changes is the same
        for each of them: it is written into their states when somebody looks."""
        last, states = self._block, self.known
        alike = last is not None and (last.ranks is block.ranks or np.array_equal(last.ranks, block.ranks))
        if last is None or not alike or self.stalled or block.at < last.at or block.nodes != last.nodes:
            for message in block.messages():
                self.heard(message, None)
            if all(states[rank].heard_at == block.at and not states[rank].stalled for rank in block.ranks.tolist()):
                self._block, self._written = block, True
            return
        self._written = False
        self._block = block
        gap = block.at - last.at
        if gap > self.gap_seconds or block.at > self.gap_at + GAP_MEMORY_SECONDS:
            self.gap_seconds, self.gap_at = gap, block.at
        if block.step != last.step:
            self.moved_at = block.at if self.moved_at is None else max(self.moved_at, block.at)
            self.changed_at = max(self.changed_at, block.at)
        self._reached(block.step, block.at)

    def to_state(self) -> dict[str, Any]:
        """JSON-able."""
        if not self._written:
            self._write_block()
        built: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return built

    def _write_block(self) -> None:
        block, self._written = self._block, True
        assert block is not None
        at, step, states = block.at, block.step, self.known
        for number, node, sequence in zip(block.ranks.tolist(), block.nodes, block.sequence.tolist(), strict=True):
            state = states[number]
            state.heard_at, state.step = at, step
            state.last = Source(number, node, "metrics", sequence)

    def heard(self, message: Metrics, place: Place | None) -> None:
        """A rank tells where it is."""
        if self._block is not None:
            if not self._written:
                self._write_block()
            self._block = None
        number, node = message.rank, message.node
        rank = self.ranks.get(number) or self._rank(number, node)
        if place is None:
            rank.last = Source(number, node, "metrics", message.sequence)
        else:
            rank.last = Source(number, node, "metrics", message.sequence, place.partition, place.offset)
        self._moved(rank, message)

    def beat(self, message: NodeHeartbeat, place: Place | None) -> None:
        """A launcher lives, whatever attempt it speaks of."""
        node = self.node(message.node)
        if place is not None and place.appended_at is not None:
            self.clocks.note(message.node, place.appended_at - message.at)
            self.bus_at = max(self.bus_at, place.appended_at)
            node.taken_at = max(node.taken_at or 0.0, place.appended_at)
        if node.heard_at is None or message.at >= node.heard_at:
            node.heard_at, node.last = message.at, source_of(message, place)

    def node(self, name: str) -> NodeState:
        return self.nodes.setdefault(name, NodeState(node=name))

    def ranks_of(self, node: str) -> list[RankState]:
        return [state for _, state in sorted(self.ranks.items()) if state.node == node]

    def live(self) -> list[RankState]:
        return [state for _, state in sorted(self.ranks.items()) if state.live]

    def live_numbers(self) -> set[int]:
        """The same, as numbers; asked at every tick in which a step may close."""
        live = self._live
        if live is None:
            told = self.known.items()
            live = {number for number, rank in told if rank.exited_at is None and rank.phase != "finished"}
            self._live = live
        return live

    def node_of(self, rank: int) -> str | None:
        state = self.ranks.get(rank)
        return state.node if state else None

    def recount(self, now: float) -> None:
        """The job may count its steps anew: the newest is what its ranks are in now."""
        newest = max(rank.step for rank in self.ranks.values())
        if newest < self.newest_step:
            self.newest_step, self.newest_at = newest, now

    def leap(self, seconds: float) -> None:
        """A producer's clock has stepped on by so much: nobody stood still or was silent meanwhile."""
        self.changed_at += seconds
        for node in self.nodes.values():
            node.heard_at = None if node.heard_at is None else node.heard_at + seconds

    @property
    def size(self) -> int:
        return max(self.world_size, len(self.known))

    @property
    def active_at(self) -> float:
        """When anything last changed: a rank's step or its phase, or the attempt's start."""
        return max(self.started_at, self.changed_at)

    @property
    def median_step(self) -> float:
        """Seconds a step takes; 0.0 before there are two."""
        return sorted(self.step_seconds)[len(self.step_seconds) // 2] if self.step_seconds else 0.0

    def phase_p99(self, phase: str) -> float:
        """Seconds that nearly all times in this phase stayed below; 0.0 before the first is over."""
        seconds = sorted(self.phase_seconds.get(phase, ()))
        return seconds[-(-99 * len(seconds) // 100) - 1] if seconds else 0.0

    @property
    def trained(self) -> bool:
        """Some rank has completed a step in this attempt."""
        return self.trained_since is not None

    @property
    def over(self) -> bool:
        """Every node that hosts ranks says that its share is gone, or every rank has ended by itself."""
        if not any(node.ended for node in self.nodes.values()):
            return False
        hosts = {state.node for state in self.ranks.values()}
        return bool(hosts) and all(self.node(name).ended for name in hosts)

    def owned(self, verdicts: list[Verdict]) -> list[Verdict]:
        """The same, saying who restarts the job where that is not recovery."""
        if not self.restarts_by:
            return verdicts
        return [msgspec.structs.replace(verdict, restarts_by=self.restarts_by) for verdict in verdicts]

    def _started(self, message: AttemptStarted) -> None:
        self.world_size, self.resume_step = message.world_size, message.resume_step
        self.restarts_by = message.restarts_by
        self.started_at = message.at
        for place in message.places:
            self._rank(place.rank, place.node)
            self.node(place.node)

    def _rank(self, rank: int, node: str) -> RankState:
        state = self.ranks.get(rank)
        if state is None:
            state = self.ranks[rank] = RankState(rank=rank, node=node)
            self._live = None
            self.node(node)
        return state

    def _moved(self, rank: RankState, message: Metrics) -> None:
        at, step, phase = message.at, message.step, message.phase
        heard_at = rank.heard_at
        if heard_at is not None:
            gap = at - heard_at
            if gap < 0.0:
                return
            if (gap > self.gap_seconds or at > self.gap_at + GAP_MEMORY_SECONDS) and not rank.stalled:
                self.gap_seconds, self.gap_at = gap, at
        rank.heard_at = at
        if self.trained_since is None and message.steps:
            self.trained_since = at
        moved, other = step != rank.step, phase != rank.phase
        if moved and (self.moved_at is None or at > self.moved_at):
            self.moved_at = at
        if (moved or other) and at > self.changed_at:
            self.changed_at = at
        if other:
            self.enter_phase(rank, phase, at)
        self._reached(step, at)
        rank.step = step

    def _reached(self, step: int, at: float) -> None:
        """Somebody is in this step."""
        if step > self.newest_step:
            if self.newest_step >= 0:
                seconds = (at - self.newest_at) / (step - self.newest_step)
                self.step_seconds = [*self.step_seconds[-63:], seconds]
                if self.apart_at is None or self.apart_at < self.newest_at:  # such phases have ceilings of their own
                    self.longest_step = max(self.longest_step, seconds)
            self.newest_step, self.newest_at = step, at

    def enter_phase(self, rank: RankState, phase: Phase, at: float) -> None:
        """The rank is in this phase from now on, whatever it was in: an end that was lost, or a second beginning,
        ends the one before; a phase whose beginning nobody saw has no length."""
        if phase == rank.phase:
            return
        if "finished" in (phase, rank.phase):
            self._live = None
        if phase in TIMED_PHASES or rank.phase in TIMED_PHASES:
            self.apart_at = max(self.apart_at or at, at)
        if rank.phase in TIMED_PHASES and rank.phase_since is not None:
            known = self.phase_seconds.get(rank.phase, [])
            self.phase_seconds[rank.phase] = [*known[-(PHASES_MAX - 1) :], at - rank.phase_since]
        rank.phase, rank.phase_since = phase, at

    def _measured(self, rank: RankState, message: DeviceMetrics) -> None:
        """A rank's GPU told how busy it is."""
        busy = message.columns.get("hw.gpu.utilization")
        if busy is None or not message.device.startswith("gpu"):
            return
        power = message.columns.get("hw.gpu.power", (None,) * len(busy))
        patience = max(MOVING_SECONDS, 2.0 * self.median_step)
        for row, at in enumerate(message.sampled_at):
            moving = self.moved_at is not None and at - self.moved_at <= patience and rank.phase != "init"
            rank.gpu.sample(at, busy[row], power[row], moving=moving)
