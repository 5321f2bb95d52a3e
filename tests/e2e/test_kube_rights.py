"""The Role of docs/kubernetes.md is enough on a real API server, and a verb that is missing is said in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from recovery.backend import Rejected
from recovery.backends.kube.rights import RIGHTS, cluster_role, cordon_role, role
from recovery.launcher.protocol import JobEnd
from tests.kube_lab.cluster import KubeJob, control_plane, kube_job, namespace
from tests.kube_lab.control_plane import ControlPlane
from tests.kube_lab.rights import give
from tests.launcher_lab import wait_for

__all__ = ["control_plane", "kube_job", "namespace"]

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
END = JobEnd(outcome="failed", reason="for the test", at=1.0)
VERBS = [(right.kind.plural, verb) for right in RIGHTS if right.needed for verb in right.verbs]


def live_through(kube_job: KubeJob, user: str) -> None:
    """Everything that recovery does, as that user."""
    allocation = kube_job.allocation(user)
    bad = kube_job.submit(allocation)[0]
    assert allocation.token(kube_job.job)
    allocation.nothing_runs_on(kube_job.job, bad)
    assert bad not in kube_job.replace(allocation, 2, bad)
    allocation.release(kube_job.job, END)
    wait_for(lambda: allocation.look(kube_job.job).phase == "ended", "its pods are gone")


def test_the_role_is_enough_and_nothing_is_missing(control_plane: ControlPlane, kube_job: KubeJob) -> None:
    give(control_plane, "recover", kube_job.namespace)
    allocation = kube_job.allocation("recover")
    assert allocation.missing_rights() == ()
    assert allocation.controller_lease("here").take()
    live_through(kube_job, "recover")


def test_without_nodes_and_leases_it_works_and_says_what_does_not(
    control_plane: ControlPlane, kube_job: KubeJob
) -> None:
    give(control_plane, "user0", kube_job.namespace, lacks=("leases", "create"), nodes=False)
    missing = kube_job.allocation("user0").missing_rights()
    assert len(missing) == 2
    assert "no right to create leases.coordination.k8s.io" in missing[0]
    assert "run one `transom recover`" in missing[0]
    assert "no right to get, list nodes in the cluster" in missing[1]
    live_through(kube_job, "user0")


@pytest.mark.parametrize(("resource", "verb"), VERBS, ids=lambda value: str(value))
def test_a_missing_verb_is_said_before_anything_is_stopped(
    control_plane: ControlPlane, kube_job: KubeJob, resource: str, verb: str
) -> None:
    user = f"user{1 + VERBS.index((resource, verb))}"
    give(control_plane, user, kube_job.namespace, lacks=(resource, verb))
    owner = kube_job.allocation()
    owner.register(kube_job.job)
    with pytest.raises(Rejected) as refused:
        kube_job.allocation(user).replace(kube_job.job, attempt=2, token="t", excluded_nodes=())
    told = str(refused.value)
    assert f"no right to {verb} {resource}" in told
    assert f"in namespace {kube_job.namespace}" in told
    assert "\n" not in told


def test_a_right_that_is_taken_away_meanwhile_is_said_in_a_sentence(
    control_plane: ControlPlane, kube_job: KubeJob
) -> None:
    with pytest.raises(Rejected, match=r"user11 may not get configmaps in namespace .*; give it that verb"):
        kube_job.allocation("user11").look(kube_job.job)


@pytest.mark.parametrize(
    "manifest",
    [role("transom", "training"), cluster_role("transom-nodes"), cordon_role("transom-cordon")],
    ids=["in", "out", "cordon"],
)
def test_the_document_shows_the_very_roles(manifest: dict[str, object]) -> None:
    blocks = [part.split("```")[0] for part in DOCUMENT.split("```yaml\n")[1:]]
    shown = [tree for block in blocks for tree in yaml.safe_load_all(block)]
    assert json.dumps(manifest, sort_keys=True) in [json.dumps(tree, sort_keys=True) for tree in shown]
