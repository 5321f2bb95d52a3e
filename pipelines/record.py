"""The `record` service: one process that takes every topic into the ledger and serves the ledger's API."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ingest import bus as transport
from ingest.bus import Bus, BusError, BusMisconfigured, Consumer, Producer, TopicPartition
from ingest.clock import Clock
from ingest.dead_letters import dead_letter
from ingest.events import Topic
from pipelines.ledger.api import Doors, create_app
from pipelines.ledger.exposition import Exposition
from pipelines.ledger.ledger import Ledger, LedgerConfig, Rejected
from pipelines.ledger.messages_in import MessageDesk, add_messages
from pipelines.ledger.posting import CommandDesk
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.serving import ApiServer, CannotServe, tcp_socket, unix_socket
from pipelines.ledger.shapes import Health, LedgerError
from pipelines.ledger.sql import SqlDesk
from pipelines.recording import NotARecording
from pipelines.recordings import Recordings

logger = logging.getLogger("transom.record")
GROUP = "record"
CONSUMED: tuple[Topic, ...] = ("metrics", "logs", "events", "verdicts", "actions", "commands")
SILENT_SECONDS = 30.0  # without a look at the bus for so long the service is not well


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Where the ledger lies, where it is served, and how often things happen."""

    ledger_folder: Path
    socket_path: Path | None = None
    tcp_host: str | None = None
    tcp_port: int = 0
    token: str | None = None  # TCP is served only with one
    recording_folder: Path | None = None  # below it a folder for each job
    recordings_keep_seconds: float | None = None  # since something was added; None: for ever
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    records_max: int = 2_000  # of one poll
    group_seconds: float = 0.1  # a commit waits so long for company
    idle_poll_seconds: float = 0.5
    retry_seconds: float = 2.0  # after a failed write, or a bus that does not answer
    lag_seconds: float = 5.0  # how often lag is asked for and the group's offset is stored
    flush_seconds_max: float = 5.0  # for the bus to take dead letters
    drain_seconds: float = 5.0  # at the end: what the bus has already is still taken


