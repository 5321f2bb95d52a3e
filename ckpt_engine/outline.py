"""What a saved shard says of itself without its tensors: layout, values, and a digest of each tensor that is a whole.

Who cuts the shards of other ranks anew needs this of all of them, and the tensors of a few. A tensor that does not say
which block of a larger one it is must be the same on all ranks; the digests tell that without sending a byte of it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import CheckpointDamaged
from .layout import Layout, TensorPlace, decode_layout, layout_hash
from .segment import SlotHeader, layout_region, payload_region, read_sealed, values_region
from .shardfile import Identity

CACHED_BYTES_MAX = 64 << 20  # of outlines that an engine remembers: all its ranks ask for the same
_LENGTHS = struct.Struct("<QQQ")  # of layout, values and payload; the digests are the rest


@dataclass(frozen=True, slots=True)
class Outline:
    """`digests`: SHA-256 in hex of each tensor that names no block, by its name."""

    layout: Layout
    layout_raw: bytes = field(repr=False)
    values: bytes = field(repr=False)
    digests: dict[str, str] = field(repr=False)

    def encoded(self) -> bytes:
        lengths = _LENGTHS.pack(len(self.layout_raw), len(self.values), self.layout.payload_bytes)
        return lengths + self.layout_raw + self.values + json.dumps(self.digests, separators=(",", ":")).encode()


def decode_outline(raw: bytes) -> Outline:
    """The outline in `raw`. Raises CheckpointDamaged and nothing else, whatever the bytes are."""
    if len(raw) < _LENGTHS.size:
        raise CheckpointDamaged("the outline of a shard ends before it begins")
    layout_bytes, values_bytes, payload_bytes = _LENGTHS.unpack_from(raw)
    values_at = _LENGTHS.size + layout_bytes
    digests_at = values_at + values_bytes
    if digests_at > len(raw):
        raise CheckpointDamaged("the outline of a shard is cut off")
    layout_raw = raw[_LENGTHS.size : values_at]
    try:
        digests = json.loads(raw[digests_at:])
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"the digests of a shard are not readable: {error}") from error
    if not isinstance(digests, dict) or not all(type(digest) is str for digest in digests.values()):
        raise CheckpointDamaged("the digests of a shard are not names and digests")
    return Outline(decode_layout(layout_raw, payload_bytes), layout_raw, raw[values_at:digests_at], digests)


def outline_of(header: SlotHeader, view: memoryview) -> Outline:
    """That of a sealed slot, whose payload the caller has compared with its checksum. Raises CheckpointDamaged where
    the slot does not hold `header`, or its layout is not the one that it names."""
    if read_sealed(view) != header:
        raise CheckpointDamaged(f"the slot of step {header.step} is another one's by its header")
    layout_raw = bytes(layout_region(view, header))
    if layout_hash(layout_raw) != header.layout_hash:
        raise CheckpointDamaged("the slot's layout does not match its hash")
    layout = decode_layout(layout_raw, header.payload_bytes)
    payload = payload_region(view, header)
    digests = {place.name: digest_of(place, payload) for place in layout.places if place.sharding is None}
    return Outline(layout, layout_raw, bytes(values_region(view, header)), digests)


def digest_of(place: TensorPlace, payload: memoryview) -> str:
    """Of dtype, shape and bytes: equal digests are equal tensors."""
    digest = hashlib.sha256(f"{place.dtype} {place.shape}\0".encode())
    digest.update(payload[place.offset : place.offset + place.size_bytes])
    return digest.hexdigest()


class Outlines:
    """Those that were made lately, encoded. Every method may be called from any thread; one is made at a time."""

    def __init__(self, bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._made: OrderedDict[Identity, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, shard: Identity, make: Callable[[], bytes]) -> bytes:
        """That of a shard, which an attempt saves only once for each step, so that it never changes. Raises what
        `make` does."""
        with self._lock:
            raw = self._made.pop(shard, None)
            if raw is None:
                raw = make()
            self._made[shard] = raw
            while sum(map(len, self._made.values())) > self._bytes_max:
                self._made.popitem(last=False)
            return raw
