"""What one measuring process is told to do, and what it answers; between processes as one JSON object a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pipelines.bench_ckpt.asked import ASKED

CASES = ("transformer", "many", "few")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement in one process. `threads`: torch's; 0 leaves its own default."""

    group: str
    folder: str
    case: str = "transformer"
    threads: int = 0
    mb: int = 300
    rounds: int = 9
    kills: int = 200
    flips: int = 200
    roundtrips: int = 1000
    seed: int = 0

    @property
    def label(self) -> str:
        """What tells the figures of this task from those of its neighbours."""
        return f"{self.case}, {'default threads' if self.threads == 0 else f'{self.threads} thread'}"


class Value(msgspec.Struct, frozen=True):
    """One measured number; `case` says where, and is empty where that does not matter."""

    name: str
    value: float
    unit: str = "ratio"
    n: int = 1
    case: str = ""


class Outcome(msgspec.Struct):
    """What a task found. `missing`: why a figure could not be measured; `rounds`: the times behind the figures."""

    values: list[Value] = []
    missing: dict[str, str] = {}
    notes: list[str] = []
    rounds: dict[str, dict[str, list[float]]] = {}


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line from a measuring process: what it is at, or, last, its outcome."""

    told: str = ""
    outcome: Outcome | None = None


Measure = Callable[[Task, Callable[[str], object]], Outcome]


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    """All of them as one."""
    whole = Outcome(values=[], missing={}, notes=[], rounds={})
    for outcome in outcomes:
        whole.values += outcome.values
        whole.missing |= outcome.missing
        whole.notes += outcome.notes
        whole.rounds |= outcome.rounds
    return whole


def headlines(values: Iterable[Value]) -> dict[str, Value]:
    """One value for each figure that is asked for: of several cases the one that is furthest from what is asked."""
    found: dict[str, Value] = {}
    relations = {asked.name: asked.relation for asked in ASKED}
    for value in values:
        relation, standing = relations.get(value.name), found.get(value.name)
        if relation is None:
            continue
        worse = standing is None or (value.value < standing.value if relation == "≥" else value.value > standing.value)
        if worse:
            found[value.name] = value
    return found
