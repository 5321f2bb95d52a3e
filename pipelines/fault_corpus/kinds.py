"""The kinds of faults in a corpus, how strong each can be, and the sizes of the job they are done to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipelines.injectable import FAULTS

Part = Literal["tuning", "held-out"]
PARTS: tuple[Part, ...] = ("tuning", "held-out")
Level = Literal["mild", "middle", "strong"]
SEVERITY_OF: Mapping[Level, float] = {"mild": 0.25, "middle": 0.5, "strong": 1.0}
FORWARD_SHARE, BACKWARD_SHARE = 0.35, 0.65  # of the own compute, measured on the demo's job
OWN_SHARE = 0.4  # of the step: the cores are shared by two ranks each
DATA_DELAY_SECONDS_MIN = 0.015  # below that a delay is lost in the noise of a shared core
LASTING_SECONDS = 7.0


class Size(NamedTuple):
    """One size of the demo's job."""

    width: int
    layers: int
    context: int
    batch: int
    part: Part

    def arguments(self) -> list[str]:
        """For train.py."""
        named = {"width": self.width, "layers": self.layers, "context": self.context, "batch": self.batch}
        return [part for name, value in named.items() for part in (f"--{name}", str(value))]


SIZES: Mapping[str, Size] = {
    "w96x3": Size(96, 3, 64, 4, "tuning"),
    "w192x4": Size(192, 4, 128, 4, "tuning"),
    "w64x3": Size(64, 3, 64, 4, "held-out"),
    "w128x4": Size(128, 4, 64, 4, "held-out"),
    "w160x4": Size(160, 4, 128, 4, "held-out"),
}  # fmt: skip
CLEAN_SIZE: Mapping[Part, str] = {"tuning": "w96x3", "held-out": "w64x3"}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a fault of a corpus is done. `watch_seconds`: how long it is looked at once it has ended (or struck)."""

    inject: str
    parameters: Mapping[Level, Mapping[str, float]]
    watch_seconds: float = 2.5
    workers: int = 0
    save_every: int = 20
    weight: int = 1  # how often it comes in a plan, against the others
    needs_small_disk: bool = False
    base_seconds: float = 4.0  # of training before it, at least
    lasting_seconds: float = field(default=0.0)

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(self.parameters)


def _lasting(inject: str, weight: int, name: str = "", values: tuple[float, ...] = (), **more: float) -> Kind:
    """A fault that goes on for a while; one level for each value of the parameter `name`."""
    levels: tuple[Level, ...] = ("mild", "middle", "strong") if values else ("strong",)
    seconds, base_seconds = more.pop("seconds", LASTING_SECONDS), more.pop("base_seconds", 4.0)
    parameters = {
        level: {"seconds": seconds, **more, **({name: value} if values else {})}
        for level, value in zip(levels, values or (0.0,), strict=True)
    }
    return Kind(inject, parameters, weight=weight, lasting_seconds=seconds, base_seconds=base_seconds)


def _once(inject: str, watch_seconds: float, weight: int, **more: float) -> Kind:
    return Kind(inject, {"strong": more}, watch_seconds=watch_seconds, weight=weight)


def _shares(share: float) -> tuple[float, ...]:
    """Factors by which a part of the own compute grows so that the whole grows by each severity."""
    return tuple(round(1.0 + severity / share, 2) for severity in SEVERITY_OF.values())


KINDS: Mapping[str, Kind] = {
    "slow": _lasting("slow", 2, "factor", _shares(FORWARD_SHARE)),
    "slow_backward": _lasting("slow_backward", 2, "factor", _shares(BACKWARD_SHARE)),
    "sleep": _lasting("sleep", 2, "delay_seconds", (0.25, 0.5, 1.0)),  # × the own compute, see `parameters_of`
    "slow_data": _lasting("slow_data", 2, "delay_seconds", (0.25, 0.5, 1.0)),  # × the step
    "gil_hog": _lasting("gil_hog", 3),
    "cpu_hog": _lasting("cpu_hog", 2, "processes", (1.0, 2.0, 4.0)),
    # Memory is judged over half a minute, and not in the first: what a job needs to begin with is no leak.
    "memory_hog": _lasting("memory_hog", 1, "megabytes_per_second", (10.0, 20.0, 40.0), megabytes_max=1500.0,
                           seconds=32.0, base_seconds=30.0),
    "stop": _once("stop", 7.0, 3),
    "kill": _once("kill", 4.0, 3),
    "nan": _once("nan", 4.0, 3, at_step=-1.0),
    "nan_gradient": _once("nan_gradient", 4.0, 3, at_step=-1.0),
    "scale_gradient": Kind("scale_gradient", {"middle": {"factor": 1e3}, "strong": {"factor": 1e6}},
                           watch_seconds=6.0, weight=1),
    "raise": _once("raise", 4.0, 3),
    "xid": _once("xid", 4.0, 3),
    "kill_worker": Kind("kill_worker", {"strong": {}}, watch_seconds=7.0, workers=2, weight=3),
    "disk_full": Kind("disk_full", {"strong": {"seconds": 10.0}}, save_every=5, weight=3, needs_small_disk=True,
                      lasting_seconds=10.0),
    "drop_telemetry": Kind("drop_telemetry", {"mild": {"seconds": 1.5}, "middle": {"seconds": 3.0},
                                              "strong": {"seconds": 6.0}}, lasting_seconds=6.0),
    "delay_telemetry": _lasting("delay_telemetry", 1, "delay_seconds", (0.5, 1.5, 4.0), seconds=6.0),
}  # fmt: skip
assert all(kind.inject in FAULTS for kind in KINDS.values())


def parameters_of(kind: str, level: Level, step_seconds: float) -> dict[str, float]:
    """What `transom inject` is told. A delay is a part of what a step takes here, so that levels are alike."""
    parameters = dict(KINDS[kind].parameters[level])
    if kind == "sleep":
        parameters["delay_seconds"] = round(parameters["delay_seconds"] * OWN_SHARE * step_seconds, 4)
    elif kind == "slow_data":
        delay = parameters["delay_seconds"] * step_seconds
        parameters["delay_seconds"] = round(max(DATA_DELAY_SECONDS_MIN, delay), 4)
    return parameters
