"""What an engine holds, as it tells a tool, and the step that all ranks of a job can agree on from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .manifest import StepRecord


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One sealed shard in memory. `verified`: its checksum is known. `durable`: it is on disk too."""

    rank: int
    step: int
    attempt: int
    world_size: int
    state: str
    size_bytes: int
    verified: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine. Rejected shards are not listed. `persist_error` is empty while the disk obeys."""

    job: str
    node: str
    attempt: int
    shards: tuple[ShardStatus, ...]
    durable_steps: tuple[int, ...]
    memory_bytes: int
    memory_bytes_max: int
    persist_error: str = ""
    ring: str = ""  # a sentence on the copies on other nodes
    ring_on: bool = False
    peer_shards: tuple[ShardStatus, ...] = ()  # that it keeps for others
    peer_memory_bytes: int = 0
    peer_memory_bytes_max: int = 0
    keeper_pid: int = 0  # 0: no keeper holds this memory, and
    keeper_error: str = ""  # why


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """A step that every rank can load, and from where: memory, memory+peer, peer, memory+disk, or disk."""

    step: int
    attempt: int
    tier: str


def newest_agreed(
    statuses: Sequence[EngineStatus],
    disk: Sequence[StepRecord],
    places: Sequence[tuple[int, str]],
    before_step: int | None = None,
) -> AgreedStep | None:
    """The newest step below `before_step` that each (rank, node) of `places` has, all of one attempt.

    Two attempts may both have saved a step with the same number; a mixture of them is no checkpoint. `disk`
    is `complete_steps(directory)`. Where the ring is on, a rank can load what any of its engines holds.
    """
    memory = {
        (status.node, shard.rank, shard.attempt, shard.step)
        for status in statuses
        for shard in status.shards
        if shard.world_size == len(places)
    }
    ring_nodes = {status.node for status in statuses if status.ring_on}
    peer = {
        (shard.rank, shard.attempt, shard.step)
        for status in statuses
        if status.ring_on
        for shard in (*status.shards, *status.peer_shards)
        if shard.world_size == len(places)
    }
    complete = {(record.attempt, record.step) for record in disk if record.world_size == len(places)}
    candidates = {(attempt, step) for _, _, attempt, step in memory} | complete
    candidates |= {(attempt, step) for _, attempt, step in peer}
    for attempt, step in sorted(candidates, reverse=True):
        if before_step is not None and step >= before_step:
            continue
        held = [(node, rank, attempt, step) in memory for rank, node in places]
        if all(held):
            return AgreedStep(step, attempt, "memory")
        fetched = [node in ring_nodes and (rank, attempt, step) in peer for rank, node in places]
        if all(here or there for here, there in zip(held, fetched, strict=True)):
            return AgreedStep(step, attempt, "memory+peer" if any(held) else "peer")
        if (attempt, step) in complete:
            return AgreedStep(step, attempt, "memory+disk" if any(held) else "disk")
    return None
