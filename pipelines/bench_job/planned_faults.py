"""Faults that a bench's job does to itself, at steps that a seed has chosen: the same ones under every launcher."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Literal

FaultKind = Literal["kill", "slow", "hang"]
FILE_NAME = "faults.json"
SLOW_STEPS = 20
SLOW_SECONDS = 0.15  # that each of them takes longer


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. `kill` and `hang` (SIGSTOP) happen once, when `step` begins; `slow` lasts for SLOW_STEPS steps."""

    number: int
    step: int
    kind: FaultKind
    rank: int


def poisson_faults(
    seed: int, count: int, mean_steps: float, world_size: int, shares: Mapping[FaultKind, float]
) -> tuple[PlannedFault, ...]:
    """`count` faults, on average one in `mean_steps`; kinds drawn by their shares, ranks alike."""
    dice = Random(seed)
    at = 0.0
    faults = []
    for number in range(count):
        at += max(2.0, dice.expovariate(1.0 / mean_steps))  # two in one step would be one
        (kind,) = dice.choices(list(shares), list(shares.values()))
        faults.append(PlannedFault(number, round(at) + 1, kind, dice.randrange(world_size)))
    return tuple(faults)


def write_faults(folder: Path, faults: Sequence[PlannedFault]) -> None:
    (folder / FILE_NAME).write_text(json.dumps([asdict(fault) for fault in faults]), encoding="ascii")


class FaultPlan:
    """The rank's side: what it has to do to itself now. What happens once leaves a file behind, before it happens."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        path = folder / FILE_NAME
        rows = json.loads(path.read_text(encoding="ascii")) if path.exists() else []
        self._mine = [fault for fault in (PlannedFault(**row) for row in rows) if fault.rank == rank]

    def seconds_more(self, step: int) -> float:
        """By how much this step is slower."""
        slow = [one for one in self._mine if one.kind == "slow" and one.step <= step < one.step + SLOW_STEPS]
        return SLOW_SECONDS * len(slow)

    def due(self, step: int) -> PlannedFault | None:
        """What is to happen once, now; nothing where it has happened before."""
        for fault in self._mine:
            if fault.step == step and fault.kind != "slow":
                try:
                    os.close(os.open(self._folder / f"fault-{fault.number}", os.O_CREAT | os.O_EXCL, 0o600))
                except FileExistsError:
                    continue
                return fault
        return None


def break_self(fault: PlannedFault) -> None:
    """Do it to this process."""
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
