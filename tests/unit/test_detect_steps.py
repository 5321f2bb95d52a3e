"""The step matrix: steps close in order, late samples revise them, missing ones stay missing."""

from __future__ import annotations

import numpy as np

from detectors.clues import Place
from detectors.ranks.channel import RankChannel
from detectors.ranks.finding import Subject, describe
from detectors.steps import StepMatrix, StepsConfig
from ingest.events import Metrics

OWN = "train.compute.own"


def told(
    rank: int, steps: tuple[int, ...], value: float, at: float, sequence: int = 0, phase: str = "train"
) -> Metrics:
    return Metrics(
        job="j", attempt=1, rank=rank, node="n", sequence=sequence, at=at, phase=phase,
        step=steps[-1] + 1,
        steps=steps, ended_at=tuple(at for _ in steps), columns={OWN: tuple(value for _ in steps)},
    )  # fmt: skip


def test_a_step_closes_when_all_live_ranks_have_told_of_it_or_have_been_waited_for() -> None:
    matrix = StepMatrix([0, 1, 2])
    for rank in (0, 1):
        matrix.add(told(rank, (0, 1), 1.0, 10.0), None)
    assert matrix.close(10.5, {0, 1, 2}) == []
    assert matrix.close(10.5, {0, 1}) == [0, 1]
    matrix.add(told(0, (2,), 1.0, 11.0), None)
    assert matrix.close(13.9, {0, 1, 2}) == []
    assert matrix.close(14.0, {0, 1, 2}) == [2]
    values = matrix.values(2, OWN)
    assert values is not None
    assert np.isnan(values[1:]).all()


def test_a_step_nobody_told_of_is_stepped_over_and_a_leap_costs_nothing() -> None:
    matrix = StepMatrix([0])
    matrix.add(told(0, (0,), 1.0, 10.0), None)
    assert matrix.close(10.0, {0}) == [0]
    matrix.add(told(0, (10**12,), 1.0, 11.0), None)
    assert matrix.close(20.0, {0}) == [10**12]


def test_a_late_sample_changes_a_closed_step_and_says_so_once() -> None:
    matrix = StepMatrix([0, 1])
    matrix.add(told(0, (0,), 1.0, 10.0), None)
    assert matrix.close(14.0, {0, 1}) == [0]
    matrix.add(told(1, (0,), 2.0, 10.1, sequence=7), Place("metrics", 0, 70))
    assert matrix.take_revised() == [0]
    assert matrix.take_revised() == []
    assert matrix.values(0, OWN).tolist() == [1.0, 2.0]
    assert matrix.report(0, 1) == (10.1, 7, 0, 70)


def test_the_ring_forgets_old_steps_and_memory_is_bounded_by_bytes() -> None:
    matrix = StepMatrix([0], StepsConfig(steps_max=64))
    for step in range(100):
        matrix.add(told(0, (step,), float(step), 10.0 + step), None)
    assert matrix.values(10, OWN) is None
    assert matrix.values(99, OWN) == 99.0
    big = StepMatrix(list(range(4096)), StepsConfig(matrix_bytes_max=16 * 2**20))
    assert big.to_state()[1]["values"].nbytes <= 16 * 2**20


def test_steps_marked_as_checkpoint_or_evaluation_are_not_scored() -> None:
    matrix = StepMatrix([0, 1])
    channel = RankChannel([0, 1], ["n", "n"])
    for step in range(60):
        for rank in (0, 1):
            phase = "checkpoint" if step >= 39 and rank == 0 else "train"
            matrix.add(told(rank, (step,), 1.0 if step < 40 or rank else 5.0, 10.0 + step, phase=phase), None)
        matrix.close(10.0 + step, {0, 1})
        assert channel.score(matrix, step) == []


def test_the_first_five_steps_of_an_attempt_are_not_learned_from() -> None:
    matrix, channel = StepMatrix([0, 1]), RankChannel([0, 1], ["n", "n"])
    for step in range(90, 100):
        for rank in (0, 1):
            matrix.add(told(rank, (step,), 9.0 if step < 95 else 1.0, 10.0 + step), None)
        for closed in matrix.close(10.0 + step, {0, 1}):
            assert channel.score(matrix, closed) == []
    assert channel.learned == 5
    assert channel.base(0).tolist() == [1.0, 1.0]


