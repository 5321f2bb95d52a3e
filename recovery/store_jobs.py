"""What lives with a job through its attempts: attempts, counters, nodes, checkpoints to reject, stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from .plan import Counters, Exclusion, Restart
from .store_file import StoreFile
from .store_schema import AttemptRow, JobRow, Place, Rejection

_encode = msgspec.json.Encoder().encode
_decode_places = msgspec.json.Decoder(tuple[Place, ...]).decode
_decode_counts = msgspec.json.Decoder(dict[str, int]).decode
_NOWHERE = _encode(())

_ATTEMPT = "job, attempt, token, persisted_at, started_at, resume_step, places, budget, cause, nodes"
_JOB = "job, outcome, reason, furthest_step, no_progress, startup_failures, held, breaker_reset_at, nodes_wanted"
_EXCLUSION = "node, at, until, verdict_id, reason, rest, told"


KNOWN_JOBS_MAX = 1_000


class _Known:
    """What was read of one job, until something of it is written."""

    __slots__ = ("attempts", "exclusions", "job", "strikes")

    def __init__(self) -> None:
        self.job: JobRow | None = None
        self.attempts: list[AttemptRow] | None = None
        self.exclusions: list[Exclusion] | None = None  # also those that have ended
        self.strikes: list[tuple[str, float]] | None = None


class Jobs(StoreFile):
    """Rows by job, each read once until it is written; times are the controller's, UTC seconds."""

    _known: dict[str, _Known]

    def _forget(self) -> None:
        super()._forget()
        self._known = {}

    def _known_of(self, job: str) -> _Known:
        known = self._known.get(job)
        if known is None:
            if len(self._known) >= KNOWN_JOBS_MAX:
                self._known.clear()
            known = self._known[job] = _Known()
        return known

    def _write_of(self, job: str, statement: str, *values: Any) -> int:
        """Write something of a job; how many rows it was."""
        self._known.pop(job, None)
        return self._write(statement, *values).rowcount

    def save_attempt(self, row: AttemptRow) -> None:
        self._write_of(
            row.job,
            f"INSERT OR REPLACE INTO attempts ({_ATTEMPT}) VALUES (?,?,?,?,?,?,?,?,?,?)",
            row.job, row.attempt, row.token, row.persisted_at, row.started_at, row.resume_step,
            _encode(row.places), row.budget, row.cause, row.nodes,
        )  # fmt: skip
        if row.places:  # nobody asks where older ones ran, and thousands of ranks in each make every look dear
            older = "job=? AND attempt<? AND places<>?"
            self._write_of(
                row.job, f"UPDATE attempts SET places=? WHERE {older}", _NOWHERE, row.job, row.attempt, _NOWHERE
            )

    def attempts(self, job: str) -> list[AttemptRow]:
        """Attempts that we started or were about to, oldest first."""
        known = self._known_of(job)
        if known.attempts is None:
            rows = self._all(f"SELECT {_ATTEMPT} FROM attempts WHERE job=? ORDER BY attempt", job)
            known.attempts = [AttemptRow(*[*row[:6], _decode_places(row[6]), *row[7:]]) for row in rows]
        return list(known.attempts)

    def job(self, job: str) -> JobRow:
        known = self._known_of(job)
        if known.job is None:
            row = self._one(f"SELECT {_JOB} FROM jobs WHERE job=?", job)
            known.job = JobRow(*[*row[:4], _decode_counts(row[4]), *row[5:]]) if row else JobRow(job)
        return known.job

    def save_job(self, row: JobRow) -> None:
        self._write_of(
            row.job,
            f"INSERT OR REPLACE INTO jobs ({_JOB}) VALUES (?,?,?,?,?,?,?,?,?)",
            row.job, row.outcome, row.reason, row.furthest_step, _encode(row.no_progress),
            row.startup_failures, row.held, row.breaker_reset_at, row.nodes_wanted,
        )  # fmt: skip

    def jobs(self) -> list[JobRow]:
        """Every job that anything is known of, by name."""
        rows = self._all(f"SELECT {_JOB} FROM jobs ORDER BY job")
        return [JobRow(*[*row[:4], _decode_counts(row[4]), *row[5:]]) for row in rows]

    def counters(self, job: str, now: float, window_seconds: float, strikes_seconds: float) -> Counters:
        """What the policy counts by: restarts and strikes within their windows, exclusions in force."""
        known = self._known_of(job)
        if known.strikes is None:
            known.strikes = self._all("SELECT node, at FROM strikes WHERE job=?", job)
        restarts = [
            Restart(one.persisted_at, one.cause, one.budget)
            for one in self.attempts(job)
            if one.persisted_at >= now - window_seconds
        ]
        strikes = Counter(node for node, at in known.strikes if at > now - strikes_seconds)
        row = self.job(job)
        return Counters(
            restarts=tuple(restarts),
            no_progress=row.no_progress,
            startup_failures=row.startup_failures,
            furthest_step=row.furthest_step,
            strikes=dict(strikes),
            exclusions=tuple(self.exclusions(job, now)),
            breaker_reset_at=row.breaker_reset_at,
        )

    # nodes

    def exclude(self, job: str, exclusion: Exclusion) -> None:
        """Keep a node away until then; one that is away already stays so at least as long. Idempotent."""
        known = self._one(f"SELECT {_EXCLUSION} FROM exclusions WHERE job=? AND node=?", job, exclusion.node)
        if known is not None and known[3] == exclusion.verdict_id:
            return
        if known is not None:
            before = _exclusion(known)
            later = max(before.until, exclusion.until)
            exclusion = replace(exclusion, until=later, rest=exclusion.rest and before.rest, told=before.told)
        row = (exclusion.node, exclusion.at, exclusion.until, exclusion.verdict_id, exclusion.reason)
        self._write_of(
            job,
            f"INSERT OR REPLACE INTO exclusions (job, {_EXCLUSION}) VALUES (?,?,?,?,?,?,?,?)",
            job, *row, exclusion.rest, exclusion.told,
        )  # fmt: skip
        if not exclusion.rest:
            values = (job, exclusion.node, exclusion.at, exclusion.verdict_id)
            self._write_of(job, "INSERT OR IGNORE INTO quarantines VALUES (?,?,?,?)", *values)

    def exclusions(self, job: str, now: float) -> list[Exclusion]:
        """Those in force, oldest first."""
        known = self._known_of(job)
        if known.exclusions is None:
            query = f"SELECT {_EXCLUSION} FROM exclusions WHERE job=? ORDER BY at, node"
            known.exclusions = [_exclusion(row) for row in self._all(query, job)]
        return [one for one in known.exclusions if one.until > now]

    def excluded(self, job: str, now: float) -> tuple[str, ...]:
        """Nodes that the next attempt must not use, oldest exclusion first."""
        return tuple(one.node for one in self.exclusions(job, now))

    def released(self, job: str, now: float) -> tuple[str, ...]:
        """Nodes that a backend still keeps away because of us, and need not any more."""
        query = "SELECT node FROM exclusions WHERE job=? AND until<=? AND told=1 ORDER BY at, node"
        return tuple(row[0] for row in self._all(query, job, now))

    def exclusions_told(self, job: str, excluded: Sequence[str], released: Sequence[str]) -> None:
        """A start has given the backend these: it keeps the first away, and the others no more."""
        for node in excluded:
            self._write_of(job, "UPDATE exclusions SET told=1 WHERE job=? AND node=?", job, node)
        for node in released:
            self._write_of(job, "DELETE FROM exclusions WHERE job=? AND node=? AND told=1", job, node)

    def release(self, job: str, node: str, now: float, *, known_there: bool = False) -> bool:
        """End the exclusion of a node; its strikes stay. `known_there`: the backend has it released already."""
        if known_there:
            return bool(self._write_of(job, "DELETE FROM exclusions WHERE job=? AND node=?", job, node))
        values = (now, job, node, now)
        return bool(self._write_of(job, "UPDATE exclusions SET until=? WHERE job=? AND node=? AND until>?", *values))

    def quarantines(self, job: str, node: str) -> int:
        """How often the node was put into quarantine so far."""
        return int(self._one("SELECT COUNT(*) FROM quarantines WHERE job=? AND node=?", job, node)[0])

    def strike(self, job: str, nodes: Sequence[str], verdict_id: str, now: float) -> None:
        """The verdict counts against these nodes; once each, however often it is decided."""
        for node in nodes:
            self._write_of(job, "INSERT OR IGNORE INTO strikes VALUES (?,?,?,?)", job, node, now, verdict_id)

    # checkpoints and stacks

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


def _exclusion(row: Any) -> Exclusion:
    return Exclusion(*[*row[:5], bool(row[5]), bool(row[6])])
