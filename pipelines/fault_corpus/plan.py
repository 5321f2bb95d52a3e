"""Which runs a corpus holds: balanced over kinds, severities, ranks, sizes and seeds; always the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Literal

from pipelines.errors import StatedError
from pipelines.fault_corpus.kinds import CLEAN_SIZE, KINDS, PARTS, SIZES, Level, Part

CLEAN = "clean"
RANKS = (0, 1, 2, 3)
FIRST_SEED: dict[Part, int] = {"tuning": 1, "held-out": 1001}  # the seeds of the parts never meet
SEEDS_MAX = 1000
CLEAN_STEPS_OF_RUN_MAX = 6_000
HELD_OUT_OF_CLEAN = 0.85
ROUNDS: dict[Part, int] = {"tuning": 1, "held-out": 2}  # how often a kind of weight 1 has each of its levels
PlanName = Literal["small", "full"]
CLEAN_STEPS: dict[PlanName, int] = {"small": 600, "full": 30_000}
SMALL: tuple[tuple[Part, str, Level, int, str], ...] = (  # of the larger sizes: fewer steps, and so fewer bytes
    ("held-out", "slow", "middle", 2, "w160x4"),
    ("held-out", "slow_backward", "strong", 1, "w128x4"),
    ("held-out", "slow_data", "middle", 3, "w160x4"),
    ("held-out", "cpu_hog", "strong", 0, "w160x4"),
    ("held-out", "memory_hog", "strong", 1, "w160x4"),
    ("held-out", "stop", "strong", 3, "w128x4"),
    ("held-out", "kill", "strong", 1, "w160x4"),
    ("held-out", "nan_gradient", "strong", 0, "w160x4"),
    ("held-out", "disk_full", "strong", 2, "w160x4"),
    ("held-out", "drop_telemetry", "strong", 2, "w160x4"),
    ("tuning", "slow", "middle", 1, "w192x4"),
)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run. `kind` is `clean` where nothing is done; then it has `clean_steps` steps."""

    part: Part
    kind: str
    level: Level
    rank: int
    size: str
    seed: int
    clean_steps: int = 0

    @property
    def name(self) -> str:
        """The folder of the run: PART/kind-level-r2-size-s1001."""
        if self.kind == CLEAN:
            return f"{self.part}/{self.kind}-{self.clean_steps}-{self.size}-s{self.seed}"
        return f"{self.part}/{self.kind}-{self.level}-r{self.rank}-{self.size}-s{self.seed}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the person asked for; an empty list is "as the plan has it"."""

    plan: PlanName = "full"
    kinds: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    seeds: int | None = None
    clean_steps: int | None = None


def make_plan(wanted: Wanted) -> list[PlannedRun]:
    """The runs in the order in which they are made, tuning first. Raises StatedError for a name that is unknown."""
    _refuse_unknown("kind", wanted.kinds, (*KINDS, CLEAN))
    _refuse_unknown("severity", wanted.severities, ("mild", "middle", "strong"))
    _refuse_unknown("size", wanted.sizes, tuple(SIZES))
    if any(rank not in RANKS for rank in wanted.ranks):
        raise StatedError(f"the ranks of the job are {RANKS[0]} to {RANKS[-1]}; give some of them")
    if wanted.seeds is not None and not 1 <= wanted.seeds <= SEEDS_MAX:
        raise StatedError(f"the number of seeds is {wanted.seeds}; give 1 to {SEEDS_MAX}")
    explicit = bool(wanted.sizes or wanted.ranks or wanted.seeds)
    if explicit:
        faults = list(_crossed(wanted))
    elif wanted.plan == "small":
        faults = [
            PlannedRun(part, kind, level, rank, size, FIRST_SEED[part] + index)
            for index, (part, kind, level, rank, size) in enumerate(SMALL)
        ]
    else:
        faults = [run for part in PARTS for run in _balanced(part)]
    chosen = [run for run in faults if _asked_for(run, wanted)]
    clean = [] if wanted.kinds and CLEAN not in wanted.kinds else list(_clean(wanted))
    return sorted([*chosen, *clean], key=lambda run: PARTS.index(run.part))


def _asked_for(run: PlannedRun, wanted: Wanted) -> bool:
    return (not wanted.kinds or run.kind in wanted.kinds) and (not wanted.severities or run.level in wanted.severities)


def _balanced(part: Part) -> Iterator[PlannedRun]:
    """Every kind with every level; ranks, sizes and seeds go round, so that each kind meets most of them."""
    sizes, ranks = cycle([name for name, size in SIZES.items() if size.part == part]), cycle(RANKS)
    seed = FIRST_SEED[part]
    for round_, kind in product(range(ROUNDS[part] * 3), KINDS):
        weight = max(1, round(KINDS[kind].weight * ROUNDS[part] / 2))
        if round_ >= weight:
            continue
        next(ranks)  # so that a kind does not meet the same rank in every round
        for level in KINDS[kind].levels:
            yield PlannedRun(part, kind, level, next(ranks), next(sizes), seed)
            seed += 1


def _crossed(wanted: Wanted) -> Iterator[PlannedRun]:
    """Every combination of what was named."""
    used: dict[Part, int] = dict(FIRST_SEED)
    seeds = wanted.seeds or 1
    for kind, size in product([kind for kind in wanted.kinds or KINDS if kind != CLEAN], wanted.sizes or SIZES):
        part = SIZES[size].part
        for level, rank, _ in product(KINDS[kind].levels, wanted.ranks or RANKS, range(seeds)):
            if not wanted.severities or level in wanted.severities:
                yield PlannedRun(part, kind, level, rank, size, used[part])
                used[part] += 1


def _clean(wanted: Wanted) -> Iterator[PlannedRun]:
    steps = CLEAN_STEPS[wanted.plan] if wanted.clean_steps is None else wanted.clean_steps
    for part in PARTS:
        named = [name for name in wanted.sizes if SIZES[name].part == part]
        if wanted.sizes and not named:
            continue
        size = named[0] if named else CLEAN_SIZE[part]
        share = HELD_OUT_OF_CLEAN if part == "held-out" else 1.0 - HELD_OUT_OF_CLEAN
        left = round(steps * (share if wanted.plan == "full" else float(part == "held-out")))
        seed = FIRST_SEED[part] + SEEDS_MAX // 2
        while left > 0:
            taken = min(left, CLEAN_STEPS_OF_RUN_MAX)
            yield PlannedRun(part, CLEAN, "strong", 0, size, seed, clean_steps=taken)
            left, seed = left - taken, seed + 1


def _refuse_unknown(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise StatedError(f"there is no {what} {unknown[0]!r} in a corpus; known: {', '.join(known)}")
