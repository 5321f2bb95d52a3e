"""Recovery's memory: one SQLite file (WAL, every commit synced) that survives kill -9 at any instant.

All of a decision is one transaction: the state of the incident, its intent, its counters and the messages
that tell of it. So nothing is done that was not written before, and no audit row is lost: what was not
published when we died is published by the next life, in order, with the same ids. One process, one thread: the
lease sees to that, and every transaction checks that nobody has opened the file since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from .action import CheckResult, Incident
from .incident import Event, transition
from .store_file import Fenced, StoreError
from .store_inbox import Entry, Inbox
from .store_incidents import Incidents
from .store_jobs import Jobs
from .store_schema import OUTBOX_TYPES, IncidentRow, IntentRow, OutboxMessage

OUTBOX_KEPT_MAX = 10_000  # published messages that stay for a look back
_encode = msgspec.json.Encoder().encode
_decode_names = msgspec.json.Decoder(tuple[str, ...]).decode
_decode_checks = msgspec.json.Decoder(tuple[CheckResult, ...]).decode

_INTENT = (
    "action_id, incident_id, job, attempt, phase, created_at, token, next_attempt, resume_step, resume_tier, "
    "excluded, note, nodes, released, checks"
)


_KINDS = {type_: kind for kind, type_ in OUTBOX_TYPES.items()}


class Waiting(NamedTuple):
    """A message to publish; hand `seq` to `mark_published` once the bus has it."""

    seq: int
    message: OutboxMessage


class RecoveryStore(Incidents, Inbox, Jobs):
    """Intents and the outbox, over incidents, what came in and what lives with jobs."""

    _told: list[tuple[str, bytes]]  # for the outbox, at the end of this transaction

    def _forget(self) -> None:
        super()._forget()
        self._told = []

    def _flush(self) -> None:
        if self._told:
            told, self._told = self._told, []
            self._write_all("INSERT INTO outbox (kind, body) VALUES (?,?)", told)
        super()._flush()

    def move(
        self, incident: IncidentRow, event: Event, cause: str, now: float, *, due_at: float | None = None
    ) -> IncidentRow:
        """Take the transition and tell of it, both in this transaction."""
        after = transition(incident.state, event)
        moved = replace(
            incident,
            state=after,
            sequence=incident.sequence + 1,
            entered_at=now if after != incident.state else incident.entered_at,
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
        assert self._in_transaction
        self._told.append((_KINDS[type(message)], _encode(message)))

    def waiting(self, limit: int) -> list[Waiting]:
        rows = self._all("SELECT seq, kind, body FROM outbox WHERE published = 0 ORDER BY seq LIMIT ?", limit)
        return [Waiting(seq, msgspec.json.decode(body, type=OUTBOX_TYPES[kind])) for seq, kind, body in rows]

    def mark_published(self, seqs: Sequence[int]) -> None:
        with self.transaction():
            self._write_all("UPDATE outbox SET published=1 WHERE seq=?", [(seq,) for seq in seqs])
            newest = max(seqs, default=0)
            self._write("DELETE FROM outbox WHERE published=1 AND seq<=?", newest - OUTBOX_KEPT_MAX)


def _intent(row: Any) -> IntentRow:
    return IntentRow(*[*row[:10], _decode_names(row[10]), *row[11:13], _decode_names(row[13]), _decode_checks(row[14])])


__all__ = ["Entry", "Fenced", "RecoveryStore", "StoreError", "Waiting"]
