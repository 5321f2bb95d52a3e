"""Recovery's memory: one SQLite file (WAL, every commit synced) that survives kill -9 at any instant.

All of a decision is one transaction: the state of the incident, its intent, its counters and the messages
that tell of it. So nothing is done that was not written before, and no audit row is lost: what was not
published when we died is published by the next life, in order, with the same ids. One process, one thread: the
lease sees to that, and every transaction checks that nobody has opened the file since.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from detectors.verdict import Verdict

from .action import Command, Incident
from .incident import TERMINAL, Event, transition
from .lease import Lease
from .policy import Plan
from .store_schema import (
    OUTBOX_TYPES,
    SCHEMA,
    SCHEMA_VERSION,
    AttemptRow,
    IncidentRow,
    IntentRow,
    JobRow,
    OutboxMessage,
    Place,
    Rejection,
)

OUTBOX_KEPT_MAX = 10_000  # published messages that stay for a look back
_encode = msgspec.json.Encoder().encode
_decode_verdict = msgspec.json.Decoder(Verdict).decode
_decode_command = msgspec.json.Decoder(Command).decode
_decode_plan = msgspec.json.Decoder(Plan).decode
_decode_names = msgspec.json.Decoder(tuple[str, ...]).decode
_decode_places = msgspec.json.Decoder(tuple[Place, ...]).decode
_decode_counts = msgspec.json.Decoder(dict[str, int]).decode


class StoreError(Exception):
    """The file cannot be relied on, so recovery must not act; the text is one sentence with what to do."""


class Fenced(StoreError):
    """A newer controller has opened this file; this one must stop at once."""


class Entry(NamedTuple):
    """A verdict in the inbox that nobody has looked at yet."""

    seq: int
    verdict: Verdict


class Waiting(NamedTuple):
    """A message to publish; hand `seq` to `mark_published` once the bus has it."""

    seq: int
    message: OutboxMessage


class RecoveryStore:
    """See the module. `durable=False` leaves the syncing to the kernel: for simulations, no power is lost."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lease = Lease(path.with_name(path.name + ".lock"))
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        except (OSError, sqlite3.DatabaseError):
            self._lease.release()
            raise
        try:
            self._open(durable)
        except (sqlite3.DatabaseError, StoreError) as error:
            self.close()
            raise (error if isinstance(error, StoreError) else self._unreliable(error)) from error
        self._in_transaction = False

    def _open(self, durable: bool) -> None:
        run = self._connection.execute
        run("PRAGMA journal_mode=WAL")
        run(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        verdict = run("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(" ".join(str(verdict).split()))
        version = run("PRAGMA user_version").fetchone()[0]
        run("BEGIN IMMEDIATE")
        if version == 0:
            for statement in SCHEMA.split(";\n"):
                run(statement)
            run("INSERT INTO meta VALUES ('epoch', 0)")
            run(f"PRAGMA user_version={SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} has schema version {version}, this recovery reads {SCHEMA_VERSION}; "
                "use the version of Transom that wrote it, or move the file aside"
            )
        run("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
        self.epoch: int = run("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0]
        run("COMMIT")

    def _unreliable(self, error: sqlite3.DatabaseError) -> StoreError:
        return StoreError(
            f"recovery's state file {self.path} cannot be relied on ({error}), so nothing is done; make room "
            "or move the file aside and start again, attempts are then read from the backend"
        )

    def close(self) -> None:
        """Give the file and the lease back; what was not committed is as if it never was. Idempotent."""
        self._connection.close()
        self._lease.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside happen, or none. Raises Fenced if somebody else has opened the file since."""
        assert not self._in_transaction
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._in_transaction = True
            newest = self._one("SELECT value FROM meta WHERE key = 'epoch'")[0]
            if newest != self.epoch:
                raise Fenced(f"a newer recovery (epoch {newest}, ours is {self.epoch}) has taken over {self.path}")
            yield
            self._commit()
        except sqlite3.DatabaseError as error:
            raise self._unreliable(error) from error
        finally:
            self._in_transaction = False
            if self._connection.in_transaction:
                self._connection.rollback()

    def _commit(self) -> None:
        self._connection.execute("COMMIT")

    def _write(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._in_transaction
        return self._connection.execute(statement, values)

    def _one(self, query: str, *values: Any) -> Any:
        return self._connection.execute(query, values).fetchone()

    def _all(self, query: str, *values: Any) -> list[Any]:
        return self._connection.execute(query, values).fetchall()

    # inbox and commands ---------------------------------------------------------------------------

    def insert_verdict(self, verdict: Verdict, now: float) -> bool:
        """True if this revision is new; a redelivery is counted and nothing else."""
        values = (verdict.verdict_id, verdict.revision, verdict.job, verdict.attempt, _encode(verdict), now)
        columns = "verdict_id, revision, job, attempt, body, accepted_at"
        done = self._write(f"INSERT OR IGNORE INTO inbox ({columns}) VALUES (?,?,?,?,?,?)", *values)
        if done.rowcount:
            return True
        self._write("UPDATE inbox SET duplicates = duplicates + 1 WHERE verdict_id=? AND revision=?", *values[:2])
        return False

    def new_verdicts(self, limit: int) -> list[Entry]:
        rows = self._all("SELECT seq, body FROM inbox WHERE outcome = '' ORDER BY seq LIMIT ?", limit)
        return [Entry(seq, _decode_verdict(body)) for seq, body in rows]

    def file_verdict(self, seq: int, outcome: str, incident_id: str | None) -> None:
        """Say what became of an inbox entry; it is not looked at again, except as part of its incident."""
        assert outcome
        self._write("UPDATE inbox SET outcome=?, incident_id=? WHERE seq=?", outcome, incident_id, seq)

    def outcomes(self) -> list[tuple[str, int, str, int]]:
        """(verdict_id, revision, outcome, duplicates) of the whole inbox, oldest first."""
        return self._all("SELECT verdict_id, revision, outcome, duplicates FROM inbox ORDER BY seq")

    def incident_of_verdict(self, verdict_id: str) -> str | None:
        """The incident that an earlier revision of this verdict belongs to."""
        row = self._one(
            "SELECT incident_id FROM inbox WHERE verdict_id=? AND incident_id IS NOT NULL LIMIT 1", verdict_id
        )
        return row[0] if row else None

    def verdicts_of(self, incident_id: str) -> list[Verdict]:
        """The newest revision of each verdict of an incident, in the order they first came."""
        newest: dict[str, Verdict] = {}
        for (body,) in self._all("SELECT body FROM inbox WHERE incident_id=? ORDER BY seq", incident_id):
            verdict = _decode_verdict(body)
            known = newest.get(verdict.verdict_id)
            if known is None or verdict.revision > known.revision:
                newest[verdict.verdict_id] = verdict
        return list(newest.values())

    def insert_command(self, command: Command, now: float) -> bool:
        columns = "command_id, body, accepted_at"
        values = (command.command_id, _encode(command), now)
        return bool(self._write(f"INSERT OR IGNORE INTO commands ({columns}) VALUES (?,?,?)", *values).rowcount)

    def new_commands(self, limit: int) -> list[tuple[int, Command]]:
        rows = self._all("SELECT seq, body FROM commands WHERE outcome = '' ORDER BY seq LIMIT ?", limit)
        return [(seq, _decode_command(body)) for seq, body in rows]

    def file_command(self, seq: int, outcome: str) -> None:
        self._write("UPDATE commands SET outcome=? WHERE seq=?", outcome, seq)

    # incidents ------------------------------------------------------------------------------------

    _INCIDENT = (
        "incident_id, job, attempt, state, sequence, opened_at, entered_at, due_at, action_id, approved_hash, plan"
    )

    def open_incident(self, incident_id: str, job: str, attempt: int, now: float) -> IncidentRow:
        row = IncidentRow(incident_id, job, attempt, "open", 0, now, now, now)
        marks = "?,?,?,?,?,?,?,?,'','',NULL,0"
        values = (incident_id, job, attempt, row.state, row.sequence, now, now, now)
        self._write(f"INSERT INTO incidents ({self._INCIDENT}, terminal) VALUES ({marks})", *values)
        return row

    def incident(self, incident_id: str) -> IncidentRow | None:
        row = self._one(f"SELECT {self._INCIDENT} FROM incidents WHERE incident_id=?", incident_id)
        return _incident(row) if row else None

    def unfinished(self, job: str | None = None) -> list[IncidentRow]:
        """Incidents that are in no terminal state, oldest first."""
        where = "terminal = 0" + ("" if job is None else " AND job = ?")
        query = f"SELECT {self._INCIDENT} FROM incidents WHERE {where} ORDER BY opened_at, rowid"
        return [_incident(row) for row in self._all(query, *([] if job is None else [job]))]

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

    # intents, attempts, jobs ----------------------------------------------------------------------

    def save_intent(self, row: IntentRow) -> None:
        self._write(
            "INSERT OR REPLACE INTO intents VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
            row.action_id, row.incident_id, row.job, row.attempt, row.phase, row.created_at, row.token,
            row.next_attempt, row.resume_step, row.resume_tier, _encode(row.excluded), row.note,
        )  # fmt: skip

    def intent(self, action_id: str) -> IntentRow | None:
        row = self._one("SELECT * FROM intents WHERE action_id=?", action_id)
        return _intent(row) if row else None

    def intents(self) -> list[IntentRow]:
        return [_intent(row) for row in self._all("SELECT * FROM intents ORDER BY created_at, rowid")]

    def save_attempt(self, row: AttemptRow) -> None:
        self._write(
            "INSERT OR REPLACE INTO attempts VALUES (?,?,?,?,?,?,?)",
            row.job, row.attempt, row.token, row.persisted_at, row.started_at, row.resume_step,
            _encode(row.places),
        )  # fmt: skip

    def attempts(self, job: str) -> list[AttemptRow]:
        """Attempts that we started or were about to, oldest first."""
        rows = self._all("SELECT * FROM attempts WHERE job=? ORDER BY attempt", job)
        return [AttemptRow(*[*row[:6], _decode_places(row[6])]) for row in rows]

    def job(self, job: str) -> JobRow:
        row = self._one("SELECT * FROM jobs WHERE job=?", job)
        return JobRow(*[*row[:4], _decode_counts(row[4]), row[5]]) if row else JobRow(job)

    def save_job(self, row: JobRow) -> None:
        self._write(
            "INSERT OR REPLACE INTO jobs VALUES (?,?,?,?,?,?)",
            row.job, row.outcome, row.reason, row.furthest_step, _encode(row.no_progress),
            row.startup_failures,
        )  # fmt: skip

    def exclude(self, job: str, nodes: Sequence[str], verdict_id: str, now: float) -> None:
        for node in nodes:
            self._write("INSERT OR IGNORE INTO exclusions VALUES (?,?,?,?)", job, node, now, verdict_id)

    def excluded(self, job: str) -> tuple[str, ...]:
        return tuple(row[0] for row in self._all("SELECT node FROM exclusions WHERE job=? ORDER BY at, node", job))

    def reject(self, rejection: Rejection) -> None:
        """Write down that checkpoints must be rejected; the lowest step of a verdict wins."""
        known = self._one(
            "SELECT step FROM rejections WHERE job=? AND verdict_id=?", rejection.job, rejection.verdict_id
        )
        if known is None or rejection.step < known[0]:
            values = (rejection.job, rejection.step, rejection.attempt, rejection.reason, rejection.verdict_id)
            self._write("INSERT OR REPLACE INTO rejections VALUES (?,?,?,?,0,?)", *values)

    def open_rejections(self) -> list[Rejection]:
        """Rejections that no catalog has confirmed yet."""
        rows = self._all("SELECT job, step, attempt, reason, verdict_id FROM rejections WHERE done = 0")
        return [Rejection(*row) for row in rows]

    def rejection_done(self, rejection: Rejection) -> None:
        self._write(
            "UPDATE rejections SET done=1 WHERE job=? AND verdict_id=? AND step=?",
            rejection.job, rejection.verdict_id, rejection.step,
        )  # fmt: skip

    def save_stacks(self, job: str, attempt: int, stacks: dict[int, str], now: float) -> None:
        for rank, text in stacks.items():
            self._write("INSERT OR REPLACE INTO stacks VALUES (?,?,?,?,?)", job, attempt, rank, now, text)

    def stacks(self, job: str, attempt: int) -> dict[int, str]:
        """Python stacks by rank as they were collected before this attempt was stopped."""
        return dict(self._all("SELECT rank, text FROM stacks WHERE job=? AND attempt=?", job, attempt))

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
    return IntentRow(*[*row[:10], _decode_names(row[10]), row[11]])
