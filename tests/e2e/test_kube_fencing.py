"""On a real control plane: dead kubelets, stuck pods, two controllers, operators; never two sets of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ingest.clock import ManualClock
from recovery.allocation import BackendSite
from recovery.backend import Conflict, Rejected
from recovery.backends.kube.api import KubeApi
from recovery.backends.kube.lease import GRANTED_SECONDS, KubernetesLease
from recovery.backends.kubernetes import make_allocation
from recovery.launcher.protocol import JobEnd, Placement
from recovery.lease import LeaseLost
from tests.kube_lab.cluster import KubeJob, control_plane, kube_job, namespace
from tests.kube_lab.control_plane import ControlPlane
from tests.launcher_lab import wait_for

__all__ = ["control_plane", "kube_job", "namespace"]

QUICK = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "transom"}]}}


@pytest.fixture
def quick_template(tmp_path: Path) -> str:
    path = tmp_path / "pod.json"
    path.write_text(str(QUICK).replace("'", '"'))  # JSON is YAML
    return str(path)


def test_a_dead_kubelet_on_an_excluded_node_does_not_hold_up_the_others(
    control_plane: ControlPlane, kube_job: KubeJob
) -> None:
    allocation = kube_job.allocation()
    bad = kube_job.submit(allocation)[0]
    control_plane.kill_kubelet(bad)
    try:
        nodes = kube_job.replace(allocation, 2, bad)
        assert bad not in nodes
        assert not allocation.nothing_runs_on(kube_job.job, bad), "its process lives, and nobody speaks for it"
    finally:
        control_plane.start_kubelet(bad)
    wait_for(lambda: allocation.nothing_runs_on(kube_job.job, bad), "its kubelet is back and ends it")


def test_a_pod_that_is_stuck_terminating_has_its_node_excluded(
    control_plane: ControlPlane, kube_job: KubeJob, quick_template: str
) -> None:
    allocation = kube_job.allocation(pod_template=quick_template, stuck_seconds=0.5)
    dead = kube_job.submit(allocation)[0]
    control_plane.kill_kubelet(dead)
    try:
        nodes = kube_job.replace(allocation, 2)
        assert dead not in nodes
        assert dead in allocation.records(kube_job.job).excluded()
    finally:
        control_plane.start_kubelet(dead)


def test_one_launcher_that_fails_takes_no_other_with_it(kube_job: KubeJob) -> None:
    allocation = kube_job.allocation()
    fails_first = ("sh", "-c", 'case "$HOSTNAME" in job-g1-0-*) exit 3;; *) exec sleep 600;; esac')
    allocation.submit(kube_job.job, nodes=2, command=fails_first)
    view = wait_for(
        lambda: (seen := allocation.look(kube_job.job)).phase == "running" and len(seen.nodes) == 1 and seen,
        "the other one runs",
    )
    assert view.generation == 1
    assert kube_job.jobs() == ["job-g1"]


def test_two_controllers_ask_for_the_same_attempt_and_one_has_it(kube_job: KubeJob) -> None:
    first, second = kube_job.allocation(), kube_job.allocation()
    kube_job.submit(first)
    kube_job.replace(first, 2, token="mine")
    with pytest.raises(Conflict, match="not newer"):
        second.replace(kube_job.job, attempt=2, token="theirs", excluded_nodes=())
    assert first.look(kube_job.job).token == "mine"
    assert "job-g3" not in kube_job.jobs()


def test_a_controller_that_lost_the_lease_writes_nothing_more(kube_job: KubeJob) -> None:
    first, second = kube_job.allocation(), kube_job.allocation()
    kube_job.submit(first)
    ours, theirs = first.controller_lease("a"), second.controller_lease("b")
    assert ours.take()
    assert not theirs.take()
    with pytest.raises(Conflict, match="another controller"):
        second.replace(kube_job.job, attempt=2, token="b", excluded_nodes=())
    kube_job.replace(first, 2)
    ours.release()
    assert theirs.take()
    assert theirs.epoch > ours.epoch
    kube_job.replace(second, 3)
    with pytest.raises(Conflict, match="another controller"):
        first.replace(kube_job.job, attempt=4, token="a", excluded_nodes=())
    with pytest.raises(Conflict, match="another controller"):
        first.records(kube_job.job).write_placement(Placement(attempt=4, token="a", places=(), master_port=1))
    assert second.look(kube_job.job).attempt == 3


def test_an_epoch_that_is_over_is_refused_by_the_records_themselves(
    kube_job: KubeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first controller believes in its lease still: it slept between its look at the clock and its write."""
    first, second = kube_job.allocation(), kube_job.allocation()
    kube_job.submit(first)
    ours, theirs = first.controller_lease("a"), second.controller_lease("b")
    assert ours.take()
    ours.release()
    assert theirs.take()
    kube_job.replace(second, 2)
    monkeypatch.setattr(type(ours), "is_ours", lambda self: True)
    with pytest.raises(Conflict, match="another controller \\(epoch 2\\)"):
        first.replace(kube_job.job, attempt=3, token="a", excluded_nodes=())


