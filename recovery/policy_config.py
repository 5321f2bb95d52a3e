"""Every number of the policy: budgets, ladder, quarantine, breaker, waits, and how exits are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from detectors.verdict import FaultClass, Verdict

from .action import Mode, Verb
from .policy_rows import BUDGETS, DEFAULT_ROWS, MODES, ROW_VERBS, Budget, PolicyRow

# Of one budget in the window; a job on many nodes has more (`nodes_per_restart`).
CLASS_RESTARTS_MAX: Mapping[Budget, int] = MappingProxyType({"user": 1, "unknown": 3, "hang": 3, "infra": 10})


@dataclass(frozen=True, slots=True)
class ExitRules:
    """What an exit that no verdict explains is taken for; `recovery/classify.py` reads it in this order."""

    # Names of exceptions, or parts of their text, and what they are; anything else that was raised is a user error.
    errors: tuple[tuple[str, FaultClass], ...] = (
        ("StartFailure", "start_failure"),
        ("OutOfMemoryError", "oom"),
        ("CUDA out of memory", "oom"),
        ("illegal memory access", "illegal_memory_access"),
        ("CUDA error", "cuda_error"),
        ("AcceleratorError", "cuda_error"),
        ("No space left on device", "disk_full"),
    )
    # Who says this lost its peers: it is a victim, unless nobody says anything else.
    victims: tuple[str, ...] = (
        "DistNetworkError", "DistBackendError", "DistStoreError", "Connection closed by peer",
        "Connection reset by peer", "NCCL", "Broken pipe", "ProcessGroup",
    )  # fmt: skip
    # Words of schedulers, by what they contain.
    states: tuple[tuple[str, FaultClass], ...] = (
        ("NODE_FAIL", "node_lost"), ("BOOT_FAIL", "node_lost"), ("NodeLost", "node_lost"),
        ("OUT_OF_MEMORY", "host_oom"), ("OOMKilled", "host_oom"),
        ("PREEMPTED", "preempted"), ("Preempt", "preempted"), ("TIMEOUT", "preempted"), ("DEADLINE", "preempted"),
        ("DisruptionTarget", "preempted"), ("Evicted", "preempted"), ("DeadlineExceeded", "preempted"),
    )  # fmt: skip
    codes: Mapping[int, FaultClass] = field(
        default_factory=lambda: MappingProxyType(
            {
                134: "unknown",  # SIGABRT: libraries abort for many reasons
                135: "rank_lost",  # SIGBUS
                137: "rank_lost",  # SIGKILL: whoever sent it
                139: "rank_lost",  # SIGSEGV
                201: "gpu_lost",  # by convention: the GPU driver is broken
                202: "start_failure",  # by convention: somebody's processes still hold the GPU
                247: "host_oom",
            }
        )
    )
    victim_codes: frozenset[int] = frozenset({143, 130})  # ended by SIGTERM or Ctrl-C
    stop_codes: frozenset[int] = frozenset({93})  # by convention: do not restart
    recover_codes: frozenset[int] = frozenset()  # restarted, though a code of 1 to 127 is the job's own error
    planned_codes: frozenset[int] = frozenset()  # the job ended on purpose and wants to go on: outside budgets


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Rows and budgets. The defaults act by themselves on the job, and only observe what touches a node."""

    rows: tuple[PolicyRow, ...] = DEFAULT_ROWS
    exits: ExitRules = ExitRules()
    coalesce_seconds_max: float = 3.0
    echo_seconds: float = 2.0  # a user error this close to an infrastructure fault is its echo
    confidence_min: float = 0.3  # below it, and with a job that looks healthy, people are only told
    # budgets
    restarts_max: int = 20
    restarts_window_seconds: float = 86_400.0
    class_restarts_max: Mapping[Budget, int] = field(default_factory=lambda: CLASS_RESTARTS_MAX)
    nodes_per_restart: int = 64  # one more in each budget but the user's: failures grow with the machine; 0: not
    no_progress_max: int = 3  # restarts for one cause while the job gets no further
    no_progress_any_cause_max: int = 5
    progress_seconds: float = 3600.0  # a job that reports no steps is judged by how long it ran
    startup_failures_max: int = 2  # the last of them stops the job
    startup_seconds: float = 60.0
    spent_budget: Literal["hold", "stop"] = "hold"
    # ladder
    rung_repeats_max: int = 1  # restarts on one rung without progress before the next rung
    flap_restarts_max: int = 3  # restarts for one cause in the time below, progress or not: one rung up
    flap_seconds: float = 3600.0
    spare_seconds: float = 3600.0  # so long a node rests whose ranks were moved to a spare
    without_checkpoint: Literal["from_scratch", "hold"] = "from_scratch"
    rollback_margin_steps: int = 0  # further back than the first bad step
    # nodes
    strikes_max: int = 2  # in the time below, then the node is put into quarantine
    strikes_window_seconds: float = 86_400.0
    quarantine_seconds: float = 86_400.0  # doubles with each time
    quarantine_seconds_max: float = 30 * 86_400.0
    quarantine_mode: Mode = "observe"  # of what the ladder and strikes do to nodes; rows have modes of their own
    breaker_share: float = (
        0.2  # of the job's nodes newly excluded in the time below, and more than two: a person's turn
    )
    breaker_nodes_max: int = 2
    breaker_seconds: float = 600.0
    # pre-flight checks
    preflight: bool = True
    preflight_seconds_max: float = 180.0  # then the job goes on without them
    check_seconds_max: float = 20.0  # a check that is not done by then has failed
    slow_ratio: float = 2.0  # a node whose multiplication takes so many times the others' median has failed
    # waits
    verdict_seconds_max: float = 900.0  # an older verdict only acts on a job that is visibly down
    approval_seconds_max: float = 1800.0
    evidence_seconds_max: float = 10.0
    persist_seconds_max: float = 20.0  # for the newest sealed step, before a planned stop
    stop_grace_seconds: float = 2.0
    stop_call_seconds_max: float = 30.0
    stop_seconds_max: float = 120.0  # then ranks of the old attempt may be alive, and people are told
    fence_seconds_max: float = 600.0  # so much longer they are asked for; then it is a person's turn
    backoff_seconds: float = 5.0  # before the second restart without progress; doubles, with jitter
    backoff_seconds_max: float = 600.0
    retry_seconds: float = 0.5  # before a backend is asked again; doubles, with jitter
    retry_seconds_max: float = 30.0
    starting_seconds_max: float = 900.0  # for a scheduler to bring an attempt up
    capacity_seconds: float = 30.0  # between two looks for nodes
    capacity_retry_seconds: float = 600.0  # a start is tried so often, whatever the looks say
    probation_steps: int = 20
    probation_seconds: float = 60.0
    probation_seconds_max: float = 1800.0
    probation_poll_seconds: float = 0.5
    held_again_seconds: float = 3600.0  # people are told again that an incident waits for them
    # looking without a verdict
    watch_seconds: float = 2.0
    exit_grace_seconds: float = 15.0  # for a verdict that explains an exit
    blind_seconds_max: float = 600.0  # without an answer of the backend, then people are told

    def row(self, fault_class: str) -> PolicyRow:
        """The row of a class; a class without one is only told to people."""
        for row in self.rows:
            if row.fault_class == fault_class:
                return row
        return PolicyRow("unknown", "notify")

    def with_modes(self, modes: Mapping[str, str]) -> PolicyConfig:
        """The same with other modes for some classes. Raises ValueError for an unknown class or mode."""
        self._check(modes, "mode", MODES)
        rows = tuple(
            replace(row, mode=next(mode for mode in MODES if mode == modes[row.fault_class]))
            if row.fault_class in modes
            else row
            for row in self.rows
        )
        return replace(self, rows=rows)

    def with_verbs(self, verbs: Mapping[str, str]) -> PolicyConfig:
        """The same with something else done about some classes. Raises ValueError for an unknown class or verb."""
        self._check(verbs, "action", ROW_VERBS)
        rows = tuple(
            replace(row, verb=next(verb for verb in ROW_VERBS if verb == verbs[row.fault_class]), firm=True)
            if row.fault_class in verbs
            else row
            for row in self.rows
        )
        return replace(self, rows=rows)

    def with_checks(self, classes: Collection[str]) -> PolicyConfig:
        """The same with pre-flight checks before restarts of these classes. Raises ValueError for an unknown class."""
        self._check(dict.fromkeys(classes, ""), "", ("",))
        return replace(self, rows=tuple(replace(row, checks=row.fault_class in classes) for row in self.rows))

    def mode_of_nodes(self, fault_class: str) -> Mode:
        """Of what is done to a node that fails a check before a restart of that class."""
        row = self.row(fault_class)
        return row.mode if row.verb == "exclude_and_restart" else self.quarantine_mode

    def with_budgets(self, budgets: Mapping[str, int]) -> PolicyConfig:
        """The same with other budgets. Raises ValueError for an unknown budget or a negative number."""
        for name, number in budgets.items():
            if name not in BUDGETS or name == "planned":
                known = ", ".join(one for one in BUDGETS if one != "planned")
                raise ValueError(f"there is no budget {name!r}; budgets: {known}")
            if number < 0:
                raise ValueError(f"budget {name} is {number}; give the restarts it allows, 0 or more")
        merged = {name: budgets.get(name, number) for name, number in self.class_restarts_max.items()}
        return replace(self, class_restarts_max=MappingProxyType(merged))

    def _check(self, chosen: Mapping[str, str], what: str, legal: tuple[str, ...]) -> None:
        known = {row.fault_class for row in self.rows}
        for fault_class, value in chosen.items():
            if fault_class not in known:
                names = ", ".join(sorted(known))
                raise ValueError(f"there is no policy row for class {fault_class!r}; classes: {names}")
            if value not in legal:
                raise ValueError(f"{what} {value!r} of class {fault_class!r} is none of {', '.join(legal)}")


def effective_verb(verdict: Verdict, config: PolicyConfig) -> Verb:
    """The verb of the verdict's row, weakened to notify where detection advises no more than that."""
    row = config.row(verdict.fault_class)
    weakened = verdict.advice == "notify" and row.verb != "stop" and not row.firm
    return "notify" if weakened else row.verb
