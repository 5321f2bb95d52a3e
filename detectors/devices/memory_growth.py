"""Memory that grows until it ends: how fast, whose, and in how many minutes the limit is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from detectors.channel import Ended, Told
from detectors.clues import Condition, Source, six_digits
from detectors.devices.series import Series, Slope
from detectors.roster import Roster
from detectors.verdict import Culprit, Evidence
from ingest.events import DeviceMetrics

PROCESS, GPU = "process.memory.usage", "hw.gpu.memory.usage"
LIMITED = {
    "container.memory.usage": "container.memory.limit",
    "system.memory.usage": "system.memory.limit",
    GPU: "hw.gpu.memory.limit",
}
MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """When growth is worth a word. Three rules: the limit is near, one rank grows and its peers do not, a slow leak."""

    warm_up_seconds: float = 30.0  # after the first step; caches and buffers grow until then
    every_seconds: float = 2.0
    windows_seconds: tuple[float, ...] = (32.0, 120.0)  # in which fast growth is looked for
    slow_every_seconds: float = 30.0
    slow_window_seconds: float = 1800.0
    points_min: int = 12
    rising_min: float = 0.9  # of pairs of points; noise gives half
    others_points_min: int = 45  # where no rank of the job does most of the growing
    used_min: float = 0.7  # of the limit
    left_seconds_max: float = 1800.0  # until the limit is reached
    apart_gain_bytes: float = 128 * MIB  # of one rank in the window, while its peers stand
    apart_gain_share: float = 0.1  # of what it had
    apart_peers_share: float = 0.25  # its peers' median growth at most
    slow_points_min: int = 20
    slow_rising_min: float = 0.95
    slow_gain_share: float = 0.05  # of what it had, in the slow window
    slow_gain_bytes: float = 256 * MIB
    calm_seconds: float = 24.0  # without growth, and it is over
    slow_calm_seconds: float = 300.0
    still_rising_min: float = 0.7  # of pairs of points in that time


class _Whose(msgspec.Struct):
    """One process, GPU, container or host."""

    rank: int
    node: str
    metric: str
    fast: Series
    slow: Series
    limit: float | None = None
    source: Source | None = None
    open: str = ""  # "fast" or "slow", while it is told


class MemoryGrowth:
    """Watches every process of a rank, GPU, container and host that tells its memory."""

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self._all: dict[str, _Whose] = {}
        self._dirty = False
        self._looked_at = float("-inf")

    def observe(self, message: DeviceMetrics, source: Source, roster: Roster) -> None:
        config = self.config
        for metric in (PROCESS, *LIMITED):
            values = message.columns.get(metric)
            if values is None:
                continue
            key = f"{metric}/{message.node}/{message.rank}/{message.device}"
            whose = self._all.get(key)
            if whose is None:
                fast = Series(config.every_seconds, int(max(config.windows_seconds) / config.every_seconds))
                slow = Series(config.slow_every_seconds, int(config.slow_window_seconds / config.slow_every_seconds))
                whose = self._all[key] = _Whose(message.rank, message.node, metric, fast, slow)
            whose.source = source
            limits = message.columns.get(LIMITED.get(metric, ""), ())
            for row, at in enumerate(message.sampled_at):
                value = values[row]
                if value is None:
                    continue
                limit = limits[row] if row < len(limits) else None
                whose.limit = limit if limit is not None and limit > 0.0 else whose.limit
                whose.fast.add(at, value)
                whose.slow.add(at, value)
            self._dirty = True

    def look(self, now: float, roster: Roster) -> list[Told]:
        config = self.config
        if not self._dirty or now < self._looked_at + config.every_seconds:
            return []
        self._dirty, self._looked_at = False, now
        if roster.trained_since is None or now < roster.trained_since + config.warm_up_seconds:
            return []
        warm = roster.trained_since + config.warm_up_seconds / 2
        told: list[Told] = []
        for window in config.windows_seconds:
            since = max(now - window, warm)
            rough = {key: whose.fast.rough(since) for key, whose in self._all.items()}
            for key in sorted(key for key, whose in self._all.items() if not whose.open and rough[key][0] > 0.0):
                told += self._fast(key, since, now, rough)
        for key in sorted(self._all):
            whose = self._all[key]
            if whose.open or len(whose.slow.at) >= config.slow_points_min:
                told += self._slow_or_over(key, now, warm)
        return told

    def _fast(self, key: str, since: float, now: float, rough: dict[str, tuple[float, float]]) -> list[Told]:
        config, whose = self.config, self._all[key]
        full = whose.limit is not None and (whose.fast.newest or 0.0) >= config.used_min * whose.limit
        gain = rough[key][0]
        if gain <= 0.0 or not (full or gain >= 0.5 * config.apart_gain_bytes):
            return []
        slope = whose.fast.slope(since)
        if slope is None or slope.points < config.points_min or slope.rising < config.rising_min:
            return []
        if not self._still(whose.fast, now - config.calm_seconds):
            return []
        rates = {other: rate for other, (_, rate) in rough.items()}
        condition = self._near(key, whose, slope, rates) or self._apart(key, whose, slope, rates)
        if condition is None:
            return []
        whose.open = "fast"
        return [condition]

    def _slow_or_over(self, key: str, now: float, warm: float) -> list[Told]:
        config, whose = self.config, self._all[key]
        if whose.open:
            fast = whose.open == "fast"
            series, calm = (whose.fast, config.calm_seconds) if fast else (whose.slow, config.slow_calm_seconds)
            if self._still(series, now - calm):
                return []
            whose.open = ""
            return [Ended(_key(key))]
        if whose.slow.rough()[0] < 0.5 * config.slow_gain_bytes:
            return []
        condition = self._slow(key, whose, warm)
        if condition is None or not self._still(whose.slow, now - config.slow_calm_seconds):
            return []
        whose.open = "slow"
        return [condition]

    def _still(self, series: Series, since: float) -> bool:
        """Whether it still grows, as far as the points since then tell."""
        recent = series.slope(since)
        return recent is None or (recent.rising >= self.config.still_rising_min and recent.gained > 0.0)

    def to_state(self) -> dict[str, Any]:
        looked_at = self._looked_at if self._looked_at > float("-inf") else None
        return {"all": msgspec.to_builtins(self._all), "dirty": self._dirty, "looked_at": looked_at}

    def load_state(self, state: dict[str, Any]) -> None:
        self._all = msgspec.convert(state["all"], dict[str, _Whose])
        self._dirty = state["dirty"]
        self._looked_at = float("-inf") if state["looked_at"] is None else state["looked_at"]

    def _near(self, key: str, whose: _Whose, slope: Slope, rates: dict[str, float]) -> Condition | None:
        """The limit is near, and will be reached soon."""
        config, used = self.config, whose.fast.newest
        if whose.limit is None or used is None or used < config.used_min * whose.limit:
            return None
        if slope.per_second <= 0.0:
            return None
        left = (whose.limit - used) / slope.per_second
        if left > config.left_seconds_max:
            return None
        rank = whose.rank if whose.rank >= 0 else self._fastest(whose.node, rates)
        if rank is None and slope.points < config.others_points_min:
            return None  # none of our ranks: somebody else's program may come and go
        what = {"container.memory.usage": "its container", "system.memory.usage": "its host", GPU: "its GPU"}
        owner = f"Rank {rank} on {whose.node}" if rank is not None else f"Node {whose.node}"
        summary = (
            f"{owner} runs out of memory in about {_minutes(left)}: {what[whose.metric]} uses"
            f" {_gib(used)} of {_gib(whose.limit)} and grows by {_rate(slope)}."
        )
        return self._condition(key, whose, slope, rank, summary, 0.8 if rank is not None else 0.6)

    def _apart(self, key: str, whose: _Whose, slope: Slope, rates: dict[str, float]) -> Condition | None:
        """One process grows while those of its peers do not."""
        config = self.config
        if whose.metric not in (PROCESS, GPU) or whose.rank < 0:
            return None
        base = (whose.fast.newest or 0.0) - slope.gained
        if slope.gained < max(config.apart_gain_bytes, config.apart_gain_share * base):
            return None
        gains = sorted(
            rates[other]
            for other, theirs in self._all.items()
            if theirs.metric == whose.metric and theirs.rank >= 0 and theirs.rank != whose.rank
        )
        if not gains or gains[len(gains) // 2] > config.apart_peers_share * slope.per_second:
            return None
        if sum(gain > 0.5 * slope.per_second for gain in gains) > len(gains) // 4:
            return None
        summary = (
            f"The memory of rank {whose.rank} on {whose.node} grows by {_rate(slope)} and is at"
            f" {_gib(whose.fast.newest or 0.0)}; that of its peers does not grow."
        )
        left = self._left(whose, slope)
        summary = summary[:-1] + f". Nothing is left in about {_minutes(left)}." if left is not None else summary
        return self._condition(key, whose, slope, whose.rank, summary, 0.8)

    def _slow(self, key: str, whose: _Whose, since: float) -> Condition | None:
        """A leak that takes hours, in a process: steady over the whole long window, and no slower at its end."""
        config = self.config
        slope = whose.slow.slope(since)
        if whose.metric not in (PROCESS, GPU) or slope is None or slope.points < config.slow_points_min:
            return None
        late = whose.slow.slope(whose.slow.at[-1] - slope.seconds / 2)
        base = (whose.slow.newest or 0.0) - slope.gained
        enough = slope.gained >= max(config.slow_gain_bytes, config.slow_gain_share * base)
        steady = late is not None and late.per_second >= 0.5 * slope.per_second
        if slope.rising < config.slow_rising_min or not enough or not steady:
            return None
        summary = (
            f"The memory of rank {whose.rank} on {whose.node} leaks: {_rate(slope)} for {_minutes(slope.seconds)},"
            f" now {_gib(whose.slow.newest or 0.0)}."
        )
        return self._condition(key, whose, slope, whose.rank, summary, 0.7)

    def _left(self, whose: _Whose, slope: Slope) -> float | None:
        """Seconds until the node's smallest limit is reached by this growth."""
        rooms = [
            theirs.limit - (theirs.fast.newest or 0.0)
            for theirs in self._all.values()
            if theirs.node == whose.node and theirs.rank < 0 and theirs.limit is not None
        ]
        left = min(rooms) / slope.per_second if rooms and slope.per_second > 0.0 else None
        return left if left is not None and left <= self.config.left_seconds_max else None

    def _fastest(self, node: str, rates: dict[str, float]) -> int | None:
        """The rank of `node` whose process grows, where it does most of the growing."""
        mine = ((rates[key], whose.rank) for key, whose in self._all.items() if whose.node == node)
        named = {whose.rank for whose in self._all.values() if whose.metric == PROCESS}
        grown = sorted(((rate, rank) for rate, rank in mine if rank in named and rank >= 0), reverse=True)
        total = sum(max(0.0, rate) for rate, _ in grown)
        return grown[0][1] if grown and total > 0.0 and grown[0][0] > 0.5 * total else None

    def _condition(
        self, key: str, whose: _Whose, slope: Slope, rank: int | None, summary: str, confidence: float
    ) -> Condition:
        assert whose.source is not None
        used = six_digits(whose.fast.newest or 0.0)
        began = whose.fast.at[-1] - slope.seconds
        evidence = Evidence(
            kind="metric", at=whose.fast.at[-1], rank=rank, node=whose.node, metric=whose.metric, value=used, unit="B",
            text=f"{whose.metric} rose by {_gib(slope.gained)} in {slope.seconds:.0f} s ({slope.points} measurements)",
            topic=whose.source.topic, partition=whose.source.partition, offset=whose.source.offset,
        )  # fmt: skip
        return Condition(
            key=_key(key), fault_class="memory_growth",
            culprits=(Culprit(rank=rank, node=whose.node, confidence=confidence),), victims=0, onset_at=began,
            onset_step=None, summary=summary, evidence=(evidence,), source=whose.source, detector="devices",
        )  # fmt: skip


def _key(key: str) -> str:
    return f"memory_growth/{key}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if abs(size_bytes) >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def _rate(slope: Slope) -> str:
    per_second = slope.per_second
    return f"{per_second / MIB:.3g} MiB/s" if per_second >= MIB else f"{60 * per_second / MIB:.3g} MiB/min"


def _minutes(seconds: float) -> str:
    if seconds < 90.0:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 5400.0 else f"{seconds / 3600.0:.1f} h"