def test_a_lease_lapses_by_time_and_its_holder_notices(control_plane: ControlPlane, namespace: str) -> None:
    clock = ManualClock()

    def lease(identity: str) -> KubernetesLease:
        api = KubeApi.connect(str(control_plane.kubeconfig()), "", namespace, clock)
        return KubernetesLease(api, "transom-recover", identity, clock)

    first, second = lease("a"), lease("b")
    assert first.take()
    assert not second.take()
    clock.advance(GRANTED_SECONDS / 2)
    first.renew()
    clock.advance(GRANTED_SECONDS / 2 + 1)
    assert not second.take(), "it was renewed"
    assert first.is_ours()
    clock.advance(GRANTED_SECONDS)
    assert not first.is_ours()
    assert second.take()
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(LeaseLost):
        first.renew()
    second.release()
    assert first.take()
    assert first.epoch == 3


def test_a_job_that_is_over_gets_no_other_nodes(kube_job: KubeJob) -> None:
    allocation = kube_job.allocation()
    allocation.submit(kube_job.job, nodes=2, command=("true",))
    wait_for(lambda: allocation.look(kube_job.job).phase == "ended", "both have finished")
    allocation.records(kube_job.job).write_end(JobEnd(outcome="finished", reason="done", at=1.0))
    with pytest.raises(Rejected, match="terminal stays terminal"):
        allocation.replace(kube_job.job, attempt=2, token="t", excluded_nodes=())
    assert kube_job.jobs() == ["job-g1"]


def test_a_job_that_an_operator_suspends_is_held(control_plane: ControlPlane, kube_job: KubeJob) -> None:
    allocation = kube_job.allocation()
    kube_job.submit(allocation)
    path = f"/apis/batch/v1/namespaces/{kube_job.namespace}/jobs/job-g1"
    merge = "application/merge-patch+json"
    control_plane.ask("PATCH", path, {"spec": {"suspend": True}}, content=merge)
    view = wait_for(lambda: (seen := allocation.look(kube_job.job)).held and seen, "it is held")
    assert "kubectl patch" in view.held
    control_plane.ask("PATCH", path, {"spec": {"suspend": False}}, content=merge)
    kube_job.wait_running(allocation)
    assert allocation.look(kube_job.job).held == ""


def test_nodes_that_do_not_fit_are_waited_for_and_the_reason_is_the_schedulers(kube_job: KubeJob) -> None:
    """Where more nodes may come, too few of them are no refusal."""
    allocation = kube_job.allocation(autoscaled=True)
    kube_job.submit(allocation)
    allocation.replace(kube_job.job, attempt=2, token="t", excluded_nodes=("n1", "n2", "n3"))

    def reason() -> str:
        allocation.replace(kube_job.job, attempt=2, token="t", excluded_nodes=("n1", "n2", "n3"))
        view = allocation.look(kube_job.job)
        return view.reason if view.phase == "pending" and "Unschedulable" in view.reason else ""

    assert "0/4 nodes are available" in wait_for(reason, "the scheduler says why", 60)


def test_another_site_with_no_shared_folder_reads_the_whole_job(kube_job: KubeJob, tmp_path: Path) -> None:
    allocation = kube_job.allocation()
    kube_job.submit(allocation)
    options = {"kubeconfig": str(kube_job.plane.kubeconfig()), "namespace": kube_job.namespace}
    elsewhere = make_allocation(BackendSite(tmp_path / "empty", ManualClock(), random.Random(2), options))
    spec = elsewhere.records(kube_job.job).spec()
    assert spec is not None
    assert spec.job == kube_job.job
    assert len(elsewhere.token(kube_job.job)) >= 32
