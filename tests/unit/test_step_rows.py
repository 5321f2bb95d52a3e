"""Rows of a rank: which number a step gets, when a row is handed on, and what bounds there are."""

from __future__ import annotations

import pytest

from ingest.clock import ManualClock
from ingest.step_rows import (
    CLOSED_ROWS_MAX,
    REST_SECONDS,
    SCALARS_MAX,
    UNREADY_ROWS_MAX,
    FinishedRow,
    StepRows,
)

ALL = 1_000_000


class Slow:
    """A deferred number that is ready when told."""

    def __init__(self) -> None:
        self.there = False

    def ready(self) -> bool:
        return self.there

    def value(self) -> float:
        return 7.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000.0)


@pytest.fixture
def rows(clock: ManualClock) -> StepRows:
    rows = StepRows(clock)
    rows.expect_optimizer(True)
    return rows


def one_step(rows: StepRows, log_step: int | None = None, **scalars: float) -> None:
    rows.begin()
    rows.put({"train.step.duration": 0.1})
    rows.finish()
    if scalars:
        rows.log(log_step, scalars)


def numbers(taken: list[FinishedRow]) -> list[int]:
    return [row.step for row in taken]


def test_without_log_calls_steps_are_counted_from_one(rows: StepRows) -> None:
    assert rows.step == -1
    for _ in range(3):
        one_step(rows)
    rows.close()
    assert numbers(rows.take(ALL)) == [1, 2, 3]
    assert rows.step == 3


def test_a_resumed_rank_counts_on_from_its_checkpoint(clock: ManualClock) -> None:
    rows = StepRows(clock, first_step=41)
    rows.begin()
    assert rows.step == 41


def test_what_is_logged_after_the_optimizer_belongs_to_the_finished_step_and_numbers_it(
    rows: StepRows,
) -> None:
    for step in (0, 1, 2):
        one_step(rows, step, loss=float(step))
    rows.begin()
    taken = rows.take(ALL)
    assert numbers(taken) == [0, 1, 2]
    assert [row.samples["loss"] for row in taken] == [0.0, 1.0, 2.0]
    assert all("train.step.duration" in row.samples for row in taken)
    assert rows.step == 3


def test_what_is_logged_before_the_forward_belongs_to_the_step_that_follows(rows: StepRows) -> None:
    for step in (10, 11):
        rows.log(step, {"rate": float(step)})
        one_step(rows)
    rows.close()
    taken = rows.take(ALL)
    assert numbers(taken) == [10, 11]
    assert all(set(row.samples) == {"rate", "train.step.duration"} for row in taken)


def test_a_loss_logged_every_third_step_keeps_the_numbers_right(rows: StepRows) -> None:
    for step in range(1, 8):
        one_step(rows, step, **({"loss": 1.0} if step % 3 == 0 else {}))
    rows.close()
    assert numbers(rows.take(ALL)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_declared_step_numbers_the_row_that_begins(rows: StepRows) -> None:
    for step in (20, 21, 22):
        rows.begin()  # the data loader is first
        rows.declare(step)
        one_step(rows)
    rows.close()
    assert numbers(rows.take(ALL)) == [20, 21, 22]


def test_several_micro_batches_are_one_step(rows: StepRows) -> None:
    for _ in range(2):
        for _ in range(4):
            rows.begin()
        rows.put({"x": 1.0})
        rows.finish()
    rows.close()
    assert numbers(rows.take(ALL)) == [1, 2]


def test_log_calls_alone_make_rows_and_merge_by_step(clock: ManualClock) -> None:
    rows = StepRows(clock)
    rows.log(5, {"loss": 1.0})
    rows.log(5, {"accuracy": 0.5})
    rows.log(6, {"loss": 2.0})
    assert rows.take(ALL) == [FinishedRow(5, 1_000.0, {"loss": 1.0, "accuracy": 0.5})]


def test_a_finished_row_that_rests_is_handed_on_and_later_scalars_follow_under_its_number(
    rows: StepRows, clock: ManualClock
) -> None:
    one_step(rows, 9, loss=1.0)
    assert rows.take(ALL) == []
    clock.advance(REST_SECONDS)
    assert numbers(rows.take(ALL)) == [9]
    rows.log(9, {"accuracy": 0.5})
    rows.begin()
    (late,) = rows.take(ALL)
    assert (late.step, late.samples) == (9, {"accuracy": 0.5})


def test_an_unfinished_row_does_not_go_early(rows: StepRows, clock: ManualClock) -> None:
    rows.begin()
    rows.log(1, {"loss": 1.0})
    clock.advance(100.0)
    assert rows.take(ALL) == []


def test_a_row_waits_for_its_device_and_those_behind_it_wait_too(rows: StepRows) -> None:
    slow = Slow()
    rows.log(1, {"loss": slow})
    rows.finish()
    one_step(rows, 2, loss=2.0)
    rows.close()
    assert rows.take(ALL) == []
    slow.there = True
    assert [row.samples["loss"] for row in rows.take(ALL)] == [7.0, 2.0]


def test_a_device_that_never_answers_costs_only_its_samples(rows: StepRows) -> None:
    rows.log(1, {"loss": Slow(), "rate": 0.1})
    rows.finish()
    for step in range(2, UNREADY_ROWS_MAX + 3):
        one_step(rows, step, loss=2.0)
    rows.close()
    first, second, *_ = rows.take(ALL)
    assert first.samples == {"loss": None, "rate": 0.1}
    assert second.samples["loss"] == 2.0


def test_a_row_holds_a_bounded_number_of_scalars(rows: StepRows) -> None:
    rows.log(1, {f"name_{index}": 1.0 for index in range(SCALARS_MAX + 50)})
    rows.log(1, {"name_0": 2.0})
    rows.finish()
    rows.close()
    (row,) = rows.take(ALL)
    assert len(row.samples) == SCALARS_MAX
    assert row.samples["name_0"] == 2.0


def test_rows_that_nobody_takes_push_out_the_oldest_and_are_counted(rows: StepRows) -> None:
    for step in range(CLOSED_ROWS_MAX + 3):
        one_step(rows, step, loss=1.0)
    rows.close()
    assert rows.dropped == 3
    assert rows.take(1)[0].step == 3


def test_a_step_of_which_nothing_is_known_makes_no_row(rows: StepRows) -> None:
    rows.begin()
    rows.close()
    assert rows.take(ALL) == []


def test_a_signal_handler_may_log_in_the_middle_of_a_log(rows: StepRows) -> None:
    class Interrupting(dict[str, float]):
        def items(self):  # type: ignore[no-untyped-def]
            rows.log(1, {"from_handler": 1.0})
            return super().items()

    rows.log(1, Interrupting(loss=2.0))
    rows.finish()
    rows.close()
    assert rows.take(ALL)[0].samples == {"from_handler": 1.0, "loss": 2.0}
