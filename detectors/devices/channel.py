"""The device channel: what processes, hosts, GPUs and network cards measure, by time and not by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from detectors.channel import Arrays, Told
from detectors.clues import Place, source_of
from detectors.devices.health import DeviceHealth, DeviceHealthConfig
from detectors.devices.memory_growth import MemoryConfig, MemoryGrowth
from detectors.roster import Roster
from detectors.steps import StepMatrix
from ingest.events import DeviceMetrics, Message

MEMORY = frozenset(
    ("process.memory.usage", "container.memory.usage", "system.memory.usage", "hw.gpu.memory.usage")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DevicesConfig:
    """Limits of the rules on device metrics."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    health: DeviceHealthConfig = field(default_factory=DeviceHealthConfig)


class DeviceChannel:
    """Rules, nothing learned but what each device itself does in training. Everything it says ends by itself."""

    wants: ClassVar[tuple[type[Message], ...]] = (DeviceMetrics,)

    def __init__(self, config: DevicesConfig) -> None:
        self.memory = MemoryGrowth(config.memory)
        self.health = DeviceHealth(config.health)

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        if not isinstance(message, DeviceMetrics):
            return
        source = source_of(message, place)
        names = message.columns.keys()
        if not MEMORY.isdisjoint(names):
            self.memory.observe(message, source, roster)
        if names - MEMORY:
            self.health.observe(message, source, roster)

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        """Steps are nothing to it."""

    def look(self, now: float, roster: Roster) -> list[Told]:
        return [*self.memory.look(now, roster), *self.health.look(now, roster)]

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        return {"memory": self.memory.to_state(), "health": self.health.to_state()}, {}

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        self.memory.load_state(state["memory"])
        self.health.load_state(state["health"])
