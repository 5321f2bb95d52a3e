"""Looks at jobs without a verdict: ends that nobody explains, backends that fall silent, nodes that are back.

Looking concludes nothing by itself. An end waits for a verdict first, and cannot reach is never gone: a backend that
does not answer is told to people after a while and nothing is done. All of it starts again in a new life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from detectors.verdict import Evidence, Verdict

from .backend import Backend, CheckpointCatalog, Observation
from .calls import Call, Grown, Refused, Result, Seen, Unanswered, look, look_to_grow
from .classify import DETECTOR
from .exits import Exits
from .incident import ACTING, IN_HAND, State
from .journal import Journal
from .nodes import adopt, usable_nodes
from .plan import Plan
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import IncidentRow

BLIND: tuple[State, ...] = ("blind",)
Jobs = Callable[[], Sequence[str]]  # that are registered with the backend and not over


@dataclass(slots=True)
class Looked:
    """What was seen of one job lately. Times are UTC seconds; None: it is not so."""

    not_before: float = 0.0
    alive_attempt: int = 0  # the newest that was seen to run, in this life
    down_attempt: int = 0
    down_since: float | None = None
    silent_since: float | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """A look that is out."""

    job: str


class Watch:
    """See the module. `due` says whom to look at; `seen` is called inside a transaction of the caller."""

    def __init__(
        self,
        store: RecoveryStore,
        backend: Backend,
        catalog: CheckpointCatalog,
        journal: Journal,
        exits: Exits,
        config: PolicyConfig,
        jobs: Jobs,
    ) -> None:
        self._store = store
        self._backend = backend
        self._catalog = catalog
        self._journal = journal
        self._exits = exits
        self._config = config
        self._jobs = jobs
        self._looked: dict[str, Looked] = {}
        self._listed_at = float("-inf")

    def due(self, now: float) -> list[str]:
        """Jobs to look at now. The list of jobs is read as often as one job is looked at."""
        if now - self._listed_at >= self._config.watch_seconds:
            self._listed_at = now
            listed = list(self._jobs())
            self._looked = {job: self._looked.get(job, Looked()) for job in listed}
        return [job for job, looked in self._looked.items() if now >= looked.not_before]

    def call(self, job: str, now: float) -> Call:
        """One look at a job, ready to run in another thread."""
        self._looked[job].not_before = now + self._config.watch_seconds
        backend, catalog = self._backend, self._catalog
        if self._store.job(job).nodes_wanted:
            return lambda: look_to_grow(backend, catalog, job)
        return lambda: look(backend, job)

    def seen(self, job: str, result: Result, now: float) -> None:
        """What a look has brought."""
        looked = self._looked.setdefault(job, Looked())
        self.heard(job, result, now)
        if isinstance(result, Unanswered | Refused):
            return  # nobody knows, or it is no job of this backend any more
        assert isinstance(result, Seen | Grown)
        observation = result.observation
        if observation.phase == "finished" or observation.ended:
            self._journal.job_over(job, observation.phase, "", now)
            return
        adopt(self._store, observation, now)
        self._down(looked, observation, now)
        if isinstance(result, Grown):
            self._may_grow(result, now)

    def overheard(self, job: str, result: Result, now: float) -> None:
        """A look that somebody else had asked for tells of a watched job as much as one of our own."""
        if job in self._looked:
            self.seen(job, result, now)

    def heard(self, job: str, result: Result, now: float) -> None:
        """Does the backend answer about a job that is watched? Whoever asked, for whatever reason."""
        looked = self._looked.get(job)
        if looked is None:
            return
        if isinstance(result, Unanswered):
            self._silent(job, looked, result.text, now)
        else:
            looked.silent_since = None
            self._answers(job, now)

    def _down(self, looked: Looked, observation: Observation, now: float) -> None:
        if any(rank.state != "exited" for rank in observation.ranks):
            looked.alive_attempt = observation.attempt
        if not self._ended_lately(looked, observation, now) or not self._exits.unexplained(observation):
            looked.down_since = None
            return
        if looked.down_since is None or looked.down_attempt != observation.attempt:
            looked.down_attempt, looked.down_since = observation.attempt, now
        waited = now - looked.down_since
        if waited >= self._config.exit_grace_seconds:
            looked.down_since = None
            self._exits.open(observation, waited, now)

    def _ended_lately(self, looked: Looked, observation: Observation, now: float) -> bool:
        """It ran while we looked, or we started it a moment ago: not a job that somebody left behind last week."""
        if looked.alive_attempt == observation.attempt:
            return True
        since = now - self._config.verdict_seconds_max
        ours = (one for one in self._store.attempts(observation.job) if one.attempt == observation.attempt)
        return any(one.started_at is not None and one.started_at >= since for one in ours)

    # A backend that does not answer

    def _silent(self, job: str, looked: Looked, text: str, now: float) -> None:
        if looked.silent_since is None:
            looked.silent_since = now
        waited = now - looked.silent_since
        if waited < self._config.blind_seconds_max or self._blind(job) is not None:
            return
        attempt = max((one.attempt for one in self._store.attempts(job)), default=0)
        incident_id = f"{job}/{attempt}/recovery/blind/{int(looked.silent_since)}"
        if self._store.incident(incident_id) is not None:
            return
        incident = self._store.open_incident(incident_id, job, attempt, now)
        words = f"the backend has not answered about {job} for {waited / 60:.0f} min, so nothing is known: {text}"
        plan = Plan("notify", "auto", "unknown", incident_id, 0, f"{words}; nothing is done")
        self._journal.tell(incident, plan, "auto", "done", words, now)
        self._store.move(incident, "blind", words, now)

    def _answers(self, job: str, now: float) -> None:
        incident = self._blind(job)
        if incident is not None:
            self._store.move(incident, "seen", "the backend answers again", now)

    def _blind(self, job: str) -> IncidentRow | None:
        return next(iter(self._store.unfinished(job, BLIND)), None)

    # A job on fewer nodes than it wants

    def _may_grow(self, grown: Grown, now: float) -> None:
        """Nodes are back: at a checkpoint that keeps what was trained since, the job takes them."""
        observation, store = grown.observation, self._store
        job, attempt = observation.job, observation.attempt
        wanted = store.job(job).nodes_wanted
        usable = usable_nodes(observation, store.excluded(job, now))
        mine = next((one for one in store.attempts(job) if one.attempt == attempt), None)
        busy = any(one.state in ACTING | IN_HAND | {"probation"} for one in store.unfinished(job))
        if not wanted or usable < wanted or observation.phase != "running" or mine is None or busy:
            return
        kept = -1 if mine.resume_step is None else mine.resume_step
        if grown.choice is None or grown.choice.step <= kept:
            return
        verdict = Verdict(
            verdict_id=f"{job}/{attempt}/recovery/grow",
            revision=1,
            job=job,
            attempt=attempt,
            fault_class="planned",
            severity="info",
            settled=True,
            onset_at=now,
            at=now,
            onset_step=observation.step if observation.step >= 0 else None,
            advice="restart_in_place",
            summary=f"Nodes are back: the job grows to {wanted} nodes at its checkpoint of step {grown.choice.step}.",
            evidence=(Evidence(kind="event", text=f"{usable} nodes can be used, {wanted} are wanted", at=now),),
            detector=DETECTOR,
        )
        if store.incident(verdict.verdict_id) is None:
            incident = store.open_incident(verdict.verdict_id, job, attempt, now)
            store.insert_filed(verdict, verdict.verdict_id, "made by recovery", now)
            store.append(verdict)
            store.move(incident, "settled", verdict.summary, now)
