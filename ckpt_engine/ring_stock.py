"""Memory that a node without shards makes ready, before the ranks of a lost node come to live there.

Making fresh pages costs more than all the rest of fetching a shard; an engine that has just started, or a spare's,
has the time for it. It takes only what leaves room for the two slots of each rank, and lets go with the first save.
"""

from __future__ import annotations

from collections.abc import Sequence

from .budget import MemoryBudget
from .errors import EngineRefused
from .memfd import Segment, create_segment
from .segment import PAGE_BYTES
from .shards import SLOTS
from .slots import SlotTable

SLACK_BYTES_MIN = 1 << 20  # for layout and values, which a list of shards does not tell


class Stock:
    """Every method may be called from any thread; `fill` and `clear` from one alone."""

    def __init__(self, table: SlotTable, budget: MemoryBudget) -> None:
        self._table = table
        self._budget = budget
        self._ready: list[Segment] = []

    def fill(self, payload_bytes: Sequence[int]) -> None:
        """A segment for each of these payloads, its pages made and mapped, unless the budget is tight."""
        sizes = [_segment_bytes(size) for size in payload_bytes]
        with self._table.changed:
            if self._ready or not self._budget.fits((1 + SLOTS) * sum(sizes)):
                return
        for size in sizes:
            try:
                with self._table.changed:
                    self._budget.take(size)
            except EngineRefused:
                return
            try:
                segment = create_segment(size, prefault=True)
            except OSError:
                with self._table.changed:
                    self._budget.give_back(size)
                return
            with self._table.changed:
                self._ready.append(segment)

    def take(self, size_bytes: int) -> Segment | None:
        """One that is large enough and not far too large, counted already; None where there is none."""
        with self._table.changed:
            fitting = [segment for segment in self._ready if size_bytes <= segment.size_bytes <= 2 * size_bytes]
            if not fitting:
                return None
            chosen = min(fitting, key=lambda segment: segment.size_bytes)
            self._ready.remove(chosen)
            return chosen

    def clear(self) -> None:
        with self._table.changed:
            segments, self._ready = self._ready, []
            self._budget.give_back(sum(segment.size_bytes for segment in segments))
        for segment in segments:
            segment.discard()

    def settle(self) -> None:
        """Let go of what nobody will come for: a rank of the newest attempt has saved here."""
        if self._ready and any(header.attempt == self._table.attempt for _, _, header in self._table.sealed()):
            self.clear()


def _segment_bytes(payload_bytes: int) -> int:
    whole = payload_bytes + max(payload_bytes // 64, SLACK_BYTES_MIN)
    return -(-whole // PAGE_BYTES) * PAGE_BYTES
