"""The `collect` service: every source in a thread of its own, what runs here from the bus, and how it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ingest.bus import Bus, BusError, Consumer
from ingest.clock import Clock
from ingest.codec import Codec, Undecodable, message_type
from ingest.events import Message
from pipelines.collect.jobs_here import WANTED, JobsHere
from pipelines.collect.outlet import Deliver, Outlet
from pipelines.collect.source import Seen, Source, SourceFailed

RETRY_SECONDS_MAX = 30.0
EVENTS_MAX = 2_000
EVENTS_POLL_SECONDS = 0.3
STATE_SECONDS = 2.0
STOP_SECONDS_MAX = 3.0
UNDELIVERED_SECONDS = 0.5
TELL_AGAIN_SECONDS = 300.0

Open = Callable[[], Source]  # raises SourceFailed


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How one source is doing."""

    name: str
    trouble: str
    delivered: int
    nobodys: int
    counters: Mapping[str, int]


class Watched:
    """One source, opened and read again and again; what fails is told once, and tried again ever more seldom."""

    def __init__(
        self, name: str, open_source: Open, jobs: JobsHere, deliver: Deliver, clock: Clock, tell: Callable[[str], None]
    ) -> None:
        self.name = name
        self._open = open_source
        self._outlet = Outlet(name, jobs, deliver, clock)
        self._clock = clock
        self._tell = tell
        self._source: Source | None = None
        self._trouble = ""
        self._told: dict[str, int] = {}
        self._failures = 0
        self._thread: threading.Thread | None = None

    def start(self, stop: threading.Event) -> None:
        self._thread = threading.Thread(target=self.run, args=(stop,), name=f"collect-{self.name}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def health(self) -> SourceHealth:
        source = self._source
        counters = dict(source.counters()) if source is not None else {}
        return SourceHealth(self.name, self._trouble, self._outlet.delivered, self._outlet.nobodys, counters)

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        try:
            while not stop.is_set():
                stop.wait(self._turn(stop))
        finally:
            if self._source is not None:
                self._source.close()

    def _turn(self, stop: threading.Event) -> float:
        """Read once; returns how long to wait."""
        try:
            if self._source is None:
                self._source = self._open()
            seen = self._source.read(self._clock.now())
        except SourceFailed as error:
            return self._failed(str(error))
        except Exception as error:  # noqa: BLE001  (a fault of ours in one source must not end it for good)
            return self._failed(f"reading failed: {type(error).__name__}: {error}")
        if self._trouble:
            self._tell(f"collect: {self.name} is read again")
        self._trouble, self._failures = "", 0
        self._put(seen, stop)
        self._tell_losses(self._source.counters())
        return self._source.every_seconds

    def _put(self, seen: Sequence[Seen], stop: threading.Event) -> None:
        """Until the bus has it: what a source gave it does not give again."""
        assert self._source is not None
        while True:
            try:
                self._outlet.put(seen)
                self._source.stored()
                return
            except SourceFailed as error:
                self._failed(str(error))
                return
            except BusError as error:
                if self._trouble != str(error):
                    self._trouble = str(error)
                    self._tell(f"collect: {self.name}: {error}; trying again")
                if stop.wait(UNDELIVERED_SECONDS):
                    return

    def _failed(self, sentence: str) -> float:
        if sentence != self._trouble:
            self._tell(f"collect: {self.name}: {sentence}")
        self._trouble = sentence
        self._failures += 1
        source, self._source = self._source, None
        if source is not None:
            with suppress(Exception):  # it is given up anyhow
                source.close()
        return min(RETRY_SECONDS_MAX, 2.0 ** min(self._failures - 1, 10))

    def _tell_losses(self, counters: Mapping[str, int]) -> None:
        for word, number in counters.items():
            if number >= 2 * max(1, self._told.get(word, 0)) or (number and word not in self._told):
                self._told[word] = number
                self._tell(f"collect: {self.name}: {number} {word.replace('_', ' ')}")


class Collect:
    """See the module."""

    def __init__(
        self, sources: Mapping[str, Open], jobs: JobsHere, deliver: Deliver, clock: Clock, state: Path,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`state`: the file that keeps who runs here."""
        self.jobs = jobs
        self._clock = clock
        self._state = state
        self._tell = tell
        self._codec = Codec()
        self._saved_at = clock.monotonic()
        self.ready = threading.Event()
        self.sources = [Watched(name, source, jobs, deliver, clock, tell) for name, source in sources.items()]
        self._knows = False
        with suppress(FileNotFoundError):
            try:
                jobs.load_state(state.read_bytes())
                self._knows = True
            except (msgspec.DecodeError, UnicodeDecodeError):
                tell(f"collect: {state} is damaged; who runs here is learned from what comes")

    def run(self, bus: Bus, group: str, stop: threading.Event) -> None:
        """Until `stop`; what comes by the bus says who runs here."""
        consumer = bus.consumer(group, ("events",), start="earliest")
        try:
            self._catch_up(consumer, stop)
            for source in self.sources:
                source.start(stop)
            self.ready.set()
            while not stop.is_set():
                self._listen(consumer, stop)
        finally:
            for source in self.sources:
                source.join(STOP_SECONDS_MAX)
            consumer.close()

    def run_alone(self, stop: threading.Event) -> None:
        """Until `stop`, where who runs here is told by somebody else, or by nobody."""
        for source in self.sources:
            source.start(stop)
        self.ready.set()
        stop.wait()
        for source in self.sources:
            source.join(STOP_SECONDS_MAX)

    def hear(self, messages: Sequence[Message]) -> None:
        self.jobs.hear(messages)

    def _catch_up(self, consumer: Consumer, stop: threading.Event) -> None:
        """Know who runs here before the first line is stamped."""
        asked_anew, began_at = self._knows, self._clock.now()
        while not stop.is_set():
            heard_until = self._listen(consumer, stop)
            places = consumer.assignment()
            if places and not asked_anew:  # the group has an offset, and what it stands for is gone
                consumer.seek(dict.fromkeys(places, 0))
                asked_anew = True
            elif places and (heard_until is None or heard_until >= began_at):
                return

    def _listen(self, consumer: Consumer, stop: threading.Event) -> float | None:
        """One look at the bus; when it took the newest of what there was, None where there was nothing."""
        try:
            records = consumer.poll(EVENTS_MAX, EVENTS_POLL_SECONDS)
            messages = []
            for record in records:
                with suppress(Undecodable):  # whoever keeps the topic tells of it
                    if message_type(record.headers) in WANTED:
                        messages.append(self._codec.decode(record.headers, record.value))
            self.jobs.hear(messages)
            if self._clock.monotonic() - self._saved_at >= STATE_SECONDS:
                self._saved_at = self._clock.monotonic()
                self._save()
                consumer.commit()
        except BusError as error:
            self._tell(f"collect: {error}; trying again")
            stop.wait(1.0)
            return None
        return records[-1].appended_at if records else None

    def _save(self) -> None:
        beside = self._state.with_suffix(".tmp")
        try:
            self._state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_bytes(self.jobs.to_state())
            beside.chmod(0o600)
            beside.replace(self._state)
        except OSError as error:
            self._tell(f"collect: who runs here cannot be written to {self._state} ({error.strerror})")
