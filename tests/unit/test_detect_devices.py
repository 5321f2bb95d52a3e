"""Rules on what processes, hosts, GPUs and network cards measure: each speaks once, names its subject, and ends."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from detectors.channel import Ended, Told
from detectors.clues import Clue, Condition, Place
from detectors.devices.channel import DeviceChannel, DevicesConfig
from detectors.devices.series import Counter, Series
from detectors.roster import Roster
from ingest.events import DeviceMetrics, Metrics

GIB, MIB = 2.0**30, 2.0**20
Sample = Callable[[float], dict[str, float]]


class Bench:
    """A roster that trains since t = 0, and a channel that is fed and asked every two seconds."""

    def __init__(self, ranks: int = 4) -> None:
        self.channel = DeviceChannel(DevicesConfig())
        self.roster = Roster(attempt=1, started_at=0.0)
        self.count = 0
        for rank in range(ranks):
            message = Metrics(
                job="job", attempt=1, rank=rank, node=f"n{rank // 2}", sequence=0, at=0.0, phase="train", step=1,
                steps=(0,), ended_at=(0.0,),
            )  # fmt: skip
            self.roster.observe(message, None)

    def run(self, begin: float, end: float, told: dict[tuple[int, str, str], Sample]) -> list[Told]:
        """`told`: by rank, node and device, what is measured at a time."""
        said: list[Told] = []
        at = begin
        while at < end:
            for (rank, node, device), sample in told.items():
                self.count += 1
                columns = {name: (value,) for name, value in sample(at).items()}
                message = DeviceMetrics(
                    job="job", attempt=1, rank=rank, node=node, sequence=self.count, at=at, device=device,
                    sampled_at=(at,), columns=columns,
                )  # fmt: skip
                place = Place("metrics", 0, self.count)
                self.roster.observe(message, place)
                self.channel.observe(message, place, self.roster)
            said += self.channel.look(at + 0.25, self.roster)
            at += 2.0
            if self.count % 10 == 0:  # live, restarted and replayed agree
                state, arrays = self.channel.to_state()
                self.channel = DeviceChannel(DevicesConfig())
                self.channel.load_state(json.loads(json.dumps(state)), arrays)
        return said


def conditions(said: list[Told]) -> list[Condition]:
    return [thing for thing in said if isinstance(thing, Condition)]


def process(rank: int, usage: Callable[[float], float]) -> dict[tuple[int, str, str], Sample]:
    return {(rank, f"n{rank // 2}", "process"): lambda at: {"process.memory.usage": usage(at)}}


def host(node: str, usage: Callable[[float], float], limit: float) -> dict[tuple[int, str, str], Sample]:
    return {(-1, node, "host"): lambda at: {"system.memory.usage": usage(at), "system.memory.limit": limit}}


def noisy(at: float) -> float:
    return 0.8 * GIB + 8 * MIB * ((at * 7.3) % 3.0)


def test_memory_that_does_not_grow_says_nothing_and_neither_does_one_jump() -> None:
    told = process(0, noisy) | process(1, lambda at: noisy(at) + (3 * GIB if at > 100 else 0.0)) | process(2, noisy)
    assert Bench().run(0.0, 400.0, told | host("n0", lambda at: 15 * GIB + noisy(at), 20 * GIB)) == []


def test_growth_of_all_ranks_before_the_warm_up_is_over_says_nothing() -> None:
    told = {}
    for rank in range(4):
        told |= process(rank, lambda at: GIB + min(at, 28.0) * 60 * MIB)
    assert Bench().run(0.0, 200.0, told) == []


def test_one_rank_that_grows_while_its_peers_stand_is_named_within_a_minute_and_it_ends() -> None:
    bench = Bench()
    told = process(2, lambda at: GIB + max(0.0, min(at, 160.0) - 60.0) * 12 * MIB)
    told |= process(0, noisy) | process(1, noisy) | process(3, noisy)
    said = bench.run(0.0, 400.0, told)
    (condition,) = conditions(said)
    assert (condition.fault_class, condition.culprits[0].rank, condition.culprits[0].node) == ("memory_growth", 2, "n1")
    assert "grows by 12 MiB/s" in condition.summary
    assert condition.evidence[0].at - 60.0 <= 60.0
    assert [thing.key for thing in said if isinstance(thing, Ended)] == [condition.key]


def test_a_host_that_fills_up_says_in_how_many_minutes_and_whose_process_it_is() -> None:
    told = host("n1", lambda at: 15 * GIB + at * 5 * MIB, 20 * GIB)
    told |= process(3, lambda at: GIB + at * 5 * MIB) | process(2, noisy)
    found = conditions(Bench().run(0.0, 60.0, told))
    near = next(condition for condition in found if "host" in condition.summary)
    assert near.culprits[0].rank == 3
    assert "runs out of memory in about 16 min" in near.summary
    assert "15.2 GiB of 20.0 GiB" in near.summary


def test_a_host_that_somebody_elses_program_fills_is_told_of_only_when_that_lasts() -> None:
    def said(until: float) -> list[Told]:
        told = host("n1", lambda at: 15 * GIB + min(at, until) * 20 * MIB, 20 * GIB)
        return Bench().run(0.0, 200.0, told | process(2, noisy) | process(3, noisy))

    assert said(60.0) == []
    (condition,) = conditions(said(200.0))
    assert (condition.culprits[0].rank, condition.culprits[0].node) == (None, "n1")


def test_a_leak_of_hours_is_found_in_the_long_window_even_where_all_ranks_have_it() -> None:
    told = {}
    for rank in range(2):
        told |= process(rank, lambda at: 2 * GIB + at * 0.6 * MIB + 4 * MIB * ((at * 7.3) % 3.0))
    found = conditions(Bench(2).run(0.0, 1500.0, told))
    assert {condition.culprits[0].rank for condition in found} == {0, 1}
    assert all("leaks: 3" in condition.summary and "MiB/min" in condition.summary for condition in found)


def gpu(rank: int, sample: Sample) -> dict[tuple[int, str, str], Sample]:
    return {(rank, f"n{rank // 2}", f"gpu:{rank}"): sample}


def clocked(at: float, bits: int, low: float = 1.0e9) -> dict[str, float]:
    mask, clock = (float(bits), low) if at >= 60.0 else (1.0, 1.9e9)
    return {"hw.gpu.clock.throttle_reasons": mask, "hw.gpu.clock.sm": clock, "hw.gpu.utilization": 0.98}


@pytest.mark.parametrize(
    ("bits", "why"), [(0x40, "thermal slowdown"), (0x80, "power brake"), (0x8, "hardware slowdown")]
)
def test_a_gpu_whose_clock_falls_for_a_reason_that_is_trouble_is_throttled(bits: int, why: str) -> None:
    said = Bench().run(0.0, 90.0, gpu(1, lambda at: clocked(at, bits)))
    (condition,) = conditions(said)
    assert (condition.fault_class, condition.culprits[0].rank) == ("throttled", 1)
    assert why in condition.summary
    assert "1000 MHz instead of 1900 MHz" in condition.summary


@pytest.mark.parametrize("bits", [0x1, 0x2, 0x4, 0x20])
def test_idle_and_chosen_limits_are_no_trouble(bits: int) -> None:
    assert Bench().run(0.0, 90.0, gpu(1, lambda at: clocked(at, bits))) == []


def test_short_throttling_counts_when_it_comes_often_and_is_over_when_it_stops() -> None:
    def sample(at: float) -> dict[str, float]:
        bad = at < 400.0 and at % 60.0 < 2.0
        return {"hw.gpu.clock.throttle_reasons": 64.0 if bad else 0.0, "hw.gpu.clock.sm": 1.9e9}

    said = Bench().run(0.0, 700.0, gpu(0, sample))
    (condition,) = conditions(said)
    assert "6 times in 10 min" in condition.summary
    assert said[-1] == Ended(condition.key)


def test_an_uncorrectable_memory_error_is_told_and_is_a_clue_to_the_crash_that_follows() -> None:
    said = Bench().run(0.0, 20.0, gpu(3, lambda at: {"hw.gpu.ecc.uncorrected": 2.0 if at >= 10.0 else 0.0}))
    (condition,) = conditions(said)
    (clue,) = (thing for thing in said if isinstance(thing, Clue))
    assert (condition.fault_class, condition.advice, condition.severity) == ("gpu_ecc", "notify", "error")
    assert (clue.kind, clue.role, clue.fault_class, clue.rank, clue.alone) == ("device", "root", "gpu_ecc", 3, False)


def test_a_counter_that_stands_or_is_reset_has_gained_nothing() -> None:
    told = gpu(0, lambda at: {"hw.gpu.ecc.uncorrected": 7.0 if at < 10.0 else 3.0})
    assert Bench().run(0.0, 30.0, told) == []
    counter = Counter()
    assert [counter.add(at, value) for at, value in ((1.0, 5.0), (2.0, 7.0), (3.0, 1.0), (2.5, 9.0))] == [0, 2, 0, 0]


def test_rows_that_wait_to_be_remapped_are_a_warning() -> None:
    (condition,) = conditions(Bench().run(0.0, 20.0, gpu(0, lambda at: {"hw.gpu.remapped_rows.pending": 1.0})))
    assert (condition.fault_class, condition.severity) == ("warning", "warning")


def nic(sample: Sample) -> dict[tuple[int, str, str], Sample]:
    return {(-1, "n1", "ib:mlx5_0"): sample}


def test_a_link_that_goes_down_once_is_degraded_and_it_ends_after_ten_quiet_minutes() -> None:
    said = Bench().run(0.0, 700.0, nic(lambda at: {"hw.network.link_downed": 1.0 if at > 20.0 else 0.0}))
    (condition,) = conditions(said)
    assert (condition.fault_class, condition.culprits[0].node, condition.culprits[0].rank) == (
        "link_degraded",
        "n1",
        None,
    )
    assert said[-1] == Ended(condition.key)


def test_link_errors_count_by_their_rate() -> None:
    rare = nic(lambda at: {"hw.network.symbol_errors": at // 60.0})
    assert Bench().run(0.0, 400.0, rare) == []
    often = nic(lambda at: {"hw.network.receive_errors": at * 2.0})
    assert [condition.fault_class for condition in conditions(Bench().run(0.0, 200.0, often))] == ["link_degraded"]


def test_a_narrow_link_of_a_busy_gpu_is_degraded_and_that_of_an_idle_one_saves_power() -> None:
    def sample(busy: float) -> Sample:
        return lambda at: {"hw.gpu.pcie.width": 8.0, "hw.gpu.pcie.width_max": 16.0, "hw.gpu.utilization": busy}

    (condition,) = conditions(Bench().run(0.0, 20.0, gpu(0, sample(0.9))))
    assert "lanes 8 of 16" in condition.summary
    assert Bench().run(0.0, 20.0, gpu(0, sample(0.0))) == []


def test_a_disk_that_is_nearly_full_is_a_warning_of_its_node() -> None:
    told = {(-1, "n0", "host"): lambda at: {"system.disk.free": 10 * GIB - at * GIB}}
    (condition,) = conditions(Bench().run(0.0, 20.0, told))
    assert (condition.fault_class, condition.culprits[0].node) == ("warning", "n0")


def test_a_series_is_thinned_and_keeps_its_newest() -> None:
    series = Series(every_seconds=2.0, points_max=5)
    for number in range(100):
        series.add(number * 0.5, float(number))
    assert len(series.at) == 5
    assert series.newest == 99.0
    slope = series.slope()
    assert slope is not None
    assert slope.per_second == pytest.approx(2.0)
    assert slope.rising == 1.0
