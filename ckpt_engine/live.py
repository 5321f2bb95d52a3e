"""Memory in the form of a slot in which the parameters and the optimizer's tensors themselves live.

To move a tensor means: its object stays, with all who hold it, and only what it points to is another place. Whoever
holds a second tensor over the old memory would not see that; such tensors are found, and stay where they were.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from .capture import Taken
from .copying import CopyList, CopyThreads, Target
from .memfd import create_segment
from .picking import picker
from .plan import TensorPlan
from .segment import PAGE_BYTES, SlotHeader, write_header
from .shardfile import Identity
from .staging import Geometry
from .tensors import TensorDoor

if TYPE_CHECKING:
    from torch import Tensor

# Of the start of a moved tensor: what the math libraries compute may depend, in the last bit, on how it lies in a
# cache line, and a run that was resumed has to compute what the first one did.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that was moved, and what it was before."""

    path: str
    owner: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    memory: Any  # a weak reference to its old storage


class LiveImage:
    """One shard as a slot has it, in memory that the engine can read; its payload is live."""

    def __init__(self, door: TensorDoor, geometry: Geometry) -> None:
        """Raises OSError where the host has no memory left."""
        self.geometry = geometry
        self._door = door
        self._segment = create_segment(geometry.segment_bytes, prefault=True)
        self.descriptor = self._segment.descriptor
        self._view = self._segment.view
        self._view[PAGE_BYTES : geometry.values_offset] = geometry.layout_raw
        places = geometry.layout.places
        self._places = [door.at_place(self._segment.memory, geometry.payload_offset, place) for place in places]
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._view)) + geometry.payload_offset
        self._addresses = [start + place.offset for place in places]
        self._target = Target(start, self.descriptor, geometry.payload_offset)
        self._plan: TensorPlan | None = None
        self._seen: list[int] = []
        self._lives: list[bool] = []  # whether each stored tensor lives here
        self._here: list[int] = []
        self._pick = picker(())  # of a state's tensors those that do
        self._aimed: Sequence[int] | None = None
        self._copies = CopyList(geometry.layout, [])
        self.names: list[str] = []  # of those that live here

    def settle(self, taken: Taken) -> None:
        """Note what of a state lives here; the rest is copied with each save."""
        plan, layout = taken.plan, taken.plan.layout
        odd = set(plan.odd)
        self._lives = [
            start == here and at not in odd and layout.places[at].size_bytes > 0
            for at, (start, here) in enumerate(zip(plan.addresses, self._addresses, strict=True))
        ]
        self._pick = picker([source.tensor for source in compress(plan.sources, self._lives)])
        self.names = [place.name for place in compress(layout.places, self._lives)]
        raw = [not (lives or at in odd) for at, lives in enumerate(self._lives)]
        self._copies, self._aimed = CopyList(layout, raw, self._door.words), None
        self._plan, self._seen = plan, plan.addresses
        self._here = list(compress(self._addresses, self._lives))

    def is_settled(self, taken: Taken) -> bool:
        """Whether what lived here when `settle` looked still does."""
        if taken.plan is not self._plan:
            return False
        if taken.plan.addresses is not self._seen:  # something has moved: an array of random state, or a parameter?
            self._seen = taken.plan.addresses
            return list(compress(self._seen, self._lives)) == self._here
        return True

    def watched(self, taken: Taken) -> list[Tensor]:
        """The tensors that live here, in the order of `names`."""
        return list(self._pick(taken.tensors))

    def move_in(self, taken: Taken, owned: Iterable[tuple[str, Tensor]]) -> list[Moved]:
        """Move what may be moved of `owned` (path, tensor) and is stored as itself. Until `take_back` it is not known
        whether somebody else still looks at the old memory; the caller lets go of `taken` before."""
        weak = self._door.torch.multiprocessing.reductions.StorageWeakRef
        targets: dict[tuple[int, int, Any], int] = {}
        for at, (source, here) in enumerate(zip(taken.plan.sources, self._addresses, strict=True)):
            tensor = taken.tensors[source.tensor]
            if source.whole and here % ALIGNMENT_BYTES == 0 and self._may_move(tensor) and tensor.data_ptr() != here:
                targets[_extent(tensor)] = at
        moves: dict[int, tuple[int, Moved]] = {}
        for path, owner in owned:
            at = targets.get(_extent(owner), -1) if self._may_move(owner) else -1
            if at >= 0 and id(owner) not in moves:
                shape, strides, offset = tuple(owner.shape), tuple(owner.stride()), int(owner.storage_offset())
                moved = Moved(path, owner, shape, strides, offset, weak(owner.untyped_storage()))
                moves[id(owner)] = (at, moved)
        with self._door.torch.no_grad():
            for at, moved in moves.values():
                place = self._places[at]
                self._door.bits(place).copy_(self._door.bits(moved.owner.detach()).view(place.shape))
        for at, moved in moves.values():
            moved.owner.data = self._places[at].view(moved.shape)
        return [moved for _, moved in moves.values()]

    def take_back(self, moves: Sequence[Moved]) -> list[str]:
        """Let those tensors be what they were whose old memory somebody else still looks at; their paths."""
        if not all(moved.memory.expired() for moved in moves):
            gc.collect()  # it may have been garbage in a cycle
        torch, back = self._door.torch, []
        for moved in moves:
            storage = torch.UntypedStorage._new_with_weak_ptr(moved.memory.cdata)
            if storage is not None:
                empty = torch.empty(0, dtype=moved.owner.dtype)
                moved.owner.data = empty.set_(storage, moved.offset, moved.shape, moved.strides)
                back.append(moved.path)
        return back

    def write(self, taken: Taken, identity: Identity, threads: CopyThreads) -> None:
        """Complete the image: what does not live here is copied, values and header are stored."""
        geometry, values = self.geometry, taken.values
        if self._aimed is not taken.plan.addresses:
            self._copies.aim(taken.plan.addresses)
            self._aimed = taken.plan.addresses
        self._copies.copy(self._target, threads)
        odd = taken.plan.odd
        if odd:
            targets = [self._places[place] for place in odd]
            self._door.copy(targets, [taken.plan.source(place, taken.tensors) for place in odd])
        self._view[geometry.values_offset : geometry.values_offset + len(values)] = values
        header = SlotHeader(
            identity.job, identity.attempt, identity.rank, identity.world_size, identity.step,
            geometry.layout_hash, len(geometry.layout_raw), geometry.values_offset, len(values),
            geometry.payload_offset, geometry.layout.payload_bytes,
        )  # fmt: skip
        write_header(self._view, header)

    def close(self) -> None:
        """Let go of the descriptor. The memory stays as long as a tensor lives in it."""
        self._places = []
        self._segment.close()

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether its bytes in memory are its values row by row, in memory of this host that is its own."""
        return (
            self._door.is_plain(tensor)
            and tensor.device.type == "cpu"
            and tensor.layout is self._door.torch.strided
            and tensor.is_contiguous()
            and tensor.numel() > 0
            and not tensor.is_complex()
            and not tensor.is_neg()
            and not tensor.is_inference()
        )


def owned_tensors(torch: Any, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of what only an optimizer's step changes: the parameters of modules, the tensors of optimizers."""
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters(remove_duplicate=False):
                yield f"{key}.{name}", parameter
        elif isinstance(value, torch.optim.Optimizer):
            for at, (parameter, entry) in enumerate(value.state.items()):
                yield f"{key}.params.{at}", parameter
                for name, tensor in entry.items() if isinstance(entry, dict) else ():
                    if isinstance(tensor, torch.Tensor):
                        yield f"{key}.state.{at}.{name}", tensor


def _extent(tensor: Tensor) -> tuple[int, int, Any]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
