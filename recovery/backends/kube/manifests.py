"""What is sent to Kubernetes for a job: its ConfigMap, its token's Secret, and one indexed Job for each generation.

Pure. A pod runs one launcher. The template is the user's own (resources, image, tolerations, volumes, priority);
what the launcher needs is put into it, and what keeps a bad node out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from recovery.backend import Rejected

from .objects import Meta

OBJECT_NAME_MAX = 40  # a pod's name adds generation, index and five letters, and has 63 characters at most
LABEL_VALUE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
JOB_LABEL = "transom/job"
GENERATION_LABEL = "transom/generation"
JOB_ANNOTATION = "transom/job-name"
ATTEMPT_ANNOTATION = "transom/attempt"
TOKEN_ANNOTATION = "transom/token"
PORT_ANNOTATION = "transom/launcher-port"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # Kueue suspends and resumes what carries it
CONTAINER = "transom"
STATE_VARIABLE = "TRANSOM_STATE_DIR"
STATE_FOLDER = "/var/lib/transom"
JOB_FOLDER = "/etc/transom/job"
TOKEN_FOLDER = "/etc/transom/token"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
GRACE_SECONDS = 30  # a launcher stops its ranks within its own grace, which is shorter
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generation:
    """One set of pods that is to be made: how many, for which attempt, and where not."""

    number: int
    pods: int
    attempt: int = 0
    token: str = ""
    excluded: tuple[str, ...] = ()


def object_name(job: str) -> str:
    """A name that Kubernetes takes for objects and label values, another one for each job."""
    if len(job) <= OBJECT_NAME_MAX and LABEL_VALUE.fullmatch(job):
        return job
    short = re.sub(r"[^a-z0-9]+", "-", job.lower())[: OBJECT_NAME_MAX - 9].strip("-")
    return f"{short or 'job'}-{sha256(job.encode()).hexdigest()[:8]}"


def generation_name(job: str, number: int) -> str:
    return f"{object_name(job)}-g{number}"


def selector(job: str) -> str:
    """Of everything that belongs to a job."""
    return f"{JOB_LABEL}={object_name(job)}"


def config_map(job: str, data: Mapping[str, str]) -> Manifest:
    """The store of a job's records; everything else belongs to it and goes with it."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(job, object_name(job)), "data": dict(data)}


def token_secret(job: str, token: str, owner: Meta) -> Manifest:
    """What launchers and controller prove themselves with; its value appears nowhere else."""
    meta = _meta(job, object_name(job)) | {"ownerReferences": [_owner(owner)]}
    data = {"token": base64.b64encode(token.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta, "data": data}


def job_of(job: str, generation: Generation, template: Mapping[str, Any], owner: Meta, port: int) -> Manifest:
    """An indexed Job whose pods run launchers, one a node.

    No pod is tried a second time by Kubernetes (`backoffLimitPerIndex` 0), and one that fails takes no other with it
    (which `backoffLimit` 0 would do): the others hold checkpoints in memory, and recovery restarts on them. A pod that
    was evicted or preempted is made anew, once it is certainly gone (`podReplacementPolicy` Failed).
    """
    pod = deepcopy(dict(template))
    labels = {JOB_LABEL: object_name(job), GENERATION_LABEL: str(generation.number)}
    meta = pod.setdefault("metadata", {})
    meta["labels"] = {**meta.get("labels", {}), **labels}
    meta["annotations"] = {**meta.get("annotations", {}), JOB_ANNOTATION: job, PORT_ANNOTATION: str(port)}
    _keep_apart(pod["spec"], job)
    _keep_off(pod["spec"], generation.excluded)
    annotations = {
        JOB_ANNOTATION: job,
        ATTEMPT_ANNOTATION: str(generation.attempt),
        TOKEN_ANNOTATION: generation.token,
    }
    queue = {QUEUE_LABEL: meta["labels"][QUEUE_LABEL]} if QUEUE_LABEL in meta["labels"] else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": generation_name(job, generation.number),
            "labels": labels | queue,
            "annotations": annotations,
            "ownerReferences": [_owner(owner)],
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": generation.pods,
            "parallelism": generation.pods,
            "backoffLimitPerIndex": 0,
            "maxFailedIndexes": generation.pods,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [0]}},
                ]
            },
            "template": pod,
        },
    }


