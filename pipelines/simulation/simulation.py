"""A simulated training job from its first message to its last, in the order in which the bus takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ingest.events import (
    AttemptStarted,
    DeviceMetrics,
    FaultInjected,
    Message,
    Metrics,
    NodeHeartbeat,
    RankPlace,
    RankStarted,
)
from pipelines.simulation.endings import Endings
from pipelines.simulation.faults import culprit_ranks
from pipelines.simulation.labels import LabelsFile, SimulatedLabel, label_of
from pipelines.simulation.machines import Machines
from pipelines.simulation.noise import Floats, recorded_noise
from pipelines.simulation.scenario import FATAL_KINDS, NODE_KINDS, Scenario, SimulatedFault
from pipelines.simulation.telemetry import RankTelemetry, Stamps
from pipelines.simulation.training import SimulatedStep, Training
from pipelines.simulation.transport import SimulatedMessage, Transport

START_SECONDS = 3.0  # from the attempt's start to the first step
AFTERWARDS_SECONDS = 2.0  # heartbeats after the last rank is gone


def simulated_messages(scenario: Scenario) -> Iterator[SimulatedMessage]:
    """The job's messages in order of arrival. Raises NotARecording or BadScenario where its noise cannot be read."""
    return Simulation(scenario).messages()


class Simulation:
    """One run of a scenario. `labels` are complete once `messages` has been read to its end."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.training = Training(scenario, recorded_noise(scenario.recording))
        self.labels: tuple[SimulatedLabel, ...] = ()
        self.transport = Transport(scenario)
        self._stamps = Stamps(scenario)
        self._ranks = RankTelemetry(scenario, self.training, self._stamps)
        self._machines = Machines(scenario)
        self._endings = Endings(scenario, self._stamps, self._ranks)
        dice = np.random.default_rng(np.random.SeedSequence(scenario.seed, spawn_key=(5,)))
        self._rank_phase: Floats = dice.uniform(0.0, scenario.flush_seconds, scenario.ranks)
        self._node_phase: Floats = dice.uniform(0.0, scenario.flush_seconds, scenario.nodes)
        self._open: dict[SimulatedFault, float] = {}
        self._over_at = np.inf
        self._last: SimulatedStep | None = None

    def labels_file(self) -> LabelsFile:
        """All that is known to be true of this run."""
        scenario = self.scenario
        trained = int(self._ranks.told.min())
        return LabelsFile(
            job=scenario.job, ranks=scenario.ranks, steps=trained, seed=scenario.seed,
            stage_of_rank=tuple(self.training.stage_of.tolist()), labels=self.labels,
        )  # fmt: skip

    def messages(self) -> Iterator[SimulatedMessage]:
        """Everything the job sends, as it arrives."""
        scenario, transport = self.scenario, self.transport
        self._begin()
        self.training.begin_at(scenario.start_at + START_SECONDS)
        tick = int(START_SECONDS / scenario.flush_seconds)
        while True:
            begin = scenario.start_at + tick * scenario.flush_seconds
            end = begin + scenario.flush_seconds
            if begin >= self._over_at:
                break
            self._train(end)
            self._speak(tick, begin)
            for node, true_at, message in self._endings.due(end):
                transport.send(message, node, true_at)
            yield from transport.arrived(end)
            tick += 1
        self._close(None)
        yield from transport.arrived(np.inf)

    def _begin(self) -> None:
        scenario, stamps = self.scenario, self._stamps
        at = scenario.start_at
        places = tuple(
            RankPlace(rank=rank, local_rank=rank % scenario.ranks_per_node, node=stamps.names[scenario.node_of(rank)])
            for rank in range(scenario.ranks)
        )
        started = AttemptStarted(
            job=scenario.job, attempt=1, rank=-1, node=stamps.names[0], sequence=0, at=stamps.at(0, at),
            world_size=scenario.ranks, places=places,
        )  # fmt: skip
        self._send_event(started, 0, at)
        for rank in range(scenario.ranks):
            node = scenario.node_of(rank)
            born = at + 0.2 + 0.8 * float(self._rank_phase[rank]) / scenario.flush_seconds
            stamp: dict[str, Any] = {"job": scenario.job, "attempt": 1, "rank": rank, "node": stamps.names[node]}
            self._send_event(
                RankStarted(
                    **stamp, sequence=stamps.events[rank], at=stamps.at(node, born), pid=10_000 + rank,
                    local_rank=rank % scenario.ranks_per_node, gpu_uuid=f"GPU-simulated-{rank:05d}",
                ),
                node, born,
            )  # fmt: skip
            stamps.events[rank] += 1
            hello = Metrics(
                **stamp, sequence=stamps.metrics[rank], at=stamps.at(node, born + 0.5), phase="init", step=-1
            )
            stamps.metrics[rank] += 1
            self.transport.send(hello, node, born + 0.5)

    def _send_event(self, message: Message, node: int, true_at: float) -> None:
        if message.rank < 0:
            self._stamps.node_events[node] += 1
        self.transport.send(message, node, true_at)

    def _train(self, until: float) -> None:
        """Train until every rank's step reaches beyond `until`, or no more steps are to come."""
        last = self._last
        while last is None or last.ended_at.min() <= until:
            if self.training.step >= self.scenario.steps:
                if last is not None and not np.isfinite(self._over_at):
                    self._over_at = self._endings.finish(last.ended_at) + AFTERWARDS_SECONDS
                break
            last = self._last = self.training.next()
            self._ranks.add(last)
            self._see(last)

    def _see(self, step: SimulatedStep) -> None:
        """Labels and endings of the faults that begin or end with this step."""
        scenario = self.scenario
        for fault in scenario.faults:
            ranks = culprit_ranks(fault, scenario)
            if step.step == fault.onset_step:
                onset = float(step.begun_at[ranks].min())
                if fault.kind in FATAL_KINDS:  # within the step, which never ends
                    onset = self._endings.begin(fault, step)
                    self._over_at = min(self._over_at, onset + fault.length_steps * scenario.step_seconds)
                self._open[fault] = onset
                self._tell(fault, onset)
            elif step.step == fault.end_step:
                self._close(fault, float(step.begun_at[ranks].max()))
        for ramp in scenario.ramps:
            if step.step == ramp.step:
                self._add(
                    SimulatedLabel(
                        kind="batch_ramp", fault_class="regime_change", is_fault=False,
                        severity=ramp.factor - 1.0, onset_step=ramp.step, onset_at=float(step.begun_at.min()),
                    )
                )  # fmt: skip

    def _tell(self, fault: SimulatedFault, at: float) -> None:
        """The label in the stream itself, which detection never reads."""
        scenario, stamps = self.scenario, self._stamps
        of_rank = fault.kind not in NODE_KINDS and fault.ranks
        rank = fault.ranks[0] if of_rank else -1
        node = scenario.node_of(rank) if of_rank else fault.node or 0
        counters = stamps.events if of_rank else stamps.node_events
        index = rank if of_rank else node
        parameters = {
            "step": float(fault.onset_step), "steps": float(fault.length_steps), "severity": fault.severity,
            "ranks": float(len(culprit_ranks(fault, scenario))),
        }  # fmt: skip
        injected = FaultInjected(
            job=scenario.job, attempt=1, rank=rank, node=stamps.names[node], sequence=counters[index],
            at=stamps.at(node, at), fault=fault.kind, parameters=parameters,
        )  # fmt: skip
        counters[index] += 1
        self.transport.send(injected, node, at)

    def _close(self, fault: SimulatedFault | None, at: float | None = None) -> None:
        for known in list(self._open) if fault is None else [fault]:
            onset = self._open.pop(known, None)
            if onset is not None:
                self._add(label_of(known, self.scenario, onset, at))

    def _add(self, label: SimulatedLabel) -> None:
        self.labels = tuple(sorted((*self.labels, label), key=lambda known: (known.onset_step, known.kind)))

    def _speak(self, tick: int, begin: float) -> None:
        """Everything that ranks and launchers send in one flush."""
        scenario, stamps = self.scenario, self._stamps
        at = begin + self._rank_phase
        messages, ranks = self._ranks.flush(at)
        nodes = self.training.node_of[ranks].tolist()
        self.transport.send_all(messages, nodes, at[ranks])
        alive_from = begin + self._node_phase
        living = np.flatnonzero(alive_from < self._endings.node_gone_at).tolist()
        beats: list[Message] = []
        for node in living:
            when = float(alive_from[node])
            alive = tuple(rank for rank in scenario.ranks_of(node) if self._endings.rank_gone_at[rank] > when)
            beats.append(
                NodeHeartbeat(
                    job=scenario.job, attempt=1, rank=-1, node=stamps.names[node], sequence=stamps.node_events[node],
                    at=stamps.at(node, when), ranks_alive=alive,
                )
            )  # fmt: skip
            stamps.node_events[node] += 1
        self.transport.send_all(beats, living, alive_from[living])
        if scenario.device_seconds:
            every = max(1, round(scenario.device_seconds / scenario.flush_seconds))
            self._measure([node for node in living if (tick + node) % every == 0], alive_from)

    def _measure(self, nodes: list[int], at: Floats) -> None:
        scenario, stamps = self.scenario, self._stamps
        made: list[Message] = []
        senders: list[int] = []
        for node in nodes:
            own = scenario.ranks_of(node)
            step = int(self._ranks.told[own.start : own.stop].min()) + 1
            when = float(at[node])
            stamped = stamps.at(node, when)
            spinning = bool(self._last is not None and self._last.frozen and step >= self._last.step)
            for rank, device, values in self._machines.samples(node, when - scenario.start_at, step, not spinning):
                if rank >= 0 and self._endings.rank_gone_at[rank] <= when:
                    continue
                counters = stamps.metrics if rank >= 0 else stamps.node_metrics
                index = rank if rank >= 0 else node
                made.append(
                    DeviceMetrics(
                        job=scenario.job, attempt=1, rank=rank, node=stamps.names[node], sequence=counters[index],
                        at=stamped, device=device, sampled_at=(stamped,),
                        columns={name: (value,) for name, value in values.items()},
                    )
                )  # fmt: skip
                counters[index] += 1
            senders += [node] * (len(made) - len(senders))
        self.transport.send_all(made, senders, at[senders])
