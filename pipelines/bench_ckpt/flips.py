"""Whether a flipped bit is found, in memory and on disk, and the next tier used: never a byte that was not saved."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import MAP_SHARED, mmap
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.client import Checkpointer
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.manifest import read_manifest, step_folder
from ckpt_engine.segment import SlotHeader, layout_region, payload_region, read_sealed, values_region
from pipelines.bench_ckpt.engine_process import JOB, NODE, EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value

TENSORS, NUMBERS = 6, 1500
DURABLE_SECONDS_MAX = 60.0
MEMFD = "/memfd:transom-slot"

Told = Callable[[str], object]


def measure_flips(task: Task, told: Told) -> Outcome:
    """Half of the flips in memory, half on disk."""
    dice = random.Random(task.seed)
    half = task.flips // 2
    found: dict[str, int] = {}
    with EngineProcess(Path(task.folder) / "engine") as engine:
        found["memory"] = sum(flip_memory(engine, number, dice, told) for number in range(half))
    directory = Path(task.folder) / "steps"
    found["disk"] = sum(flip_disk(directory, number, dice, told) for number in range(1, half + 1))
    return flip_figure(found, half)


def flip_figure(found: dict[str, int], each: int) -> Outcome:
    """The share of all flips."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={})
    tried = each * len(found)
    outcome.values.append(Value("ckpt.flips_found", sum(found.values()) / tried, "share", tried))
    outcome.notes.append("[flips] " + ", ".join(f"{name}: {count} of {each}" for name, count in found.items()))
    return outcome


def flip_memory(engine: EngineProcess, number: int, dice: random.Random, told: Told) -> bool:
    """Save, flip one bit of the slot, restart the rank: it has to get the same bytes, and not from memory."""
    told(f"flip {number} in memory")
    state = made_up(number)
    checkpointer = Checkpointer(**engine.place, attempt=2 * number + 1)
    try:
        ticket = checkpointer.save(state, number)
        if ticket.failed or not ticket.durable.wait(DURABLE_SECONDS_MAX):
            raise RuntimeError(f"our save failed: {ticket.failed or ticket.durable.reason}")
        with _slot_of(number) as (view, header):
            flip_bit(dice.choice(regions(view, header)), dice)
    finally:
        checkpointer.close()
    return _comes_back(Checkpointer(**engine.place, attempt=2 * number + 2), number, not_from="memory")


def flip_disk(directory: Path, number: int, dice: random.Random, told: Told) -> bool:
    """Save without an engine, flip one bit of the file: the load has to go back to the step before, or to refuse."""
    told(f"flip {number} on disk")
    place: dict[str, Any] = {"job": JOB, "rank": 0, "world_size": 1, "node": NODE}
    for step in (2 * number, 2 * number + 1):
        saver = Checkpointer(None, str(directory), attempt=number, **place)
        if not saver.save(made_up(step), step).durable.wait(DURABLE_SECONDS_MAX):
            raise RuntimeError("a save without an engine did not come to disk")
        saver.close()
    manifest = read_manifest(directory, 2 * number + 1)
    assert manifest is not None
    file = step_folder(directory, 2 * number + 1) / manifest.shards[0].file
    content = bytearray(file.read_bytes())
    flip_bit(memoryview(content), dice)
    file.write_bytes(content)
    return _comes_back(Checkpointer(None, str(directory), attempt=number + 1, **place), 2 * number, not_from="")


def _comes_back(checkpointer: Checkpointer, step: int, not_from: str) -> bool:
    into: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in made_up(step).items()}
    try:
        report = checkpointer.load(into)
    except CheckpointDamaged:
        return True  # nothing was handed over
    finally:
        checkpointer.close()
    whole = all(torch.equal(into[name], tensor) for name, tensor in made_up(step).items())
    return report is not None and report.step == step and report.tier != not_from and whole


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
def _slot_of(step: int) -> Iterator[tuple[memoryview, SlotHeader]]:
    """The slot that holds `step`, found among the memfds that this process has from its engine."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a link that goes meanwhile is not a path to ask
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith(MEMFD):  # noqa: PTH115
                continue
            size = os.fstat(int(name)).st_size
            memory = mmap(int(name), size, MAP_SHARED)
        except OSError:
            continue
        view = memoryview(memory)
        try:
            header = read_sealed(view)
        except CheckpointDamaged:
            continue
        known = made_up(step)["tensor0"].numpy().tobytes()  # other engines' slots may still be open in this process
        if header.step == step and bytes(payload_region(view, header)).find(known) >= 0:
            yield view, header
            return
    raise RuntimeError(f"no slot of this process holds step {step}")
