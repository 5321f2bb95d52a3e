"""The tables of recovery.sqlite, version by version, and the rows as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from detectors.verdict import Verdict

from .action import Action, CheckResult, Incident, Receipt
from .incident import State
from .plan import Plan
from .policy_rows import Budget

_FIRST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE inbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, verdict_id TEXT NOT NULL, revision INTEGER NOT NULL,
    job TEXT NOT NULL, attempt INTEGER NOT NULL, body BLOB NOT NULL, accepted_at REAL NOT NULL,
    duplicates INTEGER NOT NULL DEFAULT 0, incident_id TEXT,
    outcome TEXT NOT NULL DEFAULT '', UNIQUE (verdict_id, revision));
CREATE INDEX inbox_new ON inbox (seq) WHERE outcome = '';
CREATE INDEX inbox_of_incident ON inbox (incident_id);
CREATE TABLE commands (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, command_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL,
    accepted_at REAL NOT NULL, outcome TEXT NOT NULL DEFAULT '');
CREATE INDEX commands_new ON commands (seq) WHERE outcome = '';
CREATE TABLE incidents (
    incident_id TEXT PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
    sequence INTEGER NOT NULL, opened_at REAL NOT NULL, entered_at REAL NOT NULL, due_at REAL NOT NULL,
    action_id TEXT NOT NULL DEFAULT '', approved_hash TEXT NOT NULL DEFAULT '', plan BLOB,
    terminal INTEGER NOT NULL);
CREATE INDEX incidents_open ON incidents (opened_at) WHERE terminal = 0;
CREATE TABLE intents (
    action_id TEXT PRIMARY KEY, incident_id TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, token TEXT NOT NULL DEFAULT '', next_attempt INTEGER,
    resume_step INTEGER, resume_tier TEXT NOT NULL DEFAULT '', excluded BLOB NOT NULL,
    note TEXT NOT NULL DEFAULT '');
CREATE TABLE attempts (
    job TEXT NOT NULL, attempt INTEGER NOT NULL, token TEXT NOT NULL, persisted_at REAL NOT NULL,
    started_at REAL, resume_step INTEGER, places BLOB NOT NULL, PRIMARY KEY (job, attempt));
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, outcome TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '',
    furthest_step INTEGER NOT NULL DEFAULT -1, no_progress BLOB NOT NULL DEFAULT '{}',
    startup_failures INTEGER NOT NULL DEFAULT 0);
CREATE TABLE exclusions (
    job TEXT NOT NULL, node TEXT NOT NULL, at REAL NOT NULL, verdict_id TEXT NOT NULL,
    PRIMARY KEY (job, node));
CREATE TABLE rejections (
    job TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL, reason TEXT NOT NULL,
    done INTEGER NOT NULL DEFAULT 0, verdict_id TEXT NOT NULL, PRIMARY KEY (job, verdict_id));
CREATE TABLE stacks (
    job TEXT NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, at REAL NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (job, attempt, rank));
CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, body BLOB NOT NULL,
    published INTEGER NOT NULL DEFAULT 0);
CREATE INDEX outbox_waiting ON outbox (seq) WHERE published = 0;
"""
# Budgets by class, quarantine that ends, holds of people, jobs that run on fewer nodes than they want. Exclusions
# knew no end before: they are given the day that they would have had, and backends have been told of them.
_SECOND = """
ALTER TABLE attempts ADD COLUMN budget TEXT NOT NULL DEFAULT 'infra';
ALTER TABLE attempts ADD COLUMN cause TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN nodes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE intents ADD COLUMN nodes INTEGER;
ALTER TABLE intents ADD COLUMN released BLOB NOT NULL DEFAULT '[]';
ALTER TABLE jobs ADD COLUMN held TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN breaker_reset_at REAL NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN nodes_wanted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE exclusions ADD COLUMN until REAL NOT NULL DEFAULT 0;
ALTER TABLE exclusions ADD COLUMN reason TEXT NOT NULL DEFAULT '';
ALTER TABLE exclusions ADD COLUMN rest INTEGER NOT NULL DEFAULT 0;
ALTER TABLE exclusions ADD COLUMN told INTEGER NOT NULL DEFAULT 0;
UPDATE exclusions SET until = at + 86400, reason = 'excluded before exclusions had reasons', told = 1;
CREATE TABLE strikes (
    job TEXT NOT NULL, node TEXT NOT NULL, at REAL NOT NULL, verdict_id TEXT NOT NULL,
    PRIMARY KEY (job, node, verdict_id));
CREATE TABLE quarantines (
    job TEXT NOT NULL, node TEXT NOT NULL, at REAL NOT NULL, verdict_id TEXT NOT NULL,
    PRIMARY KEY (job, node, verdict_id));
INSERT INTO quarantines SELECT job, node, at, verdict_id FROM exclusions;
"""
# What pre-flight checks have found, until it stands in the action of the start.
_THIRD = """
ALTER TABLE intents ADD COLUMN checks BLOB NOT NULL DEFAULT '[]';
"""
# The inbox is looked through job by job, so that none waits for another's flood.
_FOURTH = """
DROP INDEX inbox_new;
CREATE INDEX inbox_new ON inbox (job, seq) WHERE outcome = '';
"""
# What brings a file from one version to the next; a new file goes through all of them.
SCHEMA_STEPS: tuple[str, ...] = (_FIRST, _SECOND, _THIRD, _FOURTH)
SCHEMA_VERSION = len(SCHEMA_STEPS)

