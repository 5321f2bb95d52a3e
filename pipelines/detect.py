"""The detect service: consume, conclude, publish, save the state with its offsets, then commit."""

from __future__ import annotations

import io
import os
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from detectors.ensemble import Ensemble
from detectors.log_rules import RuleBook
from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import Bus, BusUnavailable, Consumer, Producer, TopicPartition
from ingest.clock import Clock
from ingest.codec import Codec
from ingest.dead_letters import dead_letter
from ingest.events import JOB_TOPICS, Topic
from pipelines.detection import Detection, PartitionState
from pipelines.places import Places
from pipelines.room_configs import detector_config
from pipelines.settings import Settings

GROUP = "detect"
RECORDS_MAX = 2_000
POLL_SECONDS = 0.05
FLUSH_SECONDS_MAX = 30.0
RETRY_SECONDS = 1.0


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
        self._detection = Detection(config, RuleBook.shipped())
        self._tell = Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print
        ensemble = Ensemble(config.ensemble)
        ensemble.preload()  # PyOD takes seconds to import; a first fit in mid-stream would hold up every verdict
        if ensemble.reason:
            self._tell(f"detect: {ensemble.reason}")
        self._seeks: dict[TopicPartition, int] = {}
        self._partitions: set[int] = set()
        self._saved_at = clock.monotonic()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ready.unlink(missing_ok=True)

    def run(self, stop: Event) -> None:
        """Until `stop`; an unreachable bus is waited for."""
        producer = self._bus.producer()
        consumer = self._bus.consumer(GROUP, JOB_TOPICS, on_assign=self._assigned, on_revoke=self._revoked)
        try:
            while not stop.is_set():
                try:
                    self._pass(consumer, producer)
                except BusUnavailable as error:
                    self._tell(f"detect: {error}; trying again")
                    stop.wait(RETRY_SECONDS)
            self._save_all()
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
        for record in records:
            reason = self._detection.feed(record)
            if reason is not None:
                producer.send(*dead_letter(record, reason, self._clock))
        lagging = self._lagging(consumer) if records else set()
        verdicts = self._detection.conclude(self._clock.now(), lagging)
        for verdict in verdicts:
            self._publish(producer, verdict)
        if verdicts or records:
            producer.flush(FLUSH_SECONDS_MAX)
        if self._clock.monotonic() - self._saved_at >= self._settings.state_seconds and records:
            self._save_all()
            consumer.commit()

    def _publish(self, producer: Producer, verdict: Verdict) -> None:
        encoded = self._codec.encode(verdict)
        producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
        self._tell(
            f"{verdict.status} {verdict.fault_class}: {verdict.summary} [{verdict.verdict_id}#{verdict.revision}]"
        )

    @staticmethod
    def _lagging(consumer: Consumer) -> set[Topic]:
        return {place.topic for place, behind in consumer.lag().items() if behind > 0}

    def _assigned(self, places: frozenset[TopicPartition]) -> None:
        for partition in {place.partition for place in places} - self._partitions:
            self._partitions.add(partition)
            loaded = read_state(self._folder, partition)
            if loaded is not None:
                offsets = self._detection.load(partition, *loaded, now=self._clock.now())
                self._seeks |= {place: at for place, at in offsets.items() if place in places}

    def _revoked(self, places: frozenset[TopicPartition]) -> None:
        for partition in {place.partition for place in places} & self._partitions:
            write_state(self._folder, partition, *self._detection.save(partition))
            self._detection.drop(partition)
            self._partitions.discard(partition)

    def _save_all(self) -> None:
        for partition in self._partitions:
            write_state(self._folder, partition, *self._detection.save(partition))
        self._saved_at = self._clock.monotonic()


def write_state(folder: Path, partition: int, state: PartitionState, arrays: dict[str, NDArray[Any]]) -> None:
    """Both files, each whole or not at all; the JSON names the npz it belongs to, and is renamed last."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    name = f"partition-{partition}.{sum(state.offsets.values())}.npz"
    _replace(folder / name, buffer.getvalue())
    _replace(folder / f"partition-{partition}.json", msgspec.json.encode({"arrays": name, "state": state}))
    for old in folder.glob(f"partition-{partition}.*.npz"):
        if old.name != name:
            old.unlink()


def read_state(folder: Path, partition: int) -> tuple[PartitionState, dict[str, NDArray[Any]]] | None:
    """What `write_state` wrote; None where there is nothing, or nothing that can be read: then the bus is read anew."""
    try:
        tree = msgspec.json.decode((folder / f"partition-{partition}.json").read_bytes())
        state = msgspec.convert(tree["state"], PartitionState)
        with np.load(folder / tree["arrays"], allow_pickle=False) as arrays:
            return state, {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)
