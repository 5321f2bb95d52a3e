"""Whether the memory of engine and rank grows with the number of saves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ckpt_engine.client import Checkpointer
from pipelines.bench_ckpt.engine_process import EngineProcess
from pipelines.bench_ckpt.outcome import Outcome, Task, Value
from pipelines.bench_ckpt.saves import DURABLE_SECONDS_MAX
from pipelines.bench_ckpt.states import make_training

SAVES = 100
WARM_UP = 10
RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)  # anonymous, file and shared pages


def measure_growth(task: Task, told: Callable[[str], object]) -> Outcome:
    """Resident memory, shared included, of both processes before and after a hundred saves."""
    training = make_training(task.case, max(1, task.mb // 6), task.seed)
    with EngineProcess(Path(task.folder) / "engine") as engine:
        checkpointer = Checkpointer(**engine.place, attempt=1)
        sizes = []
        try:
            for number in range(WARM_UP + SAVES + 1):
                if number in (WARM_UP, WARM_UP + SAVES):
                    sizes.append({"rank": resident_bytes(os.getpid()), "engine": resident_bytes(engine.process.pid)})
                told(f"save {number} of {WARM_UP + SAVES}")
                training.disturb()
                ticket = checkpointer.save(training.state, training.steps)
                if ticket.failed or not ticket.durable.wait(DURABLE_SECONDS_MAX):
                    raise RuntimeError(f"our save failed: {ticket.failed or ticket.durable.reason}")
        finally:
            checkpointer.close()
    return growth_figure(sizes[0], sizes[1])


def growth_figure(before: dict[str, int], after: dict[str, int]) -> Outcome:
    """Growth of the sum; below zero where it shrank."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={})
    grown = sum(after.values()) / sum(before.values()) - 1.0
    outcome.values.append(Value("ckpt.growth_100_saves", grown, "ratio", SAVES))
    parts = ", ".join(f"{name} {before[name] / 2**20:.0f} to {after[name] / 2**20:.0f} MiB" for name in before)
    outcome.notes.append(f"[growth] {parts}")
    return outcome


def resident_bytes(pid: int) -> int:
    """What a process has in memory, pages that it shares included."""
    found = RESIDENT.search(Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024
