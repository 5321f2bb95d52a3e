"""The steps of a simulated synchronous job: all ranks of a step at once, each waiting for the slowest.

A rank trains from the end of its own last step: data, forward and backward, then it waits for the last rank to arrive
and for the transfer, then its optimizer. So the culprit computes long and waits short, its victims the reverse, and
no step time tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingest.events import Phase
from pipelines.simulation.faults import bend_numbers, bend_times, frozen_ranks
from pipelines.simulation.noise import (
    CPU_SHARE,
    DATA,
    FORWARD_SHARE,
    LOCAL_NORM,
    LOSS,
    OPTIMIZER,
    OWN,
    RUN_QUEUE,
    TRANSFER,
    Floats,
    Ints,
    NoiseStream,
    RecordedNoise,
)  # fmt: skip
from pipelines.simulation.scenario import Scenario

# Shares of `step_seconds` in a stage of mean weight; what is left is waiting for the slowest. Ranks have a processor
# of their own, as in a cluster, so the run queue is short; data loading has the share it had in the recording.
OWN_SHARE, RUN_QUEUE_SHARE, OPTIMIZER_SHARE, TRANSFER_SHARE = 0.62, 0.01, 0.07, 0.10
STAGE_WEIGHT_MIN, STAGE_WEIGHT_MAX = 0.8, 1.25
WARMUP_FACTOR = 2.5  # of the first step; falls to 1 over the warm-up
DRIFT_STEPS = 700.0  # one rise and fall of all ranks together
OFFSET_STEPS = (900.0, 2500.0)  # of one rank
LOSS_START, LOSS_FLOOR, LOSS_STEPS = 8.0, 2.0, 300.0
LEARNING_RATE, LEARNING_RATE_STEPS = 3e-4, 50.0
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step of all ranks; arrays have one entry for each rank, times are UTC seconds of the true clock.

    `arrived_at` is when a rank enters the collective, `collected_at` when it leaves it; infinite where that never
    happens. Up to `begun_at` the ranks were saving or evaluating (`before`), if at all.
    """

    step: int
    before: Phase | None
    before_step: int
    begun_at: Floats
    arrived_at: Floats
    collected_at: Floats
    ended_at: Floats
    columns: dict[str, Floats]
    warm: bool
    frozen: tuple[int, ...] = ()


