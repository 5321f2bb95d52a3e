"""Which backend runs which job, and how each is made of the settings; others come by an entry point."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from random import Random
from typing import Literal, Protocol, runtime_checkable

from ingest.clock import Clock
from pipelines.errors import StatedError
from pipelines.extras import extra_of, missing_extra
from pipelines.launcher_key import KeyRefused, key_of
from pipelines.ledger_address import TokenRefused
from pipelines.places import Places
from pipelines.settings import Settings, SettingsError
from recovery.action import CheckResult
from recovery.allocation import Allocation, BackendFactory, BackendSite
from recovery.backend import (
    Backend,
    BackendError,
    Observation,
    ProbingBackend,
    Rejected,
    StartRequest,
    Unavailable,
)
from recovery.backends.local import LocalBackend
from recovery.backends.scheduled import ScheduledBackend
from recovery.launcher.job_files import BrokenJobFile, JobFiles
from recovery.launcher.proof import JobKey
from recovery.launcher.protocol import CheckName, JobEnd
from recovery.lease import ControllerLease

LOCAL = "local"
BUILT_IN = {"slurm": "recovery.backends.slurm", "kubernetes": "recovery.backends.kubernetes"}  # their make_allocation
GROUP = "transom.recovery.backends"


class BackendRefused(StatedError):
    """There is no such backend, or it cannot be made; the text says what to do."""


@runtime_checkable
class OverLaunchers(Protocol):
    """What our own backends can do besides `Backend`, because launchers run their ranks."""

    def wait_for_launchers(self, job: str, deadline_seconds: float) -> bool: ...

    def inject(self, job: str, rank: int, fault: str, parameters: dict[str, float]) -> str: ...

    def end(self, job: str) -> JobEnd | None: ...


@runtime_checkable
class HasLease(Protocol):
    """An allocation whose scheduler keeps a lease for controllers of several hosts."""

    def controller_lease(self, identity: str) -> ControllerLease: ...


@runtime_checkable
class HasRights(Protocol):
    """An allocation whose scheduler says what we may do."""

    def missing_rights(self) -> tuple[str, ...]: ...


@runtime_checkable
class HasSecrets(Protocol):
    """An allocation whose scheduler keeps the token of a job's launchers for us; empty where it has none."""

    def token(self, job: str) -> str: ...


def backend_names() -> tuple[str, ...]:
    """All that can be asked for here."""
    installed = {entry.name for entry in entry_points(group=GROUP)}
    return (LOCAL, *BUILT_IN, *sorted(installed - {LOCAL, *BUILT_IN}))


def make_backend(name: str, settings: Settings, places: Places, clock: Clock, random: Random) -> Backend:
    """The backend of that name. Raises BackendRefused, MissingExtra or SettingsError."""
    if name == LOCAL:
        return LocalBackend(places.jobs, clock, random)
    factory = _factory(name)
    site = BackendSite(places.jobs, clock, random, settings.recover.backends.get(name, {}))
    try:
        made = factory(site)
    except ValueError as error:
        raise SettingsError(f"recover.backends.{name}: {error}") from error
    if isinstance(made, Allocation):
        return ScheduledBackend(made, _Keys(places, made).of, clock, random)
    return made


def _factory(name: str) -> BackendFactory:
    try:
        if name in BUILT_IN:
            factory: BackendFactory = importlib.import_module(BUILT_IN[name]).make_allocation
            return factory
        for entry in entry_points(group=GROUP):
            if entry.name == name:
                factory = entry.load()
                return factory
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is not None:
            raise missing_extra(extra, f"the {name} backend") from error
        raise BackendRefused(f"the backend {name!r} cannot be loaded ({error}); install what it needs") from error
    raise BackendRefused(
        f"there is no backend {name!r}; there are {', '.join(backend_names())}; others come by an entry point of the "
        f"group {GROUP}"
    )


class _Keys:
    """Keys of jobs' launchers: from the job's folder, else from the scheduler's own store of secrets."""

    def __init__(self, places: Places, allocation: Allocation) -> None:
        self._places = places
        self._allocation = allocation
        self._told: dict[str, JobKey] = {}  # by the scheduler; a job's token never changes

    def of(self, job: str) -> JobKey | None:
        """Raises Unavailable."""
        try:
            found = key_of(self._places.jobs, job)
        except (KeyRefused, TokenRefused) as error:
            raise Unavailable(str(error)) from error  # a person can mend it, and nothing was done
        if found is not None or not isinstance(self._allocation, HasSecrets):
            return found
        if job not in self._told:
            token = self._allocation.token(job)
            if not token:
                return None
            self._told[job] = JobKey(job, token.encode())
        return self._told[job]


