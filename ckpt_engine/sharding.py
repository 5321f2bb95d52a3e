"""What a DTensor knows beyond its local shard: mesh, placements, and where the shard stands in the global tensor.

The local shard is stored like any tensor; this stands beside it in the layout, for whoever puts shards together
again on another mesh. A rank's own coordinate is left out on purpose: replicas then have the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .blocks import Shard

if TYPE_CHECKING:
    from torch import Tensor

Placement = tuple[str | int, ...]  # its kind, then its arguments

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "shard": (int,),
    "strided_shard": (int, int),  # dimension, split factor: FSDP on top of tensor parallelism
    "replicate": (),
    "partial": (str,),  # the reduction that is still to be done
}
_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True, slots=True)
class Sharding:
    """`offset`: where the local shard begins in the global tensor; None where it is not one block of it."""

    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]  # empty where the dimensions have none
    device_type: str
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...] | None

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts; else each holds the whole tensor."""
        return any(placement[0] in ("shard", "strided_shard") for placement in self.placements)

    def encoded(self) -> dict[str, Any]:
        """As it stands in a layout."""
        return {
            "mesh": list(self.mesh_shape),
            "names": list(self.mesh_names),
            "device": self.device_type,
            "placements": [list(placement) for placement in self.placements],
            "shape": list(self.global_shape),
            "offset": None if self.offset is None else list(self.offset),
        }


def decode_sharding(fields: Any, local_shape: tuple[int, ...]) -> Sharding:
    """Raises ValueError, TypeError or KeyError where `fields` cannot be the sharding of such a local shard."""
    mesh, shape = _sizes(fields["mesh"]), _sizes(fields["shape"])
    names: tuple[Any, ...] = tuple(fields["names"]) if type(fields["names"]) is list else (None,)
    placements = tuple(_placement(row, len(shape)) for row in fields["placements"])
    offset = None if fields["offset"] is None else _sizes(fields["offset"])
    if type(fields["device"]) is not str or not all(type(name) is str for name in names):
        raise ValueError("names of devices and mesh dimensions must be texts")
    if len(placements) != len(mesh) or len(names) not in (0, len(mesh)) or len(shape) != len(local_shape):
        raise ValueError("mesh, placements and shape of a sharded tensor contradict each other")
    if offset is not None:
        parts = zip(offset, local_shape, shape, strict=True)
        if any(start + size > whole for start, size, whole in parts):
            raise ValueError("a local shard reaches beyond its global tensor")
    return Sharding(mesh, names, fields["device"], placements, shape, offset)


def is_sharded_tensor(value: object) -> bool:
    """Whether this is torch's own DTensor; asked by name, because importing it takes a second."""
    kind = type(value)
    return kind.__name__ == "DTensor" and kind.__module__.startswith(_MODULE)


def describe_sharding(tensor: Any, local: Tensor, path: str, torch: Any) -> Sharding:
    """The sharding of a DTensor. Raises TypeError naming `path` where it is of a kind that has no words here."""
    if isinstance(tensor, Shard):
        return Sharding((), (), local.device.type, (), tensor.global_shape, tensor.offset)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    placements = tuple(_words_of(placement, path) for placement in tensor.placements)
    inside = mesh.get_coordinate() is not None
    offset: tuple[int, ...] | None = None
    if inside:
        compute = torch.distributed.tensor._utils.compute_local_shape_and_global_offset
        local_shape, start = compute(tensor.shape, mesh, tensor.placements)
        if tuple(local_shape) != tuple(local.shape):
            raise TypeError(
                f"{path} is a DTensor whose local shard is {list(local.shape)}, where its placements say "
                f"{list(local_shape)}; a checkpoint cannot tell where such a shard belongs"
            )
        if all(placement[0] != "strided_shard" or placement[2] == 1 for placement in placements):
            # an empty shard begins at the end of its tensor, or wherever torch says; nobody will ask for its bytes
            offset = tuple(min(int(at), size) for at, size in zip(start, shape, strict=True))
        elif _is_one_block(tensor, mesh, torch):
            offset = tuple(int(at) for at in start)
    return Sharding(
        tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), str(mesh.device_type), placements, shape, offset
    )


def rebuild_sharded(local: Tensor, sharding: Sharding, mesh: Any, torch: Any) -> Any:
    """A DTensor of `local` on a living `mesh` of the same shape."""
    known = torch.distributed.tensor
    makers: dict[Any, Any] = {
        "shard": known.Shard,
        "strided_shard": lambda dim, split: known.placement_types._StridedShard(dim, split_factor=split),
        "replicate": known.Replicate,
        "partial": known.Partial,
    }
    placements = [makers[name](*arguments) for name, *arguments in sharding.placements]
    strides = [1]
    for size in reversed(sharding.global_shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return known.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(sharding.global_shape),
        stride=tuple(reversed(strides[: len(sharding.global_shape)])),
    )  # fmt: skip


def _words_of(placement: Any, path: str) -> Placement:
    kind = type(placement)
    if kind.__module__.startswith(_MODULE):
        match kind.__name__:
            case "Shard":
                return ("shard", int(placement.dim))
            case "_StridedShard":
                return ("strided_shard", int(placement.dim), int(placement.split_factor))
            case "Replicate":
                return ("replicate",)
            case "Partial":
                return ("partial", str(placement.reduce_op))
    raise TypeError(f"{path} is a DTensor with the placement {placement!r:.100}, which a checkpoint cannot hold")


def _is_one_block(tensor: Any, mesh: Any, torch: Any) -> bool:
    """Whether a strided shard is contiguous all the same, as where FSDP has split what tensor parallelism left.

    torch numbers every row of a sharded dimension, so the rows are read back: one block has no gaps.
    """
    for dim in {placement.dim for placement in tensor.placements if hasattr(placement, "dim")}:
        rows = torch.arange(tensor.shape[dim])
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) != dim:
                continue
            at, count = mesh.get_coordinate()[mesh_dim], mesh.shape[mesh_dim]
            split = getattr(placement, "split_factor", 1)
            pieces = [piece.chunk(count) for piece in rows.chunk(split)]
            rows = torch.cat([piece[at] for piece in pieces if at < len(piece)] or [rows[:0]])
        if len(rows) and int(rows[-1]) - int(rows[0]) + 1 != len(rows):
            return False
    return True


def _placement(row: Any, dimensions: int) -> Placement:
    kind, *arguments = row
    if type(row) is not list or [type(argument) for argument in arguments] != list(_ARGUMENTS[kind]):
        raise ValueError(f"{row!r:.100} is not a placement")
    if kind in ("shard", "strided_shard") and not 0 <= arguments[0] < dimensions:
        raise ValueError(f"{row!r:.100} shards a dimension that is not there")
    placement: Placement = (kind, *arguments)
    return placement


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError(f"{value!r:.100} is not a list of sizes")
    return tuple(value)
