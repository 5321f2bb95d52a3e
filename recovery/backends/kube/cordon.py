"""Nodes that are excluded are cordoned too, once for each job: whoever uncordons one knows better."""

from __future__ import annotations

from collections.abc import Iterable

from recovery.backend import BackendError, Conflict, Rejected

from .api import NODES, KubeApi
from .objects import Node

CORDONED_ANNOTATION = "transom/cordoned-for"  # the jobs, with commas, for which we have cordoned it
JOBS_MAX = 20
TRIES_MAX = 3  # a node's object changes with each report of its kubelet


class Cordon:
    """See the module. It never stands in the way: affinity keeps the job off these nodes anyway."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._done: set[tuple[str, str]] = set()  # job and node; the annotation knows it beyond this life

    def cordon(self, job: str, nodes: Iterable[str]) -> None:
        """Take no pods of anybody any more. What cannot be done now is tried with the job's next replacement."""
        for node in nodes:
            if (job, node) in self._done:
                continue
            try:
                self._one(job, node)
            except Rejected:
                self._done.add((job, node))  # no right: said when recovery starts
            except BackendError:
                continue
            else:
                self._done.add((job, node))

    def _one(self, job: str, name: str) -> None:
        for left in reversed(range(TRIES_MAX)):
            found = self._api.get(NODES, name, Node)
            if found is None or found.spec.unschedulable:
                return  # somebody else's cordon stays theirs
            jobs = [one for one in found.metadata.annotations.get(CORDONED_ANNOTATION, "").split(",") if one]
            if job in jobs:
                return
            body = {
                "metadata": {
                    "resourceVersion": found.metadata.resource_version,
                    "annotations": {CORDONED_ANNOTATION: ",".join([*jobs, job][-JOBS_MAX:])},
                },
                "spec": {"unschedulable": True},
            }
            try:
                self._api.patch(NODES, name, body, Node)
            except Conflict:
                if not left:
                    raise
            else:
                return
