"""The Kubernetes lab as fixtures: one control plane for the session, a namespace for each test."""

from __future__ import annotations

import atexit
import os
import random
import tempfile
from itertools import count
from pathlib import Path

import pytest

from ingest.clock import SystemClock
from recovery.allocation import BackendSite
from recovery.backends.kubernetes import KubernetesAllocation, make_allocation
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import JobSpec
from tests.kube_lab.build import NoGo, build
from tests.kube_lab.control_plane import ControlPlane
from tests.launcher_lab import wait_for
from tests.machine import program

NODES = ("n1", "n2", "n3", "n4")
SLEEPER = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done")
SLOW_TO_END = ("sh", "-c", "trap 'sleep 0.7; exit 0' TERM; while :; do sleep 0.05; done")
numbers = count()


_shared: list[ControlPlane] = []


def shared_plane() -> ControlPlane:
    """Started once for all tests; etcd, apiserver, controller-manager and scheduler are real, kubelets are not."""
    program("openssl")
    try:
        build(os.environ)
    except NoGo as error:
        pytest.skip(f"{error}: install it to run this test")
    if not _shared:
        folder = tempfile.TemporaryDirectory(prefix="kube-", ignore_cleanup_errors=True)
        plane = ControlPlane(Path(folder.name), NODES)
        atexit.register(folder.cleanup)
        atexit.register(plane.close)  # the last that was registered goes first
        plane.__enter__()
        _shared.append(plane)
    return _shared[0]


@pytest.fixture(scope="session")
def control_plane() -> ControlPlane:
    return shared_plane()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> str:
    """One of the test's own."""
    name = f"t{next(numbers)}"
    control_plane.make_namespace(name)
    return name


class KubeJob:
    """A job of that namespace whose pods only sleep, or run what they are told."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        folder: Path,
        *,
        job: str = "job",
        nodes: int = 2,
        register: bool = True,
    ) -> None:
        self.plane, self.namespace, self.folder, self.job = plane, namespace, folder, job
        self.files = JobFiles(folder, job)
        if register:
            self.files.write_spec(JobSpec(job=job, script="train.py", nodes=nodes, backend="kubernetes"))
        self.nodes = nodes

    def allocation(self, user: str = "admin", *, server: str = "", **options: object) -> KubernetesAllocation:
        """As that user, maybe through a proxy."""
        given = {
            "kubeconfig": str(self.plane.kubeconfig(user, server=server)),
            "namespace": self.namespace, "image": "none", **options,
        }  # fmt: skip
        return make_allocation(BackendSite(self.folder, SystemClock(), random.Random(1), given))

    def submit(self, allocation: KubernetesAllocation, command: tuple[str, ...] = SLEEPER) -> tuple[str, ...]:
        """Submitted and running; the nodes it has."""
        allocation.submit(self.job, nodes=self.nodes, command=command)
        return self.wait_running(allocation)

    def wait_running(self, allocation: KubernetesAllocation) -> tuple[str, ...]:
        def running() -> tuple[str, ...]:
            view = allocation.look(self.job)
            return view.nodes if view.phase == "running" else ()

        return wait_for(running, "its pods run", 60)

    def replace(
        self, allocation: KubernetesAllocation, attempt: int, *excluded: str, token: str = ""
    ) -> tuple[str, ...]:
        """Asked until it runs, as the backend does."""

        def running() -> tuple[str, ...]:
            view = allocation.replace(
                self.job, attempt=attempt, token=token or f"token-{attempt}", excluded_nodes=excluded
            )
            return view.nodes if view.phase == "running" else ()

        return wait_for(running, f"the pods of attempt {attempt} run", 60)

    def jobs(self) -> list[str]:
        """Names of its Jobs."""
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        return sorted(job["metadata"]["name"] for job in self.plane.ask("GET", path)["items"])


@pytest.fixture
def kube_job(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> KubeJob:
    return KubeJob(control_plane, namespace, tmp_path / "jobs")
