"""What a simulated training job is: its size, its phases, its telemetry's losses, and the faults put into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pipelines.errors import StatedError

RANKS_MAX = 16_384
STEPS_MAX = 1_000_000
FaultKind = Literal[
    "straggler", "throttle", "slow_node", "slow_link", "data_stall", "data_stall_all", "job_slow", "contended_node",
    "memory_growth", "hang", "hang_silent", "hang_busy", "rank_lost", "node_lost", "nan", "loss_spike", "divergence",
    "telemetry_gap",
]  # fmt: skip
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
NODE_KINDS: frozenset[FaultKind] = frozenset({"slow_node", "slow_link", "contended_node", "node_lost"})
JOB_KINDS: frozenset[FaultKind] = frozenset({"data_stall_all", "job_slow", "loss_spike", "divergence"})
HANGS: frozenset[FaultKind] = frozenset({"hang", "hang_silent", "hang_busy"})
LASTING_KINDS: frozenset[FaultKind] = frozenset({"nan", "divergence"})  # they do not go away
FATAL_KINDS: frozenset[FaultKind] = HANGS | {"rank_lost", "node_lost"}  # no step ends after them


class BadScenario(StatedError):
    """This scenario cannot be simulated; the text is one sentence that says what to change."""


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """One fault: who has it, from which step on, for how many steps, how strongly.

    `severity` is a share: of the own compute for what makes compute slow, of the mean step for what makes data or a
    link slow, of the node's free memory for memory_growth, of the loss for loss_spike and (in 50 steps) divergence.
    Kinds that have no strength (hang, rank_lost, node_lost, nan, telemetry_gap) do not read it. A fault of a node
    names `node`, one of the whole job nothing. A fatal kind lasts `length_steps` mean steps, then the run is over; nan
    and divergence last until the run ends; a loss spike decays by itself.
    """

    kind: FaultKind
    onset_step: int
    length_steps: int = 60
    severity: float = 0.2
    ranks: tuple[int, ...] = ()
    node: int | None = None

    @property
    def end_step(self) -> int:
        """The first step after the fault."""
        return self.onset_step + self.length_steps


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """From `step` on all ranks compute `factor` times as long, because the batch grew: a change, not a fault."""

    step: int
    factor: float = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A simulated job; the same scenario gives the same messages, byte for byte. Seconds, shares (0–1), steps."""

    ranks: int = 64
    steps: int = 400
    seed: int = 0
    job: str = "simulated"
    ranks_per_node: int = 8
    stages: int = 4
    step_seconds: float = 1.0
    start_at: float = 1_800_000_000.0
    recording: Path = field(default_factory=lambda: Path("data/clean"))  # where the noise is resampled from
    noise: float = 1.0  # the recorded residuals are taken to this power; 1 is what was recorded
    warmup_steps: int = 5
    checkpoint_steps: int = 100  # 0: never
    checkpoint_seconds: float = 4.0
    eval_steps: int = 0
    eval_seconds: float = 15.0
    ramps: tuple[BatchRamp, ...] = ()
    drift: float = 0.03  # of all ranks together, up and down over hundreds of steps
    offset: float = 0.02  # of one rank against its peers, slowly wandering within this
    missing: float = 0.01
    late: float = 0.05
    late_seconds_max: float = 20.0
    duplicates: float = 0.01
    clock_skew_seconds_max: float = 0.01
    flush_seconds: float = 1.0  # a rank says what it has, and where it is, so often
    device_seconds: float = 5.0  # 0: no device samples
    tells_phases: bool = True  # warm-up, checkpoint and eval stand in the heartbeats
    faults: tuple[SimulatedFault, ...] = ()

    def __post_init__(self) -> None:
        """Raises BadScenario where the numbers do not fit."""
        if not 1 <= self.ranks <= RANKS_MAX:
            raise BadScenario(f"{self.ranks} ranks cannot be simulated; give 1 to {RANKS_MAX}")
        if not 1 <= self.steps <= STEPS_MAX:
            raise BadScenario(f"{self.steps} steps cannot be simulated; give 1 to {STEPS_MAX}")
        if self.ranks_per_node < 1 or self.stages < 1 or self.ranks % self.stages:
            raise BadScenario(
                f"{self.ranks} ranks cannot be divided into {self.stages} stages; give a number that divides them"
            )
        for name in ("missing", "late", "duplicates"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise BadScenario(f"the share of {name} messages must be at least 0 and below 1")
        if min(self.step_seconds, self.flush_seconds) <= 0.0 or self.noise < 0.0 or self.device_seconds < 0.0:
            raise BadScenario("step, flush and device seconds must be positive and noise not negative")
        for fault in self.faults:
            self._check(fault)

    @property
    def nodes(self) -> int:
        """How many nodes the ranks fill; the last may be smaller."""
        return -(-self.ranks // self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ranks_per_node, min(self.ranks, (node + 1) * self.ranks_per_node))

    def _check(self, fault: SimulatedFault) -> None:
        if not 1 <= fault.onset_step <= self.steps or fault.length_steps < 1 or fault.severity <= 0.0:
            raise BadScenario(
                f"{fault.kind} from step {fault.onset_step} for {fault.length_steps} steps with severity "
                f"{fault.severity:g} does not fit into {self.steps} steps; give at= within them, steps= and severity= "
                "above 0"
            )
        if fault.kind in NODE_KINDS and (fault.node is None or not 0 <= fault.node < self.nodes):
            raise BadScenario(f"{fault.kind} needs a node from 0 to {self.nodes - 1}; give node=")
        known = bool(fault.ranks) and all(0 <= rank < self.ranks for rank in fault.ranks)
        if fault.kind not in NODE_KINDS | JOB_KINDS and not known:
            raise BadScenario(f"{fault.kind} needs ranks from 0 to {self.ranks - 1}; give rank=")


def node_name(node: int) -> str:
    """What the messages call node number `node`."""
    return f"node{node:04d}"


def parse_fault(text: str) -> SimulatedFault:
    """A fault as the command line writes it: `straggler:rank=5,at=200,steps=60,severity=0.2`. Raises BadScenario."""
    kind_text, _, rest = text.partition(":")
    kind = next((known for known in FAULT_KINDS if known == kind_text.strip()), None)
    if kind is None:
        raise BadScenario(f"there is no simulated fault {kind_text!r}; give one of {', '.join(FAULT_KINDS)}")
    given: dict[str, float] = {}
    ranks: list[int] = []
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError as error:
            raise BadScenario(f"{part!r} in the fault {text!r} is not name=number; write such as at=200") from error
        if name.strip() == "rank":
            ranks.append(int(number))
        elif name.strip() in ("at", "steps", "severity", "node"):
            given[name.strip()] = number
        else:
            raise BadScenario(f"{name!r} in the fault {text!r} is unknown; give rank, node, at, steps or severity")
    if "at" not in given:
        raise BadScenario(f"the fault {text!r} does not say in which step it begins; give at=")
    return SimulatedFault(
        kind=kind, onset_step=int(given["at"]), length_steps=int(given.get("steps", 60)),
        severity=given.get("severity", 0.2), ranks=tuple(ranks),
        node=int(given["node"]) if "node" in given else None,
    )  # fmt: skip
