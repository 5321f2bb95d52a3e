"""The tables of the ledger and how a message becomes a row: append-only, no index, keys as typed columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from detectors.verdict import Verdict
from ingest.bus import Record
from ingest.codec import Undecodable
from ingest.events import STEP_MAX, CheckpointEvent, Logs, Message
from recovery.action import RECOVERY_TYPES, Action, Command, Incident, Receipt

SCHEMA_VERSION = 2  # migrations.py knows the steps from older ones

Columns = tuple[tuple[str, str], ...]

STORY_COLUMNS: Columns = (
    ("seq", "BIGINT"),  # gapless within the table
    ("change", "BIGINT"),  # gapless over all story tables: the order in which the ledger took them
    ("source_partition", "BIGINT"),
    ("source_offset", "BIGINT"),
    ("event_at", "DOUBLE"),
    ("appended_at", "DOUBLE"),
    ("job", "VARCHAR"),
    ("attempt", "BIGINT"),
    ("kind", "VARCHAR"),
    ("body", "VARCHAR"),  # the message as it came
)


@dataclass(frozen=True, slots=True)
class StoryTable:
    """One table of messages: its key columns after the common ones, and what makes two messages the same."""

    name: str
    keys: Columns
    key_values: Callable[[Any], tuple[Any, ...]]
    identity: Callable[[Any], str] | None = None  # a second message of the same identity is dropped

    @property
    def columns(self) -> Columns:
        return STORY_COLUMNS + self.keys


def _verdict_keys(verdict: Verdict) -> tuple[Any, ...]:
    return verdict.verdict_id, verdict.revision, verdict.fault_class, verdict.severity, verdict.status


def _action_keys(action: Action) -> tuple[Any, ...]:
    return action.action_id, action.verdict_id, action.verb, action.mode, action.fault_class


def _receipt_keys(receipt: Receipt) -> tuple[Any, ...]:
    return receipt.action_id, receipt.outcome


def _incident_keys(incident: Incident) -> tuple[Any, ...]:
    return incident.incident_id, incident.sequence, incident.state, incident.cause


def _command_keys(command: Command) -> tuple[Any, ...]:
    return command.command_id, command.incident_id, command.verb, command.author


def _checkpoint_keys(event: CheckpointEvent) -> tuple[Any, ...]:
    return event.rank, event.node, event.step, event.tier, event.state


def _event_keys(event: Message) -> tuple[Any, ...]:
    return event.rank, event.node


def _message_id(message: Any) -> str:
    return str(message.message_id)


def _message_id_at(message: Any) -> str:
    return f"{message.message_id}@{message.at!r}"  # a decision may be told again later, with a new text


STORY_TABLES: tuple[StoryTable, ...] = (
    StoryTable(
        "verdict",
        (
            ("verdict_id", "VARCHAR"), ("revision", "BIGINT"), ("fault_class", "VARCHAR"),
            ("severity", "VARCHAR"), ("status", "VARCHAR"),
        ),
        _verdict_keys,
        _message_id,
    ),
    StoryTable(
        "action",
        (
            ("action_id", "VARCHAR"), ("verdict_id", "VARCHAR"), ("verb", "VARCHAR"),
            ("mode", "VARCHAR"), ("fault_class", "VARCHAR"),
        ),
        _action_keys,
        _message_id_at,
    ),
    StoryTable("receipt", (("action_id", "VARCHAR"), ("outcome", "VARCHAR")), _receipt_keys, _message_id_at),
    StoryTable(
        "incident",
        (("incident_id", "VARCHAR"), ("transition", "BIGINT"), ("state", "VARCHAR"), ("cause", "VARCHAR")),
        _incident_keys,
        _message_id,
    ),
    StoryTable(
        "command",
        (("command_id", "VARCHAR"), ("incident_id", "VARCHAR"), ("verb", "VARCHAR"), ("author", "VARCHAR")),
        _command_keys,
        _message_id,
    ),
    StoryTable(
        "checkpoint_event",
        (
            ("rank", "BIGINT"), ("node", "VARCHAR"), ("step", "BIGINT"),
            ("tier", "VARCHAR"), ("state", "VARCHAR"),
        ),
        _checkpoint_keys,
    ),
    StoryTable("job_event", (("rank", "BIGINT"), ("node", "VARCHAR")), _event_keys),
)  # fmt: skip
BY_NAME: Mapping[str, StoryTable] = {table.name: table for table in STORY_TABLES}

TABLE_OF_KIND: Mapping[str, str] = {
    "verdict.v1": "verdict",
    "action.v1": "action",
    "receipt.v1": "receipt",
    "incident.v1": "incident",
    "command.v1": "command",
    "checkpoint.v1": "checkpoint_event",
    "attempt_started.v1": "job_event",
    "rank_started.v1": "job_event",
    "rank_exited.v1": "job_event",
    "rank_stalled.v1": "job_event",
    "rank_stacks.v1": "job_event",
    "attempt_ended.v1": "job_event",
    "stop_notice.v1": "job_event",
    "fault_injected.v1": "job_event",
}
KIND_OF_TYPE: Mapping[type[Any], str] = {type_: kind for kind, (_, type_) in RECOVERY_TYPES.items()}

LOG_COLUMNS: Columns = (
    ("seq", "BIGINT"),
    ("source_partition", "BIGINT"),
    ("source_offset", "BIGINT"),
    ("line", "BIGINT"),  # position within its message
    ("event_at", "DOUBLE"),
    ("job", "VARCHAR"),
    ("attempt", "BIGINT"),
    ("rank", "BIGINT"),
    ("node", "VARCHAR"),
    ("stream", "VARCHAR"),
    ("text", "VARCHAR"),
)
PART_COLUMNS: Columns = (
    ("seq", "BIGINT"),
    ("path", "VARCHAR"),  # file name below metrics/; empty where parts were only taken away
    ("level", "BIGINT"),  # how often it was merged
    ("source_topic", "VARCHAR"),
    ("source_partition", "BIGINT"),
    ("first_offset", "BIGINT"),
    ("last_offset", "BIGINT"),
    ("row_count", "BIGINT"),
    ("min_at", "DOUBLE"),
    ("max_at", "DOUBLE"),
    ("jobs", "VARCHAR"),  # JSON list
    ("replaces", "VARCHAR"),  # JSON list of paths that do not exist any more
)
OFFSET_COLUMNS: Columns = (
    ("seq", "BIGINT"),
    ("topic", "VARCHAR"),
    ("source_partition", "BIGINT"),
    ("next_offset", "BIGINT"),
    ("committed_at", "DOUBLE"),
)
VERSION_COLUMNS: Columns = (("seq", "BIGINT"), ("version", "BIGINT"), ("applied_at", "DOUBLE"))
RETENTION_COLUMNS: Columns = (
    ("seq", "BIGINT"),
    ("removed_at", "DOUBLE"),
    ("table_name", "VARCHAR"),
    ("before_seq", "BIGINT"),  # rows that went had lower ones
    ("row_count", "BIGINT"),
)

TABLES: Mapping[str, Columns] = {
    **{table.name: table.columns for table in STORY_TABLES},
    "log_line": LOG_COLUMNS,
    "metric_part": PART_COLUMNS,
    "source_offset": OFFSET_COLUMNS,
    "schema_version": VERSION_COLUMNS,
    "retention": RETENTION_COLUMNS,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One message on its way into its story table; the writer puts seq and change in front."""

    table: StoryTable
    message: Any
    values: tuple[Any, ...]

    @property
    def identity(self) -> str | None:
        return None if self.table.identity is None else self.table.identity(self.message)


