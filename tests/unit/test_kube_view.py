"""A job's allocation as Kubernetes tells it, and when nothing runs on a node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from recovery.backends.kube.manifests import GENERATION_LABEL, INDEX_ANNOTATION, PORT_ANNOTATION, QUEUE_LABEL
from recovery.backends.kube.objects import ConfigMap, Job, Node, Pod
from recovery.backends.kube.records import TURN, JobMap, Turn
from recovery.backends.kube.view import Cluster, launchers_of, nothing_runs, view_of


def pod(index: int, node: str, phase: str = "Running", *, generation: int = 1, **more: Any) -> Pod:
    status: dict[str, Any] = {"phase": phase, "podIP": f"10.0.0.{index + 1}"}
    if phase == "Running":
        status["conditions"] = [{"type": "Ready", "status": "True"}]
    if phase in ("Failed", "Succeeded"):
        status["containerStatuses"] = [{"name": "transom", "state": {"terminated": {"exitCode": 1}}}]
    meta = {
        "name": f"p{generation}-{index}",
        "labels": {GENERATION_LABEL: str(generation)},
        "annotations": {INDEX_ANNOTATION: str(index), PORT_ANNOTATION: "7077"},
    }
    if more.pop("leaving", False):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    tree = {"metadata": meta, "spec": {"nodeName": node}, "status": {**status, **more}}
    return msgspec.convert(tree, Pod)


def job(generation: int = 1, **more: Any) -> Job:
    meta = {"name": f"job-g{generation}", "labels": {GENERATION_LABEL: str(generation), **more.pop("labels", {})}}
    return msgspec.convert({"metadata": meta, "spec": {"parallelism": 2, **more}}, Job)


def cluster(*pods: Pod, jobs: tuple[Job, ...] = (job(),), generation: int = 1) -> Cluster:
    turn = Turn(generation=generation, pods=2, attempt=generation, token=f"t{generation}", excluded=("bad",))
    found = JobMap(ConfigMap(data={TURN: msgspec.json.encode(turn).decode()}))
    return Cluster(found, jobs, pods)


def look(seen: Cluster, *down: str) -> Any:
    return view_of("job", seen, lambda node: node in down)


def node(*, ready: bool = True, taint: str = "") -> Node:
    conditions = [{"type": "Ready", "status": "True" if ready else "Unknown"}]
    taints = [{"key": taint}] if taint else []
    return msgspec.convert({"spec": {"taints": taints}, "status": {"conditions": conditions}}, Node)


def test_without_records_there_is_no_allocation() -> None:
    assert look(Cluster(JobMap(None), (), ())).phase == "absent"


def test_it_runs_when_every_index_has_come_up() -> None:
    waiting = look(cluster(pod(0, "n1"), pod(1, "n2", "Pending")))
    assert (waiting.phase, waiting.reason) == ("pending", "1 pods are being started")
    view = look(cluster(pod(1, "n2"), pod(0, "n1")))
    assert (view.phase, view.nodes, view.attempt, view.token) == ("running", ("n1", "n2"), 1, "t1")
    assert view.excluded_nodes == ("bad",)


def test_an_index_that_has_lost_its_pod_does_not_put_the_others_back() -> None:
    view = look(cluster(pod(0, "n1"), pod(1, "n2", "Failed")))
    assert (view.phase, view.nodes) == ("running", ("n1",))


def test_why_it_waits_is_told_in_the_schedulers_words() -> None:
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}
    view = look(cluster(pod(0, "", "Pending", conditions=[told]), pod(1, "n2")))
    assert (view.phase, view.reason) == ("pending", "Unschedulable: 0/4 nodes are available")


def test_while_older_pods_live_it_is_ending() -> None:
    seen = cluster(pod(0, "n1", generation=1), jobs=(job(1),), generation=2)
    view = look(seen)
    assert (view.phase, view.nodes, view.generation, view.attempt) == ("ending", (), 2, 2)


def test_a_suspended_job_is_held_and_kueue_is_named() -> None:
    view = look(cluster(jobs=(job(suspend=True),)))
    assert view.phase == "pending"
    assert "suspended" in view.held
    queued = look(cluster(jobs=(job(suspend=True, labels={QUEUE_LABEL: "team"}),)))
    assert "Kueue has not admitted" in queued.held


def test_only_nodes_of_pods_that_are_not_well_are_asked_about() -> None:
    asked: list[str] = []

    def is_down(name: str) -> bool:
        asked.append(name)
        return True

    sick = pod(1, "n2", conditions=[{"type": "Ready", "status": "False"}])
    view = view_of("job", cluster(pod(0, "n1"), sick), is_down)
    assert (asked, view.down_nodes) == (["n2"], ("n2",))


def test_launchers_listen_on_their_pods_address() -> None:
    seen = cluster(pod(0, "n1"), pod(1, "n2", podIP="fd00::2"), pod(2, "n3", "Pending"))
    assert [(one.node, one.address) for one in launchers_of(seen, 8)] == [
        ("n1", "tcp:10.0.0.1:7077"), ("n2", "tcp:[fd00::2]:7077"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pods", "there", "excluded", "vouched"),
    [
        ((pod(0, "n1", "Failed"),), node(ready=False), False, True),  # the kubelet reported every end
        ((pod(0, "n1"),), None, False, True),  # the node object is gone
        ((pod(0, "n1"),), node(), False, False),  # it runs
        ((pod(0, "n1"),), node(ready=False), True, False),  # not heard of is not gone, excluded or not
        ((pod(0, "n1", leaving=True),), node(ready=False), True, False),  # terminating on a dead node
        ((pod(0, "n1"),), node(taint="node.kubernetes.io/out-of-service"), False, False),
        ((pod(0, "n1"),), node(taint="node.kubernetes.io/out-of-service"), True, True),  # the operator vouches
        ((), node(), False, True),  # its kubelet is well and has no such pod
        ((), node(ready=False), True, False),  # deleted by force while nobody heard its kubelet
        ((pod(0, "n1", "Failed", containerStatuses=[]),), node(ready=False), True, False),  # somebody wrote a phase
    ],
)
def test_what_vouches_that_nothing_runs_on_a_node(
    pods: tuple[Pod, ...], there: Node | None, excluded: bool, vouched: bool
) -> None:
    assert nothing_runs(pods, there, excluded=excluded) is vouched