class Training:
    """The job: `next()` trains a step. Deterministic by the scenario's seed; faults do not move the dice."""

    def __init__(self, scenario: Scenario, noise: RecordedNoise) -> None:
        self._scenario = scenario
        self._recorded = noise
        ranks = np.arange(scenario.ranks)
        self.node_of: Ints = ranks // scenario.ranks_per_node
        self.stage_of: Ints = ranks // (scenario.ranks // scenario.stages)
        dice = np.random.default_rng(np.random.SeedSequence(scenario.seed, spawn_key=(1,)))
        weights = dice.uniform(STAGE_WEIGHT_MIN, STAGE_WEIGHT_MAX, scenario.stages)
        if scenario.stages == 1:
            weights[:] = 1.0
        self._weight: Floats = (weights / weights.mean()).clip(STAGE_WEIGHT_MIN, STAGE_WEIGHT_MAX)[self.stage_of]
        self._offset_phase = dice.uniform(0.0, 2.0 * np.pi, scenario.ranks)
        self._offset_steps = dice.uniform(*OFFSET_STEPS, scenario.ranks)
        self._offset_size = scenario.offset * dice.uniform(0.0, 1.0, scenario.ranks)
        self._drift_phase = float(dice.uniform(0.0, 2.0 * np.pi))
        self._dice = dice
        self._noise = NoiseStream(noise, self.node_of, scenario.noise, dice.spawn(1)[0])
        self._ended_at: Floats = np.full(scenario.ranks, scenario.start_at)
        self.step = 0

    def begin_at(self, at: float) -> None:
        """The first step begins then."""
        self._ended_at[:] = at

    def next(self) -> SimulatedStep:
        """Train one step of all ranks."""
        self.step += 1
        scenario, step = self._scenario, self.step
        before, pause = self._pause(step)
        factors = self._noise.next()
        times = self._times(step, factors)
        bend_times(scenario, step, times, self.node_of)
        frozen = frozen_ranks(scenario, step)
        begun = self._ended_at + pause
        compute = times["own"] + times["run_queue"]
        arrived = begun + times["data"] + compute
        if frozen:
            arrived[list(frozen)] = np.inf
        collected = arrived.max() + times["transfer"]
        ended = collected + times["optimizer"]
        forward = compute * np.clip(self._recorded.forward_share * factors[:, FORWARD_SHARE], 0.05, 0.95)
        with np.errstate(invalid="ignore"):
            columns = {
                "train.step.duration": ended - self._ended_at,
                "train.data.duration": times["data"],
                "train.forward.duration": forward,
                "train.backward.duration": compute - forward,
                "train.optimizer.duration": times["optimizer"],
                "train.collective.wait": collected - arrived,
                "train.compute.duration": compute,
                "train.compute.own": times["own"],
                "train.compute.cpu": times["own"] * np.minimum(1.0, self._recorded.cpu_share * factors[:, CPU_SHARE]),
                "train.run_queue.delay": times["run_queue"],
            }
        columns |= self._numbers(step, factors)
        self._ended_at = ended
        return SimulatedStep(
            step=step, before=before, before_step=step - 1, begun_at=begun, arrived_at=arrived,
            collected_at=collected, ended_at=ended, columns=columns,
            warm=step <= scenario.warmup_steps, frozen=frozen,
        )  # fmt: skip

    def _pause(self, step: int) -> tuple[Phase | None, Floats]:
        """What the ranks do before this step: save the last one, evaluate it, or nothing."""
        scenario, ranks = self._scenario, self._scenario.ranks
        jitter = np.exp(0.1 * self._dice.standard_normal(ranks))  # drawn always, so that periods do not move dice
        last = step - 1
        if last and scenario.eval_steps and last % scenario.eval_steps == 0:
            return "eval", scenario.eval_seconds * jitter
        if last and scenario.checkpoint_steps and last % scenario.checkpoint_steps == 0:
            return "checkpoint", scenario.checkpoint_seconds * jitter
        return None, np.zeros(ranks)

    def _times(self, step: int, factors: Floats) -> dict[str, Floats]:
        """Seconds of each part for each rank, without faults."""
        scenario = self._scenario
        seconds = scenario.step_seconds
        together = 1.0 + scenario.drift * np.sin(2.0 * np.pi * step / DRIFT_STEPS + self._drift_phase)
        for ramp in scenario.ramps:
            together *= ramp.factor if step >= ramp.step else 1.0
        if step <= scenario.warmup_steps:
            together *= 1.0 + (WARMUP_FACTOR - 1.0) * (1.0 - (step - 1) / scenario.warmup_steps)
        offset = 1.0 + self._offset_size * np.sin(2.0 * np.pi * step / self._offset_steps + self._offset_phase)
        work = seconds * self._weight * offset * together
        return {
            "own": OWN_SHARE * work * factors[:, OWN],
            "run_queue": RUN_QUEUE_SHARE * seconds * factors[:, RUN_QUEUE],
            "data": self._recorded.data_share * seconds * factors[:, DATA],
            "optimizer": OPTIMIZER_SHARE * seconds * factors[:, OPTIMIZER],
            "transfer": np.full(scenario.ranks, TRANSFER_SHARE * seconds * factors[0, TRANSFER]),
        }

    def _numbers(self, step: int, factors: Floats) -> dict[str, Floats]:
        """Loss and gradient norms: falling, with the recorded relative noise; learning rate and batch as they are."""
        scenario = self._scenario
        loss = (LOSS_FLOOR + (LOSS_START - LOSS_FLOOR) / (1.0 + step / LOSS_STEPS)) * factors[:, LOSS]
        local = self._recorded.local_norm * (0.6 + 1.0 / (1.0 + step / LOSS_STEPS)) * factors[:, LOCAL_NORM]
        size = SAMPLES
        for ramp in scenario.ramps:
            size = round(size * ramp.factor) if step >= ramp.step else size
        norm = float(np.median(local)) * 0.8  # the mean of the gradients is shorter than they are
        numbers = {
            "train.loss": loss,
            "train.gradient.local_norm": local,
            "train.gradient.norm": np.full(scenario.ranks, norm),
            "train.learning_rate": np.full(scenario.ranks, LEARNING_RATE * min(1.0, step / LEARNING_RATE_STEPS)),
            "train.samples": np.full(scenario.ranks, float(size)),
        }
        bend_numbers(scenario, step, numbers)
        return numbers
