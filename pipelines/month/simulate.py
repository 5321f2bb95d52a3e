"""`transom simulate month`, whole: every policy on every fleet, one month for each seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from ingest.clock import SystemClock
from pipelines.bench_recovery.outcome import Outcome
from pipelines.figures import Figure
from pipelines.month.assumptions import OURS, OURS_IN_MEMORY, Assumptions, Costs, Fleet
from pipelines.month.closed_form import POLICIES, month_of
from pipelines.month.real_policy import real_month
from pipelines.month.result import Month, Summary, summary_of

REAL, REAL_IN_MEMORY = "Transom, 5 min checkpoints", "Transom, 1 min in memory, spare"
REALS = {REAL: OURS, REAL_IN_MEMORY: OURS_IN_MEMORY}
CLOSED_FORM_MONTHS = 200
Tell = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """A month, and what it took on one core."""

    month: Month
    seconds: float


@dataclass(slots=True)
class Simulated:
    """All months."""

    summaries: list[Summary]
    seconds: dict[tuple[str, str], float]  # median of one month, by policy and fleet


def simulate(
    fleets: Sequence[Fleet],
    given: Assumptions,
    *,
    months: int,
    seed: int,
    processes: int,
    costs: Costs | None = None,
    tell: Tell | None = None,
) -> Simulated:
    """Others by arithmetic, ours by its own code. `costs`: instead of ours."""
    reals = REALS if costs is None else {REAL: costs}
    planned = [
        (name, fleet, own, number) for fleet in fleets for name, own in reals.items() for number in range(months)
    ]
    run = partial(_timed, given=given, seed=seed)
    found: dict[tuple[str, str], list[Timed]] = {}
    pool = ProcessPoolExecutor(processes, get_context("spawn")) if processes > 1 else None
    try:
        results = pool.map(run, planned) if pool is not None else map(run, planned)
        for number, (one, timed) in enumerate(zip(planned, results, strict=True), start=1):
            found.setdefault((one[0], one[1].name), []).append(timed)
            if tell is not None:
                tell(number, len(planned))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    summaries: list[Summary] = []
    for fleet in fleets:
        for policy in POLICIES.values():
            by_seed = [month_of(policy, fleet, given, number) for number in range(CLOSED_FORM_MONTHS)]
            summaries.append(summary_of(by_seed))
        for name in reals:
            summaries.append(summary_of([timed.month for timed in found[name, fleet.name]]))
    seconds = {key: statistics.median(one.seconds for one in timed) for key, timed in found.items()}
    return Simulated(summaries, seconds)


def _timed(planned: tuple[str, Fleet, Costs, int], given: Assumptions, seed: int) -> Timed:
    name, fleet, costs, number = planned
    clock = SystemClock()
    began = clock.monotonic()
    month = real_month(name, fleet, costs, given, seed + number)
    return Timed(month, clock.monotonic() - began)


def outcome_of(simulated: Simulated) -> Outcome:
    """The figures, where their fleets were simulated."""
    found = {(one.policy, one.fleet): one for one in simulated.summaries}
    outcome = Outcome()
    for fleet in ("1k", "16k"):
        one = found.get((REAL, fleet))
        if one is None:
            continue
        pages = "sim.pages" if fleet == "1k" else "sim.pages_16k"
        outcome.figures += [
            Figure(f"sim.goodput_{fleet}", round(one.goodput, 4), "ratio", n=one.months),
            Figure(pages, round(one.pages, 2), "pages", n=one.months),
        ]
    slowest = max(simulated.seconds, key=lambda key: simulated.seconds[key])
    outcome.figures.append(Figure("sim.wall_seconds", round(simulated.seconds[slowest], 2), "s"))
    outcome.notes.append(
        f"[month] slowest: {slowest[0]}, {slowest[1]} GPUs, {simulated.seconds[slowest]:.1f} s a month"
    )
    return outcome


def with_overrides(given: Assumptions, **overrides: float | None) -> Assumptions:
    """The assumptions with those that were given."""
    return replace(given, **{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
