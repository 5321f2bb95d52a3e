"""How a bit is flipped behind an engine's back, and what a load has to give afterwards."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import MAP_SHARED, mmap
from typing import Any

import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.segment import SlotHeader, layout_region, payload_region, read_sealed, values_region

TENSORS, NUMBERS = 6, 1500
DURABLE_SECONDS_MAX = 60.0
MEMFD = "/memfd:transom-slot"


def comes_back(checkpointer: Checkpointer, step: int, tier: str, *, may_refuse: bool = False) -> bool:
    """Whether a load gives the bytes of `step`, from `tier`; or, where it may, refuses to give any."""
    into: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in made_up(step).items()}
    try:
        report = checkpointer.load(into)
    except CheckpointDamaged:
        return may_refuse  # nothing was handed over
    finally:
        checkpointer.close()
    whole = all(torch.equal(into[name], tensor) for name, tensor in made_up(step).items())
    return report is not None and report.step == step and report.tier == tier and whole


def made_up(step: int) -> dict[str, torch.Tensor]:
    """The state of a step, told from every other step's."""
    dice = torch.Generator().manual_seed(step)
    return {f"tensor{at}": torch.randn(NUMBERS, generator=dice) for at in range(TENSORS)}


def regions(view: memoryview, header: SlotHeader) -> list[memoryview]:
    """The parts of a slot that say something; the payload twice, as it is the most."""
    payload = payload_region(view, header)
    return [payload, payload, layout_region(view, header), values_region(view, header)]


def flip_bit(region: memoryview, dice: random.Random) -> None:
    at = dice.randrange(len(region))
    region[at] ^= 1 << dice.randrange(8)


@contextmanager
def slot_of(step: int, among: Iterator[mmap] | None = None) -> Iterator[tuple[memoryview, SlotHeader]]:
    """The slot that holds `step`, among the memfds that this process has from its engine, or among those given."""
    for memory in memfds_of(os.getpid()) if among is None else among:
        view = memoryview(memory)
        try:
            header = read_sealed(view)
        except CheckpointDamaged:
            continue
        known = made_up(step)["tensor0"].numpy().tobytes()  # other engines' slots may still be open in this process
        if header.step == step and bytes(payload_region(view, header)).find(known) >= 0:
            yield view, header
            return
    raise RuntimeError(f"no slot that can be seen from here holds step {step}")


def memfds_of(pid: int) -> Iterator[mmap]:
    """The segments that a process of ours has open, mapped for a look, or a flip, behind its back."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 - a link that goes meanwhile is not a path to ask
        try:
            if not os.readlink(f"{folder}/{name}").startswith(MEMFD):  # noqa: PTH115
                continue
            descriptor = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
            try:
                yield mmap(descriptor, os.fstat(descriptor).st_size, MAP_SHARED)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            continue
