"""What the engine tells the world: one event for each thing that happened to a shard or a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WHOLE_STEP = -1  # the rank of an event that speaks of all shards of a step

EventState = Literal[
    "registered", "sealed", "backed_up", "durable", "complete", "verified", "rejected", "evicted", "damaged",
    "fallback", "loaded", "failed",
]  # fmt: skip
Tier = Literal["memory", "peer", "disk", "object"]
TIERS: dict[str, Tier] = {"memory": "memory", "peer": "peer", "disk": "disk", "object": "object"}


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One transition. `rank` is -1 where the whole step is meant; `seconds` is what the transition took."""

    state: EventState
    step: int
    attempt: int
    rank: int
    tier: Tier
    at: float
    size_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
