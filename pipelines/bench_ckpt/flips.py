"""Whether a flipped bit is found, in memory, at a peer and on disk, and the next tier used: never a byte that was not
saved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine.client import Checkpointer
from ckpt_engine.manifest import read_manifest, step_folder
from pipelines.bench_ckpt.engine_process import JOB, NODE, EngineProcess
from pipelines.bench_ckpt.flipping import DURABLE_SECONDS_MAX, comes_back, flip_bit, made_up, regions, slot_of
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.peer_flips import PeerFlips

Told = Callable[[str], object]


def measure_flips(task: Task, told: Told) -> Outcome:
    """A third of the flips in memory, a third in the memory of another node, a third on disk."""
    dice, folder = random.Random(task.seed), Path(task.folder)
    each = max(task.flips // 3, 1)
    found: dict[str, int] = {}
    with EngineProcess(folder / "engine") as engine:
        found["memory"] = sum(flip_memory(engine, number, dice, told) for number in range(each))
    with PeerFlips(folder / "ring") as ring:
        found["peer"] = sum(ring.flip(number, dice, told) for number in range(each))
    directory = folder / "steps"
    found["disk"] = sum(flip_disk(directory, number, dice, told) for number in range(1, each + 1))
    return flip_figure(found, each)


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
        with slot_of(number) as (view, header):
            flip_bit(dice.choice(regions(view, header)), dice)
    finally:
        checkpointer.close()
    return comes_back(Checkpointer(**engine.place, attempt=2 * number + 2), number, tier="disk")


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
    loader = Checkpointer(None, str(directory), attempt=number + 1, **place)
    return comes_back(loader, 2 * number, tier="disk", may_refuse=True)
