"""Blocks of tensors put together anew: every element once, from where it is, for any cut before and after."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.blocks import Block, Shard, runs
from ckpt_engine.errors import StateMismatch
from ckpt_engine.layout import Layout, StoredTensor, TensorView, plan_layout
from ckpt_engine.reshard import Target, nearest_rank, plan_reshard, run_reshard
from ckpt_engine.sharding import Sharding


class FakeTensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


def sharding(
    global_shape: tuple[int, ...], offset: tuple[int, ...] | None, *placements: tuple[str | int, ...]
) -> Sharding:
    return Sharding((), (), "cpu", placements, global_shape, offset)


def cells(block: Block) -> Iterator[tuple[int, ...]]:
    """The global index of each element, row by row."""
    yield from itertools.product(
        *(range(start, start + size) for start, size in zip(block.offset, block.shape, strict=True))
    )


def number(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """What stands at `index` of the global tensor: its own position, in two bytes."""
    at = 0
    for part, size in zip(index, shape, strict=True):
        at = at * size + part
    return at % 65_536


def content(block: Block, shape: tuple[int, ...]) -> bytes:
    return b"".join(number(index, shape).to_bytes(2, "little") for index in cells(block))


def cut(shape: tuple[int, ...], points: Sequence[Sequence[int]]) -> list[Block]:
    """Blocks of a grid that cover `shape`; `points` are where each dimension is cut."""
    edges = [
        sorted({0, size, *(point % (size + 1) for point in given)}) for size, given in zip(shape, points, strict=True)
    ]
    spans = [list(itertools.pairwise(edge)) or [(0, 0)] for edge in edges]
    return [
        Block(tuple(start for start, _ in corner), tuple(end - start for start, end in corner))
        for corner in itertools.product(*spans)
    ]


class Payloads:
    """`ShardReader` over bytes; counts what was read."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.payloads = payloads
        self.read: list[int] = []

    @contextlib.contextmanager
    def payload(self, rank: int) -> Iterator[memoryview]:
        self.read.append(rank)
        yield memoryview(self.payloads[rank])


SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)


