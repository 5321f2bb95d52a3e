"""Tensors as bytes and back. torch is handed in by the client, the only file here that imports it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import StateMismatch
from .layout import ELEMENT_TYPES, Layout

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[Any, ...]
Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class TensorDoor:
    """What the client does with torch."""

    def __init__(self, torch: Any, copy_threads: int) -> None:
        self.torch = torch
        self._copy_threads = copy_threads
        self._dtypes = {name: getattr(torch, name) for name in ELEMENT_TYPES if hasattr(torch, name)}
        self._dtype_names = {dtype: name for name, dtype in self._dtypes.items()}
        self._plain = (torch.Tensor, torch.nn.Parameter)

    def is_plain(self, value: object) -> bool:
        """A tensor that is what it says: subclasses may lie about their dtype or hold several tensors."""
        return type(value) in self._plain

    def dtype_name(self, tensor: Tensor, path: str) -> str:
        """The dtype by name. Raises TypeError where `tensor` is not of a kind that a checkpoint can hold."""
        if not self.is_plain(tensor):
            raise TypeError(
                f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}; save a plain tensor, "
                "for a DTensor its to_local()"
            )
        name = self._dtype_names.get(tensor.dtype)
        if name is None or tensor.layout is not self.torch.strided or tensor.is_meta:
            raise TypeError(
                f"{path} is a tensor of dtype {tensor.dtype}, layout {tensor.layout} on {tensor.device}, "
                "which a checkpoint cannot hold"
            )
        return name

    def views(self, memory: mmap.mmap, payload_offset: int, layout: Layout) -> list[Tensor]:
        """A tensor over each place of the payload. They keep `memory` alive; nobody may close it."""
        return [self._view(memory, payload_offset + place.offset, place.dtype, place.shape) for place in layout.places]

    def copy(self, views: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """The one copy of a save. Shapes and dtypes are equal by construction: copy_ would broadcast and
        cast."""
        pairs = [(view, source) for view, source in zip(views, sources, strict=True) if view.numel()]
        if not pairs:
            return
        with self.torch.no_grad(), self._threads():
            self.torch._foreach_copy_([view for view, _ in pairs], [source for _, source in pairs])

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """torch's threads spin where cores are busy, which made a copy 5 to 10 times slower."""
        before = self.torch.get_num_threads()
        if before == self._copy_threads:
            yield
            return
        self.torch.set_num_threads(self._copy_threads)
        try:
            yield
        finally:
            self.torch.set_num_threads(before)

    def _view(self, memory: mmap.mmap, offset: int, dtype_name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = self._dtypes.get(dtype_name)
        if dtype is None:
            raise StateMismatch(
                f"this torch has no {dtype_name}, which the checkpoint holds; use the torch it was saved with"
            )
        count = 1
        for size in shape:
            count *= size
        if count == 0:  # frombuffer refuses to look at nothing
            empty: Tensor = self.torch.empty(shape, dtype=dtype)
            return empty
        flat: Tensor = self.torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return flat.reshape(shape)


class Collector:
    """The tensors of one state, each stored once however often the state refers to it."""

    def __init__(self, door: TensorDoor) -> None:
        self._door = door
        self._indices: dict[Key, int] = {}
        self.tensors: list[Tensor] = []
        self.specs: list[Spec] = []

    def __call__(self, value: object, path: str) -> int | None:
        """The index of a tensor, None for what is not one."""
        if not isinstance(value, self._door.torch.Tensor):
            return None
        tensor: Tensor = value
        dtype, shape = self._door.dtype_name(tensor, path), tuple(tensor.shape)
        key: Key | None = None
        if tensor.numel():
            bits = (tensor.is_conj(), tensor.is_neg())
            key = (tensor.data_ptr(), shape, tensor.stride(), dtype, tensor.device, bits)
            if key in self._indices:
                return self._indices[key]
            self._indices[key] = len(self.tensors)
        self.tensors.append(tensor)
        self.specs.append((path, dtype, shape))
        return len(self.tensors) - 1
