"""The checkpoint engine wired in: one engine as a process, and all engines of a job as recovery's catalog."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.errors import EngineUnavailable
from ckpt_engine.event import EngineEvent
from ckpt_engine.manifest import complete_steps
from ckpt_engine.rejection import Rejection, add_rejection
from ckpt_engine.status import EngineStatus, newest_agreed
from ckpt_engine.storage import Storage
from ingest.bus import Bus, BusError, Producer
from ingest.codec import Codec
from ingest.events import CheckpointEvent
from pipelines.places import Places
from pipelines.run import node_names, read_job
from recovery.backend import CheckpointChoice, Unavailable

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


def serve_engine(places: Places, job: str, node: str, bus: Bus) -> None:
    """Run the engine of one node until SIGTERM; then what memory holds is brought to disk."""
    _, options = read_job(places, job)
    config = EngineConfig(
        job=job,
        node=node,
        socket_path=places.socket(job, node, "ckpt"),
        directory=places.checkpoints(job),
        memory_bytes_max=options.memory_bytes_max,
        retention_steps=options.keep_complete,
    )
    producer = bus.producer()
    try:
        Engine(config, EventPublisher(job, node, producer)).run()
    finally:
        producer.close()
        bus.close()


class EngineCatalog:
    """`CheckpointCatalog` over the engines of jobs on this machine and their checkpoint folders."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def newest_complete(
        self, job: str, *, before_step: int | None, places: Sequence[tuple[int, str]]
    ) -> CheckpointChoice | None:
        """See the Protocol. A node whose engine does not answer has nothing in memory."""
        agreed = newest_agreed(self.statuses(job), complete_steps(self._places.checkpoints(job)), places, before_step)
        return None if agreed is None else CheckpointChoice(step=agreed.step, tier=agreed.tier)

    def reject_from(self, job: str, step: int, up_to_attempt: int, reason: str) -> None:
        """Tell one engine, which writes it where all look; where none answers, write it ourselves."""
        for admin in self._admins(job):
            try:
                admin.reject_from(step, up_to_attempt, reason)
            except EngineUnavailable:
                continue
            return
        add_rejection(self._places.checkpoints(job), Rejection(step, up_to_attempt, reason), Storage(), "recovery")

    def statuses(self, job: str) -> list[EngineStatus]:
        """What the engines that answer hold."""
        statuses = []
        for admin in self._admins(job):
            try:
                statuses.append(admin.status())
            except EngineUnavailable as error:
                logger.info("%s", error)
        return statuses

    def _admins(self, job: str) -> list[EngineAdmin]:
        try:
            spec, options = read_job(self._places, job)
        except OSError as error:
            raise Unavailable(f"the job file of {job} cannot be read: {error}") from error
        sockets = [self._places.socket(job, node, "ckpt") for node in node_names(spec, options)]
        return [EngineAdmin(path, ADMIN_SECONDS_MAX) for path in sockets if path.exists()]
