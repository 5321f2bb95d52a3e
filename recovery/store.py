"""Recovery's memory: one SQLite file (WAL, every commit synced) that survives kill -9 at any instant.

All of a decision is one transaction: the state of the incident, its intent, its counters and the messages
that tell of it. So nothing is done that was not written before, and no audit row is lost: what was not
published when we died is published by the next life, in order, with the same ids. One process, one thread: the
lease sees to that, and every transaction checks that nobody has opened the file since.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from .action import CheckResult, Incident
from .incident import TERMINAL, Event, State, transition
from .plan import Plan
from .store_file import Fenced, StoreError
from .store_inbox import Entry, Inbox
from .store_jobs import Jobs
from .store_schema import OUTBOX_TYPES, IncidentRow, IntentRow, OutboxMessage

OUTBOX_KEPT_MAX = 10_000  # published messages that stay for a look back
_encode = msgspec.json.Encoder().encode
_decode_plan = msgspec.json.Decoder(Plan).decode
_decode_names = msgspec.json.Decoder(tuple[str, ...]).decode
_decode_checks = msgspec.json.Decoder(tuple[CheckResult, ...]).decode

_INCIDENT = "incident_id, job, attempt, state, sequence, opened_at, entered_at, due_at, action_id, approved_hash, plan"
_INTENT = (
    "action_id, incident_id, job, attempt, phase, created_at, token, next_attempt, resume_step, resume_tier, "
    "excluded, note, nodes, released, checks"
)


class Waiting(NamedTuple):
    """A message to publish; hand `seq` to `mark_published` once the bus has it."""

    seq: int
    message: OutboxMessage


class RecoveryStore(Inbox, Jobs):
    """Incidents, intents and the outbox, over what came in and what lives with jobs."""

    # incidents ------------------------------------------------------------------------------------

    def open_incident(self, incident_id: str, job: str, attempt: int, now: float) -> IncidentRow:
        row = IncidentRow(incident_id, job, attempt, "open", 0, now, now, now)
        marks = "?,?,?,?,?,?,?,?,'','',NULL,0"
        values = (incident_id, job, attempt, row.state, row.sequence, now, now, now)
        self._write(f"INSERT INTO incidents ({_INCIDENT}, terminal) VALUES ({marks})", *values)
        return row

    def incident(self, incident_id: str) -> IncidentRow | None:
        row = self._one(f"SELECT {_INCIDENT} FROM incidents WHERE incident_id=?", incident_id)
        return _incident(row) if row else None

    def unfinished(self, job: str | None = None, states: Collection[State] = ()) -> list[IncidentRow]:
        """Incidents that are in no terminal state (where given, in one of these), oldest first."""
        where = "terminal = 0" + ("" if job is None else " AND job = ?")
        where += f" AND state IN ({','.join('?' * len(states))})" if states else ""
        query = f"SELECT {_INCIDENT} FROM incidents WHERE {where} ORDER BY opened_at, rowid"
        return [_incident(row) for row in self._all(query, *([] if job is None else [job]), *sorted(states))]

    def move(
        self, incident: IncidentRow, event: Event, cause: str, now: float, *, due_at: float | None = None
    ) -> IncidentRow:
        """Take the transition and tell of it, both in this transaction."""
        moved = replace(
            incident,
            state=transition(incident.state, event),
            sequence=incident.sequence + 1,
            entered_at=now if transition(incident.state, event) != incident.state else incident.entered_at,
            due_at=now if due_at is None else due_at,
        )
        self.save_incident(moved)
        told = Incident(
            incident_id=moved.incident_id,
            job=moved.job,
            attempt=moved.attempt,
            at=now,
            state=moved.state,
            cause=cause,
            sequence=moved.sequence,
        )
        self.append(told)
        return moved

    def save_incident(self, row: IncidentRow) -> None:
        self._write(
            "UPDATE incidents SET attempt=?, state=?, sequence=?, entered_at=?, due_at=?, action_id=?, "
            "approved_hash=?, plan=?, terminal=? WHERE incident_id=?",
            row.attempt, row.state, row.sequence, row.entered_at, row.due_at, row.action_id,
            row.approved_hash, _encode(row.plan) if row.plan else None, row.state in TERMINAL,
            row.incident_id,
        )  # fmt: skip

    # intents --------------------------------------------------------------------------------------

    def save_intent(self, row: IntentRow) -> None:
        self._write(
            f"INSERT OR REPLACE INTO intents ({_INTENT}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            row.action_id, row.incident_id, row.job, row.attempt, row.phase, row.created_at, row.token,
            row.next_attempt, row.resume_step, row.resume_tier, _encode(row.excluded), row.note, row.nodes,
            _encode(row.released), _encode(row.checks),
        )  # fmt: skip

    def intent(self, action_id: str) -> IntentRow | None:
        row = self._one(f"SELECT {_INTENT} FROM intents WHERE action_id=?", action_id)
        return _intent(row) if row else None

    def intents(self) -> list[IntentRow]:
        return [_intent(row) for row in self._all(f"SELECT {_INTENT} FROM intents ORDER BY created_at, rowid")]

    # outbox ---------------------------------------------------------------------------------------

    def append(self, message: OutboxMessage) -> None:
        kind = next(name for name, type_ in OUTBOX_TYPES.items() if isinstance(message, type_))
        self._write("INSERT INTO outbox (kind, body) VALUES (?,?)", kind, _encode(message))

    def waiting(self, limit: int) -> list[Waiting]:
        rows = self._all("SELECT seq, kind, body FROM outbox WHERE published = 0 ORDER BY seq LIMIT ?", limit)
        return [Waiting(seq, msgspec.json.decode(body, type=OUTBOX_TYPES[kind])) for seq, kind, body in rows]

    def mark_published(self, seqs: Sequence[int]) -> None:
        with self.transaction():
            for seq in seqs:
                self._write("UPDATE outbox SET published=1 WHERE seq=?", seq)
            newest = max(seqs, default=0)
            self._write("DELETE FROM outbox WHERE published=1 AND seq<=?", newest - OUTBOX_KEPT_MAX)


def _incident(row: Any) -> IncidentRow:
    plan = _decode_plan(row[10]) if row[10] is not None else None
    return IncidentRow(*[*row[:10], plan])


def _intent(row: Any) -> IntentRow:
    return IntentRow(*[*row[:10], _decode_names(row[10]), *row[11:13], _decode_names(row[13]), _decode_checks(row[14])])


__all__ = ["Entry", "Fenced", "RecoveryStore", "StoreError", "Waiting"]
