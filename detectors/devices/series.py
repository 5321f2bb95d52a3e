"""A bounded series of one device's measurements: thinned by time, with robust slopes and what a counter gained."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import msgspec
import numpy as np


class Slope(NamedTuple):
    """A straight line through a series. `rising`: the share of pairs of points of which the later one is higher."""

    per_second: float
    rising: float
    gained: float  # last less first, as the line has it
    seconds: float
    points: int


class Series(msgspec.Struct):
    """At most `points_max` points, no two closer than `every_seconds`; the newest is always there."""

    every_seconds: float
    points_max: int
    at: list[float] = []
    values: list[float] = []

    def add(self, at: float, value: float) -> None:
        """One more measurement; one that is not newer than the last is dropped."""
        if self.at and at <= self.at[-1]:
            return
        if len(self.at) > 1 and self.at[-1] - self.at[-2] < self.every_seconds:
            self.at[-1], self.values[-1] = at, value
            return
        self.at.append(at)
        self.values.append(value)
        if len(self.at) > self.points_max:
            del self.at[0], self.values[0]

    @property
    def newest(self) -> float | None:
        return self.values[-1] if self.values else None

    def rough(self, since: float = float("-inf")) -> tuple[float, float]:
        """(gain, gain per second) from the first point at or after `since` to the last: cheap, and easily fooled."""
        first = bisect_left(self.at, since)
        if first >= len(self.at) - 1:
            return 0.0, 0.0
        gain = self.values[-1] - self.values[first]
        return gain, gain / (self.at[-1] - self.at[first])

    def slope(self, since: float = float("-inf")) -> Slope | None:
        """Theil's slope, the median over all pairs, of the points at or after `since`; None below three points."""
        points = [(at, value) for at, value in zip(self.at, self.values, strict=True) if at >= since]
        if len(points) < 3:
            return None
        times, values = np.array(points).T
        later, earlier = np.triu_indices(len(points), 1)[::-1]
        differences = values[later] - values[earlier]
        middle = float(np.median(differences / (times[later] - times[earlier])))
        seconds = float(times[-1] - times[0])
        return Slope(middle, float((differences > 0.0).mean()), middle * seconds, seconds, len(points))


class Counter(msgspec.Struct):
    """A counter that counts up, and when it did; a smaller value is a counter that was reset."""

    value: float | None = None
    events: list[tuple[float, float]] = []  # (at, gain), of the last `window_seconds`
    window_seconds: float = 600.0
    at: float = 0.0

    def add(self, at: float, value: float) -> float:
        """What it gained since the last measurement."""
        if at < self.at:
            return 0.0
        gain = 0.0 if self.value is None or value < self.value else value - self.value
        self.value, self.at = value, at
        self.events = [entry for entry in self.events if entry[0] > at - self.window_seconds][-255:]
        if gain > 0.0:
            self.events.append((at, gain))
        return gain

    def gained(self, since: float) -> float:
        return sum(gain for at, gain in self.events if at > since)
