"""Four ranks on two engines load together: all the same step, also where one of them has it damaged or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.errors import CheckpointDamaged, NoAgreement
from ckpt_engine.storage import Storage
from tests.ckpt_lab import Lab, engine_in_thread, eventually
from tests.ckpt_torch import Make, NoShards, checkpointers, flip_file, flip_memory, shard_path, together

RANKS = range(4)


class Job:
    """Two nodes of two ranks each, on one folder."""

    def __init__(self, labs: tuple[Lab, Lab], make: Make) -> None:
        self.labs = labs
        self._make = make

    def lab(self, rank: int) -> Lab:
        return self.labs[rank // 2]

    def start(self, attempt: int) -> list[Checkpointer]:
        return [
            self._make(
                self.lab(rank).socket, attempt=attempt, rank=rank, world_size=4, node=f"n{rank // 2}",
                agree_seconds_max=20.0,
            )
            for rank in RANKS
        ]  # fmt: skip

    def save(self, ranks: list[Checkpointer], step: int, *, only: tuple[int, ...] = tuple(RANKS)) -> None:
        for rank in only:
            assert ranks[rank].save({"x": torch.tensor([rank, step])}, step).sealed.reached

    def durable(self, step: int) -> None:
        eventually(lambda: any(lab.told("complete", step) for lab in self.labs), f"step {step} on disk")


def load(ranks: list[Checkpointer], **how: Any) -> list[tuple[int, str, bool]]:
    """(step, tier, verified) of each; every rank has its own bytes of that step."""

    def one(rank: int) -> tuple[int, str, bool]:
        into = {"x": torch.zeros(2, dtype=torch.int64)}
        report = ranks[rank].load(into, **how)
        assert report is not None
        assert into["x"].tolist() == [rank, report.step]
        return report.step, report.tier, report.verified

    return together([lambda rank=rank: one(rank) for rank in RANKS])  # type: ignore[misc]


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def job(tmp_path: Path, storage: Storage) -> Iterator[Job]:
    with (
        engine_in_thread(tmp_path, node="n0", storage=storage) as one,
        engine_in_thread(tmp_path, node="n1", storage=storage) as two,
        checkpointers() as make,
    ):
        yield Job((one, two), make)


class TestInMemoryAlone:
    """The disk takes nothing, so what is damaged in memory is lost."""

    @pytest.fixture
    def storage(self) -> Storage:
        return NoShards()

    def saved(self, job: Job) -> None:
        ranks = job.start(1)
        for step in (10, 20):
            job.save(ranks, step)

    def test_all_load_the_newest_that_all_have(self, job: Job) -> None:
        self.saved(job)
        assert load(job.start(2)) == [(20, "memory", True)] * 4

    def test_one_damaged_copy_sends_all_back_to_the_same_step(self, job: Job) -> None:
        self.saved(job)
        load(job.start(2))  # all checksums are known from here on
        flip_memory(job.lab(2), 20, rank=2, at=3)
        assert load(job.start(3)) == [(10, "memory", True)] * 4
        assert [event.rank for event in eventually(lambda: job.lab(2).told("damaged", 20, "memory"))] == [2]
        assert load(job.start(4)) == [(10, "memory", True)] * 4, "and it is not offered again"

    def test_when_nothing_is_whole_for_all_nobody_loads(self, job: Job) -> None:
        self.saved(job)
        first = job.start(2)
        for step in (10, 20):
            together([lambda r=r, step=step: r.load({"x": None}, step) for r in first])  # type: ignore[misc]
        flip_memory(job.lab(0), 20, rank=0, at=3)
        flip_memory(job.lab(3), 10, rank=3, at=3)
        ranks = job.start(3)

        def refused(rank: int) -> bool:
            into = {"x": torch.zeros(2, dtype=torch.int64)}
            with pytest.raises(CheckpointDamaged, match="none of the 2 steps that all ranks have is whole"):
                ranks[rank].load(into)
            return not into["x"].any()

        assert all(together([lambda rank=rank: refused(rank) for rank in RANKS]))  # type: ignore[misc]

    def test_a_step_that_one_rank_lacks_is_not_loaded(self, job: Job) -> None:
        ranks = job.start(1)
        job.save(ranks, 10)
        job.save(ranks, 20, only=(0, 1, 3))
        assert load(job.start(2)) == [(10, "memory", True)] * 4

    def test_views_agree_too(self, job: Job) -> None:
        self.saved(job)
        ranks = job.start(2)
        views = together([rank.load_views for rank in ranks])
        assert [view.state["x"].tolist() for view in views] == [[rank, 20] for rank in RANKS]

    def test_each_load_is_an_agreement_of_its_own(self, job: Job) -> None:
        self.saved(job)
        ranks = job.start(2)
        for _ in range(3):
            assert load(ranks) == [(20, "memory", True)] * 4

    def test_deferred_ranks_agree_before_they_have_compared(self, job: Job) -> None:
        self.saved(job)
        ranks = job.start(2)
        assert load(ranks, verify="deferred") == [(20, "memory", False)] * 4
        for rank in ranks:
            rank.await_verified()

    def test_a_rank_that_never_loads_is_named(self, job: Job, tmp_path: Path) -> None:
        ranks = job.start(1)
        job.save(ranks, 10)
        ranks[0]._loader._agree_seconds_max = 0.05
        with pytest.raises(NoAgreement, match="rank 1, 2, 3 has not asked for a checkpoint"):
            ranks[0].load({"x": None})

    def test_without_anything_all_begin_from_scratch(self, job: Job) -> None:
        assert together([lambda r=r: r.load({"x": None}) for r in job.start(1)]) == [None] * 4  # type: ignore[misc]


def test_a_damaged_copy_in_memory_is_made_good_by_the_disk(job: Job) -> None:
    """The step is whole for all, so nobody goes back; only one rank reads its file."""
    ranks = job.start(1)
    job.save(ranks, 10)
    job.durable(10)
    flip_memory(job.lab(1), 10, rank=1, at=3)
    assert load(job.start(2)) == [(10, "disk" if rank == 1 else "memory", True) for rank in RANKS]


def test_a_damaged_file_sends_all_back_to_the_same_step(tmp_path: Path, job: Job) -> None:
    """Without engines: each rank reads its own file, one of them finds it damaged."""
    ranks = job.start(1)
    for step in (10, 20):
        job.save(ranks, step)
        job.durable(step)
    directory = job.labs[0].directory
    flip_file(shard_path(directory, 20, rank=3))
    with checkpointers() as make:
        alone = [make(None, directory, attempt=2, rank=rank, world_size=4, agree_seconds_max=20.0) for rank in RANKS]
        assert load(alone) == [(10, "disk", True)] * 4


def test_all_load_the_newest_verified_step(job: Job) -> None:
    ranks = job.start(1)
    for step in (10, 20):
        job.save(ranks, step)
    job.labs[1].admin.mark_verified(10, 1)
    assert load(job.start(2), policy="verified") == [(10, "memory", True)] * 4
