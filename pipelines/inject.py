"""`transom inject`: break one rank of a running job on purpose, through the launcher that owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from ingest.clock import Clock
from pipelines.backends import over_launchers
from pipelines.errors import StatedError
from pipelines.injectable import FAULTS
from pipelines.places import Places
from recovery.backend import Backend
from recovery.backends.local import LocalBackend


class InjectRefused(StatedError):
    """The fault cannot be done; nothing was touched."""


class Injector:
    """Finds the launcher of a rank and tells it what to do."""

    def __init__(self, places: Places, clock: Clock, backend_of: Callable[[str], Backend] | None = None) -> None:
        self._places = places
        self._backend_of = backend_of or (lambda job: LocalBackend(places.jobs, clock, Random()))

    def inject(self, job: str, rank: int, fault: str, parameters: Mapping[str, float]) -> None:
        """Do `fault` to `rank`. Raises InjectRefused; what the backend raises passes through."""
        if fault not in FAULTS:
            raise InjectRefused(f"there is no fault {fault!r}; known: {', '.join(sorted(FAULTS))}")
        unknown = set(parameters) - set(FAULTS[fault].parameters)
        if unknown:
            known = ", ".join(FAULTS[fault].parameters) or "none"
            raise InjectRefused(f"{fault} does not read {min(unknown)}; its parameters: {known}")
        if not self._places.job(job).exists():
            raise InjectRefused(
                f"there is no job {job!r} in {self._places.state}; `transom run --allow-inject` makes one"
            )
        refusal = over_launchers(self._backend_of(job)).inject(job, rank, fault, dict(parameters))
        if refusal:
            raise InjectRefused(refusal)
