"""Faults that a rank does to itself: asked for, checked, armed, fired once."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections import namedtuple
from typing import Any

import pytest

from ingest.clock import ManualClock
from ingest.injection import (
    ARMED_FAULTS_MAX,
    Injector,
    grow_memory,
    hold_the_interpreter,
    made_nan,
    raise_injected,
)
from ingest.rank_socket import Inject


class Number:
    """As much of a tensor as is needed here."""

    def __init__(self, value: float, *, floating: bool = True) -> None:
        self.value = value
        self.floating = floating

    def is_floating_point(self) -> bool:
        return self.floating

    def __mul__(self, factor: float) -> Number:
        return Number(self.value * factor)


class TickingClock(ManualClock):
    """One second passes between two looks."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return float(self.looks)


def request(injector: Injector, **fields: Any) -> None:
    injector.request(json.dumps(fields).encode())


def test_a_fault_fires_in_its_step_and_only_once() -> None:
    fired: list[tuple[str, int]] = []
    injector = Injector(
        ManualClock(0.0), allowed=True, on_fire=lambda request, step: fired.append((request.fault, step))
    )
    request(injector, fault="nan", at_step=7)
    assert injector.due(6) is None
    due = injector.due(7)
    assert due is not None
    assert due.fault == "nan"
    assert injector.due(7) is None
    assert injector.due(8) is None
    assert fired == [("nan", 7)]


def test_without_a_step_the_next_one_is_meant_and_a_step_that_has_passed_is_the_next_one() -> None:
    injector = Injector(ManualClock(0.0), allowed=True)
    request(injector, fault="raise")
    assert injector.due(0) == Inject(fault="raise")
    request(injector, fault="nan", at_step=3)
    assert injector.due(90) is not None


def test_two_faults_of_one_step_fire_in_steps_that_follow_each_other() -> None:
    injector = Injector(ManualClock(0.0), allowed=True)
    request(injector, fault="slow", at_step=5)
    request(injector, fault="nan", at_step=5)
    assert [due.fault for step in (5, 6) if (due := injector.due(step))] == ["slow", "nan"]


def test_slowness_repeats_the_forward_by_its_factor_until_its_time_is_over() -> None:
    clock = ManualClock(0.0)
    injector = Injector(clock, allowed=True)
    assert injector.extra_forwards() == 0
    request(injector, fault="slow", factor=2.5, seconds=8.0)
    injector.due(1)
    assert [injector.extra_forwards() for _ in range(4)] == [1, 2, 1, 2]
    clock.advance(8.0)
    assert injector.extra_forwards() == 0


def test_a_backward_is_worth_two_forwards_and_lasts_as_long_as_was_asked() -> None:
    clock = ManualClock(0.0)
    injector = Injector(clock, allowed=True)
    request(injector, fault="slow_backward", factor=1.75, seconds=4.0)
    injector.due(1)
    assert [injector.extra_backwards() for _ in range(4)] == [1, 2, 1, 2]
    assert injector.extra_forwards() == 0
    clock.advance(4.0)
    assert injector.extra_backwards() == 0


@pytest.mark.parametrize(("fault", "read"), [("sleep", "forward_sleep_seconds"), ("slow_data", "data_sleep_seconds")])
def test_a_delay_is_told_until_its_time_is_over(fault: str, read: str) -> None:
    clock = ManualClock(0.0)
    injector = Injector(clock, allowed=True)
    assert getattr(injector, read) == 0.0
    request(injector, fault=fault, delay_seconds=0.25, seconds=3.0)
    injector.due(1)
    assert [getattr(injector, name) for name in ("forward_sleep_seconds", "data_sleep_seconds")].count(0.25) == 1
    assert getattr(injector, read) == 0.25
    clock.advance(3.0)
    assert getattr(injector, read) == 0.0


def test_gradients_are_spoilt_in_all_parts_of_one_step_only() -> None:
    injector = Injector(ManualClock(0.0), allowed=True)
    request(injector, fault="scale_gradient", factor=1e6)
    assert injector.take_gradient_factor(last=True) is None
    injector.due(1)
    assert [injector.take_gradient_factor(last=last) for last in (False, True, True)] == [1e6, 1e6, None]
    request(injector, fault="nan_gradient")
    injector.due(2)
    assert math.isnan(injector.take_gradient_factor(last=True) or 0.0)


