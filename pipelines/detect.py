"""The detect service: consume, conclude, publish, save the state with its offsets, then commit."""

from __future__ import annotations

import io
import os
from collections.abc import Collection
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.ensemble.ensemble import Ensemble
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import Bus, BusUnavailable, Consumer, Producer, TopicPartition
from ingest.clock import Clock
from ingest.codec import Codec
from ingest.dead_letters import dead_letter
from ingest.events import JOB_TOPICS
from pipelines.detection import Detection, PartitionState
from pipelines.own_process import tell
from pipelines.places import Places
from pipelines.room_configs import detector_config
from pipelines.rule_folder import RuleFolder
from pipelines.settings import Settings
from pipelines.silence import Silence

GROUP = "detect"
RECORDS_MAX = 2_000
POLL_SECONDS = 0.05
FLUSH_SECONDS_MAX = 30.0
SAVE_FLUSH_SECONDS_MAX = 3.0  # a process that should end, or give up a partition, has no more
RETRY_SECONDS = 1.0
RULES_SECONDS = 2.0  # how often the folder of log rules is looked at
STATE = "state"  # the array that holds the JSON; all others are named <job>|<array>


class Detect:
    """One detector of the group; more of them share the partitions."""

    def __init__(self, settings: Settings, places: Places, bus: Bus, clock: Clock) -> None:
        self._settings = settings.detect
        self._folder = places.detection
        self._ready = places.state / "detect.ready"
        self._bus = bus
        self._clock = clock
        self._codec = Codec(VERDICT_TYPES)
        config = detector_config(settings)
        self._rules = RuleFolder(self._settings.rules_dir)
        if self._rules.trouble:
            tell(f"detect: {self._rules.trouble}")
        self._rules_at = clock.monotonic()
        self._detection = Detection(config, self._rules.book)
        ensemble = Ensemble(config.ensemble)
        ensemble.preload()  # PyOD takes seconds to import; a first fit in mid-stream would hold up every verdict
        if ensemble.reason:
            tell(f"detect: {ensemble.reason}")
        self._silence = Silence(clock.now())
        self._resume: dict[TopicPartition, int] = {}  # where the states that were loaded want to read on
        self._seeks: dict[TopicPartition, int] = {}
        self._partitions: set[int] = set()
        self._catching_up = False  # a partition is new here: nothing polled does not mean that there is nothing
        self._unflushed = False  # verdicts or dead letters that may not be on the bus yet
        self._saved_at = clock.monotonic()
        self._trouble = ""  # why no state was saved the last time
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for half in self._folder.glob("*.tmp"):  # a kill's; another detector that is just writing one tries again
            half.unlink(missing_ok=True)
        self._ready.unlink(missing_ok=True)

    def run(self, stop: Event) -> None:
        """Until `stop`; an unreachable bus is waited for."""
        producer = self._producer = self._bus.producer()
        consumer = self._bus.consumer(GROUP, JOB_TOPICS, on_assign=self._assigned, on_revoke=self._revoked)
        try:
            while not stop.is_set():
                try:
                    self._pass(consumer, producer)
                except BusUnavailable as error:
                    tell(f"detect: {error}; trying again")
                    stop.wait(RETRY_SECONDS)
            try:
                self._save_all()
            except BusUnavailable as error:
                tell(f"detect: {error}; the next start reads again from the last saved state")
        finally:
            self._ready.unlink(missing_ok=True)
            consumer.close()
            producer.close()
            self._bus.close()

    def _pass(self, consumer: Consumer, producer: Producer) -> None:
        records = consumer.poll(RECORDS_MAX, POLL_SECONDS)
        if self._seeks:  # the state that was loaded knows better than the group where to read on
            seeks, self._seeks = self._seeks, {}
            consumer.seek(seeks)
            records = [record for record in records if record.place not in seeks]
        if not self._ready.exists() and consumer.assignment():
            self._ready.touch(mode=0o600)
        self._listen(consumer, heard=bool(records))
        self._look_at_rules()
        for record in records:
            reason = self._detection.feed(record)
            if reason is not None:
                self._unflushed = True
                producer.send(*dead_letter(record, reason, self._clock))
        lagging: set[TopicPartition] = set()
        if records or self._catching_up:
            lagging = {place for place, behind in consumer.lag().items() if behind > 0}
            self._catching_up = self._catching_up and bool(lagging)
        for verdict in self._detection.conclude(self._silence.heard_until, lagging):
            self._publish(producer, verdict)
        self._flush()
        is_due = self._clock.monotonic() - self._saved_at >= self._settings.state_seconds
        if is_due and records and self._save_all():
            consumer.commit()

    def _listen(self, consumer: Consumer, *, heard: bool) -> None:
        """Learn whether the bus is there; where it is not, nobody's silence means anything."""
        now = self._clock.now()
        if heard or not consumer.assignment():
            self._silence.answered(now)
        elif self._silence.should_ask(now) and not any(consumer.lag().values()):
            self._silence.answered(self._clock.now())

    def _look_at_rules(self) -> None:
        """Take over the user's log rules when they have changed, if every one of them is good."""
        if self._clock.monotonic() - self._rules_at < RULES_SECONDS:
            return
        self._rules_at = self._clock.monotonic()
        trouble = self._rules.trouble
        book = self._rules.changed()
        if book is not None:
            self._detection.use_rules(book)
            tell(f"detect: the log rules have changed: {len(book.rules)} of them are in use from now on")
        elif self._rules.trouble != trouble:
            tell(f"detect: {self._rules.trouble}")

    def _publish(self, producer: Producer, verdict: Verdict) -> None:
        encoded = self._codec.encode(verdict)
        self._unflushed = True
        producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
        tell(f"{verdict.status} {verdict.fault_class}: {verdict.summary} [{verdict.verdict_id}#{verdict.revision}]")

    def _flush(self, seconds: float = FLUSH_SECONDS_MAX) -> None:
        if self._unflushed:
            self._producer.flush(seconds)
            self._unflushed = False

    def _assigned(self, places: frozenset[TopicPartition]) -> None:
        self._catching_up = True
        for partition in {place.partition for place in places} - self._partitions:
            self._partitions.add(partition)
            self._resume |= self._load(partition)
        self._seeks |= {place: self._resume.pop(place) for place in places if place in self._resume}
        tell(f"detect: reads partitions {sorted(self._partitions)}")

    def _load(self, partition: int) -> dict[TopicPartition, int]:
        """Take over a partition's state; returns where to read on: from the beginning where it is of no use."""
        try:
            loaded = read_state(self._folder, partition)
            return {} if loaded is None else self._detection.load(partition, *loaded, now=self._clock.now())
        # The bus has all that a state was made of: whatever is wrong with one, it must not stop detection for good.
        except Exception as error:  # noqa: BLE001  any unusable state is read anew, never a crash loop
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            tell(f"detect: the state of partition {partition} cannot be used ({reason}); reading the bus anew")
            self._detection.drop(partition)
            return {TopicPartition(topic, partition): 0 for topic in JOB_TOPICS}

    def _revoked(self, places: frozenset[TopicPartition]) -> None:
        revoked = {place.partition for place in places} & self._partitions
        try:
            self._save(revoked)
        except BusUnavailable as error:  # whoever is next reads again from the state before, and says the same
            tell(f"detect: {error}; partitions {sorted(revoked)} are left as they were saved last")
        for partition in revoked:
            self._detection.drop(partition)
            self._partitions.discard(partition)
        for asked in (self._resume, self._seeks):
            for place in [place for place in asked if place.partition in revoked]:
                del asked[place]

    def _save_all(self) -> bool:
        saved = self._save(self._partitions)
        self._saved_at = self._clock.monotonic()
        return saved

    def _save(self, partitions: Collection[int]) -> bool:
        """Whether the states are on disk, so that offsets may be committed.

        Verdicts first: a state that has them behind it must not be on disk before they are on the bus.
        """
        self._flush(SAVE_FLUSH_SECONDS_MAX)
        trouble = ""
        for partition in partitions:
            try:
                write_state(self._folder, partition, *self._detection.save(partition))
            except OSError as error:
                trouble = f"the state of partition {partition} cannot be saved in {self._folder} ({error.strerror})"
        if trouble and trouble != self._trouble:
            tell(f"detect: {trouble}; trying again")
        self._trouble = trouble
        return not trouble


def write_state(folder: Path, partition: int, state: PartitionState, arrays: dict[str, NDArray[Any]]) -> None:
    """One file, whole or not at all: another detector, which took the partition over, may be writing it too."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{STATE: np.frombuffer(msgspec.json.encode(state), np.uint8)}, **arrays)
    path = folder / f"partition-{partition}.npz"
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as stream:
            stream.write(buffer.getvalue())
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)  # a full disk has no room for half a state
        raise


def read_state(folder: Path, partition: int) -> tuple[PartitionState, dict[str, NDArray[Any]]] | None:
    """What `write_state` wrote; None where there is nothing: then the group's offsets count.

    Raises one of many things where the file is not what was written.
    """
    try:
        stored = (folder / f"partition-{partition}.npz").read_bytes()
    except FileNotFoundError:
        return None
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        state = msgspec.json.decode(arrays[STATE].tobytes(), type=PartitionState)
        return state, {name: arrays[name] for name in arrays.files if name != STATE}
