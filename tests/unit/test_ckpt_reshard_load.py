"""`Checkpointer.load` on another number of ranks: what names its block is cut anew, what is the same stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.blocks import Shard
from ckpt_engine.errors import CheckpointNotFound, StateMismatch
from ckpt_engine.manifest import step_folder
from tests.ckpt_lab import Lab, engine_in_thread
from tests.reshard_lab import WHOLE, block, blocks, rank_of, save_all


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 2), (3, 1)])
def test_other_ranks_get_their_blocks(tmp_path: Path, lab: Lab, engine: bool, before: int, after: int) -> None:
    place = lab if engine else tmp_path / "alone"
    save_all(place, blocks(before, step=10))
    for rank in range(after):
        into = blocks(after, step=0)[rank]
        for tensor in (into["rows"].tensor, into["deep"]["columns"].tensor, into["same"]):
            tensor.zero_()
        pointer = into["rows"].tensor.data_ptr()
        checkpointer = rank_of(place, rank, after, attempt=2)
        report = checkpointer.load(into, 10)
        assert report is not None
        tier = "memory" if engine else "disk"
        assert (report.step, report.tier, report.attempt, into["step"]) == (10, tier, 1, 10)
        assert torch.equal(into["rows"].tensor, block(rank, after).tensor)
        assert torch.equal(into["deep"]["columns"].tensor, block(rank, after, dim=1).tensor)
        assert torch.equal(into["same"], torch.ones(3))
        assert into["rows"].tensor.data_ptr() == pointer, "in place"
        checkpointer.close()


def test_one_rank_that_wants_plain_tensors_gets_the_whole(tmp_path: Path) -> None:
    save_all(tmp_path, blocks(4))
    checkpointer = rank_of(tmp_path, 0, 1, attempt=2)
    into = {"rows": torch.zeros(12, 10), "deep": {"columns": torch.zeros(12, 10)}}
    report = checkpointer.load(into)
    assert report is not None
    assert torch.equal(into["rows"], WHOLE)  # type: ignore[arg-type]
    assert torch.equal(into["deep"]["columns"], WHOLE)  # type: ignore[call-overload]


def test_blocks_come_back_on_the_same_number_of_ranks_and_save_after_save(lab: Lab) -> None:
    checkpointer = rank_of(lab, 0, 1)
    state = {"rows": block(0, 1), "step": 0}
    for step in (1, 2, 3):
        state["rows"].tensor.mul_(2)  # type: ignore[attr-defined]
        state["step"] = step
        assert checkpointer.save(state, step).sealed.reached
    state["rows"] = Shard(WHOLE[:5].clone(), (12, 10), (0, 0))
    assert checkpointer.save(state, 4).sealed.reached, "cut otherwise, it is another layout"
    into: dict[str, Any] = {"rows": Shard(torch.zeros(5, 10), (12, 10), (0, 0)), "step": 0}
    assert checkpointer.load(into, 4) is not None
    assert torch.equal(into["rows"].tensor, WHOLE[:5])
    assert checkpointer.load({"rows": block(0, 1), "step": 0}, 3) is not None
    views = checkpointer.load_views(4)
    assert views is not None
    found = views.state["rows"]
    assert (type(found), found.global_shape, found.offset) == (Shard, (12, 10), (0, 0))
    with pytest.raises(StateMismatch, match="rows is one of"):
        checkpointer.load({"rows": Shard(torch.zeros(5, 10), (12, 10), (1, 0))}, 4)
    checkpointer.close()


def test_what_differs_and_does_not_say_why_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    states = blocks(2)
    for rank, state in enumerate(states):
        state["random"] = torch.full((700,), rank, dtype=torch.uint8)
    save_all(tmp_path, states)
    checkpointer = rank_of(tmp_path, 0, 3, attempt=2)
    into = {"rows": block(0, 3), "random": torch.zeros(700, dtype=torch.uint8)}
    with pytest.raises(StateMismatch, match="random is not the same on ranks 0 and 1 of the 2 that saved step 10"):
        checkpointer.load(into, 10)
    del into["random"]
    assert checkpointer.load(into, 10) is not None


def test_replicas_load_on_any_number_of_ranks(lab: Lab) -> None:
    """Data parallel: nobody is cut, everybody has the same, by one file for all."""
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 300)
    save_all(lab, [{"model": model, "rank": rank} for rank in range(4)])
    assert len(list(step_folder(lab.directory, 10).glob("*.safetensors"))) == 1
    for rank in range(2):
        other = torch.nn.Linear(300, 300)
        into = {"model": other, "rank": -1}
        checkpointer = rank_of(lab, rank, 2, attempt=2)
        assert checkpointer.load(into, 10) is not None
        assert torch.equal(other.weight, model.weight)
        assert into["rank"] == rank
        checkpointer.close()


def test_views_are_of_ones_own_number_of_ranks_alone(tmp_path: Path) -> None:
    save_all(tmp_path, blocks(2))
    with pytest.raises(CheckpointNotFound, match="saved by 2 ranks, now there are 3"):
        rank_of(tmp_path, 0, 3, attempt=2).load_views(10)


def test_a_damaged_shard_of_another_rank_is_found_before_anything_is_written(tmp_path: Path) -> None:
    save_all(tmp_path, blocks(2))
    path = sorted(step_folder(tmp_path, 10).glob("*.safetensors"))[1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    into = {"rows": Shard(torch.full((12, 10), 7.0), (12, 10), (0, 0))}
    with pytest.raises(Exception, match="do not match their checksum"):
        rank_of(tmp_path, 0, 1, attempt=2).load(into, 10)
    assert torch.equal(into["rows"].tensor, torch.full((12, 10), 7.0))
