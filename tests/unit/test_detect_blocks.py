"""A block of steps says what its messages say: the same verdicts, the same state, in whatever shape the job is."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job_detector import JobDetector
from detectors.step_block import StepBlock
from ingest.events import AttemptStarted, Message, Metrics, RankExited, RankPlace, RankStalled

CONFIG = DetectorConfig(ensemble=EnsembleConfig(on=False))
NAMES = ("train.compute.duration", "train.step.duration", "train.loss", "train.something")
BEGINS_AT = 1_000.0


def started(attempt: int, ranks: int, at: float) -> AttemptStarted:
    places = tuple(RankPlace(rank=rank, local_rank=rank % 4, node=f"n{rank // 4}") for rank in range(ranks))
    return AttemptStarted(
        job="job", attempt=attempt, rank=-1, node="n0", sequence=0, at=at, world_size=ranks, places=places
    )


def block(attempt: int, step: int, at: float, ranks: list[int], sequence: int, dice: np.random.Generator) -> StepBlock:
    values = dice.normal(0.4, 0.004, (len(ranks), len(NAMES)))
    values[:, 1] = 0.5
    values[:, 2] = 2.0 - 0.001 * step
    if attempt == 1 and 100 <= step < 140 and 5 in ranks:
        values[ranks.index(5), 0] *= 1.8
    if step % 7 == 0:
        values[0, 3] = np.nan  # not every rank has every sample
    if step == 11:
        values[1, 3] = 1e300  # no single holds it
    return StepBlock(
        job="job", attempt=attempt, step=step, at=at, ranks=np.array(ranks),
        nodes=tuple(f"n{rank // 4}" for rank in ranks), sequence=np.full(len(ranks), sequence),
        ended_at=np.full(len(ranks), at) - 0.01 * np.arange(len(ranks)), names=NAMES, values=values,
    )  # fmt: skip


def a_run(ranks: int, seed: int) -> Iterator[Message | StepBlock]:
    """Two attempts; a slow rank, a stopped one, steps that ranks tell alone or twice, a leap back, an end."""
    dice = np.random.default_rng(seed)
    everybody = list(range(ranks))
    at, sequence = BEGINS_AT, 0
    yield started(1, ranks, at)
    for step in range(220):
        at, sequence = at + 0.5, sequence + 1
        if step == 60:
            yield RankStalled(job="job", attempt=1, rank=2, node="n0", sequence=0, at=at, state="T", since=at)
        if step == 66:
            yield RankStalled(job="job", attempt=1, rank=2, node="n0", sequence=1, at=at, state="S", since=at)
        told = block(1, step, at, everybody, sequence, dice)
        if step % 23 == 5:  # half of them, then the others
            yield block(1, step, at, everybody[:3], sequence, dice)
            yield block(1, step, at, everybody[3:], sequence, dice)
        elif step % 31 == 8:
            yield from told.messages()
        else:
            yield told
        if step in (40, 41):  # somebody tells of an old step again
            yield block(1, step - 3, at, everybody, sequence + 1_000, dice)
    at += 200.0  # everybody is silent for long
    yield block(1, 230, at, everybody, sequence + 2_000, dice)
    yield RankExited(job="job", attempt=1, rank=3, node="n0", sequence=0, at=at + 1.0, signal=9)
    at += 30.0
    yield started(2, ranks, at)
    for step in [*range(150, 260), *range(20, 60)]:
        at, sequence = at + 0.5, sequence + 1
        yield block(2, step, at, everybody, sequence, dice)


def messages_of(told: Message | StepBlock) -> list[Message]:
    return list(told.messages()) if isinstance(told, StepBlock) else [told]


@pytest.mark.parametrize(("ranks", "seed"), [(4, 1), (16, 2)])
def test_blocks_say_what_their_messages_say(ranks: int, seed: int) -> None:
    one, many = JobDetector("job", CONFIG), JobDetector("job", CONFIG)
    said = 0
    for number, told in enumerate(a_run(ranks, seed)):
        for message in messages_of(told):
            one.observe(message)
        if isinstance(told, StepBlock):
            many.observe_block(told)
        else:
            many.observe(told)
        mine, theirs = many.advance(None), one.advance(None)
        assert mine == theirs
        said += len(mine)
        if number % 90 == 0:
            (state, arrays), (other, parts) = one.to_state(), many.to_state()
            assert msgspec.json.encode(other) == msgspec.json.encode(state)
            for name, array in arrays.items():
                assert np.array_equal(parts[name], array, equal_nan=array.dtype.kind == "f"), name
    assert said >= 2


def test_a_block_is_as_many_messages() -> None:
    told = block(1, 7, 1_010.0, [0, 1, 2], 4, np.random.default_rng(0))
    messages = list(told.messages())
    assert all(isinstance(message, Metrics) for message in messages)
    assert [message.rank for message in messages] == [0, 1, 2]
    assert messages[0].columns["train.something"] == (None,)
    assert messages[1].columns["train.loss"] == (1.993,)
