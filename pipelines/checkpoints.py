"""The checkpoint engine wired in: one engine as a process, and all engines of a job as recovery's catalog."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.counters import gauge, merged
from ckpt_engine.errors import CheckpointError, EngineUnavailable
from ckpt_engine.event import EngineEvent
from ckpt_engine.manifest import MANIFEST, StepRecord, complete_steps, rejection_of, step_folder
from ckpt_engine.objecttier import open_objects
from ckpt_engine.rejection import Rejection, add_rejection
from ckpt_engine.status import AgreedStep, EngineStatus, newest_agreed
from ckpt_engine.storage import Storage
from ckpt_engine.verification import Verification, add_verification
from ingest.bus import Bus, BusError, Producer
from ingest.clock import SystemClock
from ingest.codec import Codec
from ingest.events import CheckpointEvent
from pipelines.backends import JobBackends
from pipelines.own_process import raise_open_files_max
from pipelines.places import Places
from pipelines.proving import SavedStep
from pipelines.ring import ring_of
from pipelines.run import node_names, nodes_of, read_job
from pipelines.settings import Settings
from recovery.backend import Backend, BackendError, CheckpointChoice, Unavailable
from recovery.backends.scheduled import ScheduledBackend

FLUSH_SECONDS_MAX = 2.0
ADMIN_SECONDS_MAX = 2.0

logger = logging.getLogger("transom.ckpt")


class EventPublisher:
    """Puts the engine's story on the bus; a bus that is away costs the story, never a checkpoint."""

    def __init__(self, job: str, node: str, producer: Producer) -> None:
        self._job = job
        self._node = node
        self._producer = producer
        self._codec = Codec()
        self._sequences: dict[tuple[int, int], count[int]] = {}

    def __call__(self, event: EngineEvent) -> None:
        """Publish one event. Called from the engine's own thread for events."""
        sequence = next(self._sequences.setdefault((event.attempt, event.rank), count()))
        message = CheckpointEvent(
            job=self._job, attempt=event.attempt, rank=event.rank, node=self._node, sequence=sequence, at=event.at,
            state=event.state, step=event.step, tier=event.tier, size_bytes=event.size_bytes, seconds=event.seconds,
            reason=event.reason,
        )  # fmt: skip
        encoded = self._codec.encode(message)
        try:
            self._producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
            self._producer.flush(FLUSH_SECONDS_MAX)
        except BusError as error:
            logger.warning("an event of step %d is not on the bus yet: %s", event.step, error)


def serve_engine(places: Places, job: str, node: str, bus: Bus, settings: Settings, guardian: int = 0) -> None:
    """Run the engine of one node until SIGTERM; then what memory holds is brought to disk.

    `guardian` is the process that starts the next engine if this one falls; 0: nobody knows.
    """
    from ckpt_engine.engine import Engine, EngineConfig  # recovery, which only asks engines, starts without it

    raise_open_files_max()
    spec, options = read_job(places, job)
    # The ring of a scheduler's job is of whoever is in the job's folder, in the order of their names.
    nodes = node_names(spec, options) if spec.backend == "local" else ()
    ring, ring_off = ring_of(settings, nodes, several=spec.nodes + options.spares > 1)
    config = EngineConfig(
        job=job,
        node=node,
        socket_path=places.socket(job, node, "ckpt"),
        directory=places.checkpoints(job),
        memory_bytes_max=options.memory_bytes_max,
        retention_steps=options.keep_complete,
        keep_every_steps=settings.checkpoint.disk.keep_every_steps,
        persist_bytes_per_second_max=settings.checkpoint.disk.bytes_per_second_max,
        persist_io_class=settings.checkpoint.disk.io_priority,
        deduplicate=settings.checkpoint.disk.deduplicate,
        objects_url=settings.checkpoint.objects.url or "",
        objects_retention_steps=settings.checkpoint.objects.keep_complete,
        objects_bytes_per_second_max=settings.checkpoint.objects.bytes_per_second_max,
        keeper_seconds_max=settings.checkpoint.keeper_seconds,
        guardian=guardian,
        ring=ring,
        ring_off=ring_off,
    )
    producer = bus.producer()
    try:
        Engine(config, EventPublisher(job, node, producer)).run()
    finally:
        producer.close()
        bus.close()


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of one engine's memory. `reason` is empty where all of it is on disk."""

    node: str
    done: bool
    reason: str


