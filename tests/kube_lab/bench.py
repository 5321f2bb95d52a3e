"""`make bench-kube`: a control plane of our own, and the trials of `transom bench recovery --only kube` on it, twice.

First with living kubelets, as on any cluster; then the bad node's kubelet, here a stand-in, is killed before each
verdict.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from pipelines.bench_recovery.outcome import Outcome, Task
from pipelines.bench_recovery_kube import KubeTrials, measure_kube, percentile_95
from pipelines.cli.bench_recovery import write_outcome
from pipelines.figures import Figure
from tests.kube_lab.build import NoGo, build
from tests.kube_lab.control_plane import ControlPlane

NODES = tuple(f"node-{number}" for number in range(8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        build(os.environ)
    except NoGo as error:
        console.print(f"bench-kube: {error}")
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="kube-", ignore_cleanup_errors=True) as folder,
        ControlPlane(Path(folder), NODES) as plane,
        console.status("starting") as status,
    ):
        task = Task(Path(folder) / "bench", scheduler_trials=given.trials, kubeconfig=plane.kubeconfig())
        outcome = measure_kube(task.below("alive"), status.update)
        outcome.notes += dead_kubelets(plane, task.below("dead"), outcome, status.update)
    for figure in outcome.figures:
        console.print(f"{figure.name} = {figure.value:,.4g} {figure.unit} (n = {figure.n})")
    for note in outcome.notes:
        console.print(note, style="dim")
    if given.json is not None:
        write_outcome(given.json, outcome)
    return 0


def dead_kubelets(plane: ControlPlane, task: Task, outcome: Outcome, tell: object) -> list[str]:
    """The same trials, each with the bad node's kubelet dead before the verdict comes."""
    trials = KubeTrials(task, tell)
    taken = []
    for number in range(task.scheduler_trials):
        killed: list[str] = []

        def kill(node: str, killed: list[str] = killed) -> None:
            plane.kill_kubelet(node)
            killed.append(node)

        try:
            taken.append(trials.run(number, kill))
        finally:
            for node in killed:
                plane.start_kubelet(node)
    outcome.rounds["kube_dead_kubelet"] = taken
    reused = Figure("recovery.kube_dead_kubelet_bad_node_reused", trials.reused, "restarts", n=len(taken))
    p95 = Figure("recovery.kube_dead_kubelet_p95_seconds", round(percentile_95(taken), 3), "s", n=len(taken))
    outcome.figures += [p95, reused]
    return [f"[kube] with the bad node's kubelet dead: best {min(taken):.2f} s, worst {max(taken):.2f} s"]


if __name__ == "__main__":
    sys.exit(main())
