"""One row for each fault class: what is done about it, in which mode, and which budget pays for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from detectors.verdict import FaultClass

from .action import Mode, Verb

# Who pays for a restart: the job's own code, nobody knows, standstill, machines; what was planned costs nobody.
Budget = Literal["user", "unknown", "hang", "infra", "planned"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)
MODES: tuple[Mode, ...] = get_args(Mode)
ROW_VERBS: tuple[Verb, ...] = ("notify", "restart", "exclude_and_restart", "stop", "hold")


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What is done about one class. `root`: a user error seen at the same moment is taken for its echo."""

    fault_class: FaultClass
    verb: Verb
    mode: Mode = "auto"
    rollback: bool = False  # checkpoints from the first bad step on are rejected
    collect_evidence: bool = False  # stacks are asked for before anything is stopped
    root: bool = False
    no_progress_max: int | None = None  # stricter than the configuration's, for this class
    budget: Budget = "infra"
    checks: bool = False  # nodes are tried out before the next start; a plain restart does not cure it
    firm: bool = False  # done though detection advises no more than to notify: a person has configured it


DEFAULT_ROWS: tuple[PolicyRow, ...] = (
    PolicyRow("straggler", "notify"),
    PolicyRow("contended_node", "notify"),
    PolicyRow("job_slow", "notify"),
    PolicyRow("data_stall", "notify"),
    PolicyRow("numeric", "notify", rollback=True, budget="unknown"),
    PolicyRow("loss_spike", "notify", rollback=True, budget="unknown"),
    PolicyRow("divergence", "notify", rollback=True, budget="unknown"),
    PolicyRow("regime_change", "notify"),
    PolicyRow("memory_growth", "notify"),
    PolicyRow("throttled", "notify"),
    PolicyRow("link_degraded", "notify"),
    PolicyRow("checkpoint_failed", "notify"),
    PolicyRow("telemetry_gap", "notify"),
    PolicyRow("warning", "notify"),
    PolicyRow("disk_full", "hold"),  # a restart fills it again
    PolicyRow("rank_lost", "restart"),
    PolicyRow("hang", "restart", collect_evidence=True, budget="hang", checks=True),
    PolicyRow("collective_timeout", "restart", collect_evidence=True, budget="hang", checks=True),
    PolicyRow("nan", "restart", rollback=True, budget="unknown", checks=True),
    PolicyRow("network_error", "restart", root=True, checks=True),
    PolicyRow("cuda_error", "restart", checks=True),
    PolicyRow("illegal_memory_access", "restart", budget="unknown", checks=True),
    PolicyRow("oom", "restart", no_progress_max=1, budget="unknown"),  # the same batch needs the same memory
    PolicyRow("host_oom", "restart", root=True),
    PolicyRow("storage_error", "restart", root=True),
    PolicyRow("preempted", "restart", root=True, budget="planned"),
    PolicyRow("planned", "restart", budget="planned"),
    PolicyRow("start_failure", "restart", budget="unknown"),
    PolicyRow("unknown", "restart", collect_evidence=True, no_progress_max=1, budget="unknown"),
    PolicyRow("gpu_lost", "exclude_and_restart", "observe", root=True, checks=True),
    PolicyRow("gpu_ecc", "exclude_and_restart", "observe", root=True, checks=True),
    PolicyRow("nvlink_error", "exclude_and_restart", "observe", root=True, checks=True),
    PolicyRow("node_lost", "exclude_and_restart", "observe", root=True),
    PolicyRow("user_error", "stop", budget="user"),
)
