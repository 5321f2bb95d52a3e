"""Storms of one and the same line: told once, counted on, told again more and more seldom; and how many an hour."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

REPEAT_SECONDS = 5.0  # the same rule of the same producer is told again after this, then after twice as long …
REPEAT_SECONDS_MAX = 60.0  # … up to this, so that a death always finds a line of the last two minutes
FOLDS_MAX = 4_096
SPREAD_RANKS_MAX = 64
SPREAD_SECONDS = 120.0
STORM_LINES_MAX = 100  # of one device in an hour
STORM_SECONDS = 3_600.0
BUCKET_SECONDS = 300.0
STORMS_MAX = 256


class Folded(NamedTuple):
    """What lies behind one telling: how often the line came since `first_at`, and from how many producers."""

    times: int
    first_at: float
    producers: int


class _Fold(msgspec.Struct):
    first_at: float
    told_at: float
    wait_seconds: float = REPEAT_SECONDS
    count: int = 1


class _Spread(msgspec.Struct):
    since: float
    producers: list[str]


class LogStorms(msgspec.Struct):
    """Bounded counts of an attempt's hits. A sufferer's line is told of `SPREAD_RANKS_MAX` producers, then counted."""

    folds: dict[str, _Fold] = {}
    spreads: dict[str, _Spread] = {}
    rates: dict[str, dict[str, int]] = {}

    def tell(self, rule: str, producer: str, device: str, at: float, *, suffers: bool) -> Folded | None:
        """Count one hit; what to tell of it now, None where it is folded into what was told."""
        key = f"{rule}/{producer}/{device}"
        spread = self.spreads.get(rule)
        if spread is None or at > spread.since + SPREAD_SECONDS:
            spread = self.spreads[rule] = _Spread(at, [])
        fold = self.folds.pop(key, None)
        if fold is None:
            if len(self.folds) >= FOLDS_MAX:
                del self.folds[next(iter(self.folds))]
            self.folds[key] = fold = _Fold(at, at)
        else:
            self.folds[key] = fold
            fold.count += 1
            if at < fold.told_at + fold.wait_seconds:
                return None
            quiet = at > fold.told_at + 2.0 * REPEAT_SECONDS_MAX
            fold.wait_seconds = REPEAT_SECONDS if quiet else min(2.0 * fold.wait_seconds, REPEAT_SECONDS_MAX)
            fold.told_at = at
        if producer not in spread.producers:
            if len(spread.producers) < SPREAD_RANKS_MAX:
                spread.producers.append(producer)
            elif suffers:
                return None
        return Folded(fold.count, fold.first_at, len(spread.producers))

    def is_storm(self, key: str, at: float) -> bool:
        """Count one line of a device; whether more than `STORM_LINES_MAX` came within the last hour."""
        counts = self.rates.pop(key, None)
        if counts is None:
            if len(self.rates) >= STORMS_MAX:
                del self.rates[next(iter(self.rates))]
            counts = {}
        bucket = int(at // BUCKET_SECONDS)
        counts[str(bucket)] = counts.get(str(bucket), 0) + 1
        oldest = bucket - int(STORM_SECONDS // BUCKET_SECONDS)
        self.rates[key] = counts = {name: count for name, count in counts.items() if int(name) > oldest}
        return sum(counts.values()) > STORM_LINES_MAX
