"""What recovery does about a verdict, and what came of it: actions, receipts, and the commands people send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from detectors.verdict import VERDICT_TYPES
from ingest.events import Topic

from .launcher.protocol import CheckName, CheckVerdict

Verb = Literal[
    "notify", "restart", "exclude_and_restart", "stop", "hold", "ignore",  # what the policy decides
    "resume", "unexclude",  # what only a person asks for
]  # fmt: skip
Mode = Literal["observe", "approve", "auto"]
Outcome = Literal["done", "failed", "ambiguous", "awaiting_approval", "observed", "waiting"]
CommandVerb = Literal[
    "acknowledge", "mute", "approve", "reject", "feedback",  # of an incident
    "hold", "resume", "abort", "unexclude",  # of a job
]  # fmt: skip
JOB_VERBS: tuple[CommandVerb, ...] = ("hold", "resume", "abort", "unexclude")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one pre-flight check found on one node between two attempts. `seconds`: of what it measures."""

    node: str
    check: CheckName
    outcome: CheckVerdict
    seconds: float = 0.0
    text: str = ""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, explainable from this row alone. `action_id` = job, attempt, verb: redelivery decides the same."""

    action_id: str
    job: str
    attempt: int  # the attempt it acts on
    at: float
    verb: Verb
    mode: Mode
    verdict_id: str
    verdict_revision: int
    fault_class: str
    rule: str  # the policy row that decided, and why in words
    rung: str = ""  # of the ladder: in_place, spare, exclude, exclude_group, older_checkpoint
    excluded_nodes: tuple[str, ...] = ()  # put into quarantine
    spared_nodes: tuple[str, ...] = ()  # their ranks go to spares, without blame
    next_attempt: int | None = None
    resume_step: int | None = None  # None with a restart: from scratch
    resume_tier: str = ""  # memory, memory+peer, peer, memory+disk, disk
    reject_from_step: int | None = None  # checkpoints of this step and later are rejected
    plan_hash: str = ""
    checks: tuple[CheckResult, ...] = ()  # of its nodes before the start; of many, those that failed come first

    @property
    def message_id(self) -> str:
        return self.action_id


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an action. A later receipt of the same action replaces an earlier one."""

    action_id: str
    job: str
    attempt: int
    at: float
    outcome: Outcome
    text: str
    next_attempt: int | None = None

    @property
    def message_id(self) -> str:
        return f"{self.action_id}/{self.outcome}"


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Where an incident stands after one transition; incident_id is the verdict_id that opened it."""

    incident_id: str
    job: str
    attempt: int
    at: float
    state: str  # a state of recovery.incident.STATES
    cause: str  # the event of the transition, in words
    sequence: int = 0  # transitions of this incident so far

    @property
    def message_id(self) -> str:
        return f"{self.incident_id}/{self.sequence}"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asks of an incident (acknowledge, mute, approve a plan, say whether the verdict was right), or of
    a job as a whole: hold, resume, abort, unexclude a node. `incident_id` is empty where the job is meant."""

    command_id: str
    job: str
    at: float
    verb: CommandVerb
    incident_id: str
    author: str
    plan_hash: str = ""
    feedback: Literal["", "true_positive", "false_positive", "unknown"] = ""
    note: str = ""
    until: float | None = None
    node: str = ""  # for unexclude

    @property
    def message_id(self) -> str:
        return self.command_id


RECOVERY_TYPES: Mapping[str, tuple[Topic, type[Any]]] = {
    **VERDICT_TYPES,
    "action.v1": ("actions", Action),
    "receipt.v1": ("actions", Receipt),
    "incident.v1": ("actions", Incident),
    "command.v1": ("commands", Command),
}
