"""TrainJob manifests and patches on the real API server with the trainer's real CRD; its controller is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ingest.clock import SystemClock
from recovery.backend import Conflict, Rejected, Unavailable
from recovery.backends.kube.api import KubeApi
from recovery.backends.kube.trainjob import TRAIN_JOBS, TrainJob, TrainJobs, suspend_patch, train_job
from tests.kube_lab.cluster import control_plane, namespace
from tests.kube_lab.control_plane import ControlPlane
from tests.launcher_lab import wait_for

__all__ = ["control_plane", "namespace"]

MERGE = "application/merge-patch+json"
Make = Callable[..., TrainJobs]


@pytest.fixture(scope="module")
def crd(control_plane: ControlPlane) -> None:
    control_plane.apply_crd("trainer.kubeflow.org_trainjobs")
    path = f"/apis/{TRAIN_JOBS.group}/{TRAIN_JOBS.version}"
    wait_for(lambda: any(one["name"] == "trainjobs" for one in _resources(control_plane, path)), "the CRD is served")


def _resources(plane: ControlPlane, path: str) -> list[dict[str, str]]:
    try:
        found: list[dict[str, str]] = plane.ask("GET", path)["resources"]
    except OSError:  # 404 is an OSError too
        return []
    return found


@pytest.fixture
def jobs(control_plane: ControlPlane, namespace: str, crd: None) -> TrainJobs:
    api = KubeApi.connect(str(control_plane.kubeconfig()), "", namespace, SystemClock())
    jobs = TrainJobs(api)
    manifest = train_job(
        "llama", runtime="torch-distributed", nodes=4, image="mine:1", command=("transom", "launcher"),
        environ=(("TRANSOM_JOB", "llama"),),
    )  # fmt: skip

    def served() -> TrainJob | None:
        try:
            return jobs.submit("llama", manifest)
        except Unavailable:
            return None

    assert wait_for(served, "it is taken").metadata.name == "llama"
    return jobs


def test_it_is_suspended_and_resumed(jobs: TrainJobs) -> None:
    assert not jobs.look("llama").spec.suspend
    assert jobs.suspend("llama").spec.suspend
    assert jobs.suspend("llama").spec.suspend, "again: nothing happens"
    assert not jobs.resume("llama", ()).spec.suspend


def test_nodes_change_only_while_it_is_suspended(jobs: TrainJobs) -> None:
    with pytest.raises(Rejected, match="not suspended"):
        jobs.resume("llama", ("n1",))


def test_a_trainer_that_cannot_keep_a_node_out_says_so_and_stays_suspended(jobs: TrainJobs) -> None:
    """Trainer 2.0 has no `runtimePatches`; a request that is not strict would be taken, and the node used again."""
    jobs.suspend("llama")
    with pytest.raises(Rejected, match=r"cannot keep n1, n2 out; cordon"):
        jobs.resume("llama", ("n1", "n2"))
    assert jobs.look("llama").spec.suspend


def test_somebody_who_was_quicker_is_not_overwritten(jobs: TrainJobs) -> None:
    stale = jobs.look("llama").metadata.resource_version
    jobs.suspend("llama")
    with pytest.raises(Conflict):
        jobs._api.patch(TRAIN_JOBS, "llama", suspend_patch(stale), TrainJob)


def test_what_kueue_has_queued_is_kueues_to_suspend(
    control_plane: ControlPlane, namespace: str, jobs: TrainJobs
) -> None:
    path = f"{TRAIN_JOBS.path(namespace)}/llama"
    labels = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}}
    control_plane.ask("PATCH", path, labels, content=MERGE)
    for do in (lambda: jobs.suspend("llama"), lambda: jobs.resume("llama", ())):
        with pytest.raises(Rejected, match="Kueue \\(team-a\\) says when"):
            do()
    assert not jobs.look("llama").spec.suspend