def test_a_late_sample_in_the_window_can_take_the_ground_from_under_a_score() -> None:
    matrix = StepMatrix([0, 1, 2])
    channel = RankChannel([0, 1, 2], ["a", "b", "c"])
    found = []
    for step in range(44):
        for rank in (0, 1, 2):
            slow = 2.0 if step >= 40 and rank == 0 else 1.0
            matrix.add(told(rank, (step,), slow, 10.0 + step), None)
        matrix.close(10.0 + step, {0, 1, 2})
        found += channel.score(matrix, step)
    assert found == []  # four of eight
    matrix.add(told(0, (39,), 2.0, 49.5), None)
    for step in matrix.take_revised():
        found += channel.rescore(matrix, step)
    assert [(finding.kind, finding.subject, finding.steps) for finding in found] == [
        ("straggler", "0", (39, 40, 41, 42, 43))
    ]


def test_of_two_messages_about_a_step_the_later_one_counts_whichever_comes_first() -> None:
    matrix = StepMatrix([0])
    matrix.add(told(0, (0,), 2.0, 10.2, sequence=5), None)
    matrix.add(told(0, (0,), 1.0, 10.0, sequence=4), None)
    assert matrix.values(0, OWN).tolist() == [2.0]
    assert matrix.report(0, 0)[1] == 5


def test_a_late_message_that_changes_nothing_revises_nothing() -> None:
    matrix = StepMatrix([0, 1])
    matrix.add(told(0, (0,), 1.0, 10.0), None)
    assert matrix.close(14.0, {0, 1}) == [0]
    matrix.add(told(0, (0,), 1.0, 10.0), None)
    assert matrix.take_revised() == []


def test_a_number_beyond_what_the_matrix_holds_is_no_number() -> None:
    matrix = StepMatrix([0])
    matrix.add(told(0, (0,), 1e300, 10.0), None)
    assert np.isnan(matrix.values(0, OWN)).all()
    assert not matrix.told(0).any()
    assert matrix.ended_at(0) == 10.0


def trained(matrix: StepMatrix, ranks: tuple[int, ...], steps: range, after: int = 0) -> None:
    """Each step in a message of its own, one second each; `after`: what the sequences go on from."""
    for index, step in enumerate(steps):
        for rank in ranks:
            matrix.add(told(rank, (step,), 1.0, 10.0 + after + index, sequence=after + index), None)


def test_a_wrong_step_of_one_rank_carries_nobody_away() -> None:
    matrix = StepMatrix([0, 1, 2])
    trained(matrix, (0, 1, 2), range(3))
    assert matrix.close(13.0, {0, 1, 2}) == [0, 1, 2]
    matrix.add(told(2, (10**12,), 1.0, 13.0, sequence=3), None)
    assert matrix.close(30.0, {0, 1, 2}) == []
    trained(matrix, (0, 1, 2), range(3, 6), after=20)
    assert matrix.close(33.0, {0, 1, 2}) == [3, 4, 5]
    assert not matrix.astray


def test_where_most_ranks_have_leapt_is_where_the_job_is() -> None:
    matrix = StepMatrix([0, 1, 2])
    trained(matrix, (0, 1, 2), range(3))
    assert matrix.close(13.0, {0, 1, 2}) == [0, 1, 2]
    trained(matrix, (0, 1, 2), range(10**12, 10**12 + 3), after=3)
    assert matrix.close(30.0, {0, 1, 2}) == [10**12, 10**12 + 1, 10**12 + 2]
    assert not matrix.astray


def test_a_job_is_astray_when_most_of_its_ranks_have_gone_back_and_not_for_a_number_logged_late() -> None:
    matrix = StepMatrix([0, 1, 2])
    trained(matrix, (0, 1, 2), range(10))
    trained(matrix, (0, 1, 2), range(8, 9), after=10)  # one more word about an older step
    assert not matrix.astray
    trained(matrix, (0, 1, 2), range(10, 12), after=11)
    trained(matrix, (0,), range(3), after=13)
    assert not matrix.astray
    trained(matrix, (1,), range(3), after=13)
    assert matrix.astray
    state, arrays = matrix.to_state()
    assert StepMatrix.from_state(state, arrays).astray


def test_a_finding_begins_with_a_step_that_the_matrix_still_knows() -> None:
    matrix = StepMatrix([0, 1], StepsConfig(steps_max=64))
    trained(matrix, (0, 1), range(110))
    subject = Subject(0, "n", np.array([0]), np.array([1]))
    mask = np.ones(60, dtype=np.bool_)
    found = describe(matrix, "straggler", OWN, subject, list(range(40, 100)), mask, waits=False)
    assert found.steps == tuple(range(46, 100))
