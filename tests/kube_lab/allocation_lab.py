"""Kubernetes in the contract suite of allocations: each job in a namespace of its own, on the lab's four nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recovery.backends.kube.objects import OUT_OF_SERVICE
from tests.allocation_world import AllocationWorld
from tests.kube_lab.cluster import KubeJob, numbers, shared_plane
from tests.kube_lab.control_plane import ControlPlane


class AllocationLab:
    """The contract suite's world on Kubernetes: each job in a namespace of its own."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane = plane
        self._folder = folder

    @contextmanager
    def world(self) -> Iterator[AllocationWorld]:
        namespace = f"c{next(numbers)}"
        self._plane.make_namespace(namespace)
        job = KubeJob(self._plane, namespace, self._folder / namespace)
        allocation = job.allocation()
        allocation.register(job.job)
        yield AllocationWorld(job.job, allocation, job.allocation, self._take_down, self._bring_up)
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs?propagationPolicy=Background"
        self._plane.ask("DELETE", path)  # its pods are in nobody's way

    def _take_down(self, node: str) -> None:
        """Its kubelet is dead, and a person says that it is switched off."""
        self._plane.kill_kubelet(node)
        self._plane.taint(node, OUT_OF_SERVICE)

    def _bring_up(self, node: str) -> None:
        self._plane.taint(node)
        self._plane.start_kubelet(node)


@contextmanager
def kubernetes_lab(folder: Path) -> Iterator[AllocationLab]:
    yield AllocationLab(shared_plane(), folder)
