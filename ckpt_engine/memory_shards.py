"""The shards of another number of ranks in the memory of engines, as a rank that cuts its own from them sees them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

from . import wire
from .errors import CheckpointDamaged, EngineRefused, EngineUnavailable
from .layout import Layout, layout_hash
from .link import EngineLink
from .outline import Outline, decode_outline
from .segment import layout_region, payload_region, read_sealed
from .shardfile import Identity, identity_of

PEERS_SECONDS_MAX = 600.0  # beyond an ordinary answer: a shard may come from another node, and is compared first


class CannotBeHad(CheckpointDamaged):
    """A copy that turned out not to be there after all, or not whole; whoever has it knows."""


class EngineShards:
    """`SavedShards` of one step of one attempt. The engine compares a shard with its checksum before it hands it over,
    and fetches from the ring what it has not."""

    def __init__(self, link: EngineLink, job: str, attempt: int, step: int, world_size: int) -> None:
        self.step = step
        self.attempt = attempt
        self.world_size = world_size
        self._link = link
        self._job = job
        self._outlines: dict[int, Outline] = {}

    def layout(self, rank: int) -> Layout:
        return self._outline(rank).layout

    def values(self, rank: int) -> bytes:
        return self._outline(rank).values

    @contextlib.contextmanager
    def payload(self, rank: int) -> Iterator[memoryview]:
        """All tensors of one saved rank. Raises CannotBeHad, CheckpointDamaged."""
        descriptor = self._ask("shard", rank)[1]
        try:
            size_bytes = os.fstat(descriptor).st_size
            with (
                mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory,
                memoryview(memory) as view,
            ):
                header = read_sealed(view)
                wanted = Identity(self._job, self.attempt, rank, self.world_size, self.step)
                same_layout = layout_hash(bytes(layout_region(view, header))) == layout_hash(
                    self._outline(rank).layout_raw
                )
                if identity_of(header) != wanted or not same_layout:
                    raise CheckpointDamaged(f"the engine handed over {identity_of(header)} instead of {wanted}")
                with payload_region(view, header) as payload:
                    yield payload
        finally:
            os.close(descriptor)
            with contextlib.suppress(EngineUnavailable, EngineRefused):
                self._link.ask({"op": "return"})

    def first_difference(self, base: int, wanted: Callable[[str], bool]) -> tuple[str, int] | None:
        """See `SavedShards`."""
        own = {name: digest for name, digest in self._outline(base).digests.items() if wanted(name)}
        for rank in range(self.world_size) if own else ():
            outline = self._outline(rank)
            for place in outline.layout.places:
                if place.name in own and outline.digests.get(place.name) != own[place.name]:
                    return place.name, rank
        return None

    def _outline(self, rank: int) -> Outline:
        if rank not in self._outlines:
            reply, descriptor = self._ask("outline", rank)
            try:
                raw = os.pread(descriptor, wire.whole(reply, "size_bytes"), 0)
            finally:
                os.close(descriptor)
            self._outlines[rank] = decode_outline(raw)
        return self._outlines[rank]

    def _ask(self, operation: str, rank: int) -> tuple[dict[str, Any], int]:
        """The engine's answer and the one descriptor that comes with it, the caller's to close. Raises CannotBeHad."""
        request = {
            "op": operation, "rank": rank, "attempt": self.attempt, "step": self.step, "world_size": self.world_size,
        }  # fmt: skip
        try:
            reply, descriptors = self._link.ask(request, PEERS_SECONDS_MAX)
        except (EngineRefused, EngineUnavailable) as error:
            raise CannotBeHad(str(error)) from error
        if len(descriptors) != 1:
            wire.close_all(descriptors)
            raise CannotBeHad(f"the engine did not hand over step {self.step} of rank {rank}")
        return reply, descriptors[0]
