"""A job's allocation as Kubernetes tells it: one `AllocationView` of its records, its Jobs and its pods. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from recovery.allocation import AllocationPhase, AllocationView, LauncherAddress

from .manifests import GENERATION_LABEL, INDEX_ANNOTATION, PORT_ANNOTATION, QUEUE_LABEL
from .objects import Job, Node, Pod
from .records import JobMap, Turn

NODES_ASKED_MAX = 16  # in one look


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the cluster has of one job."""

    records: JobMap
    jobs: tuple[Job, ...]
    pods: tuple[Pod, ...]
    pods_version: str = ""  # from which a watch goes on

    @property
    def turn(self) -> Turn | None:
        return self.records.turn

    @property
    def job(self) -> Job | None:
        """Of the generation that there is to be."""
        turn = self.turn
        return next((job for job in self.jobs if turn is not None and generation_of(job) == turn.generation), None)

    @property
    def current_pods(self) -> tuple[Pod, ...]:
        turn = self.turn
        return tuple(pod for pod in self.pods if turn is not None and generation_of(pod) == turn.generation)

    @property
    def older_pods(self) -> tuple[Pod, ...]:
        """Of earlier generations, whose processes may live."""
        turn = self.turn
        return tuple(
            pod
            for pod in self.pods
            if turn is not None and generation_of(pod) < turn.generation and pod.spec.node_name and not pod.finished
        )


def generation_of(thing: Job | Pod) -> int:
    label = thing.metadata.labels.get(GENERATION_LABEL, "")
    return int(label) if label.isdigit() else 0


def view_of(job: str, cluster: Cluster, is_down: Callable[[str], bool]) -> AllocationView:
    """`is_down` is asked only about nodes whose pods are not well, and of a few at a time."""
    turn = cluster.turn
    if turn is None:
        return AllocationView(job, "absent")
    attempt, token = cluster.records.newest_attempt
    phase, reason = _phase(cluster, turn)
    running = [pod for pod in in_order(cluster.current_pods) if not pod.finished and pod.spec.node_name]
    unwell = [pod.spec.node_name for pod in (*running, *cluster.older_pods) if is_unwell(pod)]
    return AllocationView(
        job,
        phase,
        generation=turn.generation,
        nodes=tuple(dict.fromkeys(pod.spec.node_name for pod in running)),
        attempt=attempt,
        token=token,
        excluded_nodes=tuple(sorted(cluster.records.excluded | set(turn.excluded))),
        down_nodes=tuple(node for node in list(dict.fromkeys(unwell))[:NODES_ASKED_MAX] if is_down(node)),
        reason=reason,
        held=_held(cluster.job),
    )


def launchers_of(cluster: Cluster, slots: int) -> tuple[LauncherAddress, ...]:
    """Of pods that run; each listens on its pod's address."""
    found = []
    for pod in in_order(cluster.current_pods):
        port = pod.metadata.annotations.get(PORT_ANNOTATION, "")
        if pod.status.phase == "Running" and pod.status.pod_ip and port:
            host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
            found.append(LauncherAddress(pod.spec.node_name, f"tcp:{host}:{port}", slots))
    return tuple(found)


def in_order(pods: Iterable[Pod]) -> list[Pod]:
    """By completion index."""

    def index(pod: Pod) -> tuple[int, str]:
        told = pod.metadata.annotations.get(INDEX_ANNOTATION, "")
        return (int(told) if told.isdigit() else 0, pod.metadata.name)

    return sorted(pods, key=index)


def is_unwell(pod: Pod) -> bool:
    """On its way out, or it was Ready and is not any more: its node may be the reason."""
    ready = pod.condition("Ready")
    return pod.leaving or (pod.status.phase == "Running" and ready is not None and ready.status != "True")


def nothing_runs(pods: Sequence[Pod], node: Node | None, *, excluded: bool) -> bool:
    """Whether no process of these pods lives on that node, on somebody's word (`node` None: the object is gone).

    The kubelet's word: it has reported the end of each container, or it is well and has no such pod any more. The
    operator's word: the node object is deleted or tainted out-of-service, and nothing of ours will run there again.
    A node that is merely NotReady vouches for nothing: its pods go on, and so do those that somebody deleted by force.
    """
    if all(pod.processes_ended for pod in pods) and pods:
        return True
    if node is None:
        return True
    if node.out_of_service:
        return excluded
    return not [pod for pod in pods if not pod.processes_ended] and node.ready


def _phase(cluster: Cluster, turn: Turn) -> tuple[AllocationPhase, str]:
    job, pods = cluster.job, cluster.current_pods
    alive = [pod for pod in (*pods, *cluster.older_pods) if not pod.finished]
    end = cluster.records.end
    if end is not None:
        return ("ending" if alive else "ended"), f"{end.outcome}: {end.reason}"
    if job is None:
        if cluster.older_pods:
            return "ending", f"pods of generation {turn.generation - 1} and older have not ended yet"
        return "pending", f"the Job of generation {turn.generation} is not there"
    over = job.over
    if job.metadata.deletion_timestamp is not None:
        return ("ending" if alive else "ended"), f"Job {job.metadata.name} is being deleted"
    if over is not None:
        return ("ending" if alive else "ended"), f"{over.reason}: {over.message}".strip(": ")
    if job.spec.suspend:
        return "pending", f"Job {job.metadata.name} is suspended"
    # An index that came up and lost its pod does not put the others back: they can be restarted on.
    came_up = {pod.metadata.annotations.get(INDEX_ANNOTATION) for pod in pods if pod.status.phase != "Pending"}
    if len(came_up) < job.spec.parallelism:
        return "pending", _why_pending(pods)
    if any(pod.status.phase == "Running" for pod in pods):
        return "running", ""
    return "ending", "no pod runs any more"


def _why_pending(pods: Sequence[Pod]) -> str:
    for pod in pods:
        scheduled = pod.condition("PodScheduled")
        if pod.status.phase == "Pending" and scheduled is not None and scheduled.status == "False":
            return f"{scheduled.reason}: {scheduled.message}".strip(": ")
    waiting = sum(pod.status.phase == "Pending" for pod in pods)
    return f"{waiting} pods are being started" if waiting else "its pods have not been made yet"


def _held(job: Job | None) -> str:
    if job is None or not job.spec.suspend or job.metadata.deletion_timestamp is not None:
        return ""
    if QUEUE_LABEL in job.metadata.labels:
        return f"Kueue has not admitted Job {job.metadata.name} (queue {job.metadata.labels[QUEUE_LABEL]})"
    return f"Job {job.metadata.name} is suspended; `kubectl patch job` its spec.suspend to false to let it run"
