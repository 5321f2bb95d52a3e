"""What each simulated fault does to a step: pure changes of the arrays that hold one entry for each rank.

Written from what such faults do to a machine (tables in the comments of each), not from what a detector looks for.
"""

from __future__ import annotations

import numpy as np

from pipelines.simulation.noise import Floats, Ints
from pipelines.simulation.scenario import HANGS, Scenario, SimulatedFault

SPIKE_LEAD_STEPS = 4  # the gradient norm rises so long before the loss
SPIKE_DECAY_STEPS = 8.0  # e-folding: after thirty steps a fortieth of a spike is left
SPIKE_NORM_FACTOR = 12.0  # the norm rises by so many times what the loss does
DIVERGENCE_STEPS = 50.0  # in which the loss rises by the severity
DIVERGENCE_NORM_FACTOR = 4.0


def active(fault: SimulatedFault, step: int) -> bool:
    """The fault is there in this step."""
    return fault.onset_step <= step < fault.end_step


def culprit_ranks(fault: SimulatedFault, scenario: Scenario) -> list[int]:
    """The ranks that have the fault: those named, or those of the node, or all."""
    if fault.ranks:
        return list(fault.ranks)
    return list(scenario.ranks_of(fault.node)) if fault.node is not None else list(range(scenario.ranks))


def bend_times(scenario: Scenario, step: int, times: dict[str, Floats], node_of: Ints) -> None:
    """Change the seconds of this step's parts in place.

    A slow link makes the transfer long for everyone: a ring or a tree ends for all when it ends, so no timing of a
    rank tells whose link it is, only the counters of its port do. A contended node makes its ranks wait for a
    processor; their own compute stays what it was.
    """
    for fault in scenario.faults:
        if not active(fault, step):
            continue
        ranks = culprit_ranks(fault, scenario)
        more = fault.severity
        match fault.kind:
            case "straggler" | "slow_node" | "job_slow":
                times["own"][ranks] *= 1.0 + more
            case "throttle":  # the whole device is slow, the optimizer's kernels too
                times["own"][ranks] *= 1.0 + more
                times["optimizer"][ranks] *= 1.0 + more
            case "slow_link":
                times["transfer"] += more * scenario.step_seconds
            case "data_stall" | "data_stall_all":
                # A starved loader waits for storage: its delay varies as the noise of loading does, but not so wildly.
                usual = np.median(times["data"])
                swing = np.clip(times["data"][ranks] / usual, 0.5, 2.0) ** 0.3
                times["data"][ranks] += more * scenario.step_seconds * swing
            case "contended_node":
                swing = np.clip(times["run_queue"][ranks] / np.median(times["run_queue"]), 0.5, 2.0) ** 0.5
                times["run_queue"][ranks] += more * times["own"][ranks] * swing
            case _:
                pass


def bend_numbers(scenario: Scenario, step: int, numbers: dict[str, Floats]) -> None:
    """Change loss and gradient norms of this step in place."""
    for fault in scenario.faults:
        since = step - fault.onset_step
        if since < 0:
            continue
        match fault.kind:
            case "nan":
                _poison(fault, since, numbers)
            case "loss_spike":
                # In onset_step the norm is the first to rise; the loss follows after the lead.
                norm = (
                    fault.severity * SPIKE_NORM_FACTOR * np.exp(-max(0, since - SPIKE_LEAD_STEPS) / SPIKE_DECAY_STEPS)
                )
                later = since - SPIKE_LEAD_STEPS
                loss = fault.severity * np.exp(-later / SPIKE_DECAY_STEPS) if later >= 0 else 0.0
                _raise(numbers, loss, norm)
            case "divergence":
                grown = fault.severity * since / DIVERGENCE_STEPS
                _raise(numbers, grown, fault.severity * DIVERGENCE_NORM_FACTOR * min(1.0, since / 10.0) + grown)
            case _:
                pass


def _poison(fault: SimulatedFault, since: int, numbers: dict[str, Floats]) -> None:
    """One rank's numbers are NaN in the step; the all-reduce takes that to everyone, who see it in the next."""
    numbers["train.gradient.norm"][:] = np.nan
    if since == 0:
        numbers["train.gradient.local_norm"][list(fault.ranks)] = np.nan
        numbers["train.loss"][list(fault.ranks)] = np.nan
    else:
        numbers["train.gradient.local_norm"][:] = np.nan
        numbers["train.loss"][:] = np.nan


def _raise(numbers: dict[str, Floats], loss: float, norm: float) -> None:
    numbers["train.loss"] *= 1.0 + loss
    numbers["train.gradient.local_norm"] *= 1.0 + norm
    numbers["train.gradient.norm"] *= 1.0 + norm


def frozen_ranks(scenario: Scenario, step: int) -> tuple[int, ...]:
    """Ranks that never arrive at the collective of this step: they hang, or they are gone."""
    frozen: set[int] = set()
    for fault in scenario.faults:
        if step >= fault.onset_step and (fault.kind in HANGS or fault.kind in ("rank_lost", "node_lost")):
            frozen.update(culprit_ranks(fault, scenario))
    return tuple(sorted(frozen))
