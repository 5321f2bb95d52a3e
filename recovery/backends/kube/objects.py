"""What is read of Kubernetes' objects: the few fields that recovery looks at; all others are passed over."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec


class KubeObject(msgspec.Struct, frozen=True, rename="camel"):
    """Field names as the API spells them; a field that is not there has its default."""


class Meta(KubeObject, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None  # the moment at which its grace is over


class Identified(KubeObject, frozen=True):
    metadata: Meta = Meta()


class Condition(KubeObject, frozen=True):
    type: str
    status: str  # "True", "False", "Unknown"
    reason: str = ""
    message: str = ""


class Terminated(KubeObject, frozen=True):
    exit_code: int = 0
    reason: str = ""


class ContainerState(KubeObject, frozen=True):
    terminated: Terminated | None = None


class ContainerStatus(KubeObject, frozen=True):
    name: str
    state: ContainerState = ContainerState()


class PodSpec(KubeObject, frozen=True):
    node_name: str = ""


class PodStatus(KubeObject, frozen=True):
    phase: str = "Pending"
    pod_ip: str = msgspec.field(default="", name="podIP")
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = []
    container_statuses: list[ContainerStatus] = []


class Pod(Identified, frozen=True):
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def finished(self) -> bool:
        """Its phase says that no process of it lives any more."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def processes_ended(self) -> bool:
        """The kubelet itself has reported the end of each container: more than a phase, which others may write."""
        return (
            self.finished
            and bool(self.status.container_statuses)
            and all(status.state.terminated is not None for status in self.status.container_statuses)
        )

    @property
    def leaving(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    def condition(self, type_: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == type_), None)


class JobSpecification(KubeObject, frozen=True):
    parallelism: int = 1
    suspend: bool = False


class JobStatus(KubeObject, frozen=True):
    conditions: list[Condition] = []


class Job(Identified, frozen=True):
    spec: JobSpecification = JobSpecification()
    status: JobStatus = JobStatus()

    @property
    def over(self) -> Condition | None:
        """Why no pod of it will run again."""
        return next((one for one in self.status.conditions if one.type in ("Complete", "Failed") and _true(one)), None)


class Taint(KubeObject, frozen=True):
    key: str
    effect: str = ""


class NodeSpec(KubeObject, frozen=True):
    unschedulable: bool = False
    taints: list[Taint] = []


class NodeStatus(KubeObject, frozen=True):
    conditions: list[Condition] = []


OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class Node(Identified, frozen=True):
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def ready(self) -> bool:
        """Its kubelet has spoken lately."""
        return any(one.type == "Ready" and _true(one) for one in self.status.conditions)

    @property
    def takes_pods(self) -> bool:
        return self.ready and not self.spec.unschedulable and not self.out_of_service

    @property
    def out_of_service(self) -> bool:
        """A person, or who watches the power, vouches that it is switched off."""
        return any(taint.key == OUT_OF_SERVICE for taint in self.spec.taints)


class ConfigMap(Identified, frozen=True):
    data: dict[str, str] = {}
    binary_data: dict[str, bytes] = {}


class Secret(Identified, frozen=True):
    data: dict[str, bytes] = {}


class LeaseSpec(KubeObject, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Identified, frozen=True):
    spec: LeaseSpec = LeaseSpec()


class AccessStatus(KubeObject, frozen=True):
    allowed: bool = False


class AccessReview(KubeObject, frozen=True):
    status: AccessStatus = AccessStatus()


class Refusal(KubeObject, frozen=True):
    """A `Status` object: what the API server says where it does not do what it was asked."""

    message: str = ""
    reason: str = ""
    code: int = 0


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


Item = TypeVar("Item")


class ListOf(msgspec.Struct, Generic[Item], frozen=True, rename="camel"):
    """One page of a list; `metadata.resource_version` is where a watch goes on."""

    metadata: ListMeta = ListMeta()
    items: list[Item] | None = None


class Change(msgspec.Struct, frozen=True):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


def _true(condition: Condition) -> bool:
    return condition.status == "True"
