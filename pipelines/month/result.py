"""What a simulated month came to, under one policy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from pipelines.month.assumptions import DAY_SECONDS, HOUR_SECONDS, Human


@dataclass(slots=True)
class Month:
    """One month. `useful_seconds` is training that counts; `down` is (from, to) of each repair."""

    policy: str
    fleet: str
    seconds: float
    useful_seconds: float = 0.0
    failures: int = 0
    restarts: int = 0
    pages: int = 0
    lost_seconds: float = 0.0  # trained, and lost with the state
    down: list[tuple[float, float]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """The share of the month that was training which counts."""
        return self.useful_seconds / self.seconds

    @property
    def repair_seconds(self) -> list[float]:
        return [end - begin for begin, end in self.down]


@dataclass(frozen=True, slots=True)
class Summary:
    """Several months of one policy, one for each seed."""

    policy: str
    fleet: str
    months: int
    goodput: float
    goodput_sd: float
    mttr_mean_seconds: float
    mttr_median_seconds: float
    pages: float
    failures: float
    restarts: float
    down_share: float
    lost_share: float


def summary_of(months: Sequence[Month]) -> Summary:
    """Means over the months; the repair times are those of all of them together."""
    goodputs = [month.goodput for month in months]
    repairs = [seconds for month in months for seconds in month.repair_seconds] or [0.0]
    whole = sum(month.seconds for month in months)
    return Summary(
        policy=months[0].policy,
        fleet=months[0].fleet,
        months=len(months),
        goodput=statistics.fmean(goodputs),
        goodput_sd=statistics.stdev(goodputs) if len(goodputs) > 1 else 0.0,
        mttr_mean_seconds=statistics.fmean(repairs),
        mttr_median_seconds=statistics.median(repairs),
        pages=statistics.fmean(month.pages for month in months),
        failures=statistics.fmean(month.failures for month in months),
        restarts=statistics.fmean(month.restarts for month in months),
        down_share=sum(sum(month.repair_seconds) for month in months) / whole,
        lost_share=sum(month.lost_seconds for month in months) / whole,
    )


def reaction_seconds(human: Human, at: float, dice: Random) -> float:
    """How long a person takes who is paged at `at`, seconds since a midnight."""
    begin, end = human.day_hours
    median = human.day_seconds if begin <= at % DAY_SECONDS / HOUR_SECONDS < end else human.night_seconds
    return median * dice.lognormvariate(0.0, human.sigma)
