"""The policy's rows and numbers: one row per fault class, modes, budgets, and every limit of recovery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from detectors.verdict import FaultClass, Verdict

from .action import Mode, Verb

MODES: tuple[Mode, ...] = get_args(Mode)


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


DEFAULT_ROWS: tuple[PolicyRow, ...] = (
    PolicyRow("straggler", "notify"),
    PolicyRow("contended_node", "notify"),
    PolicyRow("job_slow", "notify"),
    PolicyRow("data_stall", "notify"),
    PolicyRow("numeric", "notify"),
    PolicyRow("loss_spike", "notify"),
    PolicyRow("divergence", "notify"),
    PolicyRow("regime_change", "notify"),
    PolicyRow("memory_growth", "notify"),
    PolicyRow("throttled", "notify"),
    PolicyRow("link_degraded", "notify"),
    PolicyRow("checkpoint_failed", "notify"),
    PolicyRow("telemetry_gap", "notify"),
    PolicyRow("warning", "notify"),
    PolicyRow("disk_full", "hold"),  # a restart fills it again
    PolicyRow("rank_lost", "restart"),
    PolicyRow("hang", "restart", collect_evidence=True),
    PolicyRow("collective_timeout", "restart", collect_evidence=True),
    PolicyRow("nan", "restart", rollback=True),
    PolicyRow("network_error", "restart", root=True),
    PolicyRow("cuda_error", "restart"),
    PolicyRow("illegal_memory_access", "restart"),
    PolicyRow("oom", "restart", no_progress_max=1),  # the same batch needs the same memory
    PolicyRow("host_oom", "restart", root=True),
    PolicyRow("storage_error", "restart", root=True),
    PolicyRow("preempted", "restart", root=True),
    PolicyRow("start_failure", "restart"),
    PolicyRow("unknown", "restart", collect_evidence=True, no_progress_max=1),
    PolicyRow("gpu_lost", "exclude_and_restart", "observe", root=True),
    PolicyRow("gpu_ecc", "exclude_and_restart", "observe", root=True),
    PolicyRow("nvlink_error", "exclude_and_restart", "observe", root=True),
    PolicyRow("node_lost", "exclude_and_restart", "observe", root=True),
    PolicyRow("user_error", "stop"),
)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Rows and budgets. The defaults act by themselves on the job, and only observe what touches a node."""

    rows: tuple[PolicyRow, ...] = DEFAULT_ROWS
    coalesce_seconds_max: float = 3.0
    echo_seconds: float = 2.0  # a user error this close to an infrastructure fault is its echo
    restarts_max: int = 20
    restarts_window_seconds: float = 86_400.0
    no_progress_max: int = 3  # restarts for one cause while the job gets no further
    no_progress_any_cause_max: int = 5
    progress_seconds: float = 3600.0  # a job that reports no steps is judged by how long it ran
    startup_failures_max: int = 2  # the last of them stops the job
    startup_seconds: float = 60.0
    spent_budget: Literal["hold", "stop"] = "hold"
    without_checkpoint: Literal["from_scratch", "hold"] = "from_scratch"
    verdict_seconds_max: float = 900.0  # an older verdict only acts on a job that is visibly down
    approval_seconds_max: float = 1800.0
    evidence_seconds_max: float = 10.0
    stop_grace_seconds: float = 2.0
    stop_call_seconds_max: float = 30.0
    stop_seconds_max: float = 120.0  # then the incident is held: ranks of the old attempt may be alive
    backoff_seconds: float = 5.0  # before the second restart without progress; doubles, with jitter
    backoff_seconds_max: float = 600.0
    retry_seconds: float = 0.5  # before a backend is asked again; doubles, with jitter
    retry_seconds_max: float = 30.0
    probation_steps: int = 20
    probation_seconds: float = 60.0
    probation_seconds_max: float = 1800.0
    probation_poll_seconds: float = 0.5

    def row(self, fault_class: str) -> PolicyRow:
        """The row of a class; a class without one is only told to people."""
        for row in self.rows:
            if row.fault_class == fault_class:
                return row
        return PolicyRow("unknown", "notify")

    def with_modes(self, modes: Mapping[str, str]) -> PolicyConfig:
        """The same with other modes for some classes. Raises ValueError for an unknown class or mode."""
        known = {row.fault_class for row in self.rows}
        for fault_class, mode in modes.items():
            if fault_class not in known:
                names = ", ".join(sorted(known))
                raise ValueError(f"there is no policy row for class {fault_class!r}; classes: {names}")
            if mode not in MODES:
                raise ValueError(f"mode {mode!r} of class {fault_class!r} is none of {', '.join(MODES)}")
        rows = tuple(
            replace(row, mode=next(mode for mode in MODES if mode == modes[row.fault_class]))
            if row.fault_class in modes
            else row
            for row in self.rows
        )
        return replace(self, rows=rows)


def effective_verb(verdict: Verdict, config: PolicyConfig) -> Verb:
    """The verb of the verdict's row, weakened to notify where detection advises no more than that."""
    verb = config.row(verdict.fault_class).verb
    return "notify" if verdict.advice == "notify" and verb != "stop" else verb
