"""How far the nodes' clocks lie apart, estimated from how long their heartbeats take to the bus."""

from __future__ import annotations

import math

import msgspec

WINDOW_HEARTBEATS = 150  # half a minute of them; the floor is that of this window and the one before
HEARTBEATS_MIN = 5  # before a node's clock is spoken of at all
UNCERTAINTY_SECONDS_MIN = 0.05
UNCERTAINTY_SECONDS_MAX = 2.0


class NodeClock(msgspec.Struct):
    """The delays of one node's heartbeats, in seconds: the bus's time less the producer's."""

    floor: float | None = None  # the least of this window
    floor_before: float | None = None  # the least of the window before
    count: int = 0  # in this window
    seen: int = 0
    excess: float = 0.0  # how far a delay usually lies above the floor

    @property
    def lowest(self) -> float | None:
        known = [floor for floor in (self.floor, self.floor_before) if floor is not None]
        return min(known) if known and self.seen >= HEARTBEATS_MIN else None

    def note(self, delay: float) -> None:
        """One more heartbeat."""
        if self.count >= WINDOW_HEARTBEATS:
            self.floor_before, self.floor, self.count = self.floor, None, 0
        self.floor = delay if self.floor is None else min(self.floor, delay)
        lowest = self.floor if self.floor_before is None else min(self.floor, self.floor_before)
        self.count += 1
        self.seen += 1
        self.excess += (min(delay - lowest, UNCERTAINTY_SECONDS_MAX) - self.excess) / min(self.seen, 50)


class Clocks(msgspec.Struct):
    """All nodes of a job. A message needs some least time to the bus from anywhere; what one node's least delay lies
    above the median node's is its clock being behind. (Cristian's method with one-way delays and a common floor.)

    Where the bus's time is not known nothing is corrected, and the order is the producers' own.
    """

    nodes: dict[str, NodeClock] = {}

    def note(self, node: str, delay: float) -> None:
        """A heartbeat of `node` was `delay` seconds under way, by two clocks."""
        if math.isfinite(delay):
            self.nodes.setdefault(node, NodeClock()).note(delay)

    def offset(self, node: str | None) -> float:
        """Seconds to add to this node's times; 0.0 while its clock is not known to be off."""
        own = self._lowest(node)
        floors = sorted(low for low in (clock.lowest for clock in self.nodes.values()) if low is not None)
        if own is None or len(floors) < 2:
            return 0.0
        middle = 0.5 * (floors[(len(floors) - 1) // 2] + floors[len(floors) // 2])
        offset = own - middle
        return round(offset, 3) if abs(offset) > self._excess(node) else 0.0

    def uncertainty(self, first: str | None, second: str | None) -> float:
        """Two events of these nodes that lie closer, in seconds, have no order; 0.0 for one node, or if not known."""
        if first == second or self._lowest(first) is None or self._lowest(second) is None:
            return 0.0
        return round(min(UNCERTAINTY_SECONDS_MAX, max(self._excess(first), self._excess(second))), 3)

    def _lowest(self, node: str | None) -> float | None:
        clock = self.nodes.get(node) if node is not None else None
        return clock.lowest if clock is not None else None

    def _excess(self, node: str | None) -> float:
        clock = self.nodes.get(node) if node is not None else None
        return max(UNCERTAINTY_SECONDS_MIN, clock.excess if clock is not None else 0.0)