def test_a_memory_hog_grows_at_its_pace_up_to_its_bound_and_keeps_what_it_has() -> None:
    clock = ManualClock(0.0)
    kept: list[bytes] = []
    grow_memory(Inject(fault="memory_hog", megabytes_per_second=10.0, megabytes_max=2.5, seconds=60.0), clock, kept)
    assert [len(part) for part in kept] == [1_000_000, 1_000_000, 500_000]
    assert clock.monotonic() == pytest.approx(0.3)
    grow_memory(Inject(fault="memory_hog", megabytes_per_second=10.0, megabytes_max=100.0, seconds=0.15), clock, kept)
    assert sum(len(part) for part in kept) == 4_500_000


def test_a_thread_that_holds_the_interpreter_lets_it_go_after_its_time() -> None:
    clock = TickingClock()
    hold_the_interpreter(3.0, clock)
    assert clock.looks == 4


def test_without_permission_every_fault_is_refused_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    injector = Injector(ManualClock(0.0), allowed=False)
    request(injector, fault="nan")
    assert injector.due(1_000) is None
    assert "TRANSOM_ALLOW_INJECT=1" in caplog.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"not json", "malformed"),
        (b'{"fault": "melt"}', "'melt' is not one of slow, slow_backward, sleep"),
        (b'{"fault": "slow", "factor": 0.5}', "the factor is 0.5"),
        (b'{"fault": "slow", "factor": 1e9}', "the factor is 1000000000.0"),
        (b'{"fault": "slow", "seconds": 0}', "the seconds are 0.0"),
        (b'{"fault": "scale_gradient", "factor": 1e13}', "the factor is 10000000000000.0"),
        (b'{"fault": "slow_data", "delay_seconds": 61}', "the delay_seconds are 61.0"),
        (b'{"fault": "memory_hog", "megabytes_per_second": 0}', "the megabytes_per_second are 0.0"),
        (b'{"fault": "nan", "at_step": -2}', "the step is -2"),
        (b'{"fault": "nan", "at_step": "x"}', "at_step"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(body: bytes, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    injector = Injector(ManualClock(0.0), allowed=True)
    injector.request(body)
    assert injector.due(1_000) is None
    assert reason in caplog.text


def test_only_so_many_faults_wait_for_their_step(caplog: pytest.LogCaptureFixture) -> None:
    injector = Injector(ManualClock(0.0), allowed=True)
    for step in range(ARMED_FAULTS_MAX + 1):
        request(injector, fault="nan", at_step=step)
    assert "waiting for their step" in caplog.text
    assert sum(injector.due(1_000) is not None for _ in range(ARMED_FAULTS_MAX + 1)) == ARMED_FAULTS_MAX


def test_every_floating_tensor_of_an_output_becomes_nan_and_its_shape_stays() -> None:
    Pair = namedtuple("Pair", ["scores", "mask"])
    output = {
        "loss": Number(1.0),
        "ids": Number(3.0, floating=False),
        "layers": [Number(2.0), (Number(4.0), None, "text")],
        "pair": Pair(Number(1.0), Number(1.0, floating=False)),
    }
    spoilt = made_nan(output)
    assert type(spoilt) is dict
    assert math.isnan(spoilt["loss"].value)
    assert spoilt["ids"].value == 3.0
    assert math.isnan(spoilt["layers"][0].value)
    assert math.isnan(spoilt["layers"][1][0].value)
    assert spoilt["layers"][1][1:] == (None, "text")
    assert type(spoilt["pair"]) is Pair
    assert math.isnan(spoilt["pair"].scores.value)
    assert spoilt["pair"].mask.value == 1.0
    assert output["loss"].value == 1.0  # type: ignore[attr-defined]


def test_the_exception_says_that_it_was_injected() -> None:
    with pytest.raises(RuntimeError, match=r"injected by transom inject: .* step 9"):
        raise_injected(9)


def test_a_lost_gpu_prints_the_drivers_line_and_dies_by_sigabrt() -> None:
    program = (
        "from ingest.clock import SystemClock\n"
        "from ingest.injection import Injector\n"
        "print('said before', end='')\n"
        "Injector(SystemClock(), allowed=True, pci_address='0000:3b:00').crash_like_a_lost_gpu()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == -signal.SIGABRT
    assert result.stdout == "said before"
    assert result.stderr.startswith("NVRM: Xid (PCI:0000:3b:00): 79, pid=")
    assert result.stderr.endswith("name=python3, GPU has fallen off the bus.\n")
