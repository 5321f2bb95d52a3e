"""What one engine has done and holds, in Prometheus' text format; no label grows with the number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .event import EngineEvent

PREFIX = "transom_ckpt_"
Labels = Mapping[str, str]


@dataclass(slots=True)
class _Count:
    events: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    step: int = -1
    at: float = 0.0


class Counters:
    """Counts events by state and tier. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        self._lock = threading.Lock()

    def observe(self, event: EngineEvent) -> None:
        with self._lock:
            count = self._counts.setdefault((event.state, event.tier), _Count())
            count.events += 1
            count.size_bytes += event.size_bytes
            count.seconds += event.seconds
            count.step, count.at = event.step, event.at

    def text(self, labels: Labels, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Everything as text; `gauges` are by name, with what they say and their value."""
        with self._lock:
            counts = [
                ({**labels, "state": state, "tier": tier}, count) for (state, tier), count in self._counts.items()
            ]
            lines = [
                *_family("events_total", "counter", "Transitions of shards and steps",
                         [(own, count.events) for own, count in counts]),
                *_family("event_bytes_total", "counter", "Bytes of the shards and steps in them",
                         [(own, count.size_bytes) for own, count in counts]),
                *_family("event_seconds_total", "counter", "Time that they took",
                         [(own, count.seconds) for own, count in counts]),
                *_family("last_step", "gauge", "Step of the newest such transition",
                         [(own, count.step) for own, count in counts]),
                *_family("last_timestamp_seconds", "gauge", "When it was",
                         [(own, count.at) for own, count in counts]),
            ]  # fmt: skip
        for name, (what, value) in gauges.items():
            lines += _family(name, "gauge", what, [(labels, value)])
        return "\n".join(lines) + "\n"


def merged(texts: Sequence[str]) -> str:
    """Several engines' texts as one: the format wants all samples of a name together."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                head = heads.setdefault(name, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(name, []).append(line)
    return "".join(f"{line}\n" for name, head in heads.items() for line in (*head, *samples.get(name, ())))


def gauge(name: str, what: str, labels: Labels, value: float) -> str:
    """One gauge as text."""
    return "\n".join(_family(name, "gauge", what, [(labels, value)])) + "\n"


def _family(name: str, kind: str, what: str, samples: Iterable[tuple[Labels, float]]) -> list[str]:
    full = PREFIX + name
    rows = [f"{full}{{{_labels(labels)}}} {value!r}" for labels, value in samples]
    return [f"# HELP {full} {what}", f"# TYPE {full} {kind}", *rows]


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
