"""How long a machine is without recovery after kill -9: until a verdict that came meanwhile has been decided."""

from __future__ import annotations

import os
import signal
import statistics

from detectors.verdict import Verdict
from ingest.clock import SystemClock
from ingest.codec import Codec
from pipelines.bench_job.under_transom import BenchFailed, Services
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure
from recovery.action import RECOVERY_TYPES, Action

BACK_SECONDS_MAX = 60.0
FLUSH_SECONDS_MAX = 5.0


def measure_controller_back(task: Task, tell: Tell) -> Outcome:
    """One kill in each life of `transom up`: it waits before it starts again what falls again at once."""
    lives = max(1, min(3, task.trials))
    taken = []
    for life in range(lives):
        tell(f"kill -9 of recover, {life + 1} of {lives}")
        taken.append(_one(task, life))
    figure = Figure("recovery.controller_back_seconds", round(statistics.median(taken), 3), "s", n=lives)
    note = f"[controller] median {figure.value:.2f} s, worst {max(taken):.2f} s"
    return Outcome([figure], notes=[note], rounds={"controller_back": taken})


def _one(task: Task, life: int) -> float:
    clock = SystemClock()
    with Services(task.folder / f"life-{life}", clock) as services:
        _decide(services, "before")  # it works, and its consumer has its place
        pid = int(services.places.recovery_lease.read_text(encoding="ascii"))
        at = clock.now()
        os.kill(pid, signal.SIGKILL)
        return _decide(services, "after") - at


def _decide(services: Services, name: str) -> float:
    """Publish a verdict and wait for the decision about it; when that was on the bus."""
    producer = services.bus.producer()
    encoded = Codec(RECOVERY_TYPES).encode(_verdict(name))
    producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
    producer.flush(FLUSH_SECONDS_MAX)
    producer.close()
    services.wait_for(lambda: _decided_at(services, name), "a decision", BACK_SECONDS_MAX)
    at = _decided_at(services, name)
    if at is None:
        raise BenchFailed("no decision")
    return at


def _decided_at(services: Services, name: str) -> float | None:
    for heard in services.heard:
        if isinstance(heard.message, Action) and heard.message.verdict_id == _verdict(name).verdict_id:
            return heard.at
    return None


def _verdict(name: str) -> Verdict:
    """About a job of which people are only told: nothing but recovery itself is needed to decide it."""
    return Verdict(
        verdict_id=f"told/1/0/events/{name}", revision=1, job="told", attempt=1, fault_class="warning",
        severity="warning", settled=True, onset_at=0.0, at=0.0, advice="notify", summary="a made-up warning",
    )  # fmt: skip
