"""The simulated job: physical, seeded, with noise that was really measured and labels that are right."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingest.codec import Codec
from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    DeviceMetrics,
    FaultInjected,
    Logs,
    Message,
    Metrics,
    NodeHeartbeat,
    RankExited,
    RankStalled,
)
from pipelines.simulation import telemetry
from pipelines.simulation.labels import ANSWERS
from pipelines.simulation.noise import recorded_noise
from pipelines.simulation.scenario import (
    FAULT_KINDS,
    JOB_KINDS,
    NODE_KINDS,
    BatchRamp,
    FaultKind,
    Scenario,
    SimulatedFault,
)
from pipelines.simulation.simulation import Simulation, simulated_messages
from pipelines.simulation.training import Training

CLEAN = Path(__file__).parents[2] / "data" / "clean"
PLAIN = Scenario(ranks=16, steps=60, recording=CLEAN, missing=0.0, late=0.0, duplicates=0.0, checkpoint_steps=0)
CULPRIT, MATE, ELSEWHERE = 3, 2, 13  # 2 nodes of 8


def fault(kind: FaultKind, severity: float = 0.5, onset: int = 30, length: int = 20) -> SimulatedFault:
    return SimulatedFault(
        kind=kind,
        onset_step=onset,
        length_steps=length,
        severity=severity,
        ranks=() if kind in NODE_KINDS | JOB_KINDS else (CULPRIT,),
        node=0 if kind in NODE_KINDS else None,
    )


class Run:
    """A simulated run, read to its end, with its samples by (step, rank)."""

    def __init__(self, scenario: Scenario) -> None:
        self.simulation = Simulation(scenario)
        arrived = list(self.simulation.messages())
        self.arrivals = [entry.arrives_at for entry in arrived]
        self.messages: list[Message] = [entry.message for entry in arrived]
        self.labels = self.simulation.labels
        self.samples: dict[str, dict[tuple[int, int], float | None]] = defaultdict(dict)
        for message in self.of(Metrics):
            for name in message.columns:
                for step, value in zip(message.steps, message.column(name), strict=True):
                    self.samples[name][step, message.rank] = value
            for step, end in zip(message.steps, message.ended_at, strict=True):
                self.samples["ended_at"][step, message.rank] = end

    def of(self, kind: type) -> list:
        return [message for message in self.messages if type(message) is kind]

    def device(self, name: str, rank: int, node: str | None = None) -> list[float]:
        return [
            message.columns[name][0]
            for message in sorted(self.of(DeviceMetrics), key=lambda sample: sample.at)
            if name in message.columns and message.rank == rank and (node is None or message.node == node)
        ]

    def matrix(self, name: str, first: int, last: int, ranks: int = 16) -> np.ndarray:
        """Steps first … last, step x rank."""
        return np.array([[self.samples[name][s, r] for r in range(ranks)] for s in range(first, last + 1)], float)


def steps_of(scenario: Scenario) -> list:
    training = Training(scenario, recorded_noise(CLEAN))
    training.begin_at(scenario.start_at)
    return [training.next() for _ in range(scenario.steps)]


def test_a_step_is_the_sum_of_its_parts_and_nobody_leaves_the_collective_before_the_last_has_come() -> None:
    run = Run(replace(PLAIN, stages=4, clock_skew_seconds_max=0.0))
    part = {name.removeprefix("train."): run.matrix(name, 2, 60) for name in run.samples if name != "ended_at"}
    compute, wait = part["compute.duration"], part["collective.wait"]
    assert np.allclose(part["forward.duration"] + part["backward.duration"], compute, atol=3e-6)
    assert np.allclose(part["compute.own"] + part["run_queue.delay"], compute, atol=3e-6)
    assert (part["compute.cpu"] <= part["compute.own"] + 2e-6).all()
    whole = part["data.duration"] + compute + wait + part["optimizer.duration"]
    assert np.allclose(part["step.duration"], whole, atol=5e-6)
    ends = run.matrix("ended_at", 1, 60)
    assert np.allclose(np.diff(ends, axis=0), part["step.duration"], atol=5e-6)
    arrived = ends[:-1] + part["data.duration"] + compute
    assert np.allclose(arrived + wait, (arrived + wait)[:, :1], atol=5e-6), "all leave the collective together"
    shortest = (ends[1:] - part["optimizer.duration"]).min(axis=1) - arrived.max(axis=1)
    assert (shortest > 0.0).all(), "after the slowest comes the transfer"


def test_ranks_of_a_stage_compute_alike_and_stages_differ() -> None:
    steps = steps_of(replace(PLAIN, ranks=64, stages=4, noise=0.0, seed=3))
    own = steps[20].columns["train.compute.own"].reshape(4, 16)
    assert np.ptp(own.mean(axis=1)) > 0.05
    assert (np.ptp(own, axis=1) / own.mean(axis=1) < 0.045).all(), "within the offsets of plus and minus 2 %"
    assert ((own.mean(axis=1) / own.mean() > 0.75) & (own.mean(axis=1) / own.mean() < 1.3)).all()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    codec = Codec()

    def told(seed: int) -> list[tuple[float, bytes]]:
        scenario = replace(PLAIN, steps=15, seed=seed, missing=0.02, late=0.1, duplicates=0.05)
        return [(entry.arrives_at, codec.encode(entry.message).value) for entry in simulated_messages(scenario)]

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_a_fault_does_not_move_the_dice_of_the_others() -> None:
    clean, faulty = steps_of(PLAIN), steps_of(replace(PLAIN, faults=(fault("straggler"),)))
    for before, after in zip(clean, faulty, strict=True):
        others = np.arange(16) != CULPRIT
        assert (before.columns["train.compute.own"][others] == after.columns["train.compute.own"][others]).all()


def test_messages_are_lost_late_and_doubled_in_the_shares_asked_for() -> None:
    scenario = replace(PLAIN, ranks=64, steps=120, missing=0.01, late=0.05, duplicates=0.01, clock_skew_seconds_max=0.0)
    run = Run(scenario)
    assert run.arrivals == sorted(run.arrivals)
    seen = Counter((m.rank, m.node, m.sequence) for m in run.of(Metrics) + run.of(DeviceMetrics))
    lags = np.array([at - m.at for at, m in zip(run.arrivals, run.messages, strict=True) if type(m) is Metrics])
    last = {rank: max(number for of, _, number in seen if of == rank) for rank in range(64)}
    sent = sum(number + 1 for number in last.values())
    there = sum(1 for rank, _, _ in seen if rank >= 0)
    assert 0.006 < 1.0 - there / sent < 0.014
    assert 0.004 < sum(count - 1 for count in seen.values()) / sent < 0.02
    assert 0.035 < (lags > 0.2).mean() < 0.08
    assert lags.min() > 0.0
    assert lags.max() < 26.0
    kept = [m for m in run.messages if not isinstance(m, Metrics | DeviceMetrics | NodeHeartbeat)]
    assert len(kept) == 1 + 64 + 64 + 8, "what launchers say of lives is never lost"


def test_every_message_can_go_over_the_wire_and_the_phases_are_told() -> None:
    codec = Codec()
    run = Run(replace(PLAIN, checkpoint_steps=20, eval_steps=25))
    for message in run.messages:
        encoded = codec.encode(message)
        assert codec.decode(encoded.headers, encoded.value) == message
    phases = {message.phase for message in run.of(Metrics)}
    assert phases == {"init", "warmup", "train", "checkpoint", "eval", "collective", "finished"}
    assert {m.step for m in run.of(Metrics) if m.phase == "checkpoint"} <= {20, 40, 60}
    durations = run.matrix("train.step.duration", 1, 60)
    assert durations[20].min() > 3.0, "the step after a checkpoint holds its seconds"
    assert durations[:5, 0].min() > durations[10:18, 0].mean(), "the first steps are slower"
    quiet = Run(replace(PLAIN, checkpoint_steps=20, tells_phases=False))
    assert {message.phase for message in quiet.of(Metrics)} == {"init", "train", "collective", "finished"}


def test_sequences_of_a_producer_have_no_gaps_when_nothing_is_lost() -> None:
    run = Run(replace(PLAIN, faults=(fault("straggler"),)))
    numbers = defaultdict(list)
    for message in run.messages:
        topic = "metrics" if isinstance(message, Metrics | DeviceMetrics) else "events"
        numbers[topic, message.rank, message.node].append(message.sequence)
    assert all(sorted(found) == list(range(len(found))) for found in numbers.values())


def change(run: Run, name: str, rank: int) -> float:
    """How much higher a metric is while the fault is there, in absolute terms."""
    column = run.matrix(name, 11, 49)[:, rank]
    return float(np.median(column[20:]) - np.median(column[:19]))


def test_who_is_slow_computes_long_and_waits_short() -> None:
    run = Run(replace(PLAIN, faults=(fault("straggler"),)))
    assert change(run, "train.compute.own", CULPRIT) > 0.2
    assert abs(change(run, "train.compute.own", MATE)) < 0.1
    assert change(run, "train.collective.wait", CULPRIT) < change(run, "train.collective.wait", ELSEWHERE) - 0.2
    assert change(run, "train.step.duration", ELSEWHERE) > 0.1, "all wait for it"
    both = Run(replace(PLAIN, faults=(fault("slow_node"),)))
    assert change(both, "train.compute.own", MATE) > 0.2
    assert abs(change(both, "train.compute.own", ELSEWHERE)) < 0.1


def test_a_throttled_gpu_shows_its_clock_and_a_slow_link_nothing_but_its_counter() -> None:
    throttled = Run(replace(PLAIN, faults=(fault("throttle"),)))
    assert min(throttled.device("hw.gpu.clock.sm", CULPRIT)) < 1400.0 < min(throttled.device("hw.gpu.clock.sm", MATE))
    assert max(throttled.device("hw.gpu.temperature", CULPRIT)) > 84.0
    assert max(throttled.device("hw.gpu.clock.throttle_reasons", CULPRIT)) >= 0x20
    linked = Run(replace(PLAIN, faults=(fault("slow_link"),)))
    errors = [linked.device("hw.network.symbol_errors", -1, node) for node in ("node0000", "node0001")]
    assert errors[0][-1] > errors[0][0] + 100.0
    assert errors[1][-1] == errors[1][0]
    waits = [change(linked, "train.collective.wait", rank) for rank in range(16)]
    assert min(waits) > 0.3, "a ring is as fast as its slowest link, for everyone"


def test_data_memory_and_contention() -> None:
    stalled = Run(replace(PLAIN, faults=(fault("data_stall"),)))
    assert change(stalled, "train.data.duration", CULPRIT) > 0.4
    assert abs(change(stalled, "train.data.duration", MATE)) < 0.01
    everyone = Run(replace(PLAIN, faults=(fault("data_stall_all"), fault("memory_growth"))))
    assert min(change(everyone, "train.data.duration", rank) for rank in range(16)) > 0.4
    memory = everyone.device("process.memory.usage", CULPRIT)
    assert max(memory) > 3.0 * memory[0]
    assert max(everyone.device("process.memory.usage", MATE)) < 1.01 * everyone.device("process.memory.usage", MATE)[0]
    assert max(everyone.device("system.memory.usage", -1, "node0000")) < 512 * 2**30
    crowded = Run(replace(PLAIN, faults=(fault("contended_node"),)))
    assert change(crowded, "train.run_queue.delay", MATE) > 0.2
    assert change(crowded, "train.compute.duration", MATE) > 0.2
    assert abs(change(crowded, "train.compute.own", MATE)) < 0.1


def test_nan_is_one_ranks_first_and_everyones_a_step_later() -> None:
    run = Run(replace(PLAIN, faults=(fault("nan"),)))
    first = run.matrix("train.gradient.local_norm", 30, 31)
    assert [rank for rank in range(16) if math.isnan(first[0, rank])] == [CULPRIT]
    assert np.isnan(first[1]).all()
    assert np.isnan(run.matrix("train.loss", 60, 60)).all()
    assert run.labels[0].end_step is None


def test_a_spike_shows_in_the_gradient_before_the_loss_and_passes_and_a_divergence_does_not() -> None:
    spike = Run(replace(PLAIN, steps=80, noise=0.0, faults=(fault("loss_spike"),)))
    norm = spike.matrix("train.gradient.local_norm", 1, 80)[:, 0]
    loss = spike.matrix("train.loss", 1, 80)[:, 0]
    assert norm[30] > 3.0 * norm[28]
    assert loss[31] < loss[28]
    assert loss[34] > 1.2 * loss[28]
    assert loss[79] < loss[28]
    lost = Run(replace(PLAIN, steps=130, noise=0.0, faults=(fault("divergence"),)))
    loss = lost.matrix("train.loss", 1, 130)[:, 0]
    assert loss[129] > loss[79] > loss[29]


@pytest.mark.parametrize("kind", ["hang", "hang_silent", "hang_busy"])
def test_in_a_hang_no_step_ends_and_the_peers_wait_in_the_collective(kind: FaultKind) -> None:
    run = Run(replace(PLAIN, faults=(fault(kind),)))
    onset = run.labels[0].onset_at
    later = [m for m in run.of(Metrics) if m.at > onset + 2.0]
    assert max(step for step, _ in run.samples["ended_at"]) == 29
    assert {m.step for m in later} == {30}
    assert {m.phase for m in later if m.rank != CULPRIT} == {"collective"}
    assert {m.phase for m in later if m.rank == CULPRIT} == ({"train"} if kind == "hang_busy" else set())
    assert [m.rank for m in run.of(RankStalled)] == ([CULPRIT] if kind == "hang" else [])
    assert all(CULPRIT in m.ranks_alive for m in run.of(NodeHeartbeat) if m.node == "node0000")
    assert not run.of(RankExited)


def test_a_lost_rank_takes_its_peers_with_it_and_a_lost_node_says_nothing_more() -> None:
    run = Run(replace(PLAIN, faults=(fault("rank_lost"),)))
    exits = sorted(run.of(RankExited), key=lambda exited: exited.at)
    assert (exits[0].rank, exits[0].signal) == (CULPRIT, 9)
    assert [m.exit_code for m in exits[1:]] == [1] * 15
    assert {m.rank for m in run.of(Logs)} == set(range(16)) - {CULPRIT}
    assert [m.outcome for m in run.of(AttemptEnded)] == ["failed"] * 2
    last = {m.rank: m.at for m in sorted(run.of(Metrics), key=lambda sent: sent.at)}
    assert all(last[m.rank] < m.at for m in exits), "the dead say nothing"
    gone = Run(replace(PLAIN, faults=(fault("node_lost"),)))
    onset = gone.labels[0].onset_at
    after = [m for m in gone.messages if m.at > onset + 0.1]
    assert {m.node for m in after} == {"node0001"}
    assert {m.phase for m in after if isinstance(m, Metrics) and m.at > onset + 2.0} == {"collective"}


def test_a_gap_in_the_telemetry_is_one_ranks_and_the_job_goes_on() -> None:
    run = Run(replace(PLAIN, faults=(fault("telemetry_gap"),)))
    told = {step for step, rank in run.samples["ended_at"] if rank == CULPRIT}
    assert told.isdisjoint(range(31, 49))
    assert told >= set(range(1, 29)) | set(range(52, 61))
    assert all(CULPRIT in m.ranks_alive for m in run.of(NodeHeartbeat)[:-10] if m.node == "node0000")


def test_a_batch_ramp_is_labelled_as_no_fault() -> None:
    run = Run(replace(PLAIN, ramps=(BatchRamp(30, 1.25),)))
    assert change(run, "train.compute.own", ELSEWHERE) > 0.1
    assert run.samples["train.samples"][40, 0] == 10.0
    [label] = run.labels
    assert (label.fault_class, label.is_fault, label.onset_step) == ("regime_change", False, 30)


def test_labels_say_who_and_when() -> None:
    faults = tuple(
        fault(kind, onset=10 + 4 * n, length=3) for n, kind in enumerate(("straggler", "slow_node", "job_slow"))
    )
    run = Run(replace(PLAIN, faults=faults, clock_skew_seconds_max=0.0))
    rank, node, job = run.labels
    assert (rank.fault_class, rank.ranks, rank.node) == ("straggler", (CULPRIT,), "node0000")
    assert (node.fault_class, node.ranks, node.node) == ("straggler", (), "node0000")
    assert (job.fault_class, job.ranks, job.node) == ("job_slow", (), None)
    assert rank.onset_at == pytest.approx(run.samples["ended_at"][9, CULPRIT], abs=1e-3)
    assert rank.end_step == 13
    assert rank.end_at == pytest.approx(run.samples["ended_at"][12, CULPRIT], abs=1e-3)
    assert [m.fault for m in run.of(FaultInjected)] == ["straggler", "slow_node", "job_slow"]
    assert set(ANSWERS) == set(FAULT_KINDS)


def test_only_messages_are_made_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost by construction: a step of any size is a fixed number of array operations, and a flush one loop."""
    calls: Counter[str] = Counter()
    for name in ("_where", "_messages", "flush"):
        whole = getattr(telemetry.RankTelemetry, name)

        def counted(self: object, *args: object, _whole: object = whole, _name: str = name) -> object:
            calls[_name] += 1
            return _whole(self, *args)

        monkeypatch.setattr(telemetry.RankTelemetry, name, counted)
    counts = []
    for ranks in (16, 128):
        calls.clear()
        for _ in simulated_messages(replace(PLAIN, ranks=ranks, steps=5)):
            pass
        counts.append(dict(calls))
    assert max(counts[1].values()) < 25
    assert counts[0].keys() == counts[1].keys()


def test_the_attempt_is_announced_with_all_its_ranks() -> None:
    run = Run(replace(PLAIN, steps=3))
    [started] = run.of(AttemptStarted)
    assert started.world_size == 16
    assert {place.node for place in started.places} == {"node0000", "node0001"}
    assert run.messages[0] is started
