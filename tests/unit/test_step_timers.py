"""From hook events to the metrics of a step, on a thread whose counters a test drives."""

from __future__ import annotations

from typing import Any

import pytest

from ingest.clock import ManualClock
from ingest.run_queue import Reading
from ingest.step_rows import StepRows
from ingest.step_timers import Mark, StepTimers


class Thread:
    """A training thread: `run` advances its counters."""

    def __init__(self, *, keeps_delay: bool = True, events: bool = False) -> None:
        self.wall = self.cpu = self.delay = 0.0
        self.keeps_delay = keeps_delay
        self.events: list[FakeEvent] | None = [] if events else None

    def run(self, cpu: float = 0.0, *, delay: float = 0.0, blocked: float = 0.0) -> None:
        self.cpu += cpu
        self.delay += delay
        self.wall += cpu + delay + blocked

    def mark(self) -> Mark:
        reading = Reading(self.wall, self.cpu, self.delay if self.keeps_delay else None)
        if self.events is None:
            return Mark(reading)
        self.events.append(FakeEvent(self.wall))
        return Mark(reading, self.events[-1])


class FakeEvent:
    """A device event that has passed when told."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end_event: Any) -> float:
        assert self.passed
        assert end_event.passed
        return float((end_event.at - self.at) * 1e3)


def timers_on(
    thread: Thread, *, local: bool = True, optimizer: bool = True, phases: list[str] | None = None
) -> tuple[StepTimers, StepRows]:
    rows = StepRows(ManualClock(0.0))
    seen = phases if phases is not None else []
    return StepTimers(rows, thread.mark, seen.append, compute_is_local=local, has_optimizer=optimizer), rows


def distributed_step(timers: StepTimers, thread: Thread) -> None:
    """data 1 s, forward 2 s, backward 4 s with 1 s in the run queue, waiting 8 s, optimizer 0.5 s."""
    timers.data_begin()
    thread.run(blocked=1.0)
    timers.data_end()
    timers.forward_begin()
    thread.run(2.0)
    timers.forward_end()
    thread.run(3.0, delay=1.0)
    timers.bucket_ready(last=True, norm=5.0)
    thread.run(blocked=8.0)
    timers.bucket_reduced()
    timers.optimizer_begin()
    thread.run(0.5)
    timers.optimizer_end()


def test_the_spans_of_a_distributed_step() -> None:
    thread, phases = Thread(), list[str]()
    timers, rows = timers_on(thread, phases=phases)
    distributed_step(timers, thread)
    distributed_step(timers, thread)
    rows.close()
    first, second = rows.take(10)
    assert second.samples == {
        "train.step.duration": 15.5,
        "train.data.duration": 1.0,
        "train.forward.duration": 2.0,
        "train.backward.duration": 4.0,
        "train.collective.wait": 8.0,
        "train.optimizer.duration": 0.5,
        "train.gradient.local_norm": 5.0,
        "train.compute.duration": 6.0,
        "train.compute.own": 5.0,
        "train.compute.cpu": 5.0,
        "train.run_queue.delay": 1.0,
    }
    assert set(second.samples) - set(first.samples) == {"train.step.duration"}
    assert phases == ["train", "collective", "train"] * 2


def test_with_several_buckets_waiting_begins_at_the_last_and_ends_when_all_are_reduced() -> None:
    thread, phases = Thread(), list[str]()
    timers, rows = timers_on(thread, phases=phases)
    timers.forward_begin()
    timers.forward_end()
    thread.run(2.0)
    timers.bucket_ready(last=False)
    timers.bucket_reduced()  # overlaps the rest of backward
    timers.bucket_ready(last=False)
    thread.run(3.0)
    timers.bucket_ready(last=True)
    thread.run(blocked=1.0)
    timers.bucket_reduced()
    assert phases[-1] == "collective"
    thread.run(blocked=1.0)
    timers.bucket_reduced()
    assert phases[-1] == "train"
    timers.optimizer_begin()
    timers.optimizer_end()
    rows.close()
    (row,) = rows.take(10)
    assert row.samples["train.compute.duration"] == 5.0
    assert row.samples["train.collective.wait"] == 2.0


def test_micro_batches_add_up_and_their_data_is_not_compute() -> None:
    thread = Thread()
    timers, rows = timers_on(thread)
    for last in (False, True):
        timers.data_begin()
        thread.run(blocked=10.0)
        timers.data_end()
        timers.forward_begin()
        thread.run(1.0)
        timers.forward_end()
        thread.run(2.0)
        if last:
            timers.bucket_ready(last=True)
            timers.bucket_reduced()
    timers.optimizer_begin()
    timers.optimizer_end()
    rows.close()
    (row,) = rows.take(10)
    assert row.samples["train.data.duration"] == 20.0
    assert row.samples["train.forward.duration"] == 2.0
    assert row.samples["train.backward.duration"] == 4.0
    assert row.samples["train.compute.duration"] == 6.0


def test_without_a_communication_hook_backward_ends_at_the_optimizer() -> None:
    thread = Thread()
    timers, rows = timers_on(thread)
    timers.forward_begin()
    thread.run(1.0)
    timers.forward_end()
    thread.run(2.0)
    timers.optimizer_begin()
    timers.optimizer_end()
    rows.close()
    (row,) = rows.take(10)
    assert row.samples["train.backward.duration"] == 2.0
    assert "train.collective.wait" not in row.samples


def test_compute_that_may_hide_a_collective_is_not_reported() -> None:
    thread = Thread()
    timers, rows = timers_on(thread, local=False)
    timers.forward_begin()
    timers.forward_end()
    timers.optimizer_begin()
    timers.optimizer_end()
    rows.close()
    (row,) = rows.take(10)
    assert not [name for name in row.samples if name.startswith("train.compute.")]
    assert "train.forward.duration" in row.samples


def test_without_a_run_queue_own_time_is_absent_rather_than_wrong() -> None:
    thread = Thread(keeps_delay=False)
    timers, rows = timers_on(thread)
    distributed_step(timers, thread)
    rows.close()
    (row,) = rows.take(10)
    assert "train.compute.own" not in row.samples
    assert "train.run_queue.delay" not in row.samples
    assert row.samples["train.compute.duration"] == 6.0


@pytest.mark.parametrize("has_loader", [True, False])
def test_without_an_optimizer_a_step_ends_where_the_next_begins(has_loader: bool) -> None:
    thread = Thread()
    timers, rows = timers_on(thread, optimizer=False)
    for _ in range(3):
        if has_loader:
            timers.data_begin()
            timers.data_end()
        timers.forward_begin()
        thread.run(1.0)
        timers.forward_end()
        thread.run(2.0)
    rows.close()
    taken = rows.take(10)
    assert [row.step for row in taken] == [1, 2]
    assert [row.samples["train.compute.duration"] for row in taken] == [3.0, 3.0]


def test_on_a_device_its_own_time_line_counts_once_it_has_passed_the_events() -> None:
    thread = Thread(events=True)
    timers, rows = timers_on(thread)
    distributed_step(timers, thread)
    rows.close()
    assert rows.take(10) == []
    assert thread.events is not None
    for event in thread.events:
        event.passed = True
    (row,) = rows.take(10)
    assert row.samples["train.forward.duration"] == 2.0
    assert row.samples["train.compute.duration"] == 6.0
    assert row.samples["train.collective.wait"] == 8.0
    assert "train.compute.own" not in row.samples
