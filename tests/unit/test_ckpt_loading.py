"""Loading in place: which step, from which tier, compared when; and what is written only when all fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.errors import CheckpointDamaged, CheckpointNotFound, StateMismatch
from ckpt_engine.segment import SlotState, read_state, values_region
from tests.ckpt_lab import Lab, engine_in_thread, eventually
from tests.ckpt_torch import (
    Make,
    NoShards,
    checkpointers,
    flip_file,
    flip_memory,
    fresh,
    same,
    shard_path,
    slot_of,
    slow_comparison,
    train,
    trained,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


@pytest.fixture
def make() -> Iterator[Make]:
    with checkpointers() as make:
        yield make


def saved(make: Make, lab: Lab, *steps: int) -> None:
    """Step n holds n."""
    writer = make(lab.socket)
    for step in steps:
        assert writer.save({"x": torch.full((1000,), float(step)), "step": step}, step).durable.wait(20)


def loaded(into: dict[str, Any]) -> int:
    assert set(into["x"].tolist()) == {float(into["step"])}
    return int(into["step"])


def target() -> dict[str, Any]:
    return {"x": torch.zeros(1000), "step": -1}


def test_tensors_of_model_and_optimizer_stay_where_they_are(lab: Lab, make: Make) -> None:
    """Nothing is allocated for what is there already, and views and ties of it stay what they were."""
    model, optimizer = trained()
    make(lab.socket).save({"model": model, "optimizer": optimizer}, 1)
    other, other_optimizer = trained(seed=8)
    tensors = [*other.state_dict().values()]
    tensors += [value for entry in other_optimizer.state.values() for value in entry.values()]
    places = [tensor.data_ptr() for tensor in tensors]
    report = make(lab.socket, attempt=2).load({"model": other, "optimizer": other_optimizer})
    assert report is not None
    assert (report.tier, report.verified) == ("memory", True)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    now = [*other.state_dict().values()]
    now += [value for entry in other_optimizer.state.values() for value in entry.values()]
    assert [tensor.data_ptr() for tensor in now] == places


def test_autograd_sees_that_parameters_were_written(lab: Lab, make: Make) -> None:
    """A graph that has kept one of them is out of date, as after any other change in place."""
    weight = torch.ones(10_000, requires_grad=True)
    checkpointer = make(lab.socket)
    checkpointer.save({"w": weight}, 1)
    product = (weight * weight).sum()
    checkpointer.load({"w": weight}, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_odd_targets_get_the_same_values(lab: Lab, make: Make) -> None:
    """Transposed, with gaps, conjugated, inside one another: written element by element."""
    source = torch.arange(12.0).reshape(3, 4)
    numbers = torch.complex(torch.arange(4.0), torch.ones(4))
    state = {"a": source, "b": source + 1, "c": numbers, "d": source[0].clone(), "e": torch.ones(4)}
    checkpointer = make(lab.socket)
    checkpointer.save(state, 1)
    wide = torch.zeros(3, 8)
    shared = torch.zeros(4)
    conjugated = torch.zeros(4, dtype=torch.complex64)
    into = {"a": torch.zeros(4, 3).t(), "b": wide[:, ::2], "c": conjugated.conj(), "d": shared, "e": shared}
    checkpointer.load(into, 1)
    assert same(into["a"], state["a"])
    assert same(wide[:, ::2], state["b"])
    assert not wide[:, 1::2].any()
    assert torch.equal(conjugated, numbers.conj())
    assert shared.tolist() == [1.0] * 4, "of two that share memory the later one stays"


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_model_with_other_keys_is_a_mismatch_and_nothing_is_written(lab: Lab, make: Make, tier: str) -> None:
    checkpointer = make(lab.socket)
    assert checkpointer.save({"x": torch.ones(3), "model": torch.nn.Linear(2, 2)}, 1).durable.wait(20)
    reader = checkpointer if tier == "memory" else make(None, lab.directory)
    x, wrong = torch.zeros(3), torch.nn.Linear(2, 2, bias=False)
    before = wrong.weight.detach().clone()
    with pytest.raises(StateMismatch, match="model does not take its saved state: there is no place here for bias"):
        reader.load({"x": x, "model": wrong}, 1)
    deeper = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(StateMismatch, match=r"has no 0\.weight, 0\.bias; there is no place here for weight, bias"):
        reader.load({"x": x, "model": deeper}, 1)
    assert not x.any()
    assert torch.equal(wrong.weight, before)


def test_an_optimizer_of_other_groups_is_a_mismatch_and_nothing_is_written(lab: Lab, make: Make) -> None:
    model, optimizer = trained()
    checkpointer = make(lab.socket)
    checkpointer.save({"model": model, "optimizer": optimizer}, 1)
    other, _ = fresh()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(StateMismatch, match=r"optimizer has groups of \[6\] parameters here, but of \[2, 4\]"):
        checkpointer.load({"model": other, "optimizer": torch.optim.AdamW(other.parameters())}, 1)
    assert same(dict(other.state_dict()), before)


def test_a_module_that_changes_its_keys_on_load_is_left_to_do_so(lab: Lab, make: Make) -> None:
    """Whoever has a hook knows what he does with old names; torch decides then."""

    class Renamed(torch.nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            state[prefix + "weight"] = state.pop(prefix + "kernel")
            super()._load_from_state_dict(state, prefix, *rest)

    checkpointer = make(lab.socket)
    kernel = torch.arange(4.0).reshape(2, 2)
    checkpointer.save({"model": {"kernel": kernel, "bias": torch.ones(2)}}, 1)
    model = Renamed(2, 2)
    checkpointer.load({"model": model}, 1)
    assert same(model.weight.data, kernel)


def test_the_newest_step_the_verified_one_and_one_by_its_number(lab: Lab, make: Make) -> None:
    saved(make, lab, 1, 2, 3)
    assert lab.admin.mark_verified(2, 1, "20 clean steps after it")
    assert not lab.admin.mark_verified(2, 1), "it is marked already"
    reader = make(lab.socket, attempt=2)
    for policy, step in (("newest", 3), ("verified", 2), (1, 1), (None, 3)):
        into = target()
        report = reader.load(into, policy)
        assert report is not None
        assert (report.step, loaded(into)) == (step, step), policy
    assert eventually(lambda: lab.told("verified", 2))[0].reason == "20 clean steps after it"


def test_verified_is_not_what_was_rejected_since(lab: Lab, make: Make) -> None:
    saved(make, lab, 1, 2)
    for step in (1, 2):
        lab.admin.mark_verified(step, 1)
    lab.admin.reject_from(2, 1, "loss is NaN")
    assert not lab.admin.mark_verified(2, 1), "what is rejected stays so"
    into = target()
    make(lab.socket, attempt=2).load(into, "verified")
    assert loaded(into) == 1


@pytest.mark.parametrize("engine", [True, False])
def test_where_none_is_verified_that_is_said(lab: Lab, make: Make, engine: bool) -> None:
    """Training from scratch because a mark is missing would be the worst of all."""
    reader = make(lab.socket) if engine else make(None, lab.directory)
    assert reader.load(target(), "verified") is None, "there is nothing at all"
    saved(make, lab, 4)
    reader = make(lab.socket, attempt=2) if engine else make(None, lab.directory)
    with pytest.raises(CheckpointNotFound, match="no step is verified yet; there are unverified ones: 4"):
        reader.load(target(), "verified")


def test_a_policy_that_is_none_is_refused(lab: Lab, make: Make) -> None:
    with pytest.raises(ValueError, match="policy must be"):
        make(lab.socket).load({}, "latest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify must be"):
        make(lab.socket).load({}, verify="never")  # type: ignore[arg-type]


def test_right_after_a_save_the_load_is_from_memory(tmp_path: Path, make: Make) -> None:
    """While the disk has nothing of it, and no checksum either: the engine computes one before it answers."""
    with engine_in_thread(tmp_path, storage=NoShards()) as lab:
        writer = make(lab.socket)
        assert writer.save({"x": torch.full((1000,), 7.0), "step": 7}, 7).sealed.reached
        into = target()
        report = writer.load(into)
        assert report is not None
        assert (report.tier, report.verified, loaded(into)) == ("memory", True, 7)
        assert slot_of(lab, 7)[0].checksum is not None


def test_damaged_memory_falls_to_disk_and_is_never_offered_again(lab: Lab, make: Make) -> None:
    saved(make, lab, 1, 2)
    segment = slot_of(lab, 2)[0].segment
    assert segment is not None
    flip_memory(lab, 2)
    into = target()
    report = make(lab.socket, attempt=2).load(into, 2)
    assert report is not None
    assert (report.tier, loaded(into)) == ("disk", 2)
    assert "changed after step 2 was sealed" in eventually(lambda: lab.told("damaged", 2, "memory"))[0].reason
    assert "step 2 in memory" in eventually(lambda: lab.told("fallback", 2, "disk"))[0].reason
    assert [shard.step for shard in lab.admin.status().shards] == [1]
    assert read_state(segment.view) is SlotState.EMPTY, "nor would a restarted engine take it in"


def test_a_flipped_header_in_memory_falls_to_disk(lab: Lab, make: Make) -> None:
    saved(make, lab, 1)
    slot, header = slot_of(lab, 1)
    assert slot.segment is not None
    values_region(slot.segment.view, header)[3] ^= 4
    into = target()
    report = make(lab.socket, attempt=2).load(into, 1)
    assert report is not None
    assert (report.tier, loaded(into)) == ("disk", 1)
    assert "header" in eventually(lambda: lab.told("damaged", 1, "memory"))[0].reason


@pytest.mark.parametrize("engine", [True, False])
def test_damaged_files_are_set_aside_and_the_step_before_is_loaded(tmp_path: Path, make: Make, engine: bool) -> None:
    writer = make(None, tmp_path / "ck")
    for step in (1, 2):
        writer.save({"x": torch.full((1000,), float(step)), "step": step}, step)
    path = shard_path(tmp_path / "ck", 2)
    flip_file(path)
    damaged = path.read_bytes()
    with engine_in_thread(tmp_path) as lab:
        into = target()
        report = make(lab.socket if engine else None, tmp_path / "ck", attempt=2).load(into)
        assert report is not None
        assert (report.step, report.tier, loaded(into)) == (1, "disk", 1)
        assert path.with_name(f"damaged-{path.name}").read_bytes() == damaged
        assert not path.exists()
        if engine:
            assert "set aside" in eventually(lambda: lab.told("damaged", 2, "disk"))[0].reason


def test_when_no_copy_is_whole_the_load_raises_and_writes_nothing(lab: Lab, make: Make) -> None:
    saved(make, lab, 1)
    flip_memory(lab, 1)
    flip_file(shard_path(lab.directory, 1))
    into = target()
    with pytest.raises(CheckpointDamaged, match="do not match their checksum"):
        make(lab.socket, attempt=2).load(into, 1)
    assert not into["x"].any()
    assert into["step"] == -1
    with pytest.raises(CheckpointNotFound, match="step 1 is neither in memory nor complete"):
        make(lab.socket, attempt=3).load(into, 1)


def test_a_deferred_load_is_compared_before_the_first_step(lab: Lab, make: Make) -> None:
    model, optimizer = trained()
    assert make(lab.socket).save({"model": model, "optimizer": optimizer}, 1).durable.wait(20)
    other, other_optimizer = fresh()
    reader = make(lab.socket, attempt=2)
    report = reader.load({"model": other, "optimizer": other_optimizer}, verify="deferred")
    assert report is not None
    assert (report.tier, report.verified) == ("memory", False)
    train(other, other_optimizer)
    train(model, optimizer)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    reader.await_verified()


def test_damage_that_a_deferred_load_brought_stops_the_first_step(
    lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    assert make(lab.socket).save({"model": model, "optimizer": optimizer}, 1).durable.wait(20)
    flip_memory(lab, 1)
    other, other_optimizer = fresh()
    reader = make(lab.socket, attempt=2)
    with slow_comparison(monkeypatch):
        reader.load({"model": other, "optimizer": other_optimizer}, verify="deferred")
    before = {key: value.clone() for key, value in other.state_dict().items() if "running" not in key}
    for _ in range(2):
        with pytest.raises(CheckpointDamaged, match="step 1, which has been loaded, is not what was saved"):
            train(other, other_optimizer)
    assert all(torch.equal(other.state_dict()[key], value) for key, value in before.items() if "tracked" not in key)
    eventually(lambda: lab.told("damaged", 1, "memory"))
    report = reader.load({"model": other, "optimizer": other_optimizer}, verify="deferred")
    assert report is not None
    assert (report.tier, report.verified) == ("disk", True), "the next load takes another copy"
    train(other, other_optimizer)


def test_a_load_does_not_begin_while_the_last_one_is_unverified_and_damaged(
    lab: Lab, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are in use somewhere, and nobody has been told."""
    saved(make, lab, 1, 2)
    flip_memory(lab, 1)
    reader = make(lab.socket, attempt=2)
    with slow_comparison(monkeypatch):
        reader.load(target(), 1, "deferred")
    with pytest.raises(CheckpointDamaged, match="step 1, which has been loaded"):
        reader.load(target(), 2)
    into = target()
    reader.load(into, 2)
    assert loaded(into) == 2


@pytest.mark.parametrize("damaged", [False, True])
def test_without_its_engine_the_rank_compares_by_itself(
    tmp_path: Path, make: Make, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_in_thread(tmp_path) as lab:
        saved(make, lab, 1)
        if damaged:
            flip_memory(lab, 1)
        reader = make(lab.socket, attempt=2)
        with slow_comparison(monkeypatch):
            reader.load(target(), 1, "deferred")
    if not damaged:
        reader.await_verified()
        return
    with pytest.raises(CheckpointDamaged, match="step 1, which has been loaded, is not what was saved"):
        reader.await_verified()
