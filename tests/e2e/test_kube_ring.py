"""A real torch job in pods: a GPU falls off the bus, the verdict moves the job to other nodes, and it resumes there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ingest.events import Metrics
from recovery.launcher.protocol import JobEnd
from tests.embedded_chain import Chain, embedded_chain, eventually
from tests.kube_lab.cluster import KubeJob, control_plane, namespace
from tests.kube_lab.control_plane import ControlPlane

__all__ = ["control_plane", "namespace"]

JOB = "ring"
TRAIN = Path(__file__).resolve().parents[2] / "pipelines" / "demo_job" / "train.py"
SMALL = ("--width", "32", "--layers", "1", "--context", "16", "--batch", "2", "--save-every", "5")
SECONDS_MAX = 180.0  # torch is imported four times, on slow cores
END = JobEnd(outcome="stopped", reason="the test is over", at=1.0)


def settings_of(plane: ControlPlane, namespace: str, template: Path) -> str:
    return f"""
[recover.modes]
gpu_lost = "auto"
[recover.backends.kubernetes]
kubeconfig = "{plane.kubeconfig()}"
namespace = "{namespace}"
image = "none"
pod_template = "{template}"
"""


def template_of(lab: Chain) -> dict[str, object]:
    """A state folder that all nodes share, as a volume would be; the embedded bus lies in it."""
    environ = {"TRANSOM_STATE_DIR": str(lab.state), "OMP_NUM_THREADS": "1", "CHAIN_MARK": str(lab.folder)}
    container = {
        "name": "transom",
        "env": [{"name": name, "value": value} for name, value in environ.items()],
        "volumeMounts": [{"name": "shared", "mountPath": str(lab.state)}],
    }
    volume = {"name": "shared", "hostPath": {"path": str(lab.state)}}
    return {"spec": {"terminationGracePeriodSeconds": 10, "containers": [container], "volumes": [volume]}}


def first_step(lab: Chain, attempt: int) -> int:
    told = [message.steps for message in lab.messages(Metrics, job=JOB) if message.attempt == attempt]
    return min((step for steps in told for step in steps), default=0)


def until(condition: Callable[[], bool], what: str, lab: Chain, plane: ControlPlane) -> None:
    """Where it does not come to that, what everybody said."""
    try:
        eventually(condition, what, SECONDS_MAX)
    except AssertionError as error:
        pods = "\n".join(path.read_text()[-2000:] for path in (plane.folder / "pods").glob(f"*-{JOB}-*.log"))
        told = "\n".join(lab.shown(command)[-3000:] for command in ("run", "recover", "detect"))
        kubelets = "\n".join(path.read_text()[-2000:] for path in plane.folder.glob("kubelet-*.log"))
        raise AssertionError(f"{error}\n{told}\npods:\n{pods}\nkubelets:\n{kubelets}") from None


def test_a_gpu_that_is_lost_moves_the_job_to_other_nodes_where_it_resumes(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    template = tmp_path / "pod.json"
    with embedded_chain(settings_of(control_plane, namespace, template)) as lab:
        template.write_text(json.dumps(template_of(lab)))
        given = ("--config", str(lab.config))
        lab.transom("detect", *given)
        lab.transom("recover", *given)
        lab.transom(
            "run", *given, "--backend", "kubernetes", "--nnodes", "2", "--nproc-per-node", "2", "--job", JOB,
            "--allow-inject", "--quiet", str(TRAIN), *SMALL,
        )  # fmt: skip
        job = KubeJob(control_plane, namespace, lab.state / "jobs", job=JOB, register=False)
        try:
            until(lambda: lab.steps(JOB, 1) >= 12, "attempt 1 trains", lab, control_plane)
            allocation = job.allocation()
            before = allocation.records(JOB).placement()
            assert before is not None
            bad = next(place.node for place in before.places if place.rank == 2)
            inject = lab.transom("inject", "xid", *given, "--job", JOB, "--rank", "2")
            assert inject.wait(SECONDS_MAX) == 0, lab.shown("inject")
            until(lambda: first_step(lab, 2) > 0, "attempt 2 trains", lab, control_plane)
            after = allocation.records(JOB).placement()
            assert after is not None
            assert after.attempt == 2
            assert bad not in after.nodes
            assert len(set(after.nodes)) == 2
            assert after.resume_step is not None
            assert after.resume_step >= 10
            assert first_step(lab, 2) == after.resume_step + 1
            lost = [verdict for verdict in lab.verdicts(JOB) if verdict.fault_class == "gpu_lost"]
            assert {culprit.node for verdict in lost for culprit in verdict.culprits} == {bad}
            assert allocation.look(JOB).generation == 2
        finally:
            job.allocation().release(JOB, END)  # its pods go, whatever became of it
