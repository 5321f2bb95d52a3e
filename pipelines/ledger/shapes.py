"""What a reader of the ledger is given: the shapes of the HTTP API, the Protocol behind it, errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from detectors.verdict import Culprit, Verdict
from pipelines.errors import StatedError
from recovery.action import RECOVERY_TYPES, Action, Command, CommandVerb, Incident, Receipt

LIST_LIMIT_MAX = 1_000  # rows of one answer
LIST_LIMIT_DEFAULT = 200
BUCKETS_MAX = 2_000
BUCKETS_DEFAULT = 500
SAMPLES_MAX = 2_000_000  # of one answer in Arrow
SAMPLES_DEFAULT = 200_000
SQL_ROWS_MAX = 100_000
SQL_ROWS_DEFAULT = 1_000

RowTable = Literal["verdicts", "actions", "receipts", "transitions", "checkpoints", "events", "commands"]
ROW_TABLES: Mapping[str, str] = {  # name in the API → table
    "verdicts": "verdict",
    "actions": "action",
    "receipts": "receipt",
    "transitions": "incident",
    "checkpoints": "checkpoint_event",
    "events": "job_event",
    "commands": "command",
}


class LedgerError(StatedError):
    """Base of what the ledger and its readers raise; the text is one sentence that says what to do."""


class LedgerLocked(LedgerError):
    """Another process holds the file; `pid` where the message of the lock names it."""

    def __init__(self, text: str, pid: int | None = None) -> None:
        super().__init__(text)
        self.pid = pid


class LedgerUnreadable(LedgerError):
    """The file is not a ledger, or not one that this version can read; trying again will not help."""


class LedgerWriteFailed(LedgerError):
    """The disk does not take what is written (full, gone); nothing of it counts, it may be tried again."""


class LedgerUnavailable(LedgerError):
    """Nobody answers for the ledger now."""


class LedgerBusy(LedgerError):
    """The question took too long, or the file is being opened again; asking later or for less may help."""


class NotInLedger(LedgerError):
    """There is no such thing in the ledger."""


class BadQuestion(LedgerError):
    """The question or command itself is wrong."""


class IncidentMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """What an incident took, in seconds, as far as it is known; docs/recovery-measures.md says what each stage is."""

    detect_seconds: float | None = None
    decide_seconds: float | None = None
    stop_seconds: float | None = None
    check_seconds: float | None = None
    wait_seconds: float | None = None
    select_seconds: float | None = None
    start_seconds: float | None = None
    first_step_seconds: float | None = None
    catch_up_seconds: float | None = None
    recover_seconds: float | None = None  # from the onset to the first step of the next attempt
    lost_steps: int | None = None  # that were trained again


class JobMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's faults have cost it so far; a failure is an incident for which the job was stopped."""

    failures: int = 0
    restarts: int = 0
    mttf_seconds: float | None = None  # time in which nothing was repaired ÷ failures
    mttr_seconds: float | None = None  # mean of recover_seconds
    lost_steps: int = 0


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest complete checkpoint that is not rejected."""

    step: int
    tier: str
    event_at: float


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is now.

    `goodput` = highest step reached × median step seconds / (now or its end − first attempt's start), at most
    1; work that was done twice counts once. `state` lost: it runs as far as we know, but nobody has spoken
    for a minute.
    """

    job: str
    attempt: int
    state: Literal["running", "failed", "finished", "stopped", "lost"]
    world_size: int
    started_at: float | None
    last_step: int | None
    last_seen_at: float | None
    goodput: float | None
    open_incidents: int
    checkpoint: CheckpointView | None
    outcome: str
    measures: JobMeasures = JobMeasures()


class ActionView(msgspec.Struct, frozen=True, kw_only=True):
    """What recovery decided about an incident."""

    action_id: str
    verb: str
    mode: str
    rule: str
    excluded_nodes: tuple[str, ...]
    next_attempt: int | None
    resume_step: int | None
    resume_tier: str
    plan_hash: str


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    """An incident as it is now; `seq` is its last change, `status` the verdict's, `state` recovery's."""

    seq: int
    incident_id: str
    job: str
    attempt: int
    fault_class: str
    severity: str
    status: str
    state: str
    culprits: tuple[Culprit, ...]
    victims: int
    onset_at: float | None
    onset_step: int | None
    first_bad_step: int | None
    opened_at: float
    updated_at: float
    closed_at: float | None
    summary: str
    advice: str
    settled: bool
    action: ActionView | None
    outcome: str
    outcome_text: str
    acknowledged_by: str
    acknowledged_at: float | None
    feedback: str
    muted_until: float | None
    measures: IncidentMeasures = IncidentMeasures()


