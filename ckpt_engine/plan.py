"""Which tensors a state has and how they are stored, remembered from save to save while they stay what they were.

Names, dtypes, shapes, strides and addresses are compared in a few passes of C speed; only where something else than
an address has changed is a layout made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .aliasing import find_runs, group_spans
from .copying import CopyList
from .layout import plan_layout
from .tensor_guard import TensorGuard
from .tensors import LiveTensor, TensorDoor

if TYPE_CHECKING:
    from torch import Tensor

GUARDED_MIN = 64  # tensors; fewer are compared as quickly one by one
GUARDED_AFTER = 3  # comparisons; where the tensors were planned before the first save it is done there

_SHAPES: Callable[[Any], Any] = attrgetter("shape")
_DTYPES: Callable[[Any], Any] = attrgetter("dtype")
_DEVICES: Callable[[Any], Any] = attrgetter("device")


class TensorPlan:
    """The stored tensors and views of one state, and where their bytes are now."""

    def __init__(self, door: TensorDoor, leaves: Sequence[LiveTensor], paths: Sequence[str]) -> None:
        """Raises TypeError for a tensor that a checkpoint cannot hold, ValueError for too many of them."""
        self._door = door
        tensors = [leaf.tensor for leaf in leaves]
        spans = [door.span(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        self._contiguous = [span.contiguous for span in spans]
        self._strides = {at: span.strides for at, span in enumerate(spans) if not span.contiguous}
        self._shapes = list(map(_SHAPES, tensors))
        self._dtypes = list(map(_DTYPES, tensors))
        self._devices = list(map(_DEVICES, tensors))
        self._negatives = [span.negative for span in spans]
        self._conjugates = {at: span.conjugate for at, span in enumerate(spans) if tensors[at].is_complex()}
        self._extents = [span.extent_bytes for span in spans]
        self._pointers = [span.start for span in spans]
        self._device_numbers = _numbered(self._devices)
        self._runs = find_runs(self._starts(self._pointers), self._extents)
        grouping = group_spans(spans, self._runs, door.share_elements)
        self.layout = plan_layout(grouping.stored, grouping.views)
        self.index_of = grouping.index_of
        self.sources = grouping.sources
        raw = [
            tensors[source.tensor].device.type == "cpu" and (not source.whole or spans[source.tensor].as_it_lies)
            for source in self.sources
        ]
        # memory of mixed dtypes is cut at its storage's alignment, which another address may change
        self._movable = all(
            source.whole or self.layout.places[place].dtype != "uint8" for place, source in enumerate(self.sources)
        )
        self.odd = tuple(  # strided, with a conjugate bit, or on a device: torch has to copy these
            number for number, place in enumerate(self.layout.places) if not raw[number] and place.size_bytes
        )
        self.copies = CopyList(self.layout, raw, door.words)
        self._guard: TensorGuard | None = None
        self._compared = 0  # how often these tensors were found the same, one by one
        self._aim()

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Have torch itself tell, in one call, whether these tensors are of the kinds that they were; to arrange that
        takes longer than a comparison, so it is for tensors that will come again."""
        build = self._door.guard_build
        self._compared = GUARDED_AFTER
        if build is not None and len(tensors) >= GUARDED_MIN:
            self._guard = TensorGuard(self._door.torch, tensors, build)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are stored in the same way; if so, it is their bytes that are copied next."""
        torch = self._door.torch
        if self._guard is not None and self._guard.holds(tensors):
            return self._are_at(tensors, list(map(torch.Tensor.data_ptr, tensors)))
        try:
            same = (
                list(map(torch.Tensor.is_contiguous, tensors)) == self._contiguous
                and all(tensors[at].stride() == strides for at, strides in self._strides.items())
                and list(map(_SHAPES, tensors)) == self._shapes
                and list(map(_DTYPES, tensors)) == self._dtypes
                and list(map(torch.Tensor.is_neg, tensors)) == self._negatives
                and all(tensors[at].is_conj() == bit for at, bit in self._conjugates.items())
            )
            if not same:
                return False
            pointers = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:  # of a sparse tensor neither can be asked: whoever plans anew says so by name
            return False
        self._compared += 1
        if self._compared == GUARDED_AFTER:
            self.watch(tensors)
        return self._are_at(tensors, pointers)

    def _are_at(self, tensors: Sequence[Tensor], pointers: list[int]) -> bool:
        """Whether tensors of the same kinds lie to each other as they did; if so, they are copied from there."""
        if pointers == self._pointers:
            return True
        if not self._movable or list(map(_DEVICES, tensors)) != self._devices:
            return False
        if find_runs(self._starts(pointers), self._extents) != self._runs:
            return False
        self._pointers = pointers
        self._aim()
        return True

    def source(self, place: int, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor, among those of the state, that holds the bytes of a stored one."""
        source = self.sources[place]
        tensor = tensors[source.tensor]
        if source.whole:
            return tensor
        stored = self.layout.places[place]
        start = tensor.storage_offset() * tensor.element_size() + source.behind_bytes
        dtype = self._door.dtypes[stored.dtype]
        base = self._door.torch.empty(0, dtype=dtype, device=tensor.device)
        run: Tensor = base.set_(tensor.untyped_storage(), start // base.element_size(), stored.shape, (1,))
        return run

    def _starts(self, pointers: list[int]) -> list[int]:
        """Addresses that differ where the devices do."""
        if self._device_numbers is None:
            return pointers
        pairs = zip(pointers, self._device_numbers, strict=True)
        return [pointer + (number << 64) for pointer, number in pairs]

    def _aim(self) -> None:
        self.addresses = [
            self._pointers[source.tensor] + source.behind_bytes for source in self.sources
        ]  # of each place
        self.copies.aim(self.addresses)


def _numbered(devices: Sequence[Any]) -> list[int] | None:
    """A number for each device; None where there is only one."""
    numbers = {device: number for number, device in enumerate(dict.fromkeys(devices))}
    return [numbers[device] for device in devices] if len(numbers) > 1 else None
