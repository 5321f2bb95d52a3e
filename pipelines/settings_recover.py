"""The section `recover` of transom.toml: budgets, ladder, nodes, pre-flight checks, and how ends are read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipelines.settings_section import Section as _Section

Mode = Literal["observe", "approve", "auto"]


class QuarantineSettings(_Section):
    mode: Mode = Field("observe", description="of what the ladder and strikes do to nodes; classes have modes too")
    strikes_max: int = Field(2, ge=1, description="faults that name a node in strikes_window_seconds, then quarantine")
    strikes_window_seconds: float = Field(86_400.0, gt=0.0, description="the window of strikes_max")
    seconds: float = Field(86_400.0, gt=0.0, description="how long; twice as long each further time")
    spare_seconds: float = Field(3600.0, ge=0.0, description="a node rests so long whose ranks were moved to a spare")
    breaker_share: float = Field(
        0.2, ge=0.0, le=1.0, description="more of a job's nodes than this excluded in breaker_seconds: held"
    )
    breaker_nodes_max: int = Field(2, ge=0, description="so many may be, however few nodes the job has")
    breaker_seconds: float = Field(600.0, gt=0.0, description="the window of breaker_share")


class PreflightSettings(_Section):
    enabled: bool = Field(
        True, description="nodes are tried out before a restart of a cause that came back, or of these classes"
    )
    classes: tuple[str, ...] | None = Field(
        None, description="in place of hang, collective_timeout, nan, network, CUDA and GPU faults; []: none"
    )
    seconds: float = Field(180.0, gt=0.0, description="then the job goes on without them")
    check_seconds: float = Field(20.0, gt=0.0, description="a check that is not done by then has failed")
    slow_ratio: float = Field(2.0, gt=1.0, description="of the others' median: a slower matmul, twice, has failed")


class ExitSettings(_Section):
    grace_seconds: float = Field(
        15.0, ge=0.0, description="wait for a verdict that explains an end, before error files and exit codes are read"
    )
    recover_codes: tuple[int, ...] = Field((), description="exit codes that are restarted; 1 to 127 are the job's own")
    stop_codes: tuple[int, ...] = Field((93,), description="exit codes that are never restarted")
    planned_codes: tuple[int, ...] = Field(
        (), description="exit codes of a job that wants to go on: restarted outside budgets"
    )
    watch_seconds: float = Field(2.0, gt=0.0, description="how often each job is looked at without a verdict")
    blind_seconds: float = Field(600.0, gt=0.0, description="a backend does not answer for so long: people are told")


class RecoverSettings(_Section):
    backend: str = Field("local", description="who runs jobs that do not say: local, slurm, kubernetes, or a plug-in")
    backends: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="what a backend is told, by its name: its own page lists it"
    )
    modes: dict[str, Mode] = Field(default_factory=dict, description="observe, approve or auto for each class")
    actions: dict[str, Literal["notify", "restart", "exclude_and_restart", "stop", "hold"]] = Field(
        default_factory=dict, description="what is done about a class, where it is not what the table below says"
    )
    probation_steps: int = Field(20, ge=0, description="new steps before an incident is resolved")
    probation_seconds: float = Field(60.0, ge=0.0, description="and at least so long")
    stop_grace_seconds: float = Field(5.0, ge=0.0, description="SIGTERM to SIGKILL")
    evidence_seconds: float = Field(
        10.0, ge=0.0, le=10.0, description="stacks are awaited so long before a hang is stopped"
    )
    restarts_max: int = Field(20, ge=0, description="restarts of a job in restarts_window_seconds, then it is held")
    restarts_window_seconds: float = Field(86_400.0, gt=0.0, description="the window of restarts_max")
    same_cause_max: int = Field(3, ge=1, description="restarts for one cause without a new step, then it is held")
    budgets: dict[Literal["user", "unknown", "hang", "infra"], int] = Field(
        default_factory=dict, description="restarts in the same window by kind: user 1, unknown 3, hang 3, infra 10"
    )
    nodes_per_restart: int = Field(
        64, ge=0, description="one restart more in each budget but user for so many nodes of the job; 0: none"
    )
    spent_budget: Literal["hold", "stop"] = Field("hold", description="what is done when a budget is spent")
    rung_repeats_max: int = Field(1, ge=1, description="restarts on one rung of the ladder without a new step")
    flap_restarts_max: int = Field(3, ge=1, description="restarts for one cause in flap_seconds: one rung further")
    flap_seconds: float = Field(3600.0, gt=0.0, description="the window of flap_restarts_max")
    without_checkpoint: Literal["from_scratch", "hold"] = Field(
        "from_scratch", description="what is done where no checkpoint can be loaded by all ranks"
    )
    rollback_margin_steps: int = Field(0, ge=0, description="how much further back than the first bad step")
    approval_seconds: float = Field(1800.0, gt=0.0, description="a plan waits so long for approval, then it is held")
    starting_seconds: float = Field(900.0, gt=0.0, description="a scheduler has so long to bring an attempt up")
    capacity_seconds: float = Field(30.0, gt=0.0, description="how often nodes are looked for where there are too few")
    held_again_seconds: float = Field(3600.0, gt=0.0, description="people are told again of what waits for them")
    quarantine: QuarantineSettings = QuarantineSettings()
    preflight: PreflightSettings = PreflightSettings()
    exits: ExitSettings = ExitSettings()
