"""What a simulated month assumes: docs/recovery-month.md has each number with its source. All can be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

HOUR_SECONDS = 3_600.0
DAY_SECONDS = 86_400.0

FailureKind = Literal[
    "bad_node_crash", "transient_crash", "hang_bad_node", "hang_transient", "user_bug", "poison_ckpt"
]  # fmt: skip
SHARES: Mapping[FailureKind, float] = {  # of all failures; the order is that of the dice
    "bad_node_crash": 0.52,
    "transient_crash": 0.28,
    "hang_bad_node": 0.06,
    "hang_transient": 0.06,
    "user_bug": 0.05,
    "poison_ckpt": 0.03,
}
HANGS: frozenset[FailureKind] = frozenset({"hang_bad_node", "hang_transient"})
BAD_NODES: frozenset[FailureKind] = frozenset({"bad_node_crash", "hang_bad_node"})


@dataclass(frozen=True, slots=True)
class Fleet:
    """A job's machines: how many GPUs, and how often one of them ends the job."""

    name: str
    gpus: int
    mttf_seconds: float
    gpus_per_node: int = 8

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node


FLEETS: Mapping[str, Fleet] = {
    "1k": Fleet("1k", 1_024, 7.9 * HOUR_SECONDS),
    "16k": Fleet("16k", 16_384, 1.8 * HOUR_SECONDS),
}


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving, restarting and detecting take, in seconds."""

    checkpoint_seconds: float  # from one checkpoint to the next
    save_seconds: float  # that training waits for each
    restart_seconds: float  # from the stop of the old ranks to the first step of the new ones
    hang_seconds: float = 60.0  # until a hang or a bad loss is known
    crash_seconds: float = 5.0  # until a crash is known
    decide_seconds: float = 2.0
    preflight_seconds: float = 60.0  # before a restart, but that of a transient crash


OURS = Costs(300.0, 1.5, 300.0)
OURS_IN_MEMORY = Costs(60.0, 0.3, 180.0, hang_seconds=45.0)  # a checkpoint each minute in memory, and a warm spare


@dataclass(frozen=True, slots=True)
class Human:
    """How long a person takes from the page to the hand on the keyboard: median × lognormal(0, sigma)."""

    day_seconds: float = 20 * 60.0  # between nine and six
    night_seconds: float = 2.5 * HOUR_SECONDS
    day_hours: tuple[float, float] = (9.0, 18.0)
    sigma: float = 0.6


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Everything else about the world; every day is a working day, the month begins at midnight."""

    days: float = 30.0
    shares: Mapping[FailureKind, float] = field(default_factory=lambda: SHARES)
    human: Human = Human()
    wrong_culprit: float = 0.03  # the first blame is on another node
    poison_seconds: float = 1_800.0  # for so long the state has been bad when that is seen
    user_bug_seen: float = 0.5  # of the user's errors, how many detection knows as such at once
    step_seconds: float = 10.0
    repair_seconds: float = DAY_SECONDS  # until an excluded node's place is taken by another machine
    spare_share: float = 1 / 64  # of the nodes, held ready, eight at least

    @property
    def month_seconds(self) -> float:
        return self.days * DAY_SECONDS

    def spares(self, fleet: Fleet) -> int:
        return max(8, round(fleet.nodes * self.spare_share))
