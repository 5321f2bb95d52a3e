"""Tensors that lie where the checkpoint does: nothing copied, nothing shared, and never written under their user."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.errors import CheckpointDamaged
from tests.ckpt_lab import EngineProcess, Lab, engine_in_thread, eventually
from tests.ckpt_torch import (
    Make,
    checkpointers,
    flip_file,
    flip_memory,
    same,
    shard_path,
    slot_of,
    slow_comparison,
    train,
    trained,
)

NUMBERS = 50_000


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def make() -> Iterator[Make]:
    with checkpointers() as make:
        yield make


def full(step: int) -> dict[str, Any]:
    return {"x": torch.full((NUMBERS,), float(step)), "step": step}


def test_the_views_are_the_state_bit_for_bit(lab: Lab, make: Make) -> None:
    model, optimizer = trained()
    tied = torch.randn(3)
    state = {"model": model, "optimizer": optimizer, "pair": (tied, tied), "empty": torch.ones(0), "note": {"a": None}}
    make(lab.socket).save(state, 1)
    views = make(lab.socket, attempt=2).load_views()
    assert views is not None
    assert (views.report.step, views.report.tier, views.report.verified) == (1, "memory", True)
    assert same(dict(views.state["model"]), dict(model.state_dict()))
    assert same(views.state["optimizer"], optimizer.state_dict())
    assert views.state["pair"][0] is views.state["pair"][1]
    assert same(views.state["pair"][0], tied)
    assert views.state["empty"].shape == (0,)
    assert views.state["note"] == {"a": None}
    eventually(lambda: lab.told("loaded", 1, "memory"))


def test_a_model_can_train_on_views(lab: Lab, make: Make) -> None:
    model, optimizer = trained()
    make(lab.socket).save({"model": model, "optimizer": optimizer}, 1)
    reader = make(lab.socket, attempt=2)
    views = reader.load_views(verify="deferred")
    assert views is not None
    assert not views.report.verified
    other, _ = trained(seed=3)
    other.load_state_dict(views.state["model"], assign=True)
    other_optimizer = torch.optim.AdamW(
        [{"params": other[0].parameters()}, {"params": [*other[1:].parameters()]}], lr=0.1
    )
    other_optimizer.load_state_dict(views.state["optimizer"])
    reader.verify_before(other_optimizer)
    for net, tuner in ((model, optimizer), (other, other_optimizer)):
        train(net, tuner)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_writing_to_a_view_changes_no_checkpoint(lab: Lab, make: Make) -> None:
    make(lab.socket).save(full(1), 1)
    views = make(lab.socket, attempt=2).load_views()
    assert views is not None
    views.state["x"].fill_(99)
    again = make(lab.socket, attempt=3).load_views()
    assert again is not None
    assert set(again.state["x"].tolist()) == {1.0}
    assert set(views.state["x"].tolist()) == {99.0}


def test_saves_go_on_and_never_write_where_views_look(lab: Lab, make: Make) -> None:
    """Each save gets memory: the slot that is looked at is replaced by another one."""
    checkpointer = make(lab.socket)
    for step in (1, 2):
        checkpointer.save(full(step), step)
    views = checkpointer.load_views(1)
    assert views is not None
    for step in range(3, 9):
        assert checkpointer.save(full(step), step).sealed.reached
        assert set(views.state["x"].tolist()) == {1.0}
    into = full(0)
    checkpointer.load(into, 8)
    assert same(into, full(8))


def test_the_memory_comes_back_when_the_last_view_goes(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    for step in (1, 2):
        checkpointer.save(full(step), step)
    before = lab.admin.status().memory_bytes
    views = checkpointer.load_views(1)
    assert views is not None
    kept = views.state["x"][5:7]
    del views
    gc.collect()
    for step in (3, 4, 5):
        checkpointer.save(full(step), step)
    assert lab.admin.status().memory_bytes > before, "two numbers are still looked at"
    assert kept.tolist() == [1.0, 1.0]
    del kept
    gc.collect()
    checkpointer.save(full(6), 6)
    assert lab.admin.status().memory_bytes == before


def test_a_rank_that_ends_gives_back_what_its_views_held(lab: Lab, make: Make) -> None:
    checkpointer = make(lab.socket)
    for step in (1, 2):
        checkpointer.save(full(step), step)
    before = lab.admin.status().memory_bytes
    views = checkpointer.load_views(1)
    checkpointer.save(full(3), 3)
    assert lab.admin.status().memory_bytes > before
    checkpointer.close()
    eventually(lambda: lab.admin.status().memory_bytes == before)
    assert views is not None
    assert set(views.state["x"].tolist()) == {1.0}, "the mapping is the rank's own"


def test_without_room_for_another_slot_a_save_is_skipped_and_says_so(tmp_path: Path, make: Make) -> None:
    with engine_in_thread(tmp_path, memory_bytes_max=2 * (NUMBERS * 4 + (64 << 10))) as lab:
        checkpointer = make(lab.socket, busy_wait_seconds=0.05)
        for step in (1, 2):
            assert checkpointer.save(full(step), step).sealed.reached
        views = checkpointer.load_views(1)
        assert views is not None
        ticket = checkpointer.save(full(3), 3)
        assert "memory_bytes_max" in ticket.failed
        assert set(views.state["x"].tolist()) == {1.0}
        into = full(0)
        checkpointer.load(into, 2)
        assert same(into, full(2)), "the good one stays"
        del views
        gc.collect()
        assert checkpointer.save(full(4), 4).sealed.reached


def test_a_restarted_engine_learns_of_the_views_before_it_grants_a_slot(tmp_path: Path, make: Make) -> None:
    with EngineProcess(tmp_path) as first:
        checkpointer = make(first.socket)
        for step in (1, 2):
            assert checkpointer.save(full(step), step).sealed.reached
        views = checkpointer.load_views(1)
        assert views is not None
    assert checkpointer.save(full(3), 3).failed
    with EngineProcess(tmp_path):
        eventually(lambda: not checkpointer.save(full(4), 4).failed or None)
        for step in (5, 6, 7):
            assert not checkpointer.save(full(step), step).failed
            assert set(views.state["x"].tolist()) == {1.0}


def test_a_slot_that_views_look_at_is_not_written_whoever_grants_it(lab: Lab, make: Make) -> None:
    """The last guard is the rank itself."""
    checkpointer = make(lab.socket, busy_wait_seconds=0.05)
    for step in (1, 2):
        checkpointer.save(full(step), step)
    views = checkpointer.load_views(1)
    assert views is not None
    segment = slot_of(lab, 1)[0].segment
    assert segment is not None
    segment.loans = 0  # an engine that has forgotten
    ticket = checkpointer.save(full(3), 3)
    assert "views of the only free slot are in use" in ticket.failed
    assert set(views.state["x"].tolist()) == {1.0}
    segment.loans = 1


def test_damaged_memory_gives_views_of_the_disk_copy(lab: Lab, make: Make) -> None:
    assert make(lab.socket).save(full(1), 1).durable.wait(20)
    flip_memory(lab, 1)
    views = make(lab.socket, attempt=2).load_views()
    assert views is not None
    assert (views.report.tier, views.report.verified) == ("disk", True)
    assert same(views.state, full(1))


def test_damage_under_deferred_views_is_told_before_the_first_step(
    lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(lab.socket).save(full(1), 1).durable.wait(20)
    flip_memory(lab, 1)
    reader = make(lab.socket, attempt=2)
    with slow_comparison(monkeypatch):
        views = reader.load_views(verify="deferred")
    assert views is not None
    weight = torch.nn.Parameter(views.state["x"])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    reader.verify_before(optimizer)
    weight.grad = torch.ones(NUMBERS)
    before = weight.detach().clone()
    with pytest.raises(CheckpointDamaged):
        optimizer.step()
    with pytest.raises(CheckpointDamaged):
        reader.await_verified()
    assert torch.equal(weight, before)


def test_without_an_engine_views_are_of_verified_bytes(tmp_path: Path, make: Make) -> None:
    checkpointer = make(None, tmp_path)
    checkpointer.save(full(1), 1)
    views = checkpointer.load_views(verify="deferred")
    assert views is not None
    assert (views.report.tier, views.report.verified) == ("disk", True)
    assert same(views.state, full(1))
    flip_file(shard_path(tmp_path, 1))
    assert same(views.state, full(1)), "they do not look at the file"
    with pytest.raises(CheckpointDamaged):
        checkpointer.load_views(1)


def test_nothing_to_look_at_is_none(lab: Lab, make: Make) -> None:
    assert make(lab.socket).load_views() is None
