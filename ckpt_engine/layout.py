"""Which tensor stands where in a shard: names, dtypes and shapes, packed without holes in one run of bytes.

The same run is the payload of a memory slot and the data of a safetensors file, so nothing is rearranged on
the way to disk. Larger elements come first, which aligns every tensor to its element.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import CheckpointDamaged

TENSORS_MAX = 1_000_000
DIMENSIONS_MAX = 64


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
    "complex32": ElementType(4, "F16", 2),
    "complex64": ElementType(8, "F32", 2),
    "complex128": ElementType(16, "F64", 2),
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One stored tensor. `offset` counts from the start of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_TYPES[self.dtype].size_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a shard, in the order in which the values tree counts them."""

    places: tuple[TensorPlace, ...]
    payload_bytes: int

    def encoded(self) -> bytes:
        rows = [[place.name, place.dtype, list(place.shape), place.offset] for place in self.places]
        return json.dumps({"tensors": rows}, separators=(",", ":")).encode()


def layout_hash(encoded: bytes) -> bytes:
    """32 bytes that two shards share exactly when their layouts are the same."""
    return hashlib.sha256(encoded).digest()


def plan_layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Give (name, dtype, shape) of each tensor a place; a name met twice gets a number behind it."""
    if len(tensors) > TENSORS_MAX:
        raise ValueError(f"the state holds {len(tensors)} tensors, at most {TENSORS_MAX} fit one shard")
    order = sorted(range(len(tensors)), key=lambda index: -ELEMENT_TYPES[tensors[index][1]].size_bytes)
    offsets = [0] * len(tensors)
    end = 0
    for index in order:
        offsets[index] = end
        _, dtype, shape = tensors[index]
        end += math.prod(shape) * ELEMENT_TYPES[dtype].size_bytes
    names = _unique([name for name, _, _ in tensors])
    places = tuple(
        TensorPlace(name, dtype, shape, offset)
        for name, (_, dtype, shape), offset in zip(names, tensors, offsets, strict=True)
    )
    return Layout(places, end)


def decode_layout(raw: bytes, payload_bytes: int) -> Layout:
    """The layout in `raw`. Raises CheckpointDamaged unless its tensors fill `payload_bytes` exactly, without
    overlap."""
    try:
        rows = json.loads(raw)["tensors"]
        places = tuple(_place(row) for row in rows)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"the layout is not readable: {error}") from error
    end = 0
    for place in sorted(places, key=lambda place: (place.offset, place.size_bytes)):
        if place.offset != end:
            raise CheckpointDamaged(f"tensor {place.name!r} starts at byte {place.offset}, expected {end}")
        end += place.size_bytes
    if end != payload_bytes:
        raise CheckpointDamaged(f"the layout fills {end} bytes, the payload has {payload_bytes}")
    return Layout(places, end)


def _place(row: object) -> TensorPlace:
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a row is not [name, dtype, shape, offset]")
    name, dtype, shape, offset = row
    if not isinstance(name, str) or dtype not in ELEMENT_TYPES or not _whole(offset):
        raise ValueError(f"a row is not [name, dtype, shape, offset]: {row!r:.200}")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX or not all(_whole(size) for size in shape):
        raise ValueError(f"the shape of {name!r} is not a list of sizes")
    return TensorPlace(name, dtype, tuple(shape), offset)


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set(names)
    seen: set[str] = set()
    unique = []
    for name in names:
        candidate, count = name, 1
        while candidate in seen or (count > 1 and candidate in taken):
            count += 1
            candidate = f"{name}#{count}"
        seen.add(candidate)
        unique.append(candidate)
    return unique
