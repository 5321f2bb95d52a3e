"""GPUs and links that work worse than they should: throttled, with memory errors, on a link that drops or is narrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from detectors.channel import Ended, Told
from detectors.clues import Clue, Condition, Source, six_digits
from detectors.devices.series import Counter
from detectors.roster import Roster
from detectors.verdict import Advice, Culprit, Evidence, FaultClass, Severity
from ingest.events import DeviceMetrics

# NVML's clocks event reasons (nvml.h, nvmlClocksEventReasons). Idle, power cap and the like are no trouble.
REASONS = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
TROUBLE = 0x8 | 0x40 | 0x80
THROTTLE, CLOCK, BUSY = "hw.gpu.clock.throttle_reasons", "hw.gpu.clock.sm", "hw.gpu.utilization"
UNCORRECTED, PENDING = "hw.gpu.ecc.uncorrected", "hw.gpu.remapped_rows.pending"
AT_ONCE = {"hw.network.link_downed": "the link went down"}  # one is enough
RATED = {
    "hw.network.symbol_errors": "symbol errors", "hw.network.receive_errors": "receive errors",
    "hw.gpu.nvlink.errors": "NVLink errors", "hw.gpu.pcie.replay": "PCIe replays",
}  # fmt: skip
SHAPES = (("hw.gpu.pcie.width", "lanes"), ("hw.gpu.pcie.generation", "PCIe generation"))


@dataclass(frozen=True, slots=True)
class DeviceHealthConfig:
    """When a device is told of."""

    window_seconds: float = 600.0
    throttles_per_minute: float = 0.6  # over the window (leptonai/gpud's limit for unhealthy)
    clock_share_max: float = 0.85  # of its own median in training, while a reason is set
    clock_samples: int = 3  # in a row
    clock_samples_min: int = 8  # before a median is one
    errors_per_minute: float = 10.0  # of a link, over the window
    errors_windows_min: int = 3  # so many gains at least: one burst is no rate
    shape_samples: int = 3  # in a row below its maximum while busy
    calm_seconds: float = 120.0  # without trouble, and it is over
    link_calm_seconds: float = 600.0
    disk_free_bytes_min: float = 256.0 * 2**20


class _Device(msgspec.Struct):
    """What is remembered of one device."""

    rank: int
    node: str
    device: str
    source: Source
    throttled: bool = False
    throttles: list[float] = []  # when throttling began, in the window
    clocks: list[float] = []  # Hz in training, not throttled
    slow: int = 0  # samples in a row
    narrow: dict[str, int] = {}
    counters: dict[str, Counter] = {}
    bad_at: dict[str, float] = {}  # key of an open condition, and when it was last seen


class DeviceHealth:
    """Watches GPUs and network cards; conditions end when nothing more is seen for a while."""

    def __init__(self, config: DeviceHealthConfig) -> None:
        self.config = config
        self._all: dict[str, _Device] = {}
        self._told: list[Condition | Clue] = []

    def observe(self, message: DeviceMetrics, source: Source, roster: Roster) -> None:
        key = f"{message.node}/{message.device}/{message.rank}"
        device = self._all.get(key)
        if device is None:
            device = self._all[key] = _Device(message.rank, message.node, message.device, source)
        device.source = source
        for row, at in enumerate(message.sampled_at):
            sample = {name: column[row] for name, column in message.columns.items()}
            values = {name: value for name, value in sample.items() if value is not None}
            self._throttle(device, at, values)
            self._memory_errors(device, at, values, roster)
            self._links(device, at, values)
            self._disk(device, at, values)

    def look(self, now: float, roster: Roster) -> list[Told]:
        told: list[Told] = list(self._told)
        self._told = []
        for device in self._all.values():
            for key, at in list(device.bad_at.items()):
                wait = self.config.link_calm_seconds if key.startswith("link") else self.config.calm_seconds
                if now > at + wait:
                    del device.bad_at[key]
                    told.append(Ended(key))
        return told

    def to_state(self) -> dict[str, Any]:
        told = [msgspec.to_builtins(thing) for thing in self._told]
        kinds = ["clue" if isinstance(thing, Clue) else "condition" for thing in self._told]
        return {"all": msgspec.to_builtins(self._all), "told": told, "kinds": kinds}

    def load_state(self, state: dict[str, Any]) -> None:
        self._all = msgspec.convert(state["all"], dict[str, _Device])
        self._told = [
            msgspec.convert(thing, Clue) if kind == "clue" else msgspec.convert(thing, Condition)
            for thing, kind in zip(state["told"], state["kinds"], strict=True)
        ]

    def _throttle(self, device: _Device, at: float, values: dict[str, float]) -> None:
        config, mask, clock = self.config, values.get(THROTTLE), values.get(CLOCK)
        bits = int(mask) & TROUBLE if mask is not None and 0 <= mask < 2**63 else 0
        if mask is not None:
            device.throttles = [seen for seen in device.throttles if seen > at - config.window_seconds]
            if bits and not device.throttled:
                device.throttles.append(at)
            device.throttled = bool(bits)
        busy = values.get(BUSY, 1.0) >= 0.5
        usual = _median(device.clocks) if len(device.clocks) >= config.clock_samples_min else None
        if clock is not None and not bits and busy:
            device.clocks = [*device.clocks[-63:], clock]
        down = bool(bits) and clock is not None and usual is not None and clock <= config.clock_share_max * usual
        device.slow = device.slow + 1 if down else 0
        key = f"throttled/{device.node}/{device.device}/{device.rank}"
        often = len(device.throttles) >= config.throttles_per_minute * config.window_seconds / 60.0
        if key in device.bad_at:
            device.bad_at[key] = at if bits else device.bad_at[key]
            return
        if not bits or not (often or device.slow >= config.clock_samples):
            return
        why = " and ".join(word for bit, word in REASONS.items() if bits & bit)
        summary = f"{_owner(device)} is throttled: {why}"
        if down and clock is not None and usual is not None:
            summary += f", its clock is {clock / 1e6:.0f} MHz instead of {usual / 1e6:.0f} MHz."
            measured: tuple[str, float, float | None, str] = (CLOCK, clock, usual, "Hz")
        else:
            summary += f", {len(device.throttles)} times in {config.window_seconds / 60.0:.0f} min."
            measured = (THROTTLE, float(bits), None, "")
        self._say(device, key, "throttled", at, summary, measured)

    def _memory_errors(self, device: _Device, at: float, values: dict[str, float], roster: Roster) -> None:
        pending = values.get(PENDING)
        if pending is not None:
            key = f"remap/{device.node}/{device.device}"
            if pending > 0.0 and key not in device.bad_at:
                summary = (
                    f"{_owner(device)} has {pending:.0f} memory rows to remap: it needs a reset, or it will fail again."
                )
                self._say(device, key, "warning", at, summary, (PENDING, pending, 0.0, "rows"), severity="warning")
            elif pending > 0.0:
                device.bad_at[key] = at
        count = values.get(UNCORRECTED)
        if count is None:
            return
        gain = device.counters.setdefault(UNCORRECTED, Counter()).add(at, count)
        if gain <= 0.0:
            return
        key = f"ecc/{device.node}/{device.device}"
        summary = f"{_owner(device)} had {gain:.0f} uncorrectable memory error{'s' if gain != 1 else ''}."
        if key not in device.bad_at:
            self._say(
                device, key, "gpu_ecc", at, summary, (UNCORRECTED, count, count - gain, ""), severity="error",
                advice="notify",
            )  # fmt: skip
        device.bad_at[key] = at
        state = roster.ranks.get(device.rank)
        evidence = self._evidence(device, at, summary, (UNCORRECTED, count, count - gain, ""))
        self._told.append(
            Clue(
                kind="device", role="root", fault_class="gpu_ecc", at=at, node=device.node, source=device.source,
                rank=device.rank if device.rank >= 0 else None, evidence=(evidence,), summary=summary,
                step=state.step if state is not None and state.step >= 0 else None,
            )
        )  # fmt: skip

    def _links(self, device: _Device, at: float, values: dict[str, float]) -> None:
        config = self.config
        for name, words in AT_ONCE.items():
            if name in values and device.counters.setdefault(name, Counter()).add(at, values[name]) > 0.0:
                self._link(device, name, at, f"{_owner(device)}: {words}.", (name, values[name], None, ""))
        for name, words in RATED.items():
            if name not in values:
                continue
            counter = device.counters.setdefault(name, Counter(window_seconds=config.window_seconds))
            counter.add(at, values[name])
            gained, minutes = counter.gained(at - config.window_seconds), config.window_seconds / 60.0
            if gained >= config.errors_per_minute * minutes and len(counter.events) >= config.errors_windows_min:
                summary = f"{_owner(device)} has {gained / minutes:.0f} {words} a minute."
                self._link(device, name, at, summary, (name, values[name], None, ""))
        busy = values.get(BUSY, 1.0) >= 0.5  # an idle GPU lowers its link to save power
        for name, words in SHAPES:
            now, most = values.get(name), values.get(f"{name}_max")
            if now is None or most is None:
                continue
            below = now < most and busy
            device.narrow[name] = device.narrow.get(name, 0) + 1 if below else 0
            if device.narrow[name] >= config.shape_samples:
                summary = f"{_owner(device)} runs at {words} {now:.0f} of {most:.0f}: its link is degraded."
                self._link(device, name, at, summary, (name, now, most, ""))

    def _link(
        self, device: _Device, name: str, at: float, summary: str, measured: tuple[str, float, float | None, str]
    ) -> None:
        key = f"link/{name}/{device.node}/{device.device}"
        if key not in device.bad_at:
            self._say(device, key, "link_degraded", at, summary, measured)
        device.bad_at[key] = at

    def _disk(self, device: _Device, at: float, values: dict[str, float]) -> None:
        free = values.get("system.disk.free")
        if free is None or free >= self.config.disk_free_bytes_min:
            return
        key = f"disk/{device.node}"
        if key not in device.bad_at:
            summary = f"Only {free / 2**20:.0f} MiB are free where {device.node} writes checkpoints: the next may fail."
            self._say(device, key, "warning", at, summary, ("system.disk.free", free, None, "B"), severity="warning")
        device.bad_at[key] = at

    def _say(
        self,
        device: _Device,
        key: str,
        fault_class: FaultClass,
        at: float,
        summary: str,
        measured: tuple[str, float, float | None, str],
        *,
        severity: Severity | None = None,
        advice: Advice | None = None,
    ) -> None:
        rank = device.rank if device.rank >= 0 else None
        device.bad_at[key] = at
        if fault_class == "warning":
            advice = "notify"
        self._told.append(
            Condition(
                key=key, fault_class=fault_class, culprits=(Culprit(rank=rank, node=device.node, confidence=0.9),),
                victims=0, onset_at=at, onset_step=None, summary=summary,
                evidence=(self._evidence(device, at, summary, measured),), source=device.source, detector="devices",
                severity=severity, advice=advice,
            )
        )  # fmt: skip

    def _evidence(
        self, device: _Device, at: float, text: str, measured: tuple[str, float, float | None, str]
    ) -> Evidence:
        name, value, usual, unit = measured
        return Evidence(
            kind="metric", text=text, at=at, rank=device.rank if device.rank >= 0 else None, node=device.node,
            metric=name, value=six_digits(value), peers_median=None if usual is None else six_digits(usual), unit=unit,
            topic=device.source.topic, partition=device.source.partition, offset=device.source.offset,
        )  # fmt: skip


def _owner(device: _Device) -> str:
    name = device.device.replace("gpu:", "GPU ")
    return f"{name} of rank {device.rank} on {device.node}" if device.rank >= 0 else f"{name} on {device.node}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
