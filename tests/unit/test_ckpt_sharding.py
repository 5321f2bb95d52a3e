"""DTensors: the local shard is stored, and beside it where that shard belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_engine.capture import Capture
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.layout import decode_layout
from ckpt_engine.sharding import Sharding, rebuild_sharded
from ckpt_engine.tensors import TensorDoor

DOOR = TensorDoor(torch)
WORLD, RANK = 8, 5  # in a mesh of 4 × 2: row 2, column 1


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """This process as one of several ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh() -> Any:
    return init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))


def placed(mesh: Any, whole: torch.Size | tuple[int, ...], placements: list[Any]) -> DTensor:
    """This rank's part of zeros."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, _ = compute_local_shape_and_global_offset(torch.Size(whole), mesh, placements)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride
    )


def saved(tensor: Any) -> Any:
    """The place of the only tensor of a state, read back from its encoded layout."""
    layout = Capture(DOOR).take({"w": tensor}).plan.layout
    assert decode_layout(layout.encoded(), layout.payload_bytes) == layout
    return layout.places[0]


@pytest.mark.parametrize(
    ("placements", "shape", "local", "offset", "words"),
    [
        ([Shard(0), Shard(1)], (10, 6), (3, 3), (6, 3), (("shard", 0), ("shard", 1))),
        ([Shard(0), Replicate()], (9, 6), (3, 6), (6, 0), (("shard", 0), ("replicate",))),
        ([Replicate(), Replicate()], (9, 6), (9, 6), (0, 0), (("replicate",), ("replicate",))),
        ([Shard(0), Shard(0)], (16, 2), (2, 2), (10, 0), (("shard", 0), ("shard", 0))),
        ([Shard(0), Replicate()], (2, 3), (0, 3), (2, 0), (("shard", 0), ("replicate",))),
        ([Replicate(), Partial()], (4,), (4,), (0,), (("replicate",), ("partial", "sum"))),
        (
            [_StridedShard(0, split_factor=2), Shard(0)],
            (16, 2),
            (2, 2),
            (12, 0),
            (("strided_shard", 0, 2), ("shard", 0)),
        ),
    ],
    ids=["2d", "rows", "whole", "nested", "empty", "partial", "fsdp on tp"],
)
def test_where_a_local_shard_belongs_stands_in_the_layout(
    mesh: Any, placements: list[Any], shape: Any, local: Any, offset: Any, words: Any
) -> None:
    place = saved(placed(mesh, shape, placements))
    assert place.shape == local
    assert place.sharding == Sharding((4, 2), ("dp", "tp"), "cpu", words, shape, offset)
    assert place.sharding.sharded == any(word[0].endswith("shard") for word in words)


def test_a_strided_shard_in_pieces_has_no_offset(mesh: Any) -> None:
    place = saved(placed(mesh, (16, 2), [_StridedShard(0, split_factor=2), Replicate()]))
    assert place.shape == (4, 2)
    assert place.sharding.offset is None


def test_replicas_have_the_same_layout(mesh: Any) -> None:
    """The coordinate along a replicated dimension is nobody's business: replicas are stored once."""
    assert "at" not in saved(placed(mesh, (4, 4), [Replicate(), Shard(1)])).sharding.encoded()


def test_it_is_built_again_on_a_living_mesh(mesh: Any) -> None:
    tensor = placed(mesh, (10, 6), [Shard(0), Shard(1)])
    sharding = saved(tensor).sharding
    again = rebuild_sharded(tensor.to_local(), sharding, mesh, torch)
    assert (again.shape, again.stride()) == (tensor.shape, tensor.stride())
    assert again.placements == tensor.placements
    assert again.to_local().data_ptr() == tensor.to_local().data_ptr()


def test_a_shard_that_is_not_what_its_placements_say_is_refused(mesh: Any) -> None:
    wrong = DTensor.from_local(
        torch.zeros(2, 2), mesh, [Shard(0), Shard(1)], run_check=False, shape=torch.Size((10, 6)), stride=(6, 1)
    )
    with pytest.raises(
        TypeError, match=r"^w is a DTensor whose local shard is \[2, 2\], where its placements say \[3, 3\]"
    ):
        saved(wrong)


def test_other_placements_at_a_later_save_are_seen(mesh: Any) -> None:
    capture = Capture(DOOR)
    for placements in (
        [Shard(0), Replicate()],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
    ):
        tensor = placed(mesh, (4, 4), placements)
        taken = capture.take({"w": tensor})
        fresh = Capture(DOOR).take({"w": tensor})
        assert taken.plan.layout == fresh.plan.layout
        assert [local.data_ptr() for local in taken.tensors] == [tensor.to_local().data_ptr()]


@pytest.mark.parametrize(
    "change",
    [
        {"offset": [9, 0]}, {"offset": [-1, 0]}, {"mesh": [4]}, {"placements": [["shard", 2], ["replicate"]]},
        {"placements": [["shard"], ["replicate"]]}, {"placements": ["shard", "replicate"]}, {"placements": [["x"], []]},
        {"names": ["dp"]}, {"names": "dp"}, {"shape": [9]}, {"device": 3}, {"mesh": None},
    ],
    ids=repr,
)  # fmt: skip
def test_a_sharding_that_contradicts_itself_is_damage(mesh: Any, change: dict[str, Any]) -> None:
    import json

    layout = Capture(DOOR).take({"w": placed(mesh, (9, 6), [Shard(0), Replicate()])}).plan.layout
    document = json.loads(layout.encoded())
    document["tensors"][0][4]["sharding"] |= change
    with pytest.raises(CheckpointDamaged, match="layout is not readable"):
        decode_layout(json.dumps(document).encode(), layout.payload_bytes)
