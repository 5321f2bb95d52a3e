"""A state that is taken again says what it would say if it were taken for the first time, whatever has changed."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import capture as capture_module
from ckpt_engine.capture import Capture
from ckpt_engine.client import Checkpointer
from ckpt_engine.tensors import TensorDoor
from tests.ckpt_lab import engine_in_thread

DOOR = TensorDoor(torch)


def rich() -> dict[str, Any]:
    ordered: Any = OrderedDict(weight=torch.ones(2), bias=torch.zeros(3))
    ordered._metadata = OrderedDict({"": {"version": 1}})
    return {
        "model": ordered,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}, 1: {}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "list": [torch.ones(1), 3, [1, 2]],
        "tuple": (torch.ones(1), -0.0, None),
        "$odd": {"$tensor": 7, "é\ud800": torch.ones(2)},
        "counter": Counter({3: 1}),
        "plain_ordered": OrderedDict(a=1),
        "bytes": b"abc",
        "array": torch.arange(3).numpy(),
        "n": 5,
    }


def values_of(state: dict[str, Any]) -> bytes:
    return Capture(DOOR).take(state).values


def set_in(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the last of `path` becomes what stands at the others."""
    *way, last, value = path

    def change(state: dict[str, Any]) -> None:
        place: Any = state
        for key in way:
            place = place[key]
        place[last] = value

    return change


def change_metadata(state: dict[str, Any]) -> None:
    state["model"]._metadata = OrderedDict({"": {"version": 2}})


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "nothing": lambda state: None,
    "number": set_in("n", 6),
    "number to bool": set_in("n", True),
    "sign of zero": set_in("tuple", (torch.ones(1), 0.0, None)),
    "int to float": set_in("optimizer", "groups", 0, "lr", 1),
    "nan": set_in("optimizer", "groups", 0, "lr", float("nan")),
    "tuple to list": set_in("optimizer", "groups", 0, "betas", [0.9, 0.99]),
    "new group": lambda state: state["optimizer"]["groups"].append({"lr": 1}),
    "deep number": set_in("list", 2, [1, 3]),
    "bytes to bytearray": set_in("bytes", bytearray(b"abc")),
    "bytes to array": set_in("bytes", torch.tensor([97, 98, 99], dtype=torch.uint8).numpy()),
    "counter to dict": set_in("counter", {3: 1}),
    "ordered to dict": set_in("plain_ordered", {"a": 1}),
    "metadata": change_metadata,
    "no metadata": set_in("model", OrderedDict(weight=torch.ones(2), bias=torch.zeros(3))),
    "number to tensor": set_in("n", torch.ones(1)),
    "tensor to number": set_in("list", 0, 3),
    "key": lambda state: state["optimizer"]["state"].update({2: {"step": torch.tensor(2.0)}}),
    "key's type": set_in("optimizer", "state", {0.0: {"step": torch.tensor(1.0)}, 1: {}}),
    "order of keys": set_in("model", OrderedDict(bias=torch.zeros(3), weight=torch.ones(2))),
    "shape": set_in("list", 0, torch.ones(2)),
    "dtype": set_in("list", 0, torch.ones(1, dtype=torch.float64)),
    "strides": set_in("model", "weight", torch.ones(4)[::2]),
    "array's dtype": set_in("array", torch.arange(3, dtype=torch.int32).numpy()),
    "array to tensor": set_in("array", torch.arange(3)),
    "parameter": set_in("model", "weight", torch.nn.Parameter(torch.ones(2))),
    "another address": set_in("model", "weight", torch.full((2,), 4.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_taken_again_is_as_if_taken_for_the_first_time(name: str) -> None:
    capture, state = Capture(DOOR), rich()
    assert capture.take(state).values == values_of(state)
    CHANGES[name](state)
    for _ in range(2):
        taken, fresh = capture.take(state), Capture(DOOR).take(state)
        assert taken.values == fresh.values
        assert taken.plan.layout == fresh.plan.layout
        sources = [taken.plan.source(place, taken.tensors) for place in range(len(taken.plan.layout.places))]
        wanted = [fresh.plan.source(place, fresh.tensors) for place in range(len(fresh.plan.layout.places))]
        assert [source.data_ptr() for source in sources] == [source.data_ptr() for source in wanted]


def test_an_unchanged_state_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, state = Capture(DOOR), rich()
    first = capture.take(state)
    monkeypatch.setattr(capture_module, "encode_asked", lambda *_: pytest.fail("it was encoded once more"))
    state["n"] += 1
    state["optimizer"]["groups"][0]["lr"] = 0.05
    state["model"]["weight"] = torch.full((2,), 9.0)
    again = capture.take(state)
    assert again.plan is first.plan
    assert again.values != first.values


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_in("n", object()), r"^n is a builtins\.object"),
        (set_in("list", 2, [1, {2}]), r"^list\.2\.1 is a builtins\.set"),
        (set_in("list", 0, torch.eye(2).to_sparse()), r"^list\.0 is a tensor .* layout torch\.sparse"),
        (set_in("list", 0, torch.ones(1, device="meta")), r"^list\.0 is a tensor .* on meta"),
    ],
    ids=["object", "set", "sparse", "meta"],
)
def test_what_cannot_be_saved_is_named_at_a_later_save_too(change: Any, text: str) -> None:
    capture, state = Capture(DOOR), rich()
    capture.take(state)
    change(state)
    with pytest.raises(TypeError, match=text):
        capture.take(state)
    assert capture.take(rich()).values == values_of(rich())


