"""The tensors of a checkpoint that is being loaded: compared with those they go to, filled, copied or looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .blocks import Shard
from .errors import StateMismatch
from .fetching import LoadedShard
from .filling import Region, fill, overlap
from .layout import ELEMENT_TYPES, TensorPlace, TensorView
from .sharding import Sharding, describe_sharding, is_sharded_tensor, rebuild_sharded
from .tensors import OwnedTensors, TensorDoor
from .tree import TensorRef

if TYPE_CHECKING:
    from torch import Tensor

Mesh = tuple[tuple[int, ...], tuple[str, ...]]  # shape and names


class Leaves:
    """One load's tensors. Nothing is written before `fill`."""

    def __init__(self, door: TensorDoor, shard: LoadedShard, threads: int) -> None:
        self._door = door
        self._shard = shard
        self._threads = threads
        self._tensors: tuple[TensorPlace | TensorView, ...] = shard.layout.tensors
        self._views: list[Tensor] | None = None
        self._owned: OwnedTensors | None = None
        self._sharded: dict[tuple[int, bool], Any] = {}
        self._fills: list[tuple[int, Tensor]] = []
        self._meshes: dict[Mesh, Any] = {}

    def look_for_meshes(self, targets: Iterable[Any]) -> None:
        """Note the meshes of the DTensors in modules and optimizers: others are built on the same."""
        for tensor in _tensors_of(self._door.torch, targets):
            if is_sharded_tensor(tensor):
                self._note_mesh(tensor)

    def can_check(self, live: Any) -> bool:
        return self._door.is_plain(live) or is_sharded_tensor(live) or isinstance(live, Shard)

    def check(self, node: TensorRef, live: Any, path: str) -> Tensor:
        """The plain tensor behind `live`, which is what was saved but for its bytes. Raises StateMismatch."""
        saved, local = self._tensors[node.index], self._door.local(live)
        dtype = self._door.dtype_name(local, path)
        if (saved.dtype, saved.shape) != (dtype, tuple(local.shape)):
            raise StateMismatch(
                f"{path} is {dtype}{list(local.shape)} here, but {saved.dtype}{list(saved.shape)} in the checkpoint"
            )
        sharding = None if local is live else describe_sharding(live, local, path, self._door.torch)
        if _without_device(sharding) != _without_device(saved.sharding):
            raise StateMismatch(f"{path} is {_said(sharding)} here, but {_said(saved.sharding)} in the checkpoint")
        if is_sharded_tensor(live):
            self._note_mesh(live)
        plain: Tensor = local
        return plain

    def fitting(self, node: TensorRef, live: Any) -> Tensor | None:
        """As `check`; None where it does not fit, or is no tensor at all."""
        if node.form != "tensor" or not self.can_check(live) or self._door.local(live).is_meta:
            return None
        try:
            return self.check(node, live, "it")
        except (StateMismatch, TypeError):
            return None

    def put(self, node: TensorRef, local: Tensor) -> None:
        """Let `fill` write this tensor's bytes to `local`, which has passed `check`."""
        self._fills.append((node.index, local))

    def take(self, node: TensorRef, *, own: bool) -> Any:
        """The tensor, array or scalar: with memory that nobody else has, filled by `fill`; or a view of the shard's.

        What was tied is tied again. Raises StateMismatch where it is a DTensor whose mesh is not known here.
        """
        if node.form == "scalar":
            return self._view(node.index).numpy()[()]  # a value, there and then
        tensor = self._own(node.index) if own else self._view(node.index)
        if node.form == "array":
            return tensor.numpy()
        sharding = self._tensors[node.index].sharding
        if sharding is None:
            return tensor
        if not sharding.mesh_shape and sharding.offset is not None:
            return Shard(tensor, sharding.global_shape, sharding.offset)
        key = (node.index, own)
        if key not in self._sharded:
            mesh = self._meshes.get((sharding.mesh_shape, sharding.mesh_names))
            if mesh is None:
                raise StateMismatch(
                    f"the checkpoint has a DTensor on a mesh of {list(sharding.mesh_shape)}, and none of the modules, "
                    "optimizers and tensors to load into lives on such a mesh"
                )
            self._sharded[key] = rebuild_sharded(tensor, sharding, mesh, self._door.torch)
        return self._sharded[key]

    def plain_views(self) -> list[Tensor | None]:
        """The views of all tensors that are no more than that; None for parts of something that is sharded."""
        views = self._all_views()
        return [view if it.sharding is None else None for view, it in zip(views, self._tensors, strict=True)]

    def fill(self) -> None:
        """All bytes to where they belong: straight from where they are into plain memory, else by torch."""
        fills = [(index, target) for index, target in self._fills if target.numel()]
        found = [(index, target, self._region(index, target)) for index, target in fills]
        regions = [region for _, _, region in found if region is not None]
        if overlap(regions):  # then the order matters, and there is one only where torch does it
            found, regions = [(index, target, None) for index, target in fills], []
        fill(self._shard.source(), regions, self._threads)
        self._count_as_written([target for _, target, region in found if region is not None])
        for index, target, region in found:
            if region is None:
                self._copy(target, self._view(index))

    def _region(self, index: int, target: Tensor) -> Region | None:
        """Where the bytes of `target` are, if they can be written as they stand there; else None."""
        saved, start = self._tensors[index], self._shard.payload_offset
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg() and not target.is_inference()
        if not plain or target.device.type != "cpu":
            return None
        size_bytes = target.numel() * target.element_size()
        if isinstance(saved, TensorPlace):
            return Region(start + saved.offset, target.data_ptr(), size_bytes)
        if saved.conjugate or saved.negative or saved.strides != tuple(target.stride()):
            return None
        base = self._tensors[saved.place]
        assert isinstance(base, TensorPlace)
        offset = start + base.offset + saved.offset * ELEMENT_TYPES[saved.dtype].size_bytes
        return Region(offset, target.data_ptr(), size_bytes)

    def _count_as_written(self, targets: list[Tensor]) -> None:
        """What autograd has kept of them is out of date; copy_ says so by itself."""
        increment = getattr(self._door.torch.autograd.graph, "increment_version", None)
        if increment is None or not targets:
            return
        try:
            increment(targets)
        except (TypeError, AttributeError):  # an older torch takes one at a time
            for target in targets:
                increment(target)

    def _copy(self, target: Tensor, view: Tensor) -> None:
        if any(tensor.is_conj() or tensor.is_neg() for tensor in (target, view)):
            target.copy_(view)
        else:  # as bits: some dtypes cannot be copied
            self._door.bits(target).copy_(self._door.bits(view))

    def _own(self, index: int) -> Tensor:
        if self._owned is None:
            self._owned = OwnedTensors(self._door, self._shard.layout, self._all_views(), self._fill_later)
        return self._owned.get(index)

    def _fill_later(self, index: int, tensor: Tensor) -> None:
        self._fills.append((index, tensor))

    def _view(self, index: int) -> Tensor:
        return self._all_views()[index]

    def _all_views(self) -> list[Tensor]:
        if self._views is None:
            self._views = self._shard.views(self._door)
        return self._views

    def _note_mesh(self, tensor: Any) -> None:
        mesh = tensor.device_mesh
        self._meshes.setdefault((tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())), mesh)


def _tensors_of(torch: Any, targets: Iterable[Any]) -> Iterator[Any]:
    for target in targets:
        if isinstance(target, torch.nn.Module):
            yield from target.parameters()
            yield from target.buffers()
        elif isinstance(target, torch.optim.Optimizer):
            for group in target.param_groups:
                yield from group["params"]


def _without_device(sharding: Sharding | None) -> Sharding | None:
    return None if sharding is None else dataclasses.replace(sharding, device_type="")


def _said(sharding: Sharding | None) -> str:
    if sharding is None:
        return "a plain tensor"
    placements = ", ".join(" ".join(map(str, placement)) for placement in sharding.placements)
    return f"one of {list(sharding.global_shape)} on a mesh of {list(sharding.mesh_shape)} ({placements})"