Phase = Literal["stopping", "stopped", "starting", "started", "finishing", "closed"]
OutboxMessage = Action | Receipt | Incident | Verdict
OUTBOX_TYPES: dict[str, type[Action] | type[Receipt] | type[Incident] | type[Verdict]] = {
    "action": Action,
    "receipt": Receipt,
    "incident": Incident,
    "verdict": Verdict,
}


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """One incident as it stands. `due_at`: when its state has waited long enough, where it waits for time."""

    incident_id: str
    job: str
    attempt: int
    state: State
    sequence: int
    opened_at: float
    entered_at: float
    due_at: float
    action_id: str = ""
    approved_hash: str = ""
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class IntentRow:
    """What we are about to do, written before it is done; what is started is known from `starting` on."""

    action_id: str
    incident_id: str
    job: str
    attempt: int
    phase: Phase
    created_at: float
    token: str = ""
    next_attempt: int | None = None
    resume_step: int | None = None
    resume_tier: str = ""
    excluded: tuple[str, ...] = ()
    note: str = ""
    nodes: int | None = None  # fewer than the job wants; None: as many as it wants
    released: tuple[str, ...] = ()
    checks: tuple[CheckResult, ...] = ()


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank was started."""

    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt that we started, or were about to: written before the backend was asked.

    `budget` and `cause`: what the restart was charged to; "planned" where it was charged to nobody.
    """

    job: str
    attempt: int
    token: str
    persisted_at: float
    started_at: float | None = None
    resume_step: int | None = None
    places: tuple[Place, ...] = ()
    budget: Budget = "infra"
    cause: str = ""
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class JobRow:
    """What lives with a job through its attempts. `outcome` not empty: it is over, and stays so.

    `held`: who has put it on hold, and why. `nodes_wanted`: it runs on fewer nodes than these; 0: it does not.
    """

    job: str
    outcome: str = ""
    reason: str = ""
    furthest_step: int = -1
    no_progress: dict[str, int] = field(default_factory=dict)
    startup_failures: int = 0
    held: str = ""
    breaker_reset_at: float = 0.0
    nodes_wanted: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Checkpoints of `step` and later, of `attempt` and older, are to be rejected; asked until it is done."""

    job: str
    step: int
    attempt: int
    reason: str
    verdict_id: str
