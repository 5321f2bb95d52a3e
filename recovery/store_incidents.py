"""Incidents: those that are not over stay in memory, indexed; what changes is written at the end of its transaction.

A flood opens thousands that only tell people: nobody may have to read all of them to find the one that acts, and an
incident that moves three times in one transaction is written once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from .incident import TERMINAL, State
from .plan import Plan
from .store_file import StoreFile
from .store_schema import IncidentRow

_encode = msgspec.json.Encoder().encode
_decode_plan = msgspec.json.Decoder(Plan).decode

_INCIDENT = "incident_id, job, attempt, state, sequence, opened_at, entered_at, due_at, action_id, approved_hash, plan"
_SAVE = (
    f"INSERT INTO incidents ({_INCIDENT}, terminal) VALUES (?,?,?,?,?,?,?,?,?,?,?,?) "
    "ON CONFLICT (incident_id) DO UPDATE SET "
    "attempt=excluded.attempt, state=excluded.state, sequence=excluded.sequence, entered_at=excluded.entered_at, "
    "due_at=excluded.due_at, action_id=excluded.action_id, approved_hash=excluded.approved_hash, plan=excluded.plan, "
    "terminal=excluded.terminal"
)


class OpenIncidents:
    """Incidents in no terminal state, by id, by state, and by job and state; in the order in which they were opened."""

    def __init__(self, rows: Iterable[IncidentRow]) -> None:
        self._rows: dict[str, IncidentRow] = {}
        self._numbers: dict[str, int] = {}  # the order
        self._in_state: dict[State, dict[str, None]] = {}
        self._of_job: dict[str, dict[State, dict[str, None]]] = {}
        self._opened = 0
        for row in rows:
            self.put(row)

    def get(self, incident_id: str) -> IncidentRow | None:
        return self._rows.get(incident_id)

    def put(self, row: IncidentRow) -> None:
        """As it is now; one that is over leaves."""
        name, before = row.incident_id, self._rows.get(row.incident_id)
        if before is not None and before.state != row.state:
            self._leave(before)
        if row.state in TERMINAL:
            self._rows.pop(name, None)
            self._numbers.pop(name, None)
            return
        self._rows[name] = row
        if before is None:
            self._opened += 1
            self._numbers[name] = self._opened
        if before is None or before.state != row.state:
            self._in_state.setdefault(row.state, {})[name] = None
            self._of_job.setdefault(row.job, {}).setdefault(row.state, {})[name] = None

    def _leave(self, row: IncidentRow) -> None:
        name, states = row.incident_id, self._of_job[row.job]
        self._in_state[row.state].pop(name, None)
        states[row.state].pop(name, None)
        if not states[row.state]:
            del states[row.state]
        if not states:
            del self._of_job[row.job]

    def select(self, job: str | None, states: Collection[State]) -> list[IncidentRow]:
        groups = self._in_state if job is None else self._of_job.get(job, {})
        chosen = [group for state, group in groups.items() if not states or state in states]
        rows = [self._rows[name] for group in chosen for name in group]
        return sorted(rows, key=lambda row: (row.opened_at, self._numbers[row.incident_id]))


class Incidents(StoreFile):
    """Rows by id. Whoever reads the file beside us sees what is committed."""

    _open_rows: OpenIncidents | None
    _changed: dict[str, IncidentRow]

    def _forget(self) -> None:
        super()._forget()
        self._open_rows = None
        self._changed = {}

    def _flush(self) -> None:
        if self._changed:
            rows, self._changed = self._changed, {}
            self._write_all(_SAVE, [_values(row) for row in rows.values()])
        super()._flush()

    def open_incident(self, incident_id: str, job: str, attempt: int, now: float) -> IncidentRow:
        """A new one; an id is opened once."""
        assert self.incident(incident_id) is None, f"incident {incident_id} is opened twice"
        row = IncidentRow(incident_id, job, attempt, "open", 0, now, now, now)
        self.save_incident(row)
        return row

    def save_incident(self, row: IncidentRow) -> None:
        assert self._in_transaction
        self._still_open().put(row)
        self._changed[row.incident_id] = row

    def incident(self, incident_id: str) -> IncidentRow | None:
        known = self._changed.get(incident_id) or self._still_open().get(incident_id)
        if known is not None:
            return known
        row = self._one(f"SELECT {_INCIDENT} FROM incidents WHERE incident_id=?", incident_id)
        return _incident(row) if row else None

    def unfinished(self, job: str | None = None, states: Collection[State] = ()) -> list[IncidentRow]:
        """Incidents that are in no terminal state (where given, in one of these), oldest first."""
        return self._still_open().select(job, states)

    def _still_open(self) -> OpenIncidents:
        if self._open_rows is None:
            query = f"SELECT {_INCIDENT} FROM incidents WHERE terminal = 0 ORDER BY opened_at, rowid"
            self._open_rows = OpenIncidents(_incident(row) for row in self._all(query))
        return self._open_rows


def _incident(row: Any) -> IncidentRow:
    plan = _decode_plan(row[10]) if row[10] is not None else None
    return IncidentRow(*[*row[:10], plan])


def _values(row: IncidentRow) -> tuple[Any, ...]:
    return (
        row.incident_id, row.job, row.attempt, row.state, row.sequence, row.opened_at, row.entered_at, row.due_at,
        row.action_id, row.approved_hash, _encode(row.plan) if row.plan else None, row.state in TERMINAL,
    )  # fmt: skip
