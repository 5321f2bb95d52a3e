"""Figures that count instead of timing: the kill campaign, and what nothing here measures yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingest.clock import SystemClock
from pipelines.bench_ckpt.asked import ASKED
from pipelines.bench_ckpt.outcome import Measure, Outcome, Task, Value
from pipelines.ckpt_kills import KillCounts, kill_at_random

NOT_YET = {"gpu": "there is no GPU here"}


def measure_kills(task: Task, told: Callable[[str], object]) -> Outcome:
    """kill -9 at random instants, of real processes."""
    folder = Path(task.folder) / "kills"
    folder.mkdir()

    def progress(done: int) -> None:
        told(f"{done} of {task.kills} kills")

    return kill_figures(
        kill_at_random(folder, kills=task.kills, seed=task.seed, clock=SystemClock(), progress=progress)
    )


def kill_figures(counts: KillCounts) -> Outcome:
    """The figures of a campaign."""
    outcome = Outcome(values=[], missing={}, notes=[], rounds={})
    outcome.values += [
        Value("ckpt.kills", counts.kills, "kills", counts.kills),
        Value("ckpt.torn", counts.torn, "loads", counts.loads),
        Value("ckpt.saves_lost_max", counts.saves_lost_max, "saves", counts.kills),
        Value("ckpt.engine_kill_lost", counts.engine_kill_lost, "saves", counts.by_victim.get("engine", 0)),
    ]
    victims = ", ".join(f"{victim} {count}" for victim, count in sorted(counts.by_victim.items()))
    tiers = ", ".join(f"{tier} {count}" for tier, count in sorted(counts.by_tier.items()))
    outcome.notes.append(
        f"[kills] {victims}; {counts.loads} loads, after kills from {tiers}; {counts.copies} looks at copies"
    )
    return outcome


def not_yet(group: str) -> Measure:
    """Says why the figures of a group are not measured."""

    def measure(task: Task, told: Callable[[str], object]) -> Outcome:
        missing = {asked.name: NOT_YET[group] for asked in ASKED if asked.group == group}
        return Outcome(values=[], missing=missing, notes=[], rounds={})

    return measure