class IncidentPage(msgspec.Struct, frozen=True, kw_only=True):
    """Incidents, newest change first; ask for `after=next` to get only what is new."""

    incidents: tuple[IncidentView, ...]
    next: int


class IncidentStory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was said about one incident, each list oldest first."""

    incident: IncidentView
    verdicts: tuple[Verdict, ...]
    actions: tuple[Action, ...]
    receipts: tuple[Receipt, ...]
    transitions: tuple[Incident, ...]
    commands: tuple[Command, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One message as the ledger keeps it: its number in its table, its type's name, and the message."""

    seq: int
    kind: str
    message: Any


class RowPage(msgspec.Struct, frozen=True, kw_only=True):
    """Rows, oldest first; ask for `after=next` to get only what is new."""

    rows: tuple[Row, ...]
    next: int


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One metric by rank: [event_at, step, value]; `non_finite` ([rank, step, name]) names what is None.

    `hosts`: what a node's ranks share, [event_at, value] by NODE/DEVICE.
    """

    metric: str
    ranks: dict[str, list[tuple[float, int, float | None]]]
    median: list[tuple[float, float | None]]
    non_finite: list[tuple[int, int, str]]
    hosts: dict[str, list[tuple[float, float | None]]] = {}


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a rank's output."""

    event_at: float
    rank: int
    node: str
    stream: str
    text: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How it goes; `lag`: records on the bus not read yet, by topic; `data_at`: up to when it is complete."""

    status: Literal["ok", "degraded"]
    reason: str
    lag: dict[str, int]
    data_at: float


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command as a person gives it; the ledger adds id and time."""

    verb: CommandVerb
    author: str
    incident_id: str = ""  # empty where a whole job is meant: hold, resume, abort, unexclude
    job: str = ""
    note: str = ""
    feedback: Literal["", "true_positive", "false_positive", "unknown"] = ""
    plan_hash: str = ""
    until: float | None = None
    node: str = ""


class SqlRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One SELECT, and how many rows of it at most."""

    query: str
    limit: int = SQL_ROWS_DEFAULT


class SqlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Its rows; `truncated`: there were more; `data_at`: the instant that was asked (UTC seconds)."""

    columns: tuple[str, ...]
    rows: list[list[Any]]
    truncated: bool
    data_at: float


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """A folder on the ledger's own machine that is laid out as the ledger's is and never changes."""

    folder: str
    taken_at: float
    size_bytes: int


class LedgerReader(Protocol):
    """The same questions of a live ledger (over HTTP, or inside `record`) and of a finished one."""

    def jobs(self) -> tuple[JobView, ...]: ...

    def incidents(
        self,
        *,
        job: str | None = None,
        state: str | None = None,
        fault_class: str | None = None,
        severity: str | None = None,
        after: int | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> IncidentPage:
        """Without `after` the newest `limit`; with it the next `limit` that changed since.

        `state`: one of recovery's, or open or closed.
        """
        ...

    def incident(self, incident_id: str) -> IncidentStory:
        """Raises NotInLedger."""
        ...

    def rows(
        self,
        table: RowTable,
        *,
        job: str | None = None,
        after: int | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> RowPage:
        """Without `after` the newest `limit`; with it the next `limit` since; always oldest first."""
        ...

    def series(
        self,
        job: str,
        metric: str,
        *,
        attempt: int | None = None,
        start: float | None = None,
        end: float | None = None,
        buckets: int = BUCKETS_DEFAULT,
    ) -> Series: ...

    def metric_names(self, job: str) -> tuple[str, ...]: ...

    def logs(
        self,
        job: str,
        *,
        rank: int | None = None,
        start: float | None = None,
        end: float | None = None,
        limit: int = LIST_LIMIT_DEFAULT,
    ) -> tuple[LogRow, ...]:
        """The newest `limit` lines of the span, oldest first."""
        ...

    def health(self) -> Health: ...

    def post_command(self, request: CommandRequest) -> str:
        """The command's id, once it is durable. Raises NotInLedger, BadQuestion, LedgerUnavailable."""
        ...

    def close(self) -> None: ...


def row_object(row: Row) -> dict[str, Any]:
    """A row as the API writes it: seq, kind and the message's own fields side by side."""
    return {"seq": row.seq, "kind": row.kind, **msgspec.to_builtins(row.message)}


def row_of_object(fields: Mapping[str, Any]) -> Row:
    """The row that `row_object` wrote. Raises msgspec.ValidationError, KeyError."""
    _, type_ = RECOVERY_TYPES[fields["kind"]]
    return Row(seq=fields["seq"], kind=fields["kind"], message=msgspec.convert(fields, type_))
