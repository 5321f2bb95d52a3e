"""What the engine's memory may cost: a hard cap of our own, and the room that cgroup and host leave.

A refusal comes before anything is given up or touched, and names the shortage in numbers: a page too many in
a memory cgroup is not an error that could be caught, but the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import EngineRefused
from .memory_room import MemoryRoom

ROOM_MARGIN_BYTES = 16 << 20  # for the engine's own heap, and what others in the cgroup take meanwhile
LookForRoom = Callable[[], MemoryRoom | None]


class MemoryBudget:
    """Bytes of segments. Its user holds a lock of his own around every call."""

    def __init__(self, bytes_max: int, look: LookForRoom = lambda: None) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._look = look

    def fits(self, more_bytes: int) -> bool:
        """Whether our own cap allows so many more."""
        return self.used_bytes + more_bytes <= self.bytes_max

    def require(self, rank: int, slot_bytes: int, two_slots_bytes: int, own_bytes: int) -> None:
        """Raise EngineRefused unless a rank that has `own_bytes` can have two slots of `two_slots_bytes` in all."""
        more_bytes = two_slots_bytes - own_bytes
        if more_bytes <= 0:
            return
        needs = f"rank {rank} needs two slots of {slot_bytes} bytes, {two_slots_bytes} in all"
        if not self.fits(more_bytes):
            others = self.used_bytes - own_bytes
            raise EngineRefused(
                f"{needs}, but the engine may hold {self.bytes_max} bytes, of which other slots use {others}; "
                f"raise memory_bytes_max to {others + two_slots_bytes} or more"
            )
        self._require_room(more_bytes, f"{needs}, {more_bytes} more than it has")

    def take(self, size_bytes: int) -> None:
        """Count a segment that is made next. Raises EngineRefused where there is no room for it."""
        if not self.fits(size_bytes):
            raise EngineRefused(
                f"a slot of {size_bytes} bytes does not fit: {self.used_bytes} of at most {self.bytes_max} bytes are "
                f"in use; raise memory_bytes_max to {self.used_bytes + size_bytes} or more"
            )
        self._require_room(size_bytes, f"a slot of {size_bytes} bytes is needed")
        self.used_bytes += size_bytes

    def count(self, size_bytes: int) -> bool:
        """Count a segment whose memory is taken already; False where the cap forbids to keep it."""
        if not self.fits(size_bytes):
            return False
        self.used_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """A segment is gone."""
        self.used_bytes -= size_bytes

    def room(self) -> MemoryRoom | None:
        """The tightest limit of cgroup and host, where one is known."""
        return self._look()

    def _require_room(self, more_bytes: int, needs: str) -> None:
        room = self._look()
        if room is not None and more_bytes + ROOM_MARGIN_BYTES > room.free_bytes:
            raise EngineRefused(
                f"{needs}, but {room.where} allows {room.limit_bytes} bytes and {room.used_bytes} of them are in use "
                f"(file cache left out), so {room.free_bytes} are left, of which {ROOM_MARGIN_BYTES} stay free; "
                "raise that limit, or save less"
            )
