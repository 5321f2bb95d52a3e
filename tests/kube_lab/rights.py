"""Gives a user of the lab rights: a Role in a namespace, a ClusterRole, or either without one verb."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from recovery.backends.kube.rights import cluster_role, role
from tests.kube_lab.control_plane import ControlPlane
from tests.launcher_lab import wait_for

RBAC = "/apis/rbac.authorization.k8s.io/v1"


def without(manifest: dict[str, Any], resource: str, verb: str) -> dict[str, Any]:
    """The same role, less that verb."""
    fewer = deepcopy(manifest)
    for rule in fewer["rules"]:
        if resource in rule["resources"]:
            rule["verbs"].remove(verb)
    return fewer


def give(
    plane: ControlPlane, user: str, namespace: str, *, lacks: tuple[str, str] | None = None, nodes: bool = True
) -> None:
    """The Role of docs/kubernetes.md to that user, maybe without (resource, verb), and the right to look at nodes."""
    manifest = role(f"transom-{user}", namespace)
    if lacks is not None:
        manifest = without(manifest, *lacks)
    plane.ask("POST", f"{RBAC}/namespaces/{namespace}/roles", manifest)
    plane.ask("POST", f"{RBAC}/namespaces/{namespace}/rolebindings", binding("RoleBinding", manifest, user))
    if nodes:
        cluster = cluster_role(f"transom-{user}-{namespace}")
        plane.ask("POST", f"{RBAC}/clusterroles", cluster)
        plane.ask("POST", f"{RBAC}/clusterrolebindings", binding("ClusterRoleBinding", cluster, user))
    verb = "list" if lacks == ("pods", "watch") else "watch"
    wait_for(lambda: may(plane, user, namespace, verb, "pods"), "the API server knows the role")
    if nodes:
        wait_for(lambda: may(plane, user, namespace, "get", "nodes"), "the API server knows the cluster role")


def may(plane: ControlPlane, user: str, namespace: str, verb: str, resource: str) -> bool:
    attributes = {"namespace": namespace, "verb": verb, "resource": resource}
    review = {"spec": {"user": user, "resourceAttributes": attributes}}
    answer = plane.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def binding(kind: str, of: dict[str, Any], user: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": of["metadata"]["name"]},
        "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": of["kind"], "name": of["metadata"]["name"]},
    }
