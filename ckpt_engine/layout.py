"""Which tensor stands where in a shard: names, dtypes and shapes, packed without holes in one run of bytes.

The same run is the payload of a memory slot and the data of a safetensors file, so nothing is rearranged on
the way to disk. What fills whole cache lines comes first, then larger elements before smaller ones: so the first
start at a line, and the rest is aligned to its elements. Tensors that share memory are stored once; what looks at a
part of a stored tensor is a view, and has no bytes of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from .errors import CheckpointDamaged
from .sharding import Sharding, decode_sharding

TENSORS_MAX = 1_000_000
DIMENSIONS_MAX = 64
SMALL_TENSOR_BYTES_MAX = 32 << 10  # small ones stand together, so that one system call can fill many of them
LINE_BYTES = 64  # of the processor's cache
RESERVED_NAME = "__metadata__"  # the file format's own entry


@dataclass(frozen=True, slots=True)
class ElementType:
    """A torch dtype as a file sees it: `parts` > 1 where the file has it as a trailing dimension
    (complex)."""

    size_bytes: int
    safetensors: str
    parts: int = 1


ELEMENT_TYPES: dict[str, ElementType] = {
    "float64": ElementType(8, "F64"),
    "float32": ElementType(4, "F32"),
    "float16": ElementType(2, "F16"),
    "bfloat16": ElementType(2, "BF16"),
    "int64": ElementType(8, "I64"),
    "int32": ElementType(4, "I32"),
    "int16": ElementType(2, "I16"),
    "int8": ElementType(1, "I8"),
    "uint64": ElementType(8, "U64"),
    "uint32": ElementType(4, "U32"),
    "uint16": ElementType(2, "U16"),
    "uint8": ElementType(1, "U8"),
    "bool": ElementType(1, "BOOL"),
    "float8_e4m3fn": ElementType(1, "F8_E4M3"),
    "float8_e5m2": ElementType(1, "F8_E5M2"),
    "float8_e4m3fnuz": ElementType(1, "U8"),  # no name in the file format: its bytes, the dtype in our metadata
    "float8_e5m2fnuz": ElementType(1, "U8"),
    "float8_e8m0fnu": ElementType(1, "U8"),
    "float4_e2m1fn_x2": ElementType(1, "U8"),
    "complex32": ElementType(4, "F16", 2),
    "complex64": ElementType(8, "F32", 2),
    "complex128": ElementType(16, "F64", 2),
}
_ELEMENT_BYTES = {name: element.size_bytes for name, element in ELEMENT_TYPES.items()}


class TensorPlace(NamedTuple):
    """One stored tensor. `offset` counts from the start of the payload, where it stands row by row.

    `strides` are those of the live tensor where it was not contiguous; `sharding` is that of a DTensor, of
    which this is the local shard.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None
    sharding: Sharding | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor over the bytes of a stored one. `offset` and `strides` count elements of its own dtype."""

    place: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False
    sharding: Sharding | None = None

    @property
    def end_bytes(self) -> int:
        """How far into the stored tensor it reaches."""
        if not all(self.shape):
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (self.offset + last + 1) * ELEMENT_TYPES[self.dtype].size_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a shard as the values tree counts them: first the stored ones, then the views of them."""

    places: tuple[TensorPlace, ...]
    payload_bytes: int
    views: tuple[TensorView, ...] = ()

    @property
    def tensors(self) -> tuple[TensorPlace | TensorView, ...]:
        return self.places + self.views

    def encoded(self) -> bytes:
        document: dict[str, Any] = {"tensors": [_place_row(place) for place in self.places]}
        if self.views:
            document["views"] = [_view_row(view) for view in self.views]
        return json.dumps(document, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is to get a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    sharding: Sharding | None = None


def layout_hash(encoded: bytes) -> bytes:
    """32 bytes that two shards share exactly when their layouts are the same."""
    return hashlib.sha256(encoded).digest()


def plan_layout(
    tensors: Sequence[StoredTensor | tuple[str, str, tuple[int, ...]]], views: Sequence[TensorView] = ()
) -> Layout:
    """Give each tensor, at the least (name, dtype, shape), a place; a name met twice gets a number behind it."""
    if len(tensors) + len(views) > TENSORS_MAX:
        raise ValueError(f"the state holds {len(tensors) + len(views)} tensors, at most {TENSORS_MAX} fit one shard")
    stored = [tensor if isinstance(tensor, StoredTensor) else StoredTensor(*tensor) for tensor in tensors]
    elements = [ELEMENT_TYPES[tensor.dtype].size_bytes for tensor in stored]
    sizes = [math.prod(tensor.shape) * element for tensor, element in zip(stored, elements, strict=True)]
    order = sorted(
        range(len(stored)),
        key=lambda at: (sizes[at] % LINE_BYTES != 0, -elements[at], sizes[at] <= SMALL_TENSOR_BYTES_MAX),
    )
    offsets = [0] * len(stored)
    end = 0
    for index in order:
        offsets[index] = end
        end += sizes[index]
    names = _unique([tensor.name if tensor.name.isascii() else _printable(tensor.name) for tensor in stored])
    places = tuple(
        TensorPlace(name, tensor.dtype, tensor.shape, offset, tensor.strides, tensor.sharding)
        for name, tensor, offset in zip(names, stored, offsets, strict=True)
    )
    return Layout(places, end, tuple(views))


def decode_layout(raw: bytes, payload_bytes: int) -> Layout:
    """The layout in `raw`. Raises CheckpointDamaged unless its tensors fill `payload_bytes` exactly, without
    overlap, and its views stay within them."""
    try:
        document = json.loads(raw)
        places = _places(document["tensors"])
        views = tuple(_view(row, places) for row in document.get("views", ()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"the layout is not readable: {error}") from error
    end = 0
    sizes = [math.prod(place.shape) * _ELEMENT_BYTES[place.dtype] for place in places]
    rows = zip([place.offset for place in places], sizes, range(len(places)), strict=True)
    for offset, size_bytes, number in sorted(rows):
        if offset != end:
            raise CheckpointDamaged(f"tensor {places[number].name!r} starts at byte {offset}, expected {end}")
        end += size_bytes
    if end != payload_bytes:
        raise CheckpointDamaged(f"the layout fills {end} bytes, the payload has {payload_bytes}")
    return Layout(places, end, views)


def _place_row(place: TensorPlace) -> list[Any]:
    row: list[Any] = [place.name, place.dtype, list(place.shape), place.offset]
    more: dict[str, Any] = {}
    if place.strides is not None:
        more["strides"] = list(place.strides)
    if place.sharding is not None:
        more["sharding"] = place.sharding.encoded()
    return [*row, more] if more else row


def _view_row(view: TensorView) -> list[Any]:
    bits = view.conjugate + 2 * view.negative
    sharding = None if view.sharding is None else view.sharding.encoded()
    return [view.place, view.dtype, list(view.shape), list(view.strides), view.offset, bits, sharding]


def _places(rows: Any) -> tuple[TensorPlace, ...]:
    """All stored tensors: who loads waits for thousands of them, so they are looked at column by column if they are of
    the usual kind."""
    if type(rows) is not list or set(map(type, rows)) != {list} or set(map(len, rows)) != {4}:
        return tuple(_place(row) for row in rows)
    names, dtypes, shapes, offsets = zip(*rows, strict=True)
    texts = set(map(type, chain(names, dtypes))) == {str} and ELEMENT_TYPES.keys() >= set(dtypes)
    if not texts or set(map(type, shapes)) != {list} or max(map(len, shapes)) > DIMENSIONS_MAX:
        return tuple(_place(row) for row in rows)
    numbers = [*offsets, *chain.from_iterable(shapes)]
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= 2**63:
        return tuple(_place(row) for row in rows)
    return tuple(map(TensorPlace, names, dtypes, map(tuple, shapes), offsets))


def _place(row: object) -> TensorPlace:
    if not isinstance(row, list) or len(row) not in (4, 5):
        raise ValueError("a row is not [name, dtype, shape, offset]")
    name, dtype, shape, offset = row[:4]
    if not isinstance(name, str) or not _is_dtype(dtype) or not _whole(offset):
        raise ValueError(f"a row is not [name, dtype, shape, offset]: {row!r:.200}")
    if not _are_sizes(shape):
        raise ValueError(f"the shape of {name!r} is not a list of sizes")
    more = row[4] if len(row) == 5 else {}
    if not isinstance(more, dict):
        raise ValueError(f"what is said of {name!r} beyond its place is not an object")
    strides, sharding = more.get("strides"), more.get("sharding")
    if strides is not None and (not _are_sizes(strides) or len(strides) != len(shape)):
        raise ValueError(f"the strides of {name!r} are not a list of sizes as long as its shape")
    return TensorPlace(
        name, dtype, tuple(shape), offset,
        None if strides is None else tuple(strides),
        None if sharding is None else decode_sharding(sharding, tuple(shape)),
    )  # fmt: skip


def _view(row: object, places: tuple[TensorPlace, ...]) -> TensorView:
    if not isinstance(row, list) or len(row) != 7:
        raise ValueError("a view is not [place, dtype, shape, strides, offset, bits, sharding]")
    place, dtype, shape, strides, offset, bits, sharding = row
    if not _whole(place) or place >= len(places) or not _is_dtype(dtype) or not _whole(offset) or not _whole(bits):
        raise ValueError(f"a view is not of a stored tensor: {row!r:.200}")
    if not _are_sizes(shape) or not _are_sizes(strides) or len(shape) != len(strides) or bits > 3:
        raise ValueError(f"a view has no proper shape: {row!r:.200}")
    shared = None if sharding is None else decode_sharding(sharding, tuple(shape))
    view = TensorView(place, dtype, tuple(shape), tuple(strides), offset, bool(bits & 1), bool(bits & 2), shared)
    if view.end_bytes > places[place].size_bytes:
        raise ValueError(f"a view reaches beyond the tensor {places[place].name!r}")
    return view


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and value in ELEMENT_TYPES


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) <= DIMENSIONS_MAX and all(_whole(size) for size in value)


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _printable(name: str) -> str:
    """Half of a surrogate pair is no text to other readers, and two halves in a row become one letter."""
    return name.encode("utf-8", "backslashreplace").decode()


def _unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set(names)
    if len(taken) == len(names) and RESERVED_NAME not in taken:
        return list(names)
    seen: set[str] = {RESERVED_NAME}
    unique = []
    for name in names:
        candidate, count = name, 1
        while candidate in seen or (count > 1 and candidate in taken):
            count += 1
            candidate = f"{name}#{count}"
        seen.add(candidate)
        unique.append(candidate)
    return unique
