"""Calls run beside the loop: a backend that hangs costs its own job, and nothing else waits."""

import random
import threading
from pathlib import Path
from typing import Any

from ingest.clock import ManualClock
from recovery.backend import NoCheckpoints, Observation, StartRequest
from recovery.backends.memory import MemoryBackend
from recovery.controller import Controller
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers
from tests.recovery_world import QUICK, verdict


class HangingBackend(MemoryBackend):
    """Answers about job `slow` only when it is released."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.release = threading.Event()

    def observe(self, job: str) -> Observation:
        if job == "slow":
            self.release.wait(30.0)
        return super().observe(job)


def test_a_backend_that_hangs_for_one_job_delays_no_other(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    backend = HangingBackend(clock)
    for job in ("slow", "quick"):
        backend.add_job(job, {"n0": 2, "n1": 2}, nodes_wanted=2, nproc_per_node=2)
        backend.start(StartRequest(job, 1, "first"))
        backend.set_step(job, 12)
    store = RecoveryStore(tmp_path / "recovery.sqlite")
    workers: ThreadWorkers[Any] = ThreadWorkers()
    controller = Controller(store, backend, NoCheckpoints(), QUICK, random.Random(1), workers)
    controller.accept_all([verdict("hang", job, job=job) for job in ("slow", "quick")], clock.now())
    for _ in range(2000):
        controller.tick(clock.now())
        if any(request == ("quick", 2) for request in started(backend)):
            break
        controller.wait(0.05)
    assert started(backend)[-1] == ("quick", 2)
    assert ("slow", 2) not in started(backend)
    backend.release.set()
    for _ in range(2000):
        controller.tick(clock.now())
        if ("slow", 2) in started(backend):
            break
        controller.wait(0.05)
    assert ("slow", 2) in started(backend)
    store.close()


def started(backend: MemoryBackend) -> list[tuple[str, int]]:
    return [(request.job, request.attempt) for request in backend.starts]


def test_no_more_calls_run_at_once_than_the_limit() -> None:
    workers: ThreadWorkers[int] = ThreadWorkers(calls_max=1)
    gate = threading.Event()

    def call() -> int:
        gate.wait(30.0)
        return 7

    assert workers.submit("a", call)
    assert not workers.submit("b", call)
    gate.set()
    assert workers.wait(30.0)
    assert [(done.key, done.result) for done in workers.take()] == [("a", 7)]
    assert not workers.busy("a")
    assert workers.submit("b", call)
