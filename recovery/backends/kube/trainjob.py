"""Experimental: Kubeflow's TrainJob, suspended and resumed without a bad node; it has not met a real JobSet yet.

A restart is one patch to suspend, and, when its pods are gone, one to resume that carries the excluded nodes as a
`runtimePatches` entry of ours: the API allows such a change only beside a change of `suspend`. Trainer 2.0 has no place
for an affinity yet; because requests are strict, its server says so, and no bad node comes back unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recovery.backend import Rejected

from .api import Kind, KubeApi
from .manifests import JOB_ANNOTATION, JOB_LABEL, QUEUE_LABEL, Manifest, object_name
from .objects import Condition, Identified, KubeObject

TRAIN_JOBS = Kind("trainjobs", "trainer.kubeflow.org", "v1alpha1")
OURS = "transom"  # the owner of our entry in runtimePatches
REPLICATED_JOB = "node"  # as the trainer's own runtimes call the one that trains
MULTI_KUEUE = "kueue.x-k8s.io/multikueue"


class TrainJobSpec(KubeObject, frozen=True):
    suspend: bool = False
    managed_by: str = ""


class TrainJobStatus(KubeObject, frozen=True):
    conditions: tuple[Condition, ...] = ()


class TrainJob(Identified, frozen=True):
    spec: TrainJobSpec = TrainJobSpec()
    status: TrainJobStatus = TrainJobStatus()

    @property
    def queue(self) -> str:
        """Kueue's queue, or that of another cluster's Kueue: `suspend` is then theirs; empty where it is ours."""
        if self.spec.managed_by == MULTI_KUEUE:
            return "MultiKueue"
        return self.metadata.labels.get(QUEUE_LABEL, "")


def train_job(
    job: str, *, runtime: str, nodes: int, image: str, command: Sequence[str], environ: Sequence[tuple[str, str]] = ()
) -> Manifest:
    """A TrainJob whose nodes each run `command`: a launcher."""
    return {
        "apiVersion": f"{TRAIN_JOBS.group}/{TRAIN_JOBS.version}",
        "kind": "TrainJob",
        "metadata": {
            "name": object_name(job),
            "labels": {JOB_LABEL: object_name(job)},
            "annotations": {JOB_ANNOTATION: job},
        },
        "spec": {
            "runtimeRef": {"name": runtime},
            "suspend": False,
            "trainer": {
                "numNodes": nodes,
                "image": image,
                "command": list(command),
                "env": [{"name": name, "value": value} for name, value in environ],
            },
        },
    }


def suspend_patch(version: str) -> Manifest:
    """Its pods go; nothing else of it changes."""
    return {"metadata": {"resourceVersion": version}, "spec": {"suspend": True}}


def resume_patch(version: str, excluded: Sequence[str]) -> Manifest:
    """Its pods come back, never on these nodes."""
    spec: dict[str, Any] = {"suspend": False}
    if excluded:
        spec["runtimePatches"] = [{"manager": OURS, "trainingRuntimeSpec": {"template": {"spec": _off(excluded)}}}]
    return {"metadata": {"resourceVersion": version}, "spec": spec}


class TrainJobs:
    """Submit, suspend, resume: each a compare-and-swap, refused where Kueue has the say."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def look(self, job: str) -> TrainJob:
        """Raises Rejected where there is none."""
        found = self._api.get(TRAIN_JOBS, object_name(job), TrainJob)
        if found is None:
            raise Rejected(f"there is no TrainJob {object_name(job)} in namespace {self._api.namespace}")
        return found

    def submit(self, job: str, manifest: Manifest) -> TrainJob:
        return self._api.create(TRAIN_JOBS, manifest, TrainJob)

    def suspend(self, job: str) -> TrainJob:
        found = self._own(job)
        if found.spec.suspend:
            return found
        return self._api.patch(
            TRAIN_JOBS, found.metadata.name, suspend_patch(found.metadata.resource_version), TrainJob
        )

    def resume(self, job: str, excluded: Sequence[str]) -> TrainJob:
        """Raises Rejected too where this trainer cannot keep a node out."""
        found = self._own(job)
        if not found.spec.suspend:
            raise Rejected(
                f"TrainJob {found.metadata.name} is not suspended; suspend it before other nodes are asked for"
            )
        patch = resume_patch(found.metadata.resource_version, excluded)
        try:
            return self._api.patch(TRAIN_JOBS, found.metadata.name, patch, TrainJob)
        except Rejected as error:
            if excluded and "runtimePatches" in str(error):
                raise Rejected(
                    f"this Kubeflow trainer has no runtimePatches, so it cannot keep {', '.join(excluded)} out; cordon "
                    "these nodes, update the trainer, or run the job with the kubernetes backend"
                ) from error
            raise

    def _own(self, job: str) -> TrainJob:
        found = self.look(job)
        if found.queue:
            raise Rejected(
                f"Kueue ({found.queue}) says when TrainJob {found.metadata.name} is suspended; ask it, or take the "
                f"label {QUEUE_LABEL} away"
            )
        return found


def _off(nodes: Sequence[str]) -> Manifest:
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    pod = {"template": {"spec": {"affinity": affinity}}}
    return {"replicatedJobs": [{"name": REPLICATED_JOB, "template": {"spec": pod}}]}
