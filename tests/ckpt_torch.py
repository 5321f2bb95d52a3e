"""Small training states, and checkpointers that close themselves, for tests that load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import lending
from ckpt_engine.client import Checkpointer
from ckpt_engine.manifest import shard_name, step_folder
from ckpt_engine.segment import SlotHeader
from ckpt_engine.slots import Slot
from ckpt_engine.storage import OutputFile, Storage
from tests.ckpt_lab import Lab, eventually

Make = Callable[..., Checkpointer]


@contextmanager
def checkpointers() -> Iterator[Make]:
    """Makes them for rank 0 of one, if nothing else is said."""
    made: list[Checkpointer] = []

    def make(socket: Path | None, directory: Path | None = None, attempt: int = 1, **more: Any) -> Checkpointer:
        place = {"job": "job", "attempt": attempt, "rank": 0, "world_size": 1, "node": "n0", **more}
        made.append(Checkpointer(socket and str(socket), directory and str(directory), **place))
        return made[-1]

    try:
        yield make
    finally:
        for checkpointer in made:
            checkpointer.close()


def trained(seed: int = 0) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model and its optimizer after three steps."""
    model, optimizer = fresh(seed)
    for _ in range(3):
        train(model, optimizer)
    return model, optimizer


def fresh(seed: int = 99) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW([{"params": model[0].parameters()}, {"params": [*model[1:].parameters()]}], lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 5) -> None:
    """One step."""
    dice = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 6, generator=dice)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if tensor.numel() else b""


def same(left: Any, right: Any) -> bool:
    """Equal in structure, types and bits."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def slot_of(lab: Lab, step: int, rank: int = 0) -> tuple[Slot, SlotHeader]:
    """The slot that holds a shard."""
    for _, slot, header in lab.engine._table.sealed():
        if (header.step, header.rank) == (step, rank):
            return slot, header
    raise AssertionError(f"step {step} of rank {rank} is not in memory")


def await_checksum(lab: Lab, step: int, rank: int = 0) -> tuple[Slot, SlotHeader]:
    """The slot, once the engine has its checksum."""
    slot, header = slot_of(lab, step, rank)
    eventually(lambda: slot.checksum is not None, "the checksum")
    return slot, header


def flip_memory(lab: Lab, step: int, rank: int = 0, at: int = 13) -> None:
    """One bit of the tensors in memory, after its checksum is known."""
    slot, header = await_checksum(lab, step, rank)
    assert slot.segment is not None
    slot.segment.view[header.payload_offset + at] ^= 1


def flip_file(path: Path, at: int = -5, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def shard_path(directory: Path, step: int, rank: int = 0, attempt: int = 1) -> Path:
    return step_folder(directory, step) / shard_name(rank, attempt)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return, called side by side; the first error where one raises."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class NoShards(Storage):
    """A disk that takes everything but shards."""

    def create(self, path: Path) -> OutputFile:
        if "safetensors" in path.name:
            raise OSError(28, "No space left on device")
        return super().create(path)


@contextmanager
def slow_comparison(monkeypatch: Any) -> Iterator[None]:
    """Engines compare nothing with its checksum until the end of this block."""
    gate, crc32_of = threading.Event(), lending.crc32_of

    def later(buffer: memoryview, threads: int = 1) -> int:
        assert gate.wait(20)
        return crc32_of(buffer, threads)

    with monkeypatch.context() as patch:
        patch.setattr(lending, "crc32_of", later)
        try:
            yield
        finally:
            gate.set()
