"""How many restarts come of one verdict, replayed while kill -9 hits recovery between intent and act."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from detectors.verdict import Culprit, Verdict
from ingest.clock import Clock, SystemClock
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure
from recovery.backend import NoCheckpoints, StartRequest
from recovery.backends.simulated import Gate, SimulatedBackend
from recovery.calls import Result
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers

JOB = "replayed"
KILLED_AT: tuple[Gate, ...] = ("before-stop", "after-stop", "before-start", "after-start")
LIFE_SECONDS_MAX = 60.0
POLL_SECONDS = 0.005
DELIVERED = "delivered"  # a file that says: this life has taken in all its replays
BATCH = 10  # replays in one commit


def measure_replays(task: Task, tell: Tell) -> Outcome:
    """The figure of this group."""
    tell(f"{task.replays} deliveries of one verdict, kill -9 at {len(KILLED_AT)} places")
    restarts = measure_replayed_restarts(task.folder, task.replays)
    return Outcome([Figure("recovery.replayed_restarts", restarts, "restarts", n=task.replays)])


def measure_replayed_restarts(folder: Path, replays: int = 1000) -> int:
    """Effective restarts after `replays` deliveries of one verdict in five lives; SIGKILL ended four of them.

    The backend is simulated and outlives recovery, as launchers do; recovery is a real process each time.
    """
    clock = SystemClock()
    backend = SimulatedBackend(folder / "backend", clock)
    backend.add_job(JOB, {"node-0": 2, "node-1": 2, "spare": 2}, nodes_wanted=2, nproc_per_node=2)
    backend.start(StartRequest(JOB, 1, "first"))
    backend.set_step(JOB, 100)
    backend.end_rank(JOB, 1, signal=9)
    delivered = folder / DELIVERED
    each = replays // (len(KILLED_AT) + 1)
    for gate in KILLED_AT:
        backend.close_gate(gate)
        life = _begin_life(folder, each)
        _wait_for(lambda: backend.waits_at(gate) and delivered.exists(), gate, life, clock)  # noqa: B023  called within this round
        life.kill()
        life.wait(LIFE_SECONDS_MAX)
        backend.open_gate(gate)
        delivered.unlink()
    last = _begin_life(folder, replays - each * len(KILLED_AT))
    try:
        code = last.wait(LIFE_SECONDS_MAX)
    finally:
        last.kill()
        last.wait()
    if code != 0:
        raise RuntimeError(f"recovery's last life ended with exit code {code}; its output is above")
    _check_deliveries(folder, replays)
    return len(backend.effective_starts()) - 1  # without the first attempt


def _begin_life(folder: Path, replays: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pipelines.bench_recovery.replays", str(folder), str(replays)])


def _wait_for(condition: Callable[[], bool], gate: Gate, life: subprocess.Popen[bytes], clock: Clock) -> None:
    give_up_at = clock.monotonic() + LIFE_SECONDS_MAX
    while not condition():
        if life.poll() is not None or clock.monotonic() > give_up_at:
            life.kill()
            life.wait()
            raise RuntimeError(f"recovery never came to {gate} (exit code {life.returncode})")
        clock.sleep(POLL_SECONDS)


def live(folder: Path, replays: int, clock: Clock) -> None:
    """One life of recovery: take the verdict in `replays` times, go on until nothing is left to be done."""
    store = RecoveryStore(folder / "recovery.sqlite")
    workers: ThreadWorkers[Result] = ThreadWorkers()
    controller = Controller(
        store,
        SimulatedBackend(folder / "backend", clock),
        NoCheckpoints(),
        PolicyConfig(),
        random.Random(store.epoch),
        workers,
    )
    verdict = _verdict(clock.now())
    left = replays
    give_up_at = clock.monotonic() + LIFE_SECONDS_MAX
    while left > 0 or not store.outcomes() or any(one.phase not in ("started", "closed") for one in store.intents()):
        if clock.monotonic() > give_up_at:
            raise TimeoutError(f"recovery was not done after {LIFE_SECONDS_MAX:.0f} s")
        controller.accept_all([verdict] * min(left, BATCH), clock.now())
        left -= min(left, BATCH)
        controller.tick(clock.now())
        if left == 0:
            (folder / DELIVERED).touch()
            controller.wait(POLL_SECONDS)
    store.close()


def _check_deliveries(folder: Path, replays: int) -> None:
    """Every replay must have come in, or the figure means nothing."""
    store = RecoveryStore(folder / "recovery.sqlite")
    delivered = sum(1 + duplicates for _, _, _, duplicates in store.outcomes())
    store.close()
    if delivered != replays:
        raise RuntimeError(f"{delivered} verdicts came in, {replays} were sent")


def _verdict(now: float) -> Verdict:
    """A rank was lost. Times differ from life to life, the identity does not: that is what a replay is."""
    return Verdict(
        verdict_id=f"{JOB}/1/1/events/7",
        revision=1,
        job=JOB,
        attempt=1,
        fault_class="rank_lost",
        severity="critical",
        settled=True,
        culprits=(Culprit(rank=1, node="node-0"),),
        onset_at=now,
        at=now,
        onset_step=100,
        advice="restart_in_place",
        summary="rank 1 was ended by signal 9",
    )


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]), SystemClock())