def pod_template(
    given: Mapping[str, Any] | None, *, job: str, image: str, command: Sequence[str], port: int
) -> Manifest:
    """The user's template with the launcher in it: its command, what it is told, and its folders.

    Raises Rejected.
    """
    pod: Manifest = deepcopy(dict(given or {}))
    spec = pod.setdefault("spec", {})
    if not isinstance(spec, dict):
        raise Rejected("the pod template's spec is no mapping")
    spec["restartPolicy"] = "Never"  # whether and where a launcher starts again is recovery's to say
    spec.setdefault("terminationGracePeriodSeconds", GRACE_SECONDS)
    spec.setdefault("automountServiceAccountToken", False)  # a launcher asks nothing of the cluster
    container = _launcher_container(spec)
    container.setdefault("image", image)
    if not container["image"]:
        raise Rejected("which image has transom and the training code? give image or a pod template with one")
    container["command"] = list(command)
    container.pop("args", None)
    given_env: list[Manifest] = container.get("env", [])
    has_state = any(entry["name"] == STATE_VARIABLE for entry in given_env)  # a volume of the user's own
    own: list[Manifest] = [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "TRANSOM_LAUNCHER_TOKEN_FILE", "value": TOKEN_FILE},
        *([] if has_state else [{"name": STATE_VARIABLE, "value": STATE_FOLDER}]),
    ]
    names = {entry["name"] for entry in own}
    container["env"] = own + [entry for entry in given_env if entry["name"] not in names]
    container.setdefault("ports", []).append({"name": "launcher", "containerPort": port})
    name = object_name(job)
    _mount(spec, container, "transom-job", JOB_FOLDER, {"configMap": {"name": name}})
    _mount(spec, container, "transom-token", TOKEN_FOLDER, {"secret": {"secretName": name, "defaultMode": 0o400}})
    if not has_state:
        _mount(spec, container, "transom-state", STATE_FOLDER, {"emptyDir": {}}, read_only=False)
    return pod


def pod_command(command: Sequence[str], *, port: int, interpreter: str) -> list[str]:
    """The command as a pod runs it. `--listen auto` becomes an address that is known from outside, and the job is read
    where its ConfigMap is mounted, because no folder need be shared; the image may have its Python elsewhere."""
    words = list(command)
    if interpreter:
        words[0] = interpreter
    if "--listen" in words:
        words[words.index("--listen") + 1] = f"$(POD_IP):{port}"
        words += ["--registered", JOB_FOLDER]
    return words


def _launcher_container(spec: Manifest) -> Manifest:
    """The container of that name, else the only one, else a new one."""
    containers = spec.setdefault("containers", [{"name": CONTAINER}])
    named = [one for one in containers if one.get("name") == CONTAINER]
    if named:
        found: Manifest = named[0]
        return found
    if len(containers) == 1:
        only: Manifest = containers[0]
        return only
    raise Rejected(f"which container of the pod template runs the ranks? call it {CONTAINER!r}")


def _mount(
    spec: Manifest, container: Manifest, name: str, path: str, source: Manifest, *, read_only: bool = True
) -> None:
    if any(mount["mountPath"] == path for mount in container.get("volumeMounts", [])):
        return  # the user's own
    spec.setdefault("volumes", []).append({"name": name, **source})
    container.setdefault("volumeMounts", []).append({"name": name, "mountPath": path, "readOnly": read_only})


def _keep_apart(spec: Manifest, job: str) -> None:
    """One launcher of a job on a node, and none beside a pod of an older generation that has not ended."""
    term = {
        "labelSelector": {"matchLabels": {JOB_LABEL: object_name(job)}},
        "topologyKey": "kubernetes.io/hostname",
    }
    anti = spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
    anti.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(term)


def _keep_off(spec: Manifest, nodes: Sequence[str]) -> None:
    """Never on these, by name: labels may differ from it. One value a requirement is all that a field takes."""
    if not nodes:
        return
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    for term in required["nodeSelectorTerms"]:  # any of the terms is enough, so each has to say it
        term["matchFields"] = [*term.get("matchFields", []), *fields]


def _meta(job: str, name: str) -> Manifest:
    return {"name": name, "labels": {JOB_LABEL: object_name(job)}, "annotations": {JOB_ANNOTATION: job}}


def _owner(meta: Meta) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": meta.name, "uid": meta.uid}
