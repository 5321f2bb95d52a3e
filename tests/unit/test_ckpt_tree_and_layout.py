"""What a state consists of besides bytes: the tagged tree, and the table of where each tensor stands."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest

from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.layout import decode_layout, layout_hash, plan_layout
from ckpt_engine.tree import (
    DEPTH_MAX,
    ObjectState,
    TensorRef,
    dump_tree,
    encode_state,
    encode_tree,
    load_tree,
)


def no_tensor(value: object, path: str) -> int | None:
    return None


def there_and_back(value: Any) -> Any:
    return load_tree(dump_tree(encode_tree(value, "state", no_tensor)), 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        2**70,
        -0.0,
        0.1 + 0.2,
        "naïve \ud800",
        [],
        (),
        {},
        (1, (None, [2.5])),
        {"betas": (0.9, 0.999), "maximize": False, "foreach": None},
        {0: {"step": 1}, 1: {}},
        {"$tensor": 3, "$dict": []},
        {True: 1, "x": 2},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({30: 1, 80: 2}),
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_numbers_that_json_has_no_word_for_come_back() -> None:
    values = there_and_back([math.nan, math.inf, -math.inf])
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_the_versions_that_torch_hangs_on_a_state_dict_come_back() -> None:
    state: Any = OrderedDict(weight=1)
    state._metadata = OrderedDict({"": {"version": 2}})
    assert there_and_back(state)._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("value", [{1, 2}, object(), defaultdict(list), range(3)], ids=repr)
def test_what_cannot_be_saved_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^state\.extra\.1 is a "):
        encode_tree({"extra": [0, value]}, "state", no_tensor)


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match=f"deeper than {DEPTH_MAX}"):
        encode_tree(loop, "loop", no_tensor)


@pytest.mark.parametrize("key", [(1, 2), None, math.nan])
def test_a_key_that_would_come_back_as_another_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="keys must be strings or finite numbers"):
        encode_tree({key: 1}, "state", no_tensor)


def test_only_top_level_objects_are_asked_for_their_state() -> None:
    class Scheduler:
        def state_dict(self) -> dict[str, int]:
            return {"last_epoch": 3}

        def load_state_dict(self, state: object) -> None: ...

    back = load_tree(dump_tree(encode_state({"scheduler": Scheduler()}, no_tensor)), 0)
    assert back == {"scheduler": ObjectState({"last_epoch": 3})}
    with pytest.raises(TypeError, match=r"^inner\.scheduler is a "):
        encode_state({"inner": {"scheduler": Scheduler()}}, no_tensor)


def test_a_tensor_the_shard_does_not_have_is_damage() -> None:
    assert load_tree(b'{"$tensor":0}', 1) == TensorRef(0)
    with pytest.raises(CheckpointDamaged, match="no tensor number 1"):
        load_tree(b'{"$tensor":1}', 1)


def test_tensors_fill_the_payload_without_holes_and_aligned() -> None:
    layout = plan_layout(
        [("flags", "bool", (3,)), ("weight", "float32", (5, 2)), ("half", "bfloat16", (1,)), ("step", "int64", ())]
    )
    assert layout.payload_bytes == 3 + 40 + 2 + 8
    offsets = {place.name: place.offset for place in layout.places}
    assert offsets == {"step": 0, "weight": 8, "half": 48, "flags": 50}
    assert decode_layout(layout.encoded(), layout.payload_bytes) == layout


def test_names_that_meet_are_told_apart() -> None:
    layout = plan_layout([("a.b", "int8", (1,)), ("a.b", "int8", (1,)), ("a.b#2", "int8", (1,))])
    assert len({place.name for place in layout.places}) == 3


def test_another_shape_is_another_layout_hash() -> None:
    one, other = plan_layout([("w", "int8", (2, 3))]), plan_layout([("w", "int8", (3, 2))])
    assert layout_hash(one.encoded()) != layout_hash(other.encoded())


@pytest.mark.parametrize(
    "raw",
    [
        b'{"tensors":[["w","int8",[4],0],["v","int8",[4],2]]}',
        b'{"tensors":[["w","int8",[2],0],["v","int8",[4],4]]}',
        b'{"tensors":[["w","int8",[4],0]]}',
        b'{"tensors":[["w","int9",[8],0]]}',
        b'{"tensors":[["w","int8",[-8],0]]}',
        b'{"tensors":[["w","int8",[8],true]]}',
        b"[]",
    ],
    ids=["overlap", "hole", "short", "dtype", "negative", "offset", "list"],
)
def test_a_layout_that_does_not_fill_its_payload_is_damage(raw: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        decode_layout(raw, 8)
