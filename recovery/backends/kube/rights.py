"""Which rights recovery needs in a namespace, what each is for, and which of them are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .api import CONFIG_MAPS, JOBS, LEASES, NODES, PODS, SECRETS, Kind, KubeApi


@dataclass(frozen=True, slots=True)
class Right:
    """Verbs on one kind. `needed`: nothing works without; `otherwise`: what works without it, as a sentence goes on."""

    kind: Kind
    verbs: tuple[str, ...]
    purpose: str
    otherwise: str = ""

    @property
    def needed(self) -> bool:
        return not self.otherwise


RIGHTS = (
    Right(CONFIG_MAPS, ("get", "create", "patch"), "the records of a job"),
    Right(JOBS, ("list", "get", "create", "delete"), "pods on other nodes"),
    Right(PODS, ("list", "watch"), "which nodes a job has, and when they are gone"),
    Right(SECRETS, ("get", "create"), "the token of a job's launchers"),
    Right(
        LEASES,
        ("get", "create", "patch"),
        "one controller at a time",
        "run one `transom recover` for the namespace and no more",
    ),
    Right(
        NODES,
        ("get", "list"),
        "whether a node is down or gone, and how many there are",
        "a node that does not answer is waited for until its pod is seen to have ended",
    ),
)

CORDON = Right(
    NODES,
    ("patch",),
    "recover.backends.kubernetes.cordon",
    "an excluded node is kept from its job by affinity only, and other jobs may get it",
)


def missing_rights(api: KubeApi, *, needed_only: bool, also: tuple[Right, ...] = ()) -> Iterator[str]:
    """A sentence for each kind of which verbs are missing. `also`: of what was switched on. Raises Unavailable."""
    for right in (*RIGHTS, *also):
        if needed_only and not right.needed:
            continue
        missing = [verb for verb in right.verbs if not api.may(verb, right.kind)]
        if missing:
            group = f".{right.kind.group}" if right.kind.group else ""
            where = f"in namespace {api.namespace}" if right.kind.namespaced else "in the cluster"
            rest = f"; without it, {right.otherwise}" if right.otherwise else "; docs/kubernetes.md has the Role"
            yield f"no right to {', '.join(missing)} {right.kind.plural}{group} {where} ({right.purpose}){rest}"


def role(name: str, namespace: str) -> dict[str, Any]:
    """A Role with these verbs and no others."""
    rules = [_rule(right) for right in RIGHTS if right.kind.namespaced]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": namespace},
        "rules": rules,
    }


def cluster_role(name: str) -> dict[str, Any]:
    """What is not in a namespace: looking at nodes."""
    rules = [_rule(right) for right in RIGHTS if not right.kind.namespaced]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": rules,
    }


def cordon_role(name: str) -> dict[str, Any]:
    """What cordoning takes besides."""
    return {**cluster_role(name), "rules": [_rule(CORDON)]}


def _rule(right: Right) -> dict[str, Any]:
    return {"apiGroups": [right.kind.group], "resources": [right.kind.plural], "verbs": list(right.verbs)}
