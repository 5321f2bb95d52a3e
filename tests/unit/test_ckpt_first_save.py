"""Memory is made ready before the first save asks for it, in the background, and for a size that is guessed well."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import saving, staging
from ckpt_engine.client import Checkpointer
from ckpt_engine.forecast import expected_bytes
from ckpt_engine.tensors import TensorDoor
from tests.ckpt_lab import EngineProcess, Lab, engine_in_thread, eventually

DOOR = TensorDoor(torch)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with engine_in_thread(tmp_path) as lab:
        yield lab


def checkpointer(lab: Lab, attempt: int = 1) -> Checkpointer:
    return Checkpointer(str(lab.socket), None, job="job", attempt=attempt, rank=0, world_size=1, node="n0")


def mapped(ckpt: Checkpointer) -> dict[int, tuple[int, int]]:
    """Generation and size of each slot that is mapped, by number."""
    return {slot.index: (slot.generation, slot.size_bytes) for slot in ckpt._saver._slots.values()}


def training(optimizer: str = "AdamW", **options: Any) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    return {"model": model, "optimizer": getattr(torch.optim, optimizer)(model.parameters(), **options), "step": 0}


def one_step(state: dict[str, Any]) -> None:
    state["model"](torch.randn(4, 300)).sum().backward()
    state["optimizer"].step()


def test_the_first_saves_use_the_memory_that_was_made_ready(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt, state = checkpointer(lab), training()
    ckpt.prepare(state)
    assert ckpt._saver.prepared(20)
    ready = mapped(ckpt)
    assert set(ready) == {0, 1}
    monkeypatch.setattr(saving, "map_slot", lambda *_, **__: pytest.fail("a save had to map a slot"))
    one_step(state)
    for step in (1, 2, 3):
        assert ckpt.save(state, step).sealed.reached
    assert mapped(ckpt) == ready
    ckpt.close()


def test_a_load_that_finds_nothing_prepares_what_it_was_given(lab: Lab) -> None:
    ckpt = checkpointer(lab)
    assert ckpt.load(training()) is None
    assert ckpt._saver.prepared(20)
    assert set(mapped(ckpt)) == {0, 1}
    ckpt.close()


def test_after_a_restart_the_slots_of_the_attempt_before_are_mapped_again(lab: Lab) -> None:
    state = training()
    one_step(state)
    first = checkpointer(lab)
    for step in (1, 2):
        assert first.save(state, step).sealed.reached
    kept = mapped(first)
    first.close()
    second = checkpointer(lab, attempt=2)
    second.prepare(state)
    assert second._saver.prepared(20)
    assert mapped(second) == kept
    assert {shard.step for shard in lab.admin.status().shards} == {1, 2}, "what they hold is still there"
    second.close()


def test_a_save_comes_first_and_waits_for_nothing_it_does_not_need(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page tables are being filled while the save goes through."""
    begun, go_on = threading.Event(), threading.Event()
    populate = staging.StagedSlot.populate

    def slow(slot: staging.StagedSlot) -> None:
        begun.set()
        assert go_on.wait(20)
        populate(slot)

    monkeypatch.setattr(staging.StagedSlot, "populate", slow)
    ckpt, state = checkpointer(lab), {"x": torch.arange(1000)}
    ckpt.prepare(state)
    assert begun.wait(20)
    assert ckpt.save(state, 1).sealed.reached
    into: dict[str, Any] = {"x": None}
    go_on.set()
    ckpt.load(into, step=1)
    assert torch.equal(into["x"], state["x"])
    ckpt.close()


def test_a_guess_that_was_too_small_costs_a_slot_and_no_byte(lab: Lab) -> None:
    ckpt = checkpointer(lab)
    ckpt.prepare({"x": torch.ones(10)})
    assert ckpt._saver.prepared(20)
    state = {"x": torch.randn(500_000)}
    for step in (1, 2, 3):
        assert ckpt.save(state, step).sealed.reached
    into: dict[str, Any] = {"x": None}
    ckpt.load(into, step=3)
    assert torch.equal(into["x"], state["x"])
    ckpt.close()


def test_without_an_engine_or_with_a_dead_one_nothing_happens(tmp_path: Path) -> None:
    for socket in (None, str(tmp_path / "nobody")):
        ckpt = Checkpointer(socket, str(tmp_path / "ck"), job="job", attempt=1, rank=0, world_size=1, node="n0")
        ckpt.prepare({"x": torch.ones(3)})
        assert ckpt._saver.prepared(20)
        assert mapped(ckpt) == {}
        ckpt.close()


def test_what_cannot_be_saved_is_no_matter_yet(lab: Lab) -> None:
    ckpt = checkpointer(lab)
    loop: list[Any] = []
    loop.append(loop)
    ckpt.prepare({"sparse": torch.eye(3).to_sparse(), "odd": object(), "loop": loop, "none": None})
    assert ckpt._saver.prepared(20)
    ckpt.close()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {}), ("Adam", {"amsgrad": True}), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adadelta", {}), ("Adagrad", {}),
        ("NAdam", {}),
    ],
)  # fmt: skip
def test_the_guess_fits_what_the_first_step_makes(lab: Lab, optimizer: str, options: dict[str, Any]) -> None:
    """An engine takes a slot again that is no smaller than what is needed, and no more than twice as large."""
    state = training(optimizer, **options)
    guessed = expected_bytes(DOOR, state)
    one_step(state)
    ckpt = checkpointer(lab)
    geometry, _ = ckpt._saver.take(state)
    assert geometry.segment_bytes <= guessed <= 2 * geometry.segment_bytes + (1 << 20)
    assert expected_bytes(DOOR, state) >= geometry.segment_bytes
    ckpt.close()


def test_the_descriptors_of_replaced_slots_are_closed(tmp_path: Path) -> None:
    """The engine is another process, so what is open here is the rank's."""
    with EngineProcess(tmp_path) as engine:
        ckpt = Checkpointer(str(engine.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0")
        before, most = open_slots(), 0  # engines of other tests were threads of this process
        for step, size in enumerate((10, 1_000_000, 10, 2_000_000, 10, 3_000_000, 10, 20)):
            assert ckpt.save({"x": torch.ones(size)}, step).sealed.reached
            most = max(most, open_slots() - before)
        assert most <= 4, "two slots, of which each mapping has a descriptor of its own"
        ckpt.close()
        eventually(lambda: open_slots() <= before)


def open_slots() -> int:
    """Descriptors of slots that this process has open."""
    gc.collect()
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            count += "transom-slot" in str(link.readlink())
    return count
