"""Everything a state holds besides plain tensors: it comes back as it was, or is refused by the path to it."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.layout import ELEMENT_TYPES, RESERVED_NAME, decode_layout, plan_layout
from ckpt_engine.manifest import shard_name, step_folder
from ckpt_engine.tree import dump_tree, encode_tree, load_tree
from pipelines.bench_ckpt_states import difference
from tests.ckpt_lab import engine_in_thread


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    with engine_in_thread(tmp_path_factory.mktemp("values")) as lab:
        checkpointer = Checkpointer(
            str(lab.socket), None, job="job", attempt=1, rank=0, world_size=1, node="n0", busy_wait_seconds=20.0
        )
        yield checkpointer
        checkpointer.close()


_steps = iter(range(1, 10_000))


def there_and_back(checkpointer: Checkpointer, value: Any) -> Any:
    step = next(_steps)
    ticket = checkpointer.save({"value": value}, step)
    assert not ticket.failed
    into: dict[str, Any] = {"value": None}
    checkpointer.load(into, step=step)
    return into["value"]


SIGNALLING_NAN = struct.unpack("<d", bytes.fromhex("010000000000f07f"))[0]


VALUES = [
    2**63, -(2**64), 7**2000, -(7**2000), True, -0.0, 5e-324, math.inf, -math.inf, math.nan, -math.nan,
    SIGNALLING_NAN, complex(-0.0, math.inf), complex(math.nan, -1.5), b"", b"\0\xff", bytearray(b"\0\xff"),
    "", "\0", "\ud800", "\ud83d\ude00", "😀", "a\udfffb", "$tensor", {"\ud83d\ude00": 1}, {"😀": 1},
    {"$x": {"$y": 1}}, {1: "int", 1.5: "float", "1": "str"}, {True: 1, 2: 3}, {-1: 0}, OrderedDict(),
    OrderedDict([(2, 1), ("b", OrderedDict(c=3))]), Counter({(7): 2}), [[], (), {}], ((),), (None,),
    [(1, [2.0, {"3": (4,)}])],
]  # fmt: skip


def test_every_value_comes_back_to_the_last_bit(checkpointer: Checkpointer) -> None:
    back = there_and_back(checkpointer, VALUES)
    assert [difference(torch, {"v": one}, {"v": two}) for one, two in zip(VALUES, back, strict=True)] == [""] * len(
        VALUES
    )


def test_random_numbers_go_on_where_they_were(checkpointer: Checkpointer) -> None:
    python, legacy, modern = random.Random(3), numpy.random.RandomState(4), numpy.random.default_rng(5)
    python.gauss(0, 1)  # keeps half of its pair
    legacy.standard_normal()
    torch.manual_seed(6)
    state = {
        "python": python.getstate(),
        "numpy": legacy.get_state(),
        "generator": modern.bit_generator.state,
        "twister": numpy.random.Generator(numpy.random.MT19937(7)).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    back = there_and_back(checkpointer, state)
    assert difference(torch, state, back) == ""
    expected = [python.gauss(0, 1), legacy.standard_normal(), modern.random(), torch.rand(3).tolist()]
    python.setstate(back["python"])
    legacy.set_state(back["numpy"])
    modern.bit_generator.state = back["generator"]
    torch.set_rng_state(back["torch"])
    assert [python.gauss(0, 1), legacy.standard_normal(), modern.random(), torch.rand(3).tolist()] == expected


ARRAYS = [
    numpy.arange(6, dtype="f4").reshape(2, 3), numpy.arange(6.0)[::2], numpy.arange(6.0)[::-1],
    numpy.arange(6, dtype="u2").reshape(2, 3).T, numpy.array(3.5), numpy.zeros((0, 4)), numpy.array([True, False]),
    numpy.array([1 + 2j]), numpy.float32(0.1), numpy.int64(-5), numpy.bool_(True), numpy.float64(math.nan),
]  # fmt: skip


def test_arrays_and_scalars_of_numpy_come_back_as_such(checkpointer: Checkpointer) -> None:
    for array, back in zip(ARRAYS, there_and_back(checkpointer, ARRAYS), strict=True):
        assert type(back) is type(array)
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_read_only_array_is_saved_without_a_warning(checkpointer: Checkpointer) -> None:
    array = numpy.arange(4)
    array.flags.writeable = False
    assert there_and_back(checkpointer, array).tolist() == [0, 1, 2, 3]


def test_what_happens_to_an_array_after_the_save_is_not_in_it(checkpointer: Checkpointer) -> None:
    array = numpy.arange(4)
    step = next(_steps)
    checkpointer.save({"value": array}, step)
    array[:] = 9
    into: dict[str, Any] = {"value": None}
    checkpointer.load(into, step=step)
    assert into["value"].tolist() == [0, 1, 2, 3]


class Pair(NamedTuple):
    one: int


class Tagged(dict[str, int]):
    pass


REFUSED = [
    numpy.array(["a"]), numpy.array([object()], dtype=object), numpy.zeros(2, dtype=">f4"),
    numpy.zeros(2, dtype=[("a", "f4")]), numpy.datetime64("2026-01-01"), numpy.ma.masked_array([1]),
    numpy.str_("a"), numpy.dtype("f4"), {1}, frozenset(), object(), Pair(1), Tagged(), defaultdict(int), range(3),
    torch.float32, torch.device("cpu"), torch.Size([1]), torch.Generator(), random.Random(1), len,
    {(1, 2): 3}, {None: 1}, {math.nan: 1}, {b"k": 1},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_kept_exactly_is_refused_by_its_path(checkpointer: Checkpointer) -> None:
    for value in [*REFUSED, torch.nested.nested_tensor([torch.ones(1)])]:
        with pytest.raises(TypeError, match=r"^deep\.0\.here "):
            checkpointer.save({"deep": [{"here": value}]}, next(_steps))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn_x2", "uint16", "bfloat16", "complex64", "bool"])
def test_strides_are_kept_where_the_memory_has_no_gaps(checkpointer: Checkpointer, name: str) -> None:
    raw = torch.arange(24 * ELEMENT_TYPES[name].size_bytes, dtype=torch.uint8).remainder(2)
    cube = raw.view(getattr(torch, name)).reshape(2, 3, 4)
    tensors = (
        [cube.clone().permute(2, 0, 1), cube.clone()[:, ::2], cube.clone()[:, :, 1]]
        if name != "float4_e2m1fn_x2"
        else [cube]
    )
    back = there_and_back(checkpointer, tensors)
    assert difference(torch, tensors, back) == ""
    assert back[0].stride() == tensors[0].stride()
    assert all(tensor.is_contiguous() for tensor in back[1:])


def test_channels_last_stays_channels_last(checkpointer: Checkpointer) -> None:
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = there_and_back(checkpointer, weight)
    assert back.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back, weight)


def test_a_buffer_and_a_parameter_are_their_tensors(checkpointer: Checkpointer) -> None:
    values = [torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.zeros(2)), torch.ones(1, requires_grad=True)]
    assert difference(torch, values, there_and_back(checkpointer, values)) == ""


def test_a_key_cannot_take_the_file_format_s_own_name(tmp_path: Path) -> None:
    """`__metadata__` in the header of a safetensors file is not a tensor."""
    checkpointer = Checkpointer(None, str(tmp_path), job="job", attempt=1, rank=0, world_size=1, node="n0")
    state = {RESERVED_NAME: torch.ones(3), "\ud83d\ude00": torch.zeros(1), "😀": torch.ones(1)}
    assert checkpointer.save(state, 1).durable.reached
    assert b"__metadata__#2" in (step_folder(tmp_path, 1) / shard_name(0, 1)).read_bytes()
    into: dict[str, Any] = dict.fromkeys(state)
    checkpointer.load(into, step=1)
    assert difference(torch, state, into) == ""
    checkpointer.close()


def test_names_are_text_to_every_reader() -> None:
    layout = plan_layout([("a\ud83d\ude00", "int8", (1,)), ("a😀", "int8", (1,)), ("a\ud83d\ude00", "int8", (1,))])
    names = [place.name for place in layout.places]
    assert len(set(names)) == 3
    assert all(name.encode().decode() == name for name in names)
    assert decode_layout(layout.encoded(), 3) == layout


@pytest.mark.parametrize(
    "raw",
    [
        b'{"$int":"xyz"}', b'{"$int":3}', b'{"$float":"12"}', b'{"$float":"zz"}', b'{"$float":null}',
        b'{"$bytes":"\xc3\xa9"}',
        b'{"$bytes":"a"}', b'{"$text":"gA=="}', b'{"$complex":[1]}', b'{"$complex":["a","b"]}', b'{"$array":0}',
        b'{"$scalar":true}', b'{"$ordered":[1]}', b'{"$dict":[[{"$dict":[]},1]]}', b'{"$unknown":1}', b'{"$tuple":3}',
    ],
    ids=repr,
)  # fmt: skip
def test_a_tag_with_nonsense_behind_it_is_damage(raw: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        load_tree(raw, 0)


def test_texts_that_json_would_change_are_tagged_and_others_are_not() -> None:
    raw = dump_tree(encode_tree(["é😀", "\ud83d\ude00"], "x", lambda *_: None))
    assert raw.count(b"$text") == 1
    assert load_tree(raw, 0) == ["é😀", "\ud83d\ude00"]
