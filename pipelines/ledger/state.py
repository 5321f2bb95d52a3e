"""What the ledger keeps in memory: jobs, incidents, ids it has seen; rebuilt from the tables at start."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from ingest.events import Message
from recovery.action import RECOVERY_TYPES

from .engine import duckdb
from .incidents import INCIDENTS_MAX, IncidentBook, IncidentState
from .jobs import DURATIONS_MAX, STEP_METRIC, JobBook
from .measures import EARLY_STEPS_MAX, incident_measures, job_measures
from .shapes import IncidentMeasures, IncidentPage, IncidentView, JobView
from .tables import STORY_TABLES

SEEN_MAX = 200_000  # ids remembered, newest: a redelivery comes soon
FETCH_ROWS = 5_000
LOST_AFTER_SECONDS = 60.0


class LedgerState:
    """Jobs and incidents under one lock: the writer applies, any thread asks."""

    def __init__(self, *, incidents_max: int = INCIDENTS_MAX, lost_after_seconds: float = LOST_AFTER_SECONDS) -> None:
        self._lock = threading.Lock()
        self._incidents_max = incidents_max
        self._lost_after_seconds = lost_after_seconds
        self._jobs = JobBook()
        self._incidents = IncidentBook(incidents_max, self._measures)
        self._seen: dict[str, None] = {}
        self.change = 0  # of the newest story row

    def load(self, connection: duckdb.DuckDBPyConnection, part_paths: list[str]) -> None:
        """Forget everything and build it again from the tables and parts."""
        decoders = {kind: msgspec.json.Decoder(type_) for kind, (_, type_) in RECOVERY_TYPES.items()}
        union = " UNION ALL ".join(
            f"SELECT change, kind, body, '{table.name}' AS source FROM {table.name}" for table in STORY_TABLES
        )
        with self._lock:
            self._jobs = JobBook()
            self._incidents = IncidentBook(self._incidents_max, self._measures)
            self._seen = {}
            self.change = 0
            identities = {table.name: table.identity for table in STORY_TABLES}
            connection.execute(f"SELECT change, kind, body, source FROM ({union}) ORDER BY change")
            while rows := connection.fetchmany(FETCH_ROWS):
                for change, kind, body, source in rows:
                    message = decoders[kind].decode(body)
                    self._apply(change, message)
                    identity = identities[source]
                    if identity is not None:
                        self._remember(source, identity(message))
            if part_paths:
                self._load_parts(connection, part_paths)

    def _load_parts(self, connection: duckdb.DuckDBPyConnection, part_paths: list[str]) -> None:
        paths = {"paths": part_paths}
        for job, attempt, step, at in connection.execute(
            "SELECT job, attempt, max(step), max(event_at) FROM read_parquet($paths) GROUP BY ALL ORDER BY attempt",
            paths,
        ).fetchall():
            self._jobs.restore_step(job, attempt, step, at)
        first: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for job, attempt, step, at in connection.execute(
            "SELECT job, attempt, step, min(event_at) FROM read_parquet($paths) WHERE step >= 0"
            " GROUP BY job, attempt, step"
            " QUALIFY row_number() OVER (PARTITION BY job, attempt ORDER BY step) <= $early"
            " OR step = max(step) OVER (PARTITION BY job, attempt) ORDER BY attempt, step",
            {**paths, "early": EARLY_STEPS_MAX},
        ).fetchall():
            first.setdefault((job, attempt), []).append((step, at))
        for (job, attempt), steps in first.items():
            self._jobs.restore_first_steps(job, attempt, steps)
        names: dict[str, list[str]] = {}
        for job, metric in connection.execute(
            "SELECT DISTINCT job, metric FROM read_parquet($paths)", paths
        ).fetchall():
            names.setdefault(job, []).append(metric)
        durations: dict[str, list[float]] = {}
        for job, value in connection.execute(
            "SELECT job, value FROM read_parquet($paths) WHERE metric = $metric AND isfinite(value)"
            " QUALIFY row_number() OVER (PARTITION BY job ORDER BY event_at DESC) <= $newest"
            " ORDER BY event_at",
            {**paths, "metric": STEP_METRIC, "newest": DURATIONS_MAX},
        ).fetchall():
            durations.setdefault(job, []).append(value)
        for job in names:
            self._jobs.restore_samples(job, durations.get(job, ()), names[job])

    # ---- the writer's side

    def is_known(self, source: str, identity: str) -> bool:
        """Whether a message of this identity was applied already."""
        return f"{source}/{identity}" in self._seen

    def hear(self, message: Message) -> None:
        """Take a message that has no row of its own: metrics, logs, heartbeats."""
        with self._lock:
            self._jobs.apply(message)

    def apply(self, committed: Iterable[tuple[int, str, Any, str | None]]) -> None:
        """Take what was committed just now: (change, table, message, identity)."""
        with self._lock:
            for change, source, message, identity in committed:
                self._apply(change, message)
                if identity is not None:
                    self._remember(source, identity)

    def _apply(self, change: int, message: Any) -> None:
        self.change = max(self.change, change)
        if isinstance(message, Message):
            self._jobs.apply(message)
        else:
            self._incidents.apply(change, message)

    def _remember(self, source: str, identity: str) -> None:
        self._seen[f"{source}/{identity}"] = None
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    # ---- the readers' side

    def jobs(self, now: float) -> tuple[JobView, ...]:
        with self._lock:
            counts = self._incidents.open_by_job()
            failures: dict[str, list[tuple[IncidentMeasures, bool]]] = {}
            for incident in self._incidents:
                if incident.stopped_the_job():
                    restarted = incident.action is not None and incident.action.next_attempt is not None
                    failures.setdefault(incident.job, []).append((self._measures(incident), restarted))
            return tuple(
                state.view(
                    now,
                    self._lost_after_seconds,
                    counts.get(state.job, 0),
                    job_measures(failures.get(state.job, ()), state.wall_seconds(now)),
                )
                for state in self._jobs.newest_first()
            )

    def newest_at(self) -> float:
        """The latest sign of life of any job; 0.0 where there is none."""
        with self._lock:
            return max((state.last_seen_at or 0.0 for state in self._jobs), default=0.0)

    def metric_names(self, job: str) -> tuple[str, ...]:
        with self._lock:
            state = self._jobs.get(job)
            return tuple(sorted(state.metric_names)) if state is not None else ()

    def incidents(
        self,
        *,
        job: str | None,
        state: str | None,
        fault_class: str | None,
        severity: str | None,
        after: int | None,
        limit: int,
    ) -> IncidentPage:
        with self._lock:
            return self._incidents.page(
                job=job, state=state, fault_class=fault_class, severity=severity, after=after, limit=limit
            )

    def incident(self, incident_id: str) -> IncidentView | None:
        with self._lock:
            state = self._incidents.get(incident_id)
            return state.view(self._measures(state)) if state is not None else None

    def measures(self) -> list[IncidentMeasures]:
        """What each of the remembered incidents took for which a job was stopped."""
        with self._lock:
            return [self._measures(state) for state in self._incidents if state.stopped_the_job()]

    def _measures(self, incident: IncidentState) -> IncidentMeasures:
        """Of one incident, with what its job's attempts tell. The lock is held."""
        job, action = self._jobs.get(incident.job), incident.action
        after = action.next_attempt if action is not None else None
        return incident_measures(
            incident.times,
            onset_at=incident.verdict.onset_at if incident.verdict is not None else None,
            told_at=incident.told_at,
            before=job.attempts.get(incident.attempt) if job is not None else None,
            after=job.attempts.get(after) if job is not None and after is not None else None,
            resume_step=action.resume_step if action is not None else None,
            restarted=after is not None,
        )

    def open_by_severity(self) -> dict[str, int]:
        """How many incidents are open, by severity."""
        with self._lock:
            counts: dict[str, int] = {}
            for state in self._incidents:
                if state.is_open:
                    counts[state.severity()] = counts.get(state.severity(), 0) + 1
            return counts