@given(data=st.data(), shape=SHAPES)
@settings(max_examples=150)
def test_any_cut_becomes_any_other_cut(data: st.DataObject, shape: tuple[int, ...]) -> None:
    points = st.tuples(*(st.lists(st.integers(0, 20), max_size=3) for _ in shape))
    before, after = cut(shape, data.draw(points)), cut(shape, data.draw(points))
    layouts = [
        plan_layout([StoredTensor("w", "int16", block.shape, None, sharding(shape, block.offset))]) for block in before
    ]
    reader = Payloads([content(block, shape) for block in before])
    for block in after:
        target = Target(block.shape, sharding(shape, block.offset))
        plan = plan_reshard(layouts, 0, {"w": target})
        assert sum(copy.size_bytes for copy in plan.copies) == 2 * block.elements, "each element once"
        memory = run_reshard(plan, reader)
        assert memory[: plan.layout.payload_bytes] == content(block, shape)
        assert plan.layout.places[0].sharding == target.sharding


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_what_is_taken_out_of_a_block_leaves_the_rest_of_it(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = Block((0,) * len(shape), shape)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(data.draw(st.integers(1, whole_size - at)) for at, whole_size in zip(start, shape, strict=True))
    part = Block(start, size)
    found = [*cells(part), *(index for rest in whole.without(part) for index in cells(rest))]
    assert sorted(found) == sorted(cells(whole))


def test_neighbouring_rows_are_one_run() -> None:
    whole = Block((0, 0, 0), (4, 3, 5))
    rows, columns = Block((1, 0, 0), (2, 3, 5)), Block((0, 0, 1), (4, 3, 2))
    assert list(runs(rows, whole, rows, 2)) == [(30, 0, 60)]
    assert len(list(runs(columns, whole, columns, 2))) == 12
    assert list(runs(whole, whole, whole, 2)) == [(0, 0, 120)]


def four_ranks() -> tuple[list[Layout], Payloads]:
    """A matrix in row blocks, a bias that all have, a counter that is each rank's own."""
    layouts, payloads = [], []
    for rank in range(4):
        block = Block((rank * 2, 0), (2, 3))
        layout = plan_layout(
            [
                StoredTensor("w", "int16", (2, 3), None, sharding((8, 3), block.offset, ("shard", 0))),
                StoredTensor("b", "int16", (3,), None, sharding((3,), (0,), ("replicate",))),
                StoredTensor("own", "int16", ()),
            ]
        )
        raw = {"w": content(block, (8, 3)), "b": b"bbbbbb", "own": rank.to_bytes(2, "little")}
        payload = bytearray(layout.payload_bytes)
        for place in layout.places:
            payload[place.offset : place.offset + place.size_bytes] = raw[place.name]
        layouts.append(layout)
        payloads.append(bytes(payload))
    return layouts, Payloads(payloads)


def tensors(layout: Layout, memory: bytes) -> dict[str, bytes]:
    return {place.name: memory[place.offset : place.offset + place.size_bytes] for place in layout.places}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_four_ranks_become_others(world_size: int) -> None:
    layouts, reader = four_ranks()
    edges = [rank * 8 // world_size for rank in range(world_size + 1)]
    for rank in range(world_size):
        block = Block((edges[rank], 0), (edges[rank + 1] - edges[rank], 3))
        base = nearest_rank(rank, world_size, 4)
        plan = plan_reshard(layouts, base, {"w": Target(block.shape, sharding((8, 3), block.offset))})
        found = tensors(plan.layout, run_reshard(plan, reader)[:])
        assert found == {"w": content(block, (8, 3)), "b": b"bbbbbb", "own": base.to_bytes(2, "little")}
    assert [nearest_rank(rank, 8, 4) for rank in range(8)] == [0, 1, 2, 3, 2, 2, 3, 3]


def test_only_the_shards_that_have_something_are_read() -> None:
    layouts, reader = four_ranks()
    block = Block((2, 0), (2, 3))
    plan = plan_reshard(layouts, 1, {"w": Target(block.shape, sharding((8, 3), block.offset))}, near=[1])
    assert plan.ranks == (1,)
    run_reshard(plan, reader)
    assert reader.read == [1]


def test_a_plain_target_gets_the_whole_and_a_sharded_one_its_part_of_a_plain_tensor() -> None:
    layouts, reader = four_ranks()
    plan = plan_reshard(layouts, 0, {"w": Target((8, 3), None), "b": Target((1,), sharding((3,), (2,)))})
    found = tensors(plan.layout, run_reshard(plan, reader)[:])
    assert found["w"] == content(Block((0, 0), (8, 3)), (8, 3))
    assert found["b"] == b"bb"


def test_what_the_state_does_not_have_yet_is_spread_like_what_was_spread_alike() -> None:
    """An optimizer that has not stepped has no moments: they go with the parameters that they belong to."""
    layouts = [
        plan_layout(
            [
                StoredTensor(name, "int16", (2, 3), None, sharding((8, 3), (rank * 2, 0), ("shard", 0)))
                for name in ("model.w", "optimizer.state.0.exp_avg")
            ]
        )
        for rank in range(4)
    ]
    new = sharding((8, 3), (4, 0), ("shard", 0))
    plan = plan_reshard(layouts, 1, {"model.w": Target((4, 3), new)})
    assert [(place.shape, place.sharding) for place in plan.layout.places] == [((4, 3), new)] * 2


def test_a_hole_is_said_and_not_filled() -> None:
    layouts, _ = four_ranks()
    with pytest.raises(StateMismatch, match=r"of w the block at \[6, 0\] of shape \[2, 3\] is in no saved shard"):
        plan_reshard(layouts[:3], 0, {"w": Target((8, 3), None)})


@pytest.mark.parametrize(
    "stored", [sharding((4,), (0,), ("partial", "sum")), sharding((4,), None, ("strided_shard", 0, 2))]
)
def test_what_cannot_be_cut_is_refused(stored: Sharding) -> None:
    layout = plan_layout([StoredTensor("w", "int16", (4,), None, stored)])
    with pytest.raises(StateMismatch, match="cannot be undone"):
        plan_reshard([layout], 0, {})


def test_other_shapes_and_odd_targets_are_refused_by_name() -> None:
    layouts, _ = four_ranks()
    for target in (Target((8, 4), None), Target((2, 4), sharding((8, 4), (0, 0)))):
        with pytest.raises(StateMismatch, match=r"w is \[8, 4\] here as a whole, but \[8, 3\]"):
            plan_reshard(layouts, 0, {"w": target})
    with pytest.raises(StateMismatch, match="not one block of its tensor"):
        plan_reshard(layouts, 0, {"w": Target((2, 3), sharding((8, 3), None))})
    with pytest.raises(StateMismatch, match=r"own is \[4\] here as a whole, but \[\]"):
        plan_reshard(layouts, 0, {"own": Target((2,), sharding((4,), (0,)))})


def test_memory_that_others_share_is_not_cut() -> None:
    stored = StoredTensor("w", "int16", (2,), None, sharding((4,), (0,), ("shard", 0)))
    other = StoredTensor("w", "int16", (2,), None, sharding((4,), (2,), ("shard", 0)))
    views = [TensorView(0, "int16", (1,), (1,), 1)]
    layouts = [plan_layout([stored], views), plan_layout([other], views)]
    with pytest.raises(StateMismatch, match="shares its memory"):
        plan_reshard(layouts, 0, {"w": Target((4,), None)})
    plan = plan_reshard(layouts, 0, {"w": Target((2,), sharding((4,), (2,)))})
    assert plan.layout.views == tuple(views), "of the same size, everything stays where it was"


@pytest.mark.parametrize(
    ("shape", "global_shape", "offset"),
    [((2,), (4, 4), (0,)), ((2,), (4,), (3,)), ((2,), (4,), (-1,)), ((2, 2), (4, 4), (0,)), ((5,), (4,), (0,))],
)
def test_a_shard_that_cannot_be_one_is_refused(
    shape: tuple[int, ...], global_shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="a shard of shape"):
        Shard(FakeTensor(*shape), global_shape, offset)


def test_a_shard_says_where_it_stands() -> None:
    shard = Shard(FakeTensor(2, 3), [8, 3], [6, 0])  # type: ignore[arg-type]
    assert (shard.global_shape, shard.offset) == ((8, 3), (6, 0))
    assert math.prod(shard.tensor.shape) == 6