class EngineCatalog:
    """`CheckpointCatalog` over the engines of jobs and their checkpoint folders.

    Engines on other machines are asked through their launchers, where `backend_of` is given.
    """

    def __init__(
        self, places: Places, backend_of: Callable[[str], Backend] | None = None, objects_url: str = ""
    ) -> None:
        self._places = places
        self._backend_of = backend_of
        self._objects_url = objects_url

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        """See the Protocol. A node whose engine does not answer has nothing in memory."""
        agreed = self.agreed(job, self.statuses(job), places, before_step)
        return None if agreed is None else CheckpointChoice(step=agreed.step, tier=agreed.tier)

    def agreed(
        self,
        job: str,
        statuses: Sequence[EngineStatus],
        places: Sequence[tuple[int, str]],
        before_step: int | None = None,
    ) -> AgreedStep | None:
        """What `newest_complete` chooses. The object store is asked only where nothing else has a step: what is there
        was complete on disk before."""
        found = newest_agreed(statuses, complete_steps(self._places.checkpoints(job)), places, before_step)
        if found is not None or not self._objects_url:
            return found
        try:
            return newest_agreed((), (), places, before_step, self.object_steps(job))
        except (CheckpointError, OSError) as error:
            raise Unavailable(f"the object store cannot be asked for checkpoints of {job}: {error}") from error

    def object_steps(self, job: str) -> list[StepRecord]:
        """The complete steps in the object store, ascending; none where there is no store. Raises CheckpointError."""
        return open_objects(self._objects_url, job)().complete_steps() if self._objects_url else []

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        """Tell one engine, which writes it where all look; where none answers, write it ourselves."""
        for admin in self._admins(job):
            try:
                admin.reject_from(step, up_to_attempt, reason)
            except EngineUnavailable:
                continue
            return
        add_rejection(self._places.checkpoints(job), Rejection(step, up_to_attempt, reason), Storage(), "recovery")

    def mark_verified(self, job: str, step: int, attempt: int, reason: str) -> None:
        """Say that training has proved a step good, to one engine or, where none answers, to the folder itself.
        Idempotent; what is rejected stays rejected."""
        for admin in self._admins(job):
            try:
                admin.mark_verified(step, attempt, reason)
            except EngineUnavailable:
                continue
            return
        mark_in_folder(self._places.checkpoints(job), step, attempt, reason)

    def saved_steps(self, job: str) -> list[SavedStep]:
        """See `MarkingCatalog`."""
        return saved_in_folder(self._places.checkpoints(job))

    def statuses(self, job: str) -> list[EngineStatus]:
        """What the engines that answer hold."""
        statuses = []
        for admin in self._admins(job):
            try:
                statuses.append(admin.status())
            except EngineUnavailable as error:
                logger.info("%s", error)
        return statuses

    def drain(self, job: str, timeout_seconds: float) -> list[Drained]:
        """Let every engine write what its memory holds, all at once, and wait. An engine that does not answer has
        nothing in memory that we could save."""
        admins = self._admins(job)
        with ThreadPoolExecutor(max(len(admins), 1), "drain") as pool:
            return list(pool.map(lambda admin: _drained(admin, timeout_seconds), admins))

    def persist_newest(self, job: str, *, deadline_seconds: float) -> str:
        """See `PersistingCatalog`: before nodes go away on purpose, their memory is brought to disk."""
        missing = [
            f"{one.node or 'an engine'}: {one.reason}" for one in self.drain(job, deadline_seconds) if not one.done
        ]
        return "; ".join(missing)

    def metrics(self, job: str) -> str:
        """Prometheus' text of all engines of a job; `transom_ckpt_engine_up` is 0 where one does not answer."""
        texts = []
        for node, admin in self._engines(job):
            labels, up = {"job": job, "node": node}, 1
            try:
                texts.append(admin.metrics())
            except EngineUnavailable:
                up = 0
            texts.append(gauge("engine_up", "1 where the engine of a node answers", labels, up))
        return merged(texts)

    def _admins(self, job: str) -> list[EngineAdmin]:
        return [admin for _, admin in self._engines(job) if admin.may_answer()]

    def _engines(self, job: str) -> list[tuple[str, EngineAdmin]]:
        """By node; those on other machines are asked through launchers."""
        try:
            spec, options = read_job(self._places, job)
        except OSError as error:
            raise Unavailable(f"the job file of {job} cannot be read: {error}") from error
        backend = self._backend_of(job) if self._backend_of is not None and spec.backend != "local" else None
        if isinstance(backend, ScheduledBackend):
            return [(node, _through_launcher(backend, job, node)) for node in backend.nodes(job)]
        return [
            (node, EngineAdmin(self._places.socket(job, node, "ckpt"), ADMIN_SECONDS_MAX))
            for node in nodes_of(self._places, spec, options)
        ]


def catalog_of(settings: Settings, places: Places) -> EngineCatalog:
    """The engines of jobs of any backend. Raises what a backend that is set by default raises when it is made."""
    backend_of = JobBackends(settings, places, SystemClock(), Random()).of
    return EngineCatalog(places, backend_of, settings.checkpoint.objects.url or "")


def _through_launcher(backend: ScheduledBackend, job: str, node: str) -> EngineAdmin:
    def relay(packet: str, timeout_seconds: float) -> str:
        try:
            return backend.ask_engine(job, node, packet, timeout_seconds)
        except BackendError as error:
            raise EngineUnavailable(str(error)) from error

    return EngineAdmin(node, ADMIN_SECONDS_MAX, relay)


def saved_in_folder(directory: Path) -> list[SavedStep]:
    """The steps that a restart could load from a checkpoint folder, ascending, and when each became complete."""
    saved = []
    for record in complete_steps(directory):
        with contextlib.suppress(FileNotFoundError):  # retention was quicker
            saved_at = (step_folder(directory, record.step) / MANIFEST).stat().st_mtime
            saved.append(SavedStep(record.step, record.attempt, saved_at))
    return saved


def mark_in_folder(directory: Path, step: int, attempt: int, reason: str) -> None:
    """Say that training has proved a step good, where no engine does it. What is rejected stays rejected."""
    if rejection_of(directory, step, attempt) is None:
        add_verification(directory, Verification(step, attempt, reason), Storage(), "recovery")


def _drained(admin: EngineAdmin, timeout_seconds: float) -> Drained:
    try:
        node = admin.status().node
    except EngineUnavailable as error:
        return Drained("", False, str(error))
    try:
        if admin.persist_now(timeout_seconds):
            return Drained(node, True, "")
        reason = admin.status().persist_error
    except EngineUnavailable as error:
        return Drained(node, False, str(error))
    return Drained(node, False, reason or f"not all was written within {timeout_seconds:g} s; wait longer")
