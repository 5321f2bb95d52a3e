"""What the policy decides from, and what it decides: values only, told apart from how they come about."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from detectors.verdict import Verdict

from .action import Mode, Verb
from .backend import Observation
from .policy_rows import Budget

# What is tried next for a cause that comes back: each is a step further than the one before.
Rung = Literal["in_place", "spare", "exclude", "exclude_group", "older_checkpoint"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart that was written down, as the budgets count it."""

    at: float
    cause: str = ""
    budget: Budget = "infra"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A node that no attempt of the job may use. `until`: then it may again. `rest`: no blame, its ranks were moved."""

    node: str
    at: float
    until: float
    verdict_id: str
    reason: str
    rest: bool = False
    told: bool = False  # a backend has been given it with a start


@dataclass(frozen=True, slots=True)
class Counters:
    """What the job has used up. `no_progress`: restarts by cause since the job last got further."""

    restarts: tuple[Restart, ...] = ()  # within the window, oldest first
    no_progress: Mapping[str, int] = field(default_factory=dict)
    startup_failures: int = 0
    furthest_step: int = -1
    strikes: Mapping[str, int] = field(default_factory=dict)  # by node, within their window
    exclusions: tuple[Exclusion, ...] = ()  # in force
    breaker_reset_at: float = 0.0  # a person has looked at the exclusions up to then


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The job at the moment of the decision. `attempt`: the newest that was started, 0 where none is."""

    job: str
    attempt: int
    observation: Observation | None = None
    outcome: str = ""  # not empty: the job is over, and how
    restarted: bool = False  # we have restarted it before
    started_at: float | None = None  # of this attempt, where we started it
    resume_step: int | None = None  # of this attempt, where we started it
    nodes: int = 0  # of this attempt, where that is known
    held: str = ""  # who has put the job on hold, and why

    @property
    def node_count(self) -> int:
        """How many nodes its ranks are on; what is known of it."""
        if self.nodes or self.observation is None:
            return self.nodes
        return len({rank.node for rank in self.observation.ranks})


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision and what explains it. `plan_hash` names what would be done, whatever mode and budget say."""

    verb: Verb
    mode: Mode
    fault_class: str
    verdict_id: str
    verdict_revision: int
    rule: str
    cause: str = ""  # what the budgets count by
    excluded_nodes: tuple[str, ...] = ()  # put into quarantine
    before_step: int | None = None  # resume below this step, reject checkpoints from it on
    collect_evidence: bool = False
    reason: str = ""  # for stop: what the job is told
    budget_spent: bool = False
    no_progress: dict[str, int] = field(default_factory=dict)  # the counters after this restart
    repeats: int = 0  # restarts for this cause already made that brought the job no further
    startup_failures: int = 0
    reached_step: int = -1
    plan_hash: str = ""
    rung: Rung = "in_place"
    budget: Budget = "infra"
    spared_nodes: tuple[str, ...] = ()  # their ranks go to spares; they rest for a while
    struck_nodes: tuple[str, ...] = ()  # this counts against them
    resume_below: int | None = None  # resume below this step, without rejecting what is there

    @property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Nodes that the next attempt must not use because of this plan."""
        return tuple(sorted({*self.excluded_nodes, *self.spared_nodes}))

    @property
    def resumes_below(self) -> int | None:
        """The lowest of the steps that the next attempt must stay below; None: any."""
        return min((step for step in (self.before_step, self.resume_below) if step is not None), default=None)


def hash_of(plan: Plan, lead: Verdict) -> str:
    """SHA-256 over what would be done; the same decision about the same attempt hashes the same."""
    canonical = msgspec.json.encode(
        {
            "job": lead.job,
            "attempt": lead.attempt,
            "verb": plan.verb,
            "cause": plan.cause,
            "excluded_nodes": list(plan.excluded_nodes),
            "spared_nodes": list(plan.spared_nodes),
            "before_step": plan.before_step,
            "resume_below": plan.resume_below,
        },
        order="deterministic",
    )
    return hashlib.sha256(canonical).hexdigest()
