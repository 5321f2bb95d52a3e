"""When a log line was written: by the time that stands in it, by the last one before, or by the steps it tells of."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache

from detectors.diagnosis.places import DAY_SECONDS, Stamp

YEAR_UNKNOWN = 1970
STEP_SECONDS = 1.0  # of a log without times and durations
_LEAP = 2000  # stamps count their days in a leap year


@lru_cache(maxsize=4_096)
def _midnight(year: int, day_of_leap_year: int) -> float:
    date = datetime(_LEAP, 1, 1, tzinfo=UTC) + timedelta(days=day_of_leap_year)
    try:
        return date.replace(year=year).timestamp()
    except ValueError:  # 29 February of a year that has none
        return date.replace(year=year, month=3, day=1).timestamp()


def seconds_of(stamp: Stamp, year: int) -> float | None:
    """UTC seconds of a stamp whose year is `year` where it does not say it; None for the machine's uptime."""
    if stamp.uptime:
        return None
    day = int(stamp.seconds // DAY_SECONDS)
    return max(0.0, _midnight(stamp.year or year, min(day, 365)) + stamp.seconds - day * DAY_SECONDS)


class LogClock:
    """The time of one file's lines; it never goes back. A file without any time goes by what its steps took."""

    def __init__(self, starts_at: float, year: int, *, stamped: bool) -> None:
        self._at = starts_at
        self._year = year
        self._stamped = stamped
        self._step: int | None = None

    @property
    def at(self) -> float:
        return self._at

    def line(self, stamp: Stamp | None) -> float:
        """When a line with this stamp was written."""
        told = None if stamp is None else seconds_of(stamp, self._year)
        if told is not None and told > self._at:
            self._at = told
        return self._at

    def step(self, step: int, seconds: float | None) -> float:
        """A line tells of a step, and perhaps how long one takes."""
        if not self._stamped:
            steps = 1 if self._step is None or step <= self._step else step - self._step
            self._at += steps * (seconds or STEP_SECONDS)
            self._step = step
        return self._at
