"""Kubernetes as an `Allocation`: an indexed Job of launchers for each generation of nodes, and a ConfigMap that stays.

The order of a replacement is what makes it exactly one: the next generation is written down (compare-and-swap, with
the controller's epoch), the older Jobs are deleted (by uid), their pods are seen to be gone, the new Job is made under
a name that only that generation has. Whoever comes back after a crash, or was not answered, asks again and goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ingest.clock import Clock
from recovery.allocation import AllocationView, BackendSite, JobRecords, LauncherAddress
from recovery.backend import Conflict, Rejected, TooFewNodes, Unavailable
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import Excluded, JobEnd, JobSpec
from recovery.lease import ControllerLease

from .kube.api import CONFIG_MAPS, JOBS, NODES, PODS, SECRETS, AlreadyExists, KubeApi
from .kube.cordon import Cordon
from .kube.lease import KubernetesLease
from .kube.manifests import (
    TOKEN_ANNOTATION,
    Generation,
    config_map,
    generation_name,
    job_of,
    object_name,
    pod_command,
    pod_template,
    selector,
    token_secret,
)
from .kube.objects import ConfigMap, Job, Node, Pod, Secret
from .kube.records import EXCLUDED, SPEC, TEMPLATE, TURN, Changes, ConfigMapRecords, JobMap, Turn
from .kube.rights import CORDON, missing_rights
from .kube.view import Cluster, generation_of, launchers_of, nothing_runs, view_of

GONE_SECONDS_MAX = 1.5  # so long does `replace` itself wait for old pods; then it is asked again
GATHER_SECONDS = 0.02  # changes come in bursts
JOB_FILE_BYTES_MAX = 256 * 1024
LEASE_NAME = "transom-recover"


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`recover.backends.kubernetes`; with no kubeconfig and context: our pod's service account, or the user's own."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = "default"
    image: str = ""
    pod_template: str = ""  # a YAML file: metadata and spec of a pod
    interpreter: str = ""  # Python in the image; empty: where it is here
    launcher_port: int = 7077
    stuck_seconds: float = 10.0  # a pod that is there so long after its grace is stuck, and its node is excluded
    topology_label: str = ""  # of nodes: those with the same value fail together (rack, switch, NVLink domain)
    cordon: bool = False  # a node that is excluded takes no pods of anybody any more; takes the right to patch nodes
    autoscaled: bool = False  # more nodes come when pods wait: too few of them is no reason to refuse


class KubernetesAllocation:
    """See the module. Safe to use from several threads."""

    name = "kubernetes"

    def __init__(self, api: KubeApi, site: BackendSite, options: KubernetesOptions) -> None:
        self._api = api
        self._jobs_folder = site.jobs_folder
        self._clock: Clock = site.clock
        self._options = options
        self._lease: ControllerLease | None = None
        self._rights_known = False
        self._cordon = Cordon(api)

    def controller_lease(self, identity: str) -> ControllerLease:
        """The lease of whoever recovers jobs in this namespace; from now on we write with its epoch."""
        self._lease = KubernetesLease(self._api, LEASE_NAME, identity, self._clock)
        return self._lease

    # Allocation

    def submit(self, job: str, *, nodes: int, command: Sequence[str]) -> AllocationView:
        self._check_rights()
        self.register(job)
        template = msgspec.json.encode(self._template(job, command))
        first = msgspec.json.encode(Turn(generation=1, pods=nodes))
        seen = self._records(job).swap(lambda seen: {} if seen.turn else {TEMPLATE: template, TURN: first})
        turn = seen.turn
        assert turn is not None
        if seen.end is None and turn.generation == 1:
            self._ensure_secret(job, seen)
            self._ensure_job(job, seen, turn)
        return self.look(job)

    def look(self, job: str) -> AllocationView:
        return view_of(job, self._cluster(job), self._is_down)

    def records(self, job: str) -> JobRecords:
        return self._records(job)

    def launchers(self, job: str) -> tuple[LauncherAddress, ...]:
        cluster = self._cluster(job)
        spec = cluster.records.read(SPEC, JobSpec)
        return launchers_of(cluster, spec.nproc_per_node if spec else 0)

    def replace(self, job: str, *, attempt: int, token: str, excluded_nodes: Sequence[str]) -> AllocationView:
        self._check_rights()  # before anything is stopped
        self._refuse_too_few(job, attempt, token, excluded_nodes)
        seen = self._write_turn(job, attempt, token, excluded_nodes)
        turn = seen.turn
        assert turn is not None
        if self._options.cordon:
            self._cordon.cordon(job, turn.excluded)
        for old in self._cluster(job).jobs:
            if generation_of(old) < turn.generation and old.metadata.deletion_timestamp is None:
                self._api.delete(JOBS, old.metadata)
        if self._older_pods_are_gone(job):
            self._ensure_job(job, seen, turn)
        return self.look(job)

    def nothing_runs_on(self, job: str, node: str) -> bool:
        cluster = self._cluster(job)
        pods = [pod for pod in cluster.pods if pod.spec.node_name == node]
        if pods and all(pod.processes_ended for pod in pods):
            return True  # without the right to look at nodes, nothing else vouches
        try:
            found = self._api.get(NODES, node, Node)
        except Rejected:
            return False
        return nothing_runs(pods, found, excluded=node in cluster.records.excluded)

    def groups(self, job: str, nodes: Sequence[str]) -> Mapping[str, str]:
        """The value of `topology_label` that each node has; Rejected where we may not look at nodes."""
        label = self._options.topology_label
        if not label:
            return {}
        found, _ = self._api.list_all(NODES, Node, labels=label)
        told = {node.metadata.name: node.metadata.labels.get(label, "") for node in found}
        return {node: told[node] for node in nodes if told.get(node)}

    def release(self, job: str, end: JobEnd) -> None:
        records = self._records(job)
        if records.look().found is None:
            return
        records.write_end(end)
        for old in self._cluster(job).jobs:
            if old.metadata.deletion_timestamp is None:
                self._api.delete(JOBS, old.metadata)

    # For whoever joins it up

    def token(self, job: str) -> str:
        """What the job's launchers prove themselves with; empty where there is none."""
        found = self._api.get(SECRETS, object_name(job), Secret)
        return "" if found is None else found.data.get("token", b"").decode()

    def missing_rights(self) -> tuple[str, ...]:
        """What recovery could do and may not here, a sentence each: empty where nothing is missing."""
        also = (CORDON,) if self._options.cordon else ()
        return tuple(missing_rights(self._api, needed_only=False, also=also))

    # Registering

    def register(self, job: str) -> None:
        """The job's ConfigMap, of the files that `transom run` wrote: what its pods read. Idempotent."""
        if self._records(job).look().found is not None:
            return
        files = JobFiles(self._jobs_folder, job)
        if files.spec() is None:
            raise Rejected(f"there is no job {job} in {self._jobs_folder}; `transom run` makes one")
        data = {path.name: _small_text(path) for path in sorted(files.folder.glob("*.json"))}
        try:
            self._api.create(CONFIG_MAPS, config_map(job, data), ConfigMap)
        except AlreadyExists:
            return

    def _template(self, job: str, command: Sequence[str]) -> dict[str, Any]:
        given, port = _read_template(self._options.pod_template), self._options.launcher_port
        words = pod_command(command, port=port, interpreter=self._options.interpreter)
        return pod_template(given, job=job, image=self._options.image, command=words, port=port)

    def _ensure_secret(self, job: str, seen: JobMap) -> None:
        path = JobFiles(self._jobs_folder, job).folder / "token"
        token = path.read_text(encoding="ascii").strip() if path.is_file() else secrets.token_hex(32)
        assert seen.found is not None
        try:
            self._api.create(SECRETS, token_secret(job, token, seen.found.metadata), Secret)
        except AlreadyExists:
            return

    # Replacing

    def _write_turn(self, job: str, attempt: int, token: str, excluded_nodes: Sequence[str]) -> JobMap:
        """The intent. Raises Conflict for an attempt that is not newer, Rejected where the job is over."""

        def change(seen: JobMap) -> Changes:
            if seen.end is not None:
                raise Rejected(f"job {job} is over ({seen.end.outcome}); terminal stays terminal")
            turn = seen.turn
            if turn is None:
                raise Rejected(f"job {job} has no allocation; `transom run --backend kubernetes` submits it")
            if (turn.attempt, turn.token) == (attempt, token):
                return {}
            newest, _ = seen.newest_attempt
            if attempt <= newest:
                raise Conflict(f"attempt {newest} of {job} was here, {attempt} is not newer")
            excluded = seen.excluded | set(excluded_nodes)
            following = Turn(
                generation=turn.generation + 1,
                pods=turn.pods,
                attempt=attempt,
                token=token,
                excluded=tuple(sorted(excluded)),
            )
            return {
                TURN: msgspec.json.encode(following),
                EXCLUDED: msgspec.json.encode(Excluded(nodes=tuple(sorted(excluded)))),
            }

        return self._records(job).swap(change)

    def _refuse_too_few(self, job: str, attempt: int, token: str, excluded_nodes: Sequence[str]) -> None:
        """Where nodes can be counted and no other ones ever come, before anything is given back. Raises TooFewNodes."""
        seen = self._records(job).look()
        turn = seen.turn
        if self._options.autoscaled or turn is None or (turn.attempt, turn.token) == (attempt, token):
            return
        try:
            nodes, _ = self._api.list_all(NODES, Node)
        except Rejected:
            return  # we may not look at nodes: the pods wait, and the scheduler says for what
        excluded = seen.excluded | set(excluded_nodes)
        usable = sum(node.takes_pods and node.metadata.name not in excluded for node in nodes)
        if usable < turn.pods:
            raise TooFewNodes(
                f"job {job} needs {turn.pods} nodes and the cluster has {usable} that can be used "
                f"({len(excluded)} excluded)",
                usable,
            )

    def _older_pods_are_gone(self, job: str) -> bool:
        """Waits a little. A pod on an excluded node is not waited for: no new one can come up beside it, and whether
        its ranks are gone was asked before. Nor is one that outlives its grace by far: its node is excluded too."""
        end = self._clock.monotonic() + GONE_SECONDS_MAX
        while True:
            cluster = self._cluster(job)
            turn = cluster.turn
            assert turn is not None
            stuck = sorted(
                {pod.spec.node_name for pod in cluster.older_pods if self._is_stuck(pod)} - set(turn.excluded)
            )
            if stuck:
                self._exclude(job, stuck)
                continue
            if all(pod.spec.node_name in turn.excluded for pod in cluster.older_pods):
                return True
            left = end - self._clock.monotonic()
            if left <= 0:
                return False
            self._await_change(job, cluster.pods_version, left)

    def _exclude(self, job: str, nodes: Sequence[str]) -> None:
        def change(seen: JobMap) -> Changes:
            turn = seen.turn
            assert turn is not None
            excluded = tuple(sorted({*turn.excluded, *seen.excluded, *nodes}))
            return {
                TURN: msgspec.json.encode(msgspec.structs.replace(turn, excluded=excluded)),
                EXCLUDED: msgspec.json.encode(Excluded(nodes=excluded)),
            }

        self._records(job).swap(change)

    def _is_stuck(self, pod: Pod) -> bool:
        told = pod.metadata.deletion_timestamp
        if told is None:
            return False
        return self._clock.now() > datetime.fromisoformat(told).timestamp() + self._options.stuck_seconds

    def _ensure_job(self, job: str, seen: JobMap, turn: Turn) -> None:
        """The Job of this generation, unless it is there. Raises Conflict where it is somebody else's."""
        generation = Generation(turn.generation, turn.pods, turn.attempt, turn.token, turn.excluded)
        assert seen.found is not None
        manifest = job_of(job, generation, seen.template, seen.found.metadata, self._options.launcher_port)
        newest = self._records(job).look().turn  # a pod may have been found stuck, or we may have been overtaken
        if newest is None or newest.generation != turn.generation:
            raise Conflict(f"a newer generation of {job} has been asked for meanwhile")
        if newest.excluded != turn.excluded:
            self._ensure_job(job, seen, newest)
            return
        try:
            self._api.create(JOBS, manifest, Job)
        except AlreadyExists as error:
            there = self._api.get(JOBS, generation_name(job, turn.generation), Job)
            if there is not None and there.metadata.annotations.get(TOKEN_ANNOTATION, "") != turn.token:
                raise Conflict(f"somebody else has made {there.metadata.name}") from error

    # Looking

    def _records(self, job: str) -> ConfigMapRecords:
        return ConfigMapRecords(self._api, job, self._epoch)

    def _epoch(self) -> int:
        if self._lease is None:
            return 0
        if not self._lease.is_ours():
            raise Conflict("another controller has, or may have, the lease of this namespace")
        return self._lease.epoch

    def _cluster(self, job: str) -> Cluster:
        found = self._records(job).look()
        jobs, _ = self._api.list_all(JOBS, Job, labels=selector(job))
        pods, version = self._api.list_all(PODS, Pod, labels=selector(job))
        return Cluster(found, tuple(jobs), tuple(pods), version)

    def _await_change(self, job: str, version: str, seconds: float) -> None:
        """Until a pod of the job changes, or so long."""
        try:
            for _ in self._api.watch(PODS, Pod, version=version, seconds=seconds, labels=selector(job)):
                self._clock.sleep(GATHER_SECONDS)
                return
        except Unavailable:
            self._clock.sleep(GATHER_SECONDS)  # also where the history is gone: the next list says how it stands

    def _is_down(self, node: str) -> bool:
        """Whether the cluster has given it up. Where we may not look at nodes, it has not told us."""
        try:
            found = self._api.get(NODES, node, Node)
        except Rejected:
            return False
        return found is None or found.out_of_service or not found.ready

    def _check_rights(self) -> None:
        if self._rights_known:
            return
        missing = list(missing_rights(self._api, needed_only=True))
        if missing:
            raise Rejected("; ".join(missing))
        self._rights_known = True


def make_allocation(site: BackendSite) -> KubernetesAllocation:
    """Of the options in `recover.backends.kubernetes`. Raises ValueError, Rejected."""
    options = site.read_options(KubernetesOptions)
    api = KubeApi.connect(options.kubeconfig, options.context, options.namespace, site.clock)
    return KubernetesAllocation(api, site, options)


def _read_template(path: str) -> dict[str, Any]:
    """A pod's metadata and spec. Raises Rejected."""
    if not path:
        return {}
    import yaml  # comes with the client

    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Rejected(f"the pod template {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("spec"), dict):
        raise Rejected(f"the pod template {path} has no spec; it is the `template` of a Job")
    return {name: tree[name] for name in ("metadata", "spec") if tree.get(name)}


def _small_text(path: Path) -> str:
    if path.stat().st_size > JOB_FILE_BYTES_MAX:
        raise Rejected(f"{path} has more than {JOB_FILE_BYTES_MAX} bytes and does not fit into a ConfigMap")
    return path.read_text(encoding="utf-8")