class JobBackends:
    """`Backend` for jobs of several backends at once: each job's spec says whose it is."""

    name = "jobs"

    def __init__(self, settings: Settings, places: Places, clock: Clock, random: Random) -> None:
        self._settings = settings
        self._places = places
        self._clock = clock
        self._random = random
        self.before_nodes_go: Callable[[str], object] = lambda job: None  # see ScheduledBackend
        self._made: dict[str, Backend] = {}
        self._lock = threading.Lock()  # calls for several jobs come from several threads
        self.named(settings.recover.backend)  # what is wrong with it is said now

    def named(self, name: str) -> Backend:
        """One for all calls. Raises what `make_backend` raises."""
        with self._lock:
            if name not in self._made:
                made = make_backend(name, self._settings, self._places, self._clock, self._random)
                if isinstance(made, ScheduledBackend):
                    made.before_nodes_go = lambda job: self.before_nodes_go(job)
                self._made[name] = made
            return self._made[name]

    def of(self, job: str) -> Backend:
        """The backend of a job. Raises Unavailable where it cannot be made here."""
        try:
            spec = JobFiles(self._places.jobs, job).spec()
        except ValueError:
            spec = None  # no job has such a name: whoever is asked says so
        except BrokenJobFile as error:
            raise Unavailable(f"whose job {job} is cannot be read: {error}") from error
        name = self._settings.recover.backend if spec is None else spec.backend
        try:
            return self.named(name)
        except (StatedError, ImportError) as error:
            raise Unavailable(f"the backend of job {job} cannot be made here: {error}") from error

    def controller_lease(self, identity: str) -> ControllerLease | None:
        """The lease of the scheduler that runs jobs where nothing else is said; None where it has none."""
        backend = self.named(self._settings.recover.backend)
        allocation = backend.allocation if isinstance(backend, ScheduledBackend) else None
        return allocation.controller_lease(identity) if isinstance(allocation, HasLease) else None

    def missing_rights(self) -> tuple[str, ...]:
        """What the scheduler does not let us do, a sentence each, as far as it can be told now."""
        backend = self.named(self._settings.recover.backend)
        allocation = backend.allocation if isinstance(backend, ScheduledBackend) else None
        try:
            return allocation.missing_rights() if isinstance(allocation, HasRights) else ()
        except BackendError as error:
            return (f"which rights we have cannot be told: {error}",)

    # Backend

    def observe(self, job: str) -> Observation:
        return self.of(job).observe(job)

    def start(self, request: StartRequest) -> Observation:
        return self.of(request.job).start(request)

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        return self.of(job).stop(job, attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds)

    def finish(self, job: str, outcome: Literal["finished", "failed", "stopped"], reason: str) -> None:
        self.of(job).finish(job, outcome, reason)

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        return self.of(job).collect_evidence(job, attempt, deadline_seconds=deadline_seconds)

    def probe(
        self,
        job: str,
        attempt: int,
        checks: Sequence[CheckName],
        groups: Sequence[Sequence[str]],
        *,
        seconds: float,
    ) -> list[CheckResult]:
        backend = self.of(job)
        if not isinstance(backend, ProbingBackend):
            raise Rejected(f"the backend {backend.name} has no checks")
        return backend.probe(job, attempt, checks, groups, seconds=seconds)


def over_launchers(backend: Backend) -> OverLaunchers:
    """The backend as one that has launchers. Raises BackendRefused."""
    if not isinstance(backend, OverLaunchers):
        raise BackendRefused(f"the backend {backend.name} has no launchers of ours, which this needs")
    return backend


def submit(backend: Backend, job: str, *, nodes: int, command: Sequence[str]) -> None:
    """Take a registered job's first nodes. Raises BackendRefused where somebody else has to."""
    if not isinstance(backend, ScheduledBackend):
        raise BackendRefused(f"the backend {backend.name} takes no jobs from `transom run`; submit {job} its own way")
    backend.submit(job, nodes=nodes, command=command)
