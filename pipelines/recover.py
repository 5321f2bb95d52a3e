"""The recover service: verdicts and commands in durably, decisions and receipts out, ranks started and stopped."""

from __future__ import annotations

import os
import socket
from random import Random
from threading import Event

from detectors.verdict import Verdict
from ingest.bus import Bus, BusUnavailable, Consumer, Producer, Record
from ingest.clock import Clock
from ingest.codec import Codec, Undecodable
from ingest.dead_letters import dead_letter
from pipelines.backends import JobBackends
from pipelines.checkpoints import EngineCatalog
from pipelines.lease_keeper import LeaseKeeper
from pipelines.notify.people import told_people
from pipelines.own_process import tell
from pipelines.places import Places
from pipelines.policy_settings import policy_config
from pipelines.proving import Proving
from pipelines.settings import Settings
from recovery.action import RECOVERY_TYPES, Command
from recovery.backend import BackendError
from recovery.calls import Result
from recovery.controller import Controller
from recovery.lease import ControllerLease
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers

GROUP = "recover"
RECORDS_MAX = 500
POLL_SECONDS = 0.05
BUSY_POLL_SECONDS = 0.01  # while a call to a backend is out
FLUSH_SECONDS_MAX = 10.0
RETRY_SECONDS = 1.0
SAVE_MEMORY_SECONDS_MAX = 60.0  # of engines, before their nodes are given back


def open_jobs(places: Places) -> list[str]:
    """Jobs that are registered here and whose end nobody has written down."""
    registered = (path.parent for path in places.jobs.glob("*/job.json"))
    return sorted(folder.name for folder in registered if not (folder / "outcome.json").exists())


def _save_memory(catalog: EngineCatalog, job: str) -> None:
    """Bring what engines hold to disk while they live: with its nodes a job gives their memory back."""
    try:
        missing = catalog.persist_newest(job, deadline_seconds=SAVE_MEMORY_SECONDS_MAX)
    except BackendError as error:
        missing = str(error)
    if missing:
        tell(f"recover: {job} gets other nodes, and memory is not all on disk: {missing}")


class Recover:
    """The one controller of this host; a second one is refused by the lease."""

    def __init__(
        self,
        settings: Settings,
        places: Places,
        bus: Bus,
        clock: Clock,
        random: Random,
        lease: ControllerLease | None = None,
    ) -> None:
        """`lease`: where controllers of several hosts might serve the same jobs; None: as the backend has one."""
        self._bus = bus
        self._clock = clock
        self._codec = Codec(RECOVERY_TYPES)
        self._ready = places.state / "recover.ready"
        self._store = RecoveryStore(places.recovery_store)
        workers: ThreadWorkers[Result] = ThreadWorkers()
        self._backend = backend = JobBackends(settings, places, clock, random)
        lease = lease or backend.controller_lease(f"{socket.gethostname()}-{os.getpid()}")
        self._keeper = None if lease is None else LeaseKeeper(lease, tell)
        catalog = EngineCatalog(places, backend.of, settings.checkpoint.objects.url or "")
        backend.before_nodes_go = lambda job: _save_memory(catalog, job)
        self._controller = Controller(
            self._store, backend, catalog, policy_config(settings), random, workers,
            jobs=lambda: open_jobs(places), lease=lease,
        )  # fmt: skip
        self._proving = Proving(catalog, settings.checkpoint.proved_seconds, lambda: self._quiet_jobs(places))
        self._people = told_people(settings, self._store, clock, tell)
        self._ready.unlink(missing_ok=True)

    def run(self, stop: Event) -> None:
        """Until `stop`. An unreachable bus stops no decision that is already on disk: only the telling waits."""
        for sentence in self._backend.missing_rights():
            tell(f"recover: {sentence}")
        if self._keeper is not None:
            self._keeper.start()
        self._people.begin()
        for incident in self._controller.reconcile():
            tell(f"recover: going on with incident {incident.incident_id} ({incident.state})")
        producer = self._bus.producer()
        consumer = self._bus.consumer(GROUP, ("verdicts", "commands"))
        try:
            while not stop.is_set():
                sees_bus = True
                try:
                    self._read(consumer, producer)
                except BusUnavailable as error:
                    sees_bus = False
                    tell(f"recover: {error}; trying again")
                    stop.wait(RETRY_SECONDS)
                self._controller.tick(self._clock.now())
                self._people.turn(sees_bus)
                self._publish(producer)
                self._proving.tick(self._clock.now())
        finally:
            self._proving.close()
            self._people.close()
            self._ready.unlink(missing_ok=True)
            if self._keeper is not None:
                self._keeper.close()
            consumer.close()
            producer.close()
            self._bus.close()
            self._store.close()

    def _quiet_jobs(self, places: Places) -> list[str]:
        """Jobs that are not over and have no open incident."""
        troubled = {incident.job for incident in self._store.unfinished()}
        return [job for job in open_jobs(places) if job not in troubled]

    def _read(self, consumer: Consumer, producer: Producer) -> None:
        records = consumer.poll(RECORDS_MAX, POLL_SECONDS if self._controller.idle() else BUSY_POLL_SECONDS)
        if not self._ready.exists() and consumer.assignment():
            self._ready.touch(mode=0o600)
        if not records:
            return
        now = self._clock.now()
        with self._store.together():  # a storm waits for the disk once
            for record in records:
                self._take(record, producer, now)
        producer.flush(FLUSH_SECONDS_MAX)
        consumer.commit()

    def _take(self, record: Record, producer: Producer, now: float) -> None:
        try:
            message = self._codec.decode(record.headers, record.value)
        except Undecodable as error:
            producer.send(*dead_letter(record, error.reason, self._clock))
            return
        if isinstance(message, Verdict):
            self._controller.accept(message, now)
        elif isinstance(message, Command):
            self._controller.accept_command(message, now)
        else:
            producer.send(
                *dead_letter(record, f"a {type(message).__name__} does not belong on {record.topic}", self._clock)
            )

    def _publish(self, producer: Producer) -> None:
        waiting = self._controller.pending_messages()
        if not waiting:
            return
        self._people.hear(entry.message for entry in waiting)  # also while the bus is away
        try:
            for entry in waiting:
                encoded = self._codec.encode(entry.message)
                producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
            producer.flush(FLUSH_SECONDS_MAX)
        except BusUnavailable as error:
            tell(f"recover: {error}; {len(waiting)} messages wait to be published")
            return
        self._controller.mark_published([entry.seq for entry in waiting])
        for entry in waiting:
            tell(f"recover: {entry.message}")
