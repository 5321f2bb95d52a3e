"""The pass from records to verdicts, pure: live service and replay run this very code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.clues import Place
from detectors.config import DetectorConfig
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook
from detectors.merge import Merge
from detectors.verdict import Verdict
from ingest.bus import Record, TopicPartition
from ingest.codec import Codec, Undecodable
from ingest.events import MESSAGE_TYPES, Message, Topic

JOBS_MAX = 1_000
IDLE_SECONDS_MAX = 3_600.0  # a job that says nothing for so long is forgotten; its attempt is over or lost


@dataclass(slots=True)
class _Job:
    merge: Merge
    detector: JobDetector
    partition: int
    heard_at: float


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of the jobs of one partition, and where to read on from: JSON beside the arrays of an npz."""

    version: int
    offsets: dict[str, int]  # "topic/partition": the first record that is not in this state
    merges: dict[str, dict[str, Any]]
    detectors: dict[str, dict[str, Any]]


STATE_VERSION = 1


class Detection:
    """Feeds each job's merge and detector; keeps no clock, does no input or output."""

    def __init__(self, config: DetectorConfig, rules: RuleBook) -> None:
        self._config = config
        self._rules = rules
        self._codec = Codec(MESSAGE_TYPES)
        self._jobs: dict[str, _Job] = {}
        self._next: dict[tuple[Topic, int], int] = {}

    def feed(self, record: Record) -> str | None:
        """Take one record; returns why it cannot be read, if it cannot: it belongs to the dead letters."""
        place = Place(record.topic, record.partition, record.offset, record.appended_at)
        try:
            message = self._codec.decode(record.headers, record.value)
        except Undecodable as error:
            self._next[place.topic, place.partition] = place.offset + 1
            return error.reason
        return self.hear(message, place, record.appended_at)

    def hear(self, message: Message, place: Place, appended_at: float) -> str | None:
        """Take one message that somebody has decoded already; else as `feed`. `appended_at`: when the bus took it."""
        partition = place.partition
        self._next[place.topic, partition] = place.offset + 1
        job = self._jobs.get(message.job)
        if job is None:
            if len(self._jobs) >= JOBS_MAX:
                return f"more than {JOBS_MAX} jobs at once; run more detectors over more partitions"
            job = _Job(Merge(self._config.merge), JobDetector(message.job, self._config, self._rules), partition, 0.0)
            self._jobs[message.job] = job
        elif job.partition != partition:
            where = f"partition {job.partition} and in {partition}"
            return f"job {message.job!r} is in {where}; producers must use murmur2 of the key"
        job.heard_at = appended_at
        job.merge.put(message, place, appended_at)
        return None

    def conclude(self, now: float, lagging: Collection[TopicPartition] = ()) -> list[Verdict]:
        """Verdicts about everything up to the watermark; `lagging` partitions have not been read to their end."""
        verdicts: list[Verdict] = []
        for name in sorted(self._jobs):
            job = self._jobs[name]
            behind = {place.topic for place in lagging if place.partition == job.partition}
            job.merge.advance(now, behind)
            job.detector.observe_all(job.merge.take(behind))
            if job.merge.watermark is not None:
                verdicts += job.detector.advance(job.merge.watermark, job.merge.heard_until)
            if now - job.heard_at > IDLE_SECONDS_MAX:
                del self._jobs[name]
        return verdicts

    def use_rules(self, rules: RuleBook) -> None:
        """Other log rules for all jobs, from each one's next tick on."""
        self._rules = rules
        for job in self._jobs.values():
            job.detector.use_rules(rules)

    def save(self, partition: int) -> tuple[PartitionState, dict[str, NDArray[Any]]]:
        """The state of one partition's jobs; arrays are named `<job>|<array>`."""
        offsets = {TopicPartition(*key): at for key, at in self._next.items() if key[1] == partition}
        merges: dict[str, dict[str, Any]] = {}
        detectors: dict[str, dict[str, Any]] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for name, job in self._jobs.items():
            if job.partition != partition:
                continue
            for key, held in job.merge.held_offsets().items():
                offsets[key] = min(held, offsets.get(key, held))
            merges[name] = job.merge.to_state()
            detectors[name], own = job.detector.to_state()
            arrays |= {f"{name}|{array}": values for array, values in own.items()}
        named = {f"{key.topic}/{key.partition}": at for key, at in offsets.items()}
        return PartitionState(version=STATE_VERSION, offsets=named, merges=merges, detectors=detectors), arrays

    def load(
        self, partition: int, state: PartitionState, arrays: Mapping[str, NDArray[Any]], now: float
    ) -> dict[TopicPartition, int]:
        """Take over a partition's jobs; returns the offsets to read on from. Raises ValueError for another version."""
        if state.version != STATE_VERSION:
            raise ValueError(f"detection state of version {state.version} cannot be read by version {STATE_VERSION}")
        for name, merge in state.merges.items():
            own = {
                key.split("|", 1)[1]: np.asarray(values) for key, values in arrays.items() if key.startswith(f"{name}|")
            }
            detector = JobDetector.from_state(name, self._config, self._rules, state.detectors[name], own)
            self._jobs[name] = _Job(Merge.from_state(merge, self._config.merge), detector, partition, now)
        offsets = {TopicPartition(_topic(key), int(key.rpartition("/")[2])): at for key, at in state.offsets.items()}
        self._next |= {(place.topic, place.partition): at for place, at in offsets.items()}
        return offsets

    def drop(self, partition: int) -> None:
        """Forget a partition that somebody else has now."""
        self._jobs = {name: job for name, job in self._jobs.items() if job.partition != partition}
        self._next = {key: at for key, at in self._next.items() if key[1] != partition}


def _topic(key: str) -> Topic:
    topic: Topic = msgspec.convert(key.rpartition("/")[0], Topic)
    return topic
