"""A verdict: what is wrong, who did it, how sure we are, and what we saw.

`verdict_id` is fixed when an incident opens (job, attempt and the identity of the first evidence's producer);
class, culprits and onset may change in later revisions, the id never does. Redelivery and replay are ordinary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ingest.events import MESSAGE_TYPES, Topic

FaultClass = Literal[
    "straggler", "rank_lost", "node_lost", "hang", "nan", "numeric", "gpu_lost", "gpu_ecc", "nvlink_error",
    "network_error", "cuda_error", "illegal_memory_access", "oom", "host_oom", "storage_error", "disk_full",
    "data_stall", "contended_node", "job_slow", "start_failure", "preempted", "planned", "user_error",
    "collective_timeout", "loss_spike", "divergence", "regime_change", "memory_growth", "throttled", "link_degraded",
    "checkpoint_failed", "telemetry_gap", "warning", "unknown",
]  # fmt: skip
Severity = Literal["info", "warning", "error", "critical"]
Advice = Literal["none", "notify", "restart_in_place", "restart_exclude_node", "rollback_restart", "stop"]


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """Who did it. `rank` is None where a whole node is meant, `node` is None only where it is not known."""

    rank: int | None = None
    node: str | None = None
    confidence: float = 1.0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing we saw. For a metric: its value beside its peers' median, in `unit`; for a log: the line itself."""

    kind: Literal["log", "metric", "event", "silence", "stack"]
    text: str
    at: float
    rank: int | None = None
    node: str | None = None
    rule: str = ""
    metric: str = ""
    step: int | None = None
    value: float | None = None
    peers_median: float | None = None
    unit: str = ""
    topic: Topic | None = None
    partition: int | None = None
    offset: int | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What detection concludes. `settled`: no more evidence is awaited, it may be acted on at once.

    An empty `culprits` means that the culprit is unknown, which is a legal answer; `victims` counts the ranks
    that only suffer. `status` becomes "closed" in the revision that says it is over.
    """

    verdict_id: str
    revision: int
    job: str
    attempt: int
    fault_class: FaultClass
    severity: Severity
    status: Literal["open", "closed"] = "open"
    settled: bool = False
    culprits: tuple[Culprit, ...] = ()
    victims: int = 0
    onset_at: float
    at: float  # event time of this revision
    onset_step: int | None = None
    first_bad_step: int | None = None  # checkpoints of this step and later carry the fault
    advice: Advice
    summary: str  # one sentence for a person
    evidence: tuple[Evidence, ...] = ()
    detector: str = ""
    restarts_by: str | msgspec.UnsetType = msgspec.UNSET  # who restarts the job, where it is not recovery

    @property
    def message_id(self) -> str:
        return f"{self.verdict_id}#{self.revision}"


VERDICT_TYPES: Mapping[str, tuple[Topic, type[Any]]] = {**MESSAGE_TYPES, "verdict.v1": ("verdicts", Verdict)}
