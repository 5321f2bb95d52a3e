"""Groups of nodes and cordons on the real thing: slurmctld with a topology, and a real API server's nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from recovery.backends.kube.rights import cordon_role
from recovery.backends.slurm import SlurmAllocation
from tests.kube_lab.cluster import KubeJob, control_plane, kube_job, namespace
from tests.kube_lab.control_plane import ControlPlane
from tests.kube_lab.rights import RBAC, binding, give, may
from tests.launcher_lab import wait_for
from tests.slurm_lab import SlurmLab

__all__ = ["control_plane", "kube_job", "namespace"]

RACK = "example.com/rack"
MERGE = "application/merge-patch+json"


@pytest.mark.parametrize(
    ("switches", "expected"),
    [({"leaf1": "n[1-2]", "leaf2": "n3,n4"}, {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2"}), (None, {})],
    ids=["tree", "flat"],
)
def test_slurm_tells_the_switch_of_each_node(
    tmp_path: Path, switches: dict[str, str] | None, expected: dict[str, str]
) -> None:
    lab = SlurmLab(tmp_path / "slurm", switches=switches)
    try:
        lab.start_controller()
        allocation = SlurmAllocation(tmp_path, lab.commands, SystemClock())
        wait_for(lambda: "is UP" in lab.run("scontrol", "ping", check=False), "slurmctld answers")
        assert allocation.groups("job", ("n1", "n2", "n3", "elsewhere")) == expected
    finally:
        lab.down()


@pytest.fixture
def nodes_as_they_were(control_plane: ControlPlane) -> Iterator[None]:
    yield
    for node in control_plane.nodes:
        clean = {"metadata": {"labels": {RACK: None}, "annotations": None}, "spec": {"unschedulable": None}}
        control_plane.ask("PATCH", f"/api/v1/nodes/{node}", clean, content=MERGE)


def cordoned(plane: ControlPlane) -> set[str]:
    nodes = plane.ask("GET", "/api/v1/nodes")["items"]
    return {node["metadata"]["name"] for node in nodes if node["spec"].get("unschedulable")}


@pytest.mark.usefixtures("nodes_as_they_were")
def test_nodes_of_one_label_are_a_group(control_plane: ControlPlane, kube_job: KubeJob) -> None:
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b")):
        body = {"metadata": {"labels": {RACK: rack}}}
        control_plane.ask("PATCH", f"/api/v1/nodes/{node}", body, content=MERGE)
    assert kube_job.allocation(topology_label=RACK).groups("job", ("n1", "n3", "n4")) == {"n1": "a", "n3": "b"}
    assert kube_job.allocation().groups("job", ("n1",)) == {}


@pytest.mark.usefixtures("nodes_as_they_were")
def test_what_a_replacement_excludes_is_cordoned_once(control_plane: ControlPlane, kube_job: KubeJob) -> None:
    allocation = kube_job.allocation(cordon=True)
    bad = kube_job.submit(allocation)[0]
    assert bad not in kube_job.replace(allocation, 2, bad)
    assert cordoned(control_plane) == {bad}
    body = {"spec": {"unschedulable": False}}
    control_plane.ask("PATCH", f"/api/v1/nodes/{bad}", body, content=MERGE)  # a person knows better
    kube_job.replace(kube_job.allocation(cordon=True), 3, bad)
    assert cordoned(control_plane) == set()


@pytest.mark.usefixtures("nodes_as_they_were")
def test_without_the_right_it_is_said_and_affinity_is_what_there_is(
    control_plane: ControlPlane, kube_job: KubeJob
) -> None:
    give(control_plane, "uncordoning", kube_job.namespace)
    allocation = kube_job.allocation("uncordoning", cordon=True)
    (said,) = allocation.missing_rights()
    assert "no right to patch nodes in the cluster (recover.backends.kubernetes.cordon)" in said
    assert "affinity only" in said
    assert kube_job.allocation("uncordoning").missing_rights() == ()
    bad = kube_job.submit(allocation)[0]
    assert bad not in kube_job.replace(allocation, 2, bad)
    assert cordoned(control_plane) == set()


@pytest.mark.usefixtures("nodes_as_they_were")
def test_the_documents_second_cluster_role_is_enough(control_plane: ControlPlane, kube_job: KubeJob) -> None:
    give(control_plane, "recover", kube_job.namespace)
    manifest = cordon_role(f"cordon-{kube_job.namespace}")
    control_plane.ask("POST", f"{RBAC}/clusterroles", manifest)
    control_plane.ask("POST", f"{RBAC}/clusterrolebindings", binding("ClusterRoleBinding", manifest, "recover"))
    wait_for(lambda: may(control_plane, "recover", kube_job.namespace, "patch", "nodes"), "the right is known")
    allocation = kube_job.allocation("recover", cordon=True)
    assert allocation.missing_rights() == ()
    bad = kube_job.submit(allocation)[0]
    kube_job.replace(allocation, 2, bad)
    assert cordoned(control_plane) == {bad}
    control_plane.ask("DELETE", f"{RBAC}/clusterrolebindings/{manifest['metadata']['name']}")
