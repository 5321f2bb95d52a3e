"""Tensors as bytes and back. torch is handed in by the client; NumPy's arrays come through torch's own bridge."""

from __future__ import annotations

import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aliasing import Span
from .blocks import Shard
from .errors import StateMismatch
from .layout import ELEMENT_TYPES, Layout, TensorPlace, TensorView
from .sharding import Sharding, describe_sharding, is_sharded_tensor
from .tensor_guard import Build, trusted_build
from .tree import Form, Node
from .words import TorchWords

if TYPE_CHECKING:
    from torch import Tensor

ELEMENTS_COMPARED_MAX = 1 << 24  # of strided tensors, one by one; more than these are taken to overlap
SLICE_ELEMENTS_MAX = 32_767  # torch shares out copies of more elements among its threads
_BITS_OF = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A leaf of a state: the plain tensor that holds its bytes, and as what it stands there."""

    tensor: Tensor
    dtype: str
    form: Form = "tensor"
    sharding: Sharding | None = None


class TensorDoor:
    """What the checkpointer does with torch."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.dtypes = {name: getattr(torch, name) for name in ELEMENT_TYPES if hasattr(torch, name)}
        self._dtype_names = {dtype: name for name, dtype in self.dtypes.items()}
        self.plain = (torch.Tensor, torch.nn.Parameter)
        self.words = TorchWords(torch)

    @functools.cached_property
    def guard_build(self) -> Build | None:
        """How this torch tells in one call whether tensors are what they were; None where it cannot."""
        return trusted_build(self.torch)

    def is_plain(self, value: object) -> bool:
        """A tensor that is what it says: subclasses may lie about their dtype or hold several tensors."""
        return type(value) in self.plain

    def local(self, value: Any) -> Any:
        """The part of a DTensor, or of `Shard`, that this rank holds; any other tensor as it is."""
        if isinstance(value, Shard):
            return value.tensor
        if not is_sharded_tensor(value):
            return value
        local = getattr(value, "_local_tensor", None)  # without a node of autograd for each
        return value.to_local() if local is None else local

    def live(self, value: object, path: str) -> LiveTensor | None:
        """`value` as a leaf; None where it is none. Raises TypeError where a checkpoint cannot hold it."""
        if isinstance(value, (self.torch.Tensor, Shard)):
            local = self.local(value)
            dtype = self.dtype_name(local, path)
            sharding = None if local is value else describe_sharding(value, local, path, self.torch)
            return LiveTensor(local, dtype, "tensor", sharding)
        kind = type(value)
        numpy = sys.modules.get("numpy")
        if numpy is None or kind.__module__ != "numpy":
            return None
        if kind is numpy.ndarray:
            form: Form = "array"
        elif issubclass(kind, numpy.generic):
            form = "scalar"
        else:
            return None
        tensor = self.from_array(value, path)
        return LiveTensor(tensor, self.dtype_name(tensor, path), form)

    def from_array(self, value: Any, path: str) -> Tensor:
        """A tensor over the memory of a NumPy array, or with the value of a NumPy scalar."""
        array = value if type(value).__name__ == "ndarray" else value.reshape(1)
        try:
            if not array.flags.writeable or any(stride < 0 for stride in array.strides):
                array = array.copy()
            tensor: Tensor = self.torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{path} is a NumPy value of dtype {value.dtype}, which a checkpoint cannot hold: {error}"
            ) from error
        return tensor if array is value or value.ndim else tensor.reshape(())

    def dtype_name(self, tensor: Tensor, path: str) -> str:
        """The dtype by name. Raises TypeError where `tensor` is not of a kind that a checkpoint can hold."""
        if not self.is_plain(tensor):
            raise TypeError(
                f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}, of which a checkpoint cannot "
                "tell what is in it; save plain tensors or DTensors"
            )
        name = self._dtype_names.get(tensor.dtype)
        if name is None or tensor.layout is not self.torch.strided or tensor.is_meta or tensor.is_nested:
            raise TypeError(
                f"{path} is a tensor of dtype {tensor.dtype}, layout {tensor.layout} on {tensor.device}, "
                "which a checkpoint cannot hold"
            )
        return name

    def span(self, leaf: LiveTensor, path: str) -> Span:
        """Where a leaf lies."""
        tensor = leaf.tensor
        start = tensor.data_ptr()
        element = tensor.element_size()
        return Span(
            path, leaf.dtype, tuple(tensor.shape), tuple(tensor.stride()), start,
            start - int(tensor.storage_offset()) * element, tensor.is_contiguous(),
            tensor.is_conj(), tensor.is_neg(), leaf.sharding,
        )  # fmt: skip

    def share_elements(self, spans: Sequence[Span]) -> bool:
        """Whether any element of one is an element of another; sure only where False."""
        elements = [span.size_bytes // span.element_bytes for span in spans]
        if len({span.dtype for span in spans}) > 1 or sum(elements) > ELEMENTS_COMPARED_MAX:
            return True
        torch, start = self.torch, min(span.start for span in spans)
        touched = []
        for span in spans:
            at, odd = divmod(span.start - start, span.element_bytes)
            if odd:
                return True
            offsets = torch.full((), at, dtype=torch.int64)
            for size, stride in zip(span.shape, span.strides, strict=True):
                offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
            touched.append(offsets.reshape(-1))
        every = torch.cat(touched)
        return bool(torch.unique(every).numel() < every.numel())

    def bits(self, tensor: Tensor) -> Tensor:
        """`tensor` as integers of the same size: some dtypes can be neither copied nor compared."""
        name = _BITS_OF.get(tensor.element_size())
        if name is None or tensor.is_conj() or tensor.is_neg():
            return tensor
        return tensor.view(getattr(self.torch, name))

    def views(self, memory: mmap.mmap, payload_offset: int, layout: Layout) -> list[Tensor]:
        """A tensor over each tensor of the layout. They keep `memory` alive; nobody may close it."""
        frombuffer, dtypes = self.torch.frombuffer, self.dtypes
        places: list[Tensor] = []
        for place in layout.places:  # thousands, and somebody waits: as at_place does it, without its calls
            dtype, count = dtypes.get(place.dtype), math.prod(place.shape)
            if dtype is None or not count:
                places.append(self.at_place(memory, payload_offset, place))
                continue
            flat = frombuffer(memory, dtype=dtype, count=count, offset=payload_offset + place.offset)
            places.append(flat if len(place.shape) == 1 else flat.resize_(place.shape))
        return places + [self.look(places[view.place], view) for view in layout.views]

    def view(self, memory: mmap.mmap, payload_offset: int, layout: Layout, index: int) -> Tensor:
        """A tensor over tensor `index` of the layout."""
        places = len(layout.places)
        if index < places:
            return self.at_place(memory, payload_offset, layout.places[index])
        view = layout.views[index - places]
        return self.look(self.at_place(memory, payload_offset, layout.places[view.place]), view)

    def at_place(self, memory: mmap.mmap, payload_offset: int, place: TensorPlace) -> Tensor:
        """A tensor over one stored tensor."""
        dtype = self.dtype(place.dtype)
        count = math.prod(place.shape)
        if count == 0:  # frombuffer refuses to look at nothing
            empty: Tensor = self.torch.empty(place.shape, dtype=dtype)
            return empty
        flat: Tensor = self.torch.frombuffer(memory, dtype=dtype, count=count, offset=payload_offset + place.offset)
        return flat if len(place.shape) == 1 else flat.resize_(place.shape)  # a tensor of its own, not a view of one

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source into its target of the same shape and dtype: copy_ would broadcast and cast.

        torch shares out the copy of many elements among its threads, whose number is the process's and not ours to
        change, and which spin where cores are busy; so it is given few at a time.
        """
        with self.torch.no_grad():
            pending = [self._comparable(target, source) for target, source in zip(targets, sources, strict=True)]
            while pending:
                target, source = pending.pop()
                if source.numel() <= SLICE_ELEMENTS_MAX or source.device.type != "cpu" or target.device.type != "cpu":
                    target.copy_(source)
                    continue
                dim = max(range(source.dim()), key=lambda dim: int(source.shape[dim]))
                rows = max(1, SLICE_ELEMENTS_MAX // (source.numel() // source.shape[dim]))
                split = self.torch.split
                pending.extend(zip(split(target, rows, dim), split(source, rows, dim), strict=True))

    def _comparable(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        bits = self.bits(target), self.bits(source)
        return bits if bits[0].dtype == bits[1].dtype else (target, source)  # a conjugate is one only when it is copied

    def look(self, base: Tensor, view: TensorView) -> Tensor:
        """`view` over the memory of a contiguous stored tensor."""
        start = base.storage_offset() * base.element_size() // ELEMENT_TYPES[view.dtype].size_bytes
        empty = self.torch.empty(0, dtype=self.dtype(view.dtype), device=base.device)
        tensor: Tensor = empty.set_(base.untyped_storage(), start + view.offset, view.shape, view.strides)
        if view.conjugate:
            tensor = tensor.conj()
        return self.torch._neg_view(tensor) if view.negative else tensor

    def dtype(self, name: str) -> Any:
        """torch's dtype of this name. Raises StateMismatch where this torch has none."""
        dtype = self.dtypes.get(name)
        if dtype is None:
            raise StateMismatch(
                f"this torch has no {name}, which the checkpoint holds; use the torch it was saved with"
            )
        return dtype


class OwnedTensors:
    """Tensors that nobody else has for what a checkpoint holds, one for each stored tensor: what was tied is tied
    again, and what shared memory shares it again.

    `views` are those of the loaded memory; `fill(index, tensor)` is told of each that needs the bytes of one.
    """

    def __init__(
        self, door: TensorDoor, layout: Layout, views: Sequence[Tensor], fill: Callable[[int, Tensor], object]
    ) -> None:
        self._door = door
        self._layout = layout
        self._views = views
        self._fill = fill
        self._owned: dict[int, Tensor] = {}

    def get(self, index: int) -> Tensor:
        """Tensor `index` of the layout; the same object each time."""
        if index not in self._owned:
            places = len(self._layout.places)
            if index < places:
                self._owned[index] = self._stored(index)
            else:
                view = self._layout.views[index - places]
                self._owned[index] = self._door.look(self.get(view.place), view)
        return self._owned[index]

    def _stored(self, index: int) -> Tensor:
        torch, place, dtype = self._door.torch, self._layout.places[index], self._views[index].dtype
        if place.strides is not None and is_dense(place.shape, place.strides):
            tensor: Tensor = torch.empty_strided(place.shape, place.strides, dtype=dtype)
        else:
            tensor = torch.empty(place.shape, dtype=dtype)
        self._fill(index, tensor)
        return tensor


class Collector:
    """The leaves of a state, in the order in which it names them."""

    def __init__(self, door: TensorDoor) -> None:
        self._door = door
        self.leaves: list[LiveTensor] = []
        self.paths: list[str] = []
        self._nodes: list[dict[str, int]] = []

    def __call__(self, value: object, path: str) -> Node:
        live = self._door.live(value, path)
        if live is None:
            return None
        node = {f"${live.form}": len(self.leaves)}
        self.leaves.append(live)
        self.paths.append(path)
        self._nodes.append(node)
        return node

    def number(self, index_of: Sequence[int]) -> None:
        """Let every node say where its tensor stands in the layout."""
        for node, index in zip(self._nodes, index_of, strict=True):
            for tag in node:
                node[tag] = index


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these strides fills its memory: a transposed one does, every other column does not."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
