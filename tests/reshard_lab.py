"""States whose parts are spread over ranks, and ranks that save and load them on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt_engine.blocks import Shard
from ckpt_engine.client import Checkpointer
from ckpt_engine.manifest import complete_steps
from tests.ckpt_lab import Lab, eventually

WHOLE = torch.arange(120, dtype=torch.float32).reshape(12, 10)


def rank_of(place: Lab | Path, rank: int, world_size: int, attempt: int = 1) -> Checkpointer:
    """A rank of an engine, or of a folder alone."""
    socket, folder = (str(place.socket), None) if isinstance(place, Lab) else (None, str(place))
    return Checkpointer(socket, folder, job="job", attempt=attempt, rank=rank, world_size=world_size, node="n0")


def block(rank: int, world_size: int, whole: torch.Tensor = WHOLE, dim: int = 0) -> Shard:
    size = whole.shape[dim]
    start, end = rank * size // world_size, (rank + 1) * size // world_size
    offset = [0] * whole.dim()
    offset[dim] = start
    return Shard(whole.narrow(dim, start, end - start).clone(), tuple(whole.shape), tuple(offset))


def save_all(place: Lab | Path, states: list[dict[str, Any]], step: int = 10) -> None:
    for rank, state in enumerate(states):
        checkpointer = rank_of(place, rank, len(states))
        assert checkpointer.save(state, step).durable.wait(20)
        checkpointer.close()
    folder = place.directory if isinstance(place, Lab) else place
    eventually(lambda: complete_steps(folder), "the step")


def blocks(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"rows": block(rank, count), "deep": {"columns": block(rank, count, dim=1)}, "same": torch.ones(3), **more}
        for rank in range(count)
    ]