def create_statements() -> list[str]:
    """DDL of everything, harmless where it exists."""
    return [
        f"CREATE TABLE IF NOT EXISTS {name} ({', '.join(f'{column} {type_}' for column, type_ in columns)})"
        for name, columns in TABLES.items()
    ]


def check_storable(record: Record, message: Any) -> None:
    """Raise Undecodable where a message decodes but cannot be a row: it would stop the ledger for ever."""
    kind = KIND_OF_TYPE[type(message)]
    topic, _ = RECOVERY_TYPES[kind]
    if topic != record.topic:
        raise Undecodable(f"a {kind} message belongs on the topic {topic}, not on {record.topic}")
    for name in (
        "attempt",
        "revision",
        "sequence",
    ):  # the types of `ingest` have bounds, the others have none
        number = getattr(message, name, 0)
        if not 0 <= number <= STEP_MAX:
            raise Undecodable(f"the {name} of a {kind} message is {number}, which is out of range")


def entry_of(record: Record, message: Any) -> Entry | None:
    """The story row of a message; None for metrics, logs and heartbeats. Raises Undecodable."""
    kind = KIND_OF_TYPE[type(message)]
    name = TABLE_OF_KIND.get(kind)
    if name is None:
        return None
    table = BY_NAME[name]
    try:
        body = record.value.decode("utf-8")  # a field that no reader knows may hold anything
    except UnicodeDecodeError as error:
        raise Undecodable(f"a {kind} message is not UTF-8 text") from error
    common = (
        record.partition, record.offset, message.at, record.appended_at, message.job,
        getattr(message, "attempt", 0), kind, body,
    )  # fmt: skip
    return Entry(table, message, common + table.key_values(message))


def log_rows(record: Record, message: Logs) -> list[tuple[Any, ...]]:
    """The lines of a batch, without their seq."""
    return [
        (
            record.partition, record.offset, index, line.at, message.job, message.attempt, message.rank,
            message.node, line.stream, line.text,
        )
        for index, line in enumerate(message.lines)
    ]  # fmt: skip
