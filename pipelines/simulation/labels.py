"""The right answers to a simulated run: for each fault its class, its culprit, and when it was there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from detectors.verdict import FaultClass
from pipelines.simulation.scenario import (
    FATAL_KINDS,
    LASTING_KINDS,
    NODE_KINDS,
    FaultKind,
    Scenario,
    SimulatedFault,
    node_name,
)

LABELS_FILE = "labels.json"


class SimulatedLabel(msgspec.Struct, frozen=True, kw_only=True):
    """What a right verdict says. `also_right`: classes that a person would accept as well.

    `ranks` and `node` are the culprits; a node without ranks is the node as a whole, neither is the whole job. A
    verdict right in its node but not its rank is half right. `is_fault` is False for a change that is none
    (batch ramp): an info verdict of its class is right, silence too. Times are those of the culprit's own clock.
    """

    kind: str
    fault_class: FaultClass
    also_right: tuple[FaultClass, ...] = ()
    is_fault: bool = True
    ranks: tuple[int, ...] = ()
    node: str | None = None
    severity: float = 0.0
    onset_step: int
    onset_at: float
    end_step: int | None = None  # the first step after it; None: it lasts until the run ends
    end_at: float | None = None


class LabelsFile(msgspec.Struct, frozen=True, kw_only=True):
    """labels.json beside a simulated recording."""

    format: str = "transom-simulated-labels"
    version: int = 1
    job: str
    ranks: int
    steps: int  # that were trained; fewer than asked where a fault ended the run
    seed: int
    stage_of_rank: tuple[int, ...]
    labels: tuple[SimulatedLabel, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The right class of a kind, and what is accepted too."""

    fault_class: FaultClass
    also: tuple[FaultClass, ...] = ()


ANSWERS: Mapping[FaultKind, Answer] = {
    "straggler": Answer("straggler"),
    "throttle": Answer("throttled", ("straggler",)),
    "slow_node": Answer("straggler"),
    "slow_link": Answer("link_degraded", ("network_error", "job_slow")),
    "data_stall": Answer("data_stall"),
    "data_stall_all": Answer("data_stall", ("job_slow",)),
    "job_slow": Answer("job_slow"),
    "contended_node": Answer("contended_node"),
    "memory_growth": Answer("memory_growth", ("oom", "host_oom")),
    "hang": Answer("hang", ("collective_timeout",)),
    "hang_silent": Answer("hang", ("collective_timeout",)),
    "hang_busy": Answer("hang", ("collective_timeout",)),
    "rank_lost": Answer("rank_lost"),
    "node_lost": Answer("node_lost"),
    "nan": Answer("nan", ("numeric",)),
    "loss_spike": Answer("loss_spike"),
    "divergence": Answer("divergence", ("loss_spike",)),
    "telemetry_gap": Answer("telemetry_gap"),
}


def label_of(fault: SimulatedFault, scenario: Scenario, onset_at: float, end_at: float | None) -> SimulatedLabel:
    """The label of a fault that began at `onset_at`."""
    answer = ANSWERS[fault.kind]
    node = fault.node if fault.kind in NODE_KINDS else None
    if fault.kind not in NODE_KINDS and fault.ranks:
        node = scenario.node_of(fault.ranks[0])
    lasting = fault.kind in FATAL_KINDS | LASTING_KINDS or fault.end_step > scenario.steps
    return SimulatedLabel(
        kind=fault.kind,
        fault_class=answer.fault_class,
        also_right=answer.also,
        ranks=() if fault.kind in NODE_KINDS else fault.ranks,
        node=None if node is None else node_name(node),
        severity=fault.severity,
        onset_step=fault.onset_step,
        onset_at=onset_at,
        end_step=None if lasting else fault.end_step,
        end_at=None if lasting else end_at,
    )
