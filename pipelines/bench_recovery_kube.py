"""How long a verdict takes to other pods on Kubernetes: the real controller, launchers in pods, any cluster.

Each trial is a job of its own: four pods that each run a launcher with one sleeping rank, a verdict that one node's
GPU is lost, and the time until a next generation runs on four nodes without that one.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from pathlib import Path
from random import Random

from detectors.verdict import Culprit, Verdict
from ingest.clock import Clock, SystemClock
from pipelines.backends import make_backend
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure
from pipelines.open_bus import own_command
from pipelines.places import Places
from pipelines.policy_settings import policy_config
from pipelines.run import RunOptions, register_job
from pipelines.settings import Settings, load_settings
from recovery.allocation import Allocation, AllocationView
from recovery.backend import NoCheckpoints, StartRequest, Unavailable
from recovery.backends.scheduled import ScheduledBackend
from recovery.calls import Result
from recovery.controller import Controller
from recovery.launcher.protocol import JobSpec
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers

PODS = 4
NODES_MIN = PODS + 1
SLEEP = ("-n", "1", "-r", "1", "import time; time.sleep(3600)")  # of python -m timeit: nothing need be in the image
NEEDS = (
    f"a kubeconfig of a cluster with {NODES_MIN} nodes or more (--kubeconfig FILE), and the image and namespace to use "
    "under recover.backends.kubernetes; `make bench-kube` brings a control plane of its own up and measures on that"
)
LAUNCHERS_SECONDS_MAX = 180.0  # images may have to be pulled
RESTART_SECONDS_MAX = 120.0
TICK_SECONDS = 0.01
LOOK_SECONDS = 0.05
FIGURES = ("recovery.kube_p95_seconds", "recovery.kube_bad_node_reused")
BreakNode = Callable[[str], object]


def measure_kube(task: Task, tell: Tell) -> Outcome:
    """The trials on the cluster that the kubeconfig names; its kubelets are alive."""
    if task.kubeconfig is None:
        return Outcome(missing=dict.fromkeys(FIGURES, f"it needs {NEEDS}"))
    trials = KubeTrials(task, tell)
    taken = [trials.run(number) for number in range(task.scheduler_trials)]
    return Outcome(
        figures=[
            Figure(FIGURES[0], round(percentile_95(taken), 3), "s", n=len(taken)),
            Figure(FIGURES[1], trials.reused, "restarts", n=len(taken)),
        ],
        notes=[f"[kube] verdict → {PODS} pods running elsewhere: best {min(taken):.2f} s, worst {max(taken):.2f} s"],
        rounds={"kube": taken},
    )


def percentile_95(taken: list[float]) -> float:
    """The value that 95 % do not exceed (nearest rank)."""
    return sorted(taken)[max(0, math.ceil(0.95 * len(taken)) - 1)]


class KubeTrials:
    """One trial after the other. `reused` counts restarts that used the node that was lost."""

    def __init__(self, task: Task, tell: Tell) -> None:
        self._folder = task.folder
        self._tell = tell
        self._total = task.scheduler_trials
        self._clock: Clock = SystemClock()
        self._random = Random(task.seed)
        self._settings = _settings(task.folder / "state", task.kubeconfig)
        self._places = Places.of(self._settings)
        made = make_backend("kubernetes", self._settings, self._places, self._clock, self._random)
        assert isinstance(made, ScheduledBackend)
        self._backend = made
        self.reused = 0

    def run(self, number: int, break_node: BreakNode | None = None) -> float:
        """Seconds from the verdict to the last pod that runs. `break_node` is called before the verdict."""
        job = f"bench-{secrets.token_hex(3)}"
        self._tell(f"trial {number + 1} of {self._total}: pods")
        try:
            self._submit(job)
            before = self._allocation.look(job)
            bad = before.nodes[number % len(before.nodes)]
            self._tell(f"trial {number + 1} of {self._total}: {bad} is lost")
            if break_node is not None:
                break_node(bad)
            return self._restart(job, bad, before)
        finally:
            self._backend.finish(job, "stopped", "the trial is over")

    @property
    def _allocation(self) -> Allocation:
        return self._backend.allocation

    def _submit(self, job: str) -> None:
        spec = JobSpec(job=job, script="timeit", module=True, argv=SLEEP, nodes=PODS, backend="kubernetes")
        register_job(self._places, spec, RunOptions(checkpoints=False, show_output=False))
        command = own_command("launcher", "--job", job, "--listen", "auto")
        self._backend.submit(job, nodes=PODS, command=command)
        if not self._backend.wait_for_launchers(job, LAUNCHERS_SECONDS_MAX):
            view = self._allocation.look(job)
            raise Unavailable(f"{PODS} launchers do not answer: {view.phase} {view.reason}; see `kubectl get pods`")
        self._backend.start(StartRequest(job, 1, "first"))

    def _restart(self, job: str, bad: str, before: AllocationView) -> float:
        """The real controller decides and acts; we look at the pods beside it."""
        folder = self._folder / job
        folder.mkdir(parents=True)
        store = RecoveryStore(folder / "recovery.sqlite")
        workers: ThreadWorkers[Result] = ThreadWorkers()
        config = policy_config(self._settings)
        controller = Controller(store, self._backend, NoCheckpoints(), config, self._random, workers)
        try:
            began, look_at = self._clock.monotonic(), 0.0
            controller.accept(_verdict(job, bad, self._clock.now()), self._clock.now())
            while True:
                controller.tick(self._clock.now())
                now = self._clock.monotonic()
                if now >= look_at:
                    view = self._allocation.look(job)
                    if view.generation > before.generation and view.phase == "running":
                        self.reused += bad in view.nodes
                        return self._clock.monotonic() - began
                    look_at = self._clock.monotonic() + LOOK_SECONDS
                if now - began > RESTART_SECONDS_MAX:
                    said = "; ".join(str(entry.message) for entry in controller.pending_messages())[-1000:]
                    raise Unavailable(f"no other pods after {RESTART_SECONDS_MAX:.0f} s ({view}): {said}")
                controller.wait(TICK_SECONDS)
        finally:
            _let_calls_end(workers, job, self._clock)
            store.close()


def _let_calls_end(workers: ThreadWorkers[Result], job: str, clock: Clock) -> None:
    give_up_at = clock.monotonic() + RESTART_SECONDS_MAX
    while workers.busy(job) and clock.monotonic() < give_up_at:
        workers.wait(TICK_SECONDS)
        workers.take()


def _settings(state: Path, kubeconfig: Path | None) -> Settings:
    """Those of transom.toml here, with a state folder of our own; a lost GPU moves the job without asking anybody."""
    given = {
        "image": "transom",
        **load_settings().recover.backends.get("kubernetes", {}),
        "kubeconfig": str(kubeconfig),
    }
    overrides = {
        "state_dir": state,
        "recover": {"modes": {"gpu_lost": "auto"}, "backends": {"kubernetes": given}},
    }
    return load_settings(overrides=overrides)


def _verdict(job: str, node: str, now: float) -> Verdict:
    return Verdict(
        verdict_id=f"{job}/1/0/events/1",
        revision=1,
        job=job,
        attempt=1,
        fault_class="gpu_lost",
        severity="critical",
        settled=True,
        culprits=(Culprit(rank=None, node=node),),
        onset_at=now,
        at=now,
        onset_step=-1,
        advice="restart_exclude_node",
        summary=f"a GPU of {node} has fallen off the bus",
    )