class Record:
    """Runs until told to stop; `ready` is set once the ledger is open and served.

    Raises LedgerLocked, LedgerUnreadable and CannotServe at start. Later failures of disk or bus make it
    unhealthy; it takes nothing more until they are over, and then reads again from the ledger's own offsets.
    """

    def __init__(self, config: RecordConfig, bus: Bus, clock: Clock) -> None:
        self._config = config
        self._bus = bus
        self._clock = clock
        self.ready = threading.Event()
        self._trouble = ""
        self._must_reopen = False
        self._undelivered: list[Rejected] = []
        self._letters_wait = False  # given to the producer, not flushed
        self._letter_count = 0
        self._lag: dict[TopicPartition, int] = {}
        self._asked_at = clock.monotonic()
        self._turned_at = clock.monotonic()
        self._data_at = 0.0
        self._ledger: Ledger
        self._recordings: Recordings
        self._letters: Producer
        self._consumer: Consumer | None = None

    def run(self, stop: threading.Event) -> None:
        """Record and serve until `stop` is set, then take what the bus has already, commit and end."""
        with ExitStack() as closing:
            self._ledger = Ledger(self._config.ledger_folder, self._clock, self._config.ledger)
            closing.callback(self._ledger.close)
            self._recordings = Recordings(
                self._config.recording_folder, self._clock, keep_seconds=self._config.recordings_keep_seconds
            )
            closing.callback(self._recordings.close)
            self._letters = self._bus.producer()
            closing.callback(self._letters.close)
            commands = self._bus.producer()
            closing.callback(commands.close)
            posted = self._bus.producer()
            closing.callback(posted.close)
            for server in self._servers(commands, MessageDesk(posted, self._clock)):
                server.start()
                closing.callback(server.stop)
            consumer = self._bus.consumer(GROUP, CONSUMED, start="earliest", on_assign=self._seek)
            closing.callback(consumer.close)
            self._consumer = consumer
            if consumer.assignment():
                self._seek(consumer.assignment())
            self.ready.set()
            while not stop.is_set():
                self._turn(consumer, stop)
            self._drain(consumer)

    def health(self) -> Health:
        """How it goes; asked for by any thread."""
        silent = self._clock.monotonic() - self._turned_at
        trouble = self._trouble
        if not trouble and silent > SILENT_SECONDS:
            trouble = f"the ledger has not looked at the bus for {silent:.0f} s"
        lag: dict[str, int] = {}
        for place, count in dict(self._lag).items():
            lag[place.topic] = lag.get(place.topic, 0) + count
        return Health(status="degraded" if trouble else "ok", reason=trouble, lag=lag, data_at=self._data_at)

    def _servers(self, commands: Producer, messages: MessageDesk) -> list[ApiServer]:
        config, ledger = self._config, self._ledger
        desk = CommandDesk(ledger.state, commands, self._clock)
        reader = LocalReader(
            ledger.cursor, ledger.state, ledger.parts, now=self._clock.now, health=self.health, post=desk.post
        )
        exposition = Exposition(
            ledger, self.health, lambda: dict(self._lag), lambda: self._letter_count, self._clock.now
        )
        doors = Doors(SqlDesk(ledger.snapshots.ask), ledger.snapshots.ask)
        servers = []
        if config.socket_path is not None:
            app = create_app(reader, exposition.text, doors=doors)
            add_messages(app, messages)
            servers.append(ApiServer(app, unix_socket(config.socket_path), name="ledger-api"))
        if config.tcp_host is not None:
            if not config.token:
                raise CannotServe("the ledger is served on TCP only with a token; set record.token_file")
            app = create_app(reader, exposition.text, doors=doors, token=config.token)
            add_messages(app, messages)
            servers.append(ApiServer(app, tcp_socket(config.tcp_host, config.tcp_port), name="ledger-tcp"))
        return servers

    def _seek(self, places: frozenset[TopicPartition]) -> None:
        """The ledger's own offsets count, whatever the group has stored."""
        if self._consumer is None:
            return  # `run` seeks as soon as it has the consumer
        offsets = self._ledger.offsets()
        self._consumer.seek({place: offsets.get(place, 0) for place in places})

    # ---- one turn

    def _turn(self, consumer: Consumer, stop: threading.Event) -> None:
        began = self._clock.monotonic()
        self._turned_at = began
        records: Sequence[transport.Record] = ()
        try:
            self._recover_from_failure(consumer)
            self._bury()
            wait = min(self._config.idle_poll_seconds, self._ledger.due_seconds())
            records = consumer.poll(self._config.records_max, wait)
            self._take(records)
            self._ask(consumer)
            self._trouble = ""
        except BusError as error:
            self._trouble = f"the bus does not answer: {error}"
        except (LedgerError, NotARecording, OSError) as error:
            self._fail(error)
        if self._trouble:
            stop.wait(self._config.retry_seconds)
        elif records:
            full = len(records) >= self._config.records_max
            self._data_at = records[-1].appended_at if full else self._clock.now()
            if not full:  # wait for company, so that a trickle is not a commit for each record
                stop.wait(max(0.0, self._config.group_seconds - (self._clock.monotonic() - began)))
        else:
            self._data_at = self._clock.now()

    def _take(self, records: Sequence[transport.Record]) -> None:
        if records:
            self._undelivered.extend(self._ledger.append(records))
            self._recordings.write(records)
            self._bury()
        if self._ledger.due_seconds() <= 0.0:
            self._commit()

    def _commit(self, *, force: bool = False) -> None:
        self._recordings.flush()  # first: what the ledger has passed is never read again
        self._ledger.commit(force=force)

    def _bury(self) -> None:
        """Make dead letters durable; until that is done, the offsets of their records are not committed."""
        while self._undelivered:
            entry = self._undelivered[0]
            topic, key, headers, value = dead_letter(entry.record, entry.reason, self._clock)
            try:
                self._letters.send(topic, key, headers, value)
            except BusMisconfigured as error:  # one bad record must not stop the stream
                logger.error("a record of %s is lost, the bus refused its dead letter: %s", entry.record.topic, error)
            del self._undelivered[0]
            self._letter_count += 1
            self._letters_wait = True
        if self._letters_wait:
            self._letters.flush(self._config.flush_seconds_max)
            self._letters_wait = False

    def _ask(self, consumer: Consumer) -> None:
        """Now and then: the lag, and the group's own offset for whoever looks at the bus from outside."""
        now = self._clock.monotonic()
        if now - self._asked_at < self._config.lag_seconds:
            return
        self._asked_at = now
        self._recordings.forget_old()
        self._lag = consumer.lag()
        if self._ledger.is_clean:
            consumer.commit()

    def _fail(self, error: Exception) -> None:
        self._trouble = str(error)
        self._must_reopen = True
        self._recordings.abandon()

    def _recover_from_failure(self, consumer: Consumer) -> None:
        """After a failed write everything since the last commit is read again."""
        if not self._must_reopen:
            return
        self._ledger.reopen()
        self._undelivered.clear()
        self._seek(consumer.assignment())
        self._must_reopen = False

    def _drain(self, consumer: Consumer) -> None:
        deadline = self._clock.monotonic() + self._config.drain_seconds
        try:
            self._recover_from_failure(consumer)
            while self._clock.monotonic() < deadline:
                records = consumer.poll(self._config.records_max, 0.0)
                if not records:
                    break
                self._take(records)
            self._commit(force=True)
            consumer.commit()
        except (BusError, LedgerError, NotARecording, OSError) as error:
            self._trouble = str(error)  # the next start reads from what was committed
