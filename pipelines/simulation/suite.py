"""The standard suite of simulated runs: all kinds of faults at all severities, a curve of weak ones, and clean runs.

A round holds every kind once; severities are dealt out, so that after as many rounds as there are severities each kind
has had each. Faults of a round follow each other in two runs, each with clean steps before and after and each ended
by a fault that ends it. `seed` changes everything: tune with one, publish with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pipelines.simulation.scenario import (
    JOB_KINDS,
    NODE_KINDS,
    BatchRamp,
    FaultKind,
    Scenario,
    SimulatedFault,
)

SEVERITIES = (0.10, 0.12, 0.2, 0.3, 0.5)
WEAK_SEVERITIES = (0.03, 0.05)
PASSING: tuple[FaultKind, ...] = (
    "straggler", "slow_link", "data_stall", "job_slow", "memory_growth", "telemetry_gap",
    "throttle", "slow_node", "data_stall_all", "contended_node", "loss_spike",
)  # fmt: skip
WITHOUT_SEVERITY: frozenset[FaultKind] = frozenset({"telemetry_gap"})
ENDING: tuple[FaultKind, ...] = ("hang", "rank_lost", "nan", "divergence", "node_lost", "hang_silent", "hang_busy")
LENGTH_STEPS: Mapping[FaultKind, int] = {"memory_growth": 120, "loss_spike": 40, "telemetry_gap": 40}
WEAK_LENGTH_STEPS, STRONG_LENGTH_STEPS = 80, 60  # who is weaker than this must last longer to cost the same
WEAK_BELOW = 0.15
ENDING_STEPS = 100  # for a divergence to be one; a fatal fault is over after so many mean steps
FATAL_STEPS = 40
AFTERWARDS_STEPS = 20

Part = Literal["faults", "curve", "clean"]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything there is for a world size; steps between faults are clean and counted so."""

    rounds: int
    weak_rounds: int
    clean_runs: int
    clean_steps: int
    lead_steps: int
    gap_steps: int
    device_seconds: float


SIZES: Mapping[int, Size] = {
    64: Size(10, 4, 20, 1_050, 150, 60, 5.0),
    512: Size(5, 2, 4, 1_000, 150, 60, 5.0),
    4_096: Size(2, 1, 1, 500, 100, 40, 10.0),
}


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """One run of the suite. `curve` runs have faults weaker than what is asked to be found."""

    name: str
    part: Part
    scenario: Scenario


def size_of(ranks: int) -> Size:
    """The measures of the largest world size of the table that is not above `ranks`, or of the smallest."""
    return SIZES[max((known for known in SIZES if known <= ranks), default=min(SIZES))]


def standard_suite(ranks: int, seed: int = 0, recording: Path = Path("data/clean")) -> tuple[SuiteRun, ...]:
    """All runs for a world size: faults first, then the curve, then clean ones. Deterministic by `seed`."""
    size = size_of(ranks)
    runs = []
    for part, rounds, severities in (
        ("faults", size.rounds, SEVERITIES),
        ("curve", size.weak_rounds, WEAK_SEVERITIES),
    ):
        for number in range(rounds):
            half = len(PASSING) // 2 + 1
            for index, kinds in enumerate((PASSING[:half], PASSING[half:])):
                at = 2 * number + index
                dealt = [
                    severities[(PASSING.index(kind) + number + number // len(severities)) % len(severities)]
                    for kind in kinds
                ]
                name = f"{part}-{ranks}-{at:02d}"
                scenario = _faults_in_a_row(
                    ranks, _seed(seed, ranks, part, at), kinds, dealt, ENDING[at % len(ENDING)], size, recording
                )
                runs.append(SuiteRun(name, "faults" if part == "faults" else "curve", scenario))
    for number in range(size.clean_runs):
        runs.append(SuiteRun(f"clean-{ranks}-{number:02d}", "clean", _clean(ranks, seed, number, size, recording)))
    return tuple(runs)


def _seed(seed: int, ranks: int, part: str, number: int) -> int:
    return int(np.random.SeedSequence((seed, ranks, len(part), number)).generate_state(1)[0])


def _faults_in_a_row(
    ranks: int,
    seed: int,
    kinds: Sequence[FaultKind],
    severities: Sequence[float],
    ending: FaultKind,
    size: Size,
    recording: Path,
) -> Scenario:
    dice = np.random.default_rng(seed)
    nodes = max(1, ranks // 8)
    homes = dice.permutation(nodes)  # a node is not hit twice while there are others
    at = size.lead_steps
    faults: list[SimulatedFault] = []
    order = dice.permutation(len(kinds)).tolist()
    for number, index in enumerate([*order, None]):
        kind = ending if index is None else kinds[index]
        severity = 0.2 if kind in WITHOUT_SEVERITY else severities[-1 if index is None else index]
        onset = at + int(dice.integers(0, 10))
        length = LENGTH_STEPS.get(kind, WEAK_LENGTH_STEPS if severity < WEAK_BELOW else STRONG_LENGTH_STEPS)
        if index is None:
            length = ENDING_STEPS if kind in ("divergence", "nan") else FATAL_STEPS
        node = int(homes[number % nodes])
        rank = min(ranks - 1, node * 8 + int(dice.integers(0, 8)))
        faults.append(
            SimulatedFault(
                kind=kind, onset_step=onset, length_steps=length, severity=severity,
                ranks=() if kind in NODE_KINDS | JOB_KINDS else (rank,), node=node if kind in NODE_KINDS else None,
            )
        )  # fmt: skip
        at = onset + length + size.gap_steps
    return Scenario(
        ranks=ranks, steps=faults[-1].end_step + AFTERWARDS_STEPS, seed=seed, faults=tuple(faults),
        stages=(4, 1)[int(dice.integers(0, 2))] if ranks % 4 == 0 else 1, checkpoint_steps=100,
        eval_steps=(0, 250)[int(dice.integers(0, 2))], device_seconds=size.device_seconds, recording=recording,
    )  # fmt: skip


def _clean(ranks: int, seed: int, number: int, size: Size, recording: Path) -> Scenario:
    """Clean runs differ in stages, evals, ramps and in whether the job tells its phases."""
    return Scenario(
        ranks=ranks, steps=size.clean_steps, seed=_seed(seed, ranks, "clean runs", number),
        stages=(4, 1)[number % 2] if ranks % 4 == 0 else 1, checkpoint_steps=(100, 60)[number // 2 % 2],
        eval_steps=(0, 250)[number // 4 % 2], tells_phases=number % 5 != 4,
        ramps=(BatchRamp(size.clean_steps // 2, 1.25),) if number % 4 == 3 else (),
        device_seconds=size.device_seconds, recording=recording,
    )  # fmt: skip