def test_a_shape_that_changes_in_place_is_seen() -> None:
    """The object is the same, and so is its address."""
    capture, tensor = Capture(DOOR), torch.arange(6.0)
    state = {"t": tensor}
    capture.take(state)
    tensor.resize_(2, 3)
    assert capture.take(state).plan.layout.places[0].shape == (2, 3)
    tensor.t_()
    assert capture.take(state).plan.layout.places[0].strides == (1, 3)


def test_an_object_that_becomes_a_dict_is_no_object_any_more() -> None:
    class Counted:
        def state_dict(self) -> dict[str, Any]:
            return {"t": torch.ones(1)}

        def load_state_dict(self, state: object) -> None: ...

    capture = Capture(DOOR)
    as_object = capture.take({"x": Counted()}).values
    as_dict = capture.take({"x": Counted().state_dict()}).values
    assert b"$object" in as_object
    assert b"$object" not in as_dict


def test_an_ordered_dict_with_attributes_of_its_own_is_refused() -> None:
    state: dict[str, Any] = {"o": OrderedDict(a=torch.ones(1))}
    capture = Capture(DOOR)
    capture.take(state)
    state["o"].extra = 1
    for attempt in (capture, Capture(DOOR)):
        with pytest.raises(TypeError, match=r"^o is an OrderedDict with attributes .*: extra"):
            attempt.take(state)


def test_nothing_of_the_state_is_kept_alive() -> None:
    capture, tensor = Capture(DOOR), torch.ones(1000)
    alive = weakref.ref(tensor)
    taken = capture.take({"t": tensor})
    del tensor, taken
    gc.collect()
    assert alive() is None


def test_what_was_taken_beside_training_is_read_anew() -> None:
    """A plain value that changed between its text and its mark would never be written again."""
    capture, state = Capture(DOOR), rich()
    del state["array"]
    capture.take(state)
    state["n"] = 9
    for node in walk(capture._root):
        if isinstance(node, capture_module._Plain) and node.text == "5":
            node.mark = capture_module._mark_of(9)  # as it would be, had the number changed in between
    assert capture.take(state).values != values_of(state)
    capture.doubt()
    assert capture.take(state).values == values_of(state)


def walk(node: Any) -> list[Any]:
    below = [*getattr(node, "children", []), *getattr(node, "metadata", [])]
    return [node, *(found for child in below for found in walk(child))]


def test_a_state_with_a_sharded_part_is_not_remembered_in_doubt() -> None:
    capture, state = Capture(DOOR), rich()
    capture.take(state)
    capture.doubt()
    assert capture._root is None, "an array's tensor has to be asked for"
    assert capture.take(state).values == values_of(state)


@pytest.mark.parametrize("mode", ["copy", "fenced"])
def test_no_save_searches_the_heap_for_garbage_while_it_looks(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    take = Capture.take

    def watched(capture: Capture, state: dict[str, Any]) -> Any:
        looks.append(gc.isenabled())
        return take(capture, state)

    monkeypatch.setattr(Capture, "take", watched)
    with engine_in_thread(tmp_path) as lab:
        ckpt = Checkpointer(str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0", mode=mode)
        assert ckpt.save({"x": torch.ones(3)}, 1).sealed.wait(20)
        ckpt.close()
    assert looks
    assert not any(looks)
    assert gc.isenabled()
