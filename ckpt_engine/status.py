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
    """A step that every rank can load, and from where: memory, memory+peer, peer, memory+disk, disk or object."""

    step: int
    attempt: int
    tier: str


def newest_agreed(
    statuses: Sequence[EngineStatus],
    disk: Sequence[StepRecord],
    places: Sequence[tuple[int, str]],
    before_step: int | None = None,
    objects: Sequence[StepRecord] = (),
) -> AgreedStep | None:
    """The newest step below `before_step` that each (rank, node) of `places` can load, all of one attempt.

    Two attempts may both have saved a step with the same number; a mixture of them is no checkpoint. `disk` is
    `complete_steps(directory)`, `objects` the same of an object store. Where the ring is on, a rank can load what any
    of its engines holds. What another number of ranks saved counts where all of it can be had, because each rank then
    cuts its own part.
    """
    ring_nodes = {status.node for status in statuses if status.ring_on}
    here: dict[_Step, set[tuple[str, int]]] = {}  # (node, rank) of what an engine has sealed
    ring: dict[_Step, set[int]] = {}  # ranks of what an engine of the ring has, be it for another
    for status in statuses:
        for shard in status.shards:
            here.setdefault(_step_of(shard), set()).add((status.node, shard.rank))
        for shard in (*status.shards, *status.peer_shards) if status.ring_on else ():
            ring.setdefault(_step_of(shard), set()).add(shard.rank)
    complete = {(record.attempt, record.step, record.world_size) for record in disk}
    stored = {(record.attempt, record.step, record.world_size) for record in objects}
    for step in sorted({*here, *ring, *complete, *stored}, reverse=True) if places else ():
        attempt, number, world_size = step
        if before_step is not None and number >= before_step:
            continue
        tier = (_tier_of if world_size == len(places) else _tier_of_others)(
            places, world_size, here.get(step, set()), ring.get(step, set()), ring_nodes, step in complete
        )
        if not tier and step in stored and world_size == len(places):
            tier = "object"  # it comes to the disk first, rank by rank
        if tier:
            return AgreedStep(number, attempt, tier)
    return None


_Step = tuple[int, int, int]  # attempt, step, world size


def _step_of(shard: ShardStatus) -> _Step:
    return (shard.attempt, shard.step, shard.world_size)


def _tier_of(
    places: Sequence[tuple[int, str]],
    world_size: int,
    here: set[tuple[str, int]],
    ring: set[int],
    ring_nodes: set[str],
    complete: bool,
) -> str:
    """Where each rank has its own shard from; empty where not all have it."""
    held = [(node, rank) in here for rank, node in places]
    if all(held):
        return "memory"
    fetched = [node in ring_nodes and rank in ring for rank, node in places]
    if all(mine or theirs for mine, theirs in zip(held, fetched, strict=True)):
        return "memory+peer" if any(held) else "peer"
    if complete:
        return "memory+disk" if any(held) else "disk"
    return ""


def _tier_of_others(
    places: Sequence[tuple[int, str]],
    world_size: int,
    here: set[tuple[str, int]],
    ring: set[int],
    ring_nodes: set[str],
    complete: bool,
) -> str:
    """Where each rank has all shards from, to cut its own from them; empty where one cannot be had."""
    nodes = {node for _, node in places}
    if all((node, rank) in here for node in nodes for rank in range(world_size)):
        return "memory"
    if nodes <= ring_nodes and ring >= set(range(world_size)):
        return "peer"
    return "disk" if complete else ""
