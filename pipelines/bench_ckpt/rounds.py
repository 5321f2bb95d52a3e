"""Several methods timed one after another, round by round, and what may be said of their times afterwards.

Times of one machine wander; ratios of two times from the same round do so much less. So every figure is the
median of paired ratios, and where the plain memcpy of the rounds wandered too far, nothing is said at all.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SPREAD_MAX = 0.25  # of the base method: interquartile range over median
TRIES_MAX = 3
CONFIDENCE = 0.95
BASE = "memcpy"

Settle = Callable[[], object]
Seconds = Mapping[str, Sequence[float]]


class Unsteady(Exception):
    """The machine was too busy with other things for any figure; the text says how busy."""


@dataclass(frozen=True, slots=True)
class Method:
    """What is timed. `call` gets a number that grows, and returns what to wait for, untimed, before the next begins."""

    name: str
    call: Callable[[int], Settle | None]
    before: Callable[[int], object] = field(default=lambda number: None)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of each method, one for each round; `first` are those of the warm-up."""

    seconds: dict[str, list[float]]
    first: dict[str, float]

    @property
    def count(self) -> int:
        return min(map(len, self.seconds.values()), default=0)

    def ratios(self, over: str, under: str = BASE) -> list[float]:
        """`over` ÷ `under`, each from the same round."""
        return [one / other for one, other in zip(self.seconds[over], self.seconds[under], strict=True)]

    def ratio(self, over: str, under: str = BASE) -> float:
        """The median of the paired ratios."""
        return statistics.median(self.ratios(over, under))

    def not_slower(self, ours: str, other: str) -> bool:
        """Whether `ours` takes no longer than `other`: the interval of the paired ratio reaches down to 1 or below."""
        return interval(self.ratios(ours, other))[0] <= 1.0


def spread(values: Sequence[float]) -> float:
    """Interquartile range over median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bounds of the median by the sign test: no assumption about how the values are spread.

    With fewer than six values it is all of them, and holds less than `confidence`.
    """
    ordered = sorted(values)
    count, outside, cut = len(ordered), 0.0, 0
    while cut < (count - 1) // 2:
        outside += 2 * math.comb(count, cut) / 2**count
        if outside > 1 - confidence:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[count - 1 - cut]


def measure(
    methods: Sequence[Method],
    rounds: int,
    clock: Callable[[], float],
    *,
    first_number: int = 0,
    told: Callable[[str], object] = lambda text: None,
    tidy: Callable[[], object] = gc.collect,
) -> Rounds:
    """Time every method in each of `rounds` rounds after a warm-up; each round begins with another of them."""
    first: dict[str, float] = {}
    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    for count in range(rounds + 1):
        begin = count % len(methods)
        for method in (*methods[begin:], *methods[:begin]):
            told(f"round {count} of {rounds}: {method.name}" if count else f"warm-up: {method.name}")
            taken = _timed(method, first_number + count, clock, tidy)
            if count:
                seconds[method.name].append(taken)
            else:
                first[method.name] = taken
    return Rounds(seconds, first)


def measure_steady(
    methods: Sequence[Method],
    rounds: int,
    clock: Callable[[], float],
    *,
    base: str = BASE,
    told: Callable[[str], object] = lambda text: None,
    tidy: Callable[[], object] = gc.collect,
) -> Rounds:
    """`measure`, again while `base` wandered. Raises Unsteady when it did so every time."""
    seen = []
    for attempt in range(TRIES_MAX):
        taken = measure(methods, rounds, clock, first_number=attempt * (rounds + 1), told=told, tidy=tidy)
        seen.append(spread(taken.seconds[base]))
        if seen[-1] <= SPREAD_MAX:
            return taken
    wandered = ", ".join(f"{value:.0%}" for value in seen)
    raise Unsteady(
        f"the {base} of the same rounds wandered by {wandered} (interquartile range over median), more than "
        f"{SPREAD_MAX:.0%}; measure again on a machine that does nothing else"
    )


def _timed(method: Method, number: int, clock: Callable[[], float], tidy: Callable[[], object]) -> float:
    method.before(number)
    tidy()  # or one method would pay for the garbage of another
    began = clock()
    settle = method.call(number)
    taken = clock() - began
    if settle is not None:
        settle()
    return taken
