"""What sources have seen as messages: stamped with who runs on the node, counted, in batches that fit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from ingest.bus import BusError, Producer
from ingest.clock import Clock
from ingest.codec import Codec, Encoded
from ingest.events import DeviceMetrics, LogLine, Logs, Message
from pipelines.collect.jobs_here import JobsHere, Stamp
from pipelines.collect.source import Measured, Seen, SeenLine

BATCH_CHARS_MAX = 120_000  # JSON may need six bytes for a character: a batch always fits a message
BATCH_LINES_MAX = 500
FLUSH_SECONDS_MAX = 5.0
STREAMS_MAX = 20_000


class Deliver(Protocol):
    """Makes messages durable, or raises BusError; then nothing of them counts."""

    def __call__(self, messages: Sequence[Encoded]) -> None: ...


def onto_bus(producer: Producer) -> Deliver:
    """By a producer of the bus; sources take turns."""
    lock = threading.Lock()

    def deliver(messages: Sequence[Encoded]) -> None:
        with lock:
            for encoded in messages:
                producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
            producer.flush(FLUSH_SECONDS_MAX)

    return deliver


class Outlet:
    """For one source. What belongs to no job that runs here is counted and let go."""

    def __init__(self, name: str, jobs: JobsHere, deliver: Deliver, clock: Clock) -> None:
        self._collector = f"collect/{name}"
        self._jobs = jobs
        self._deliver = deliver
        self._clock = clock
        self._codec = Codec()
        self._first = int(clock.now() * 1_000)  # after a restart a sequence goes on above the earlier ones
        self._sequences: dict[tuple[Stamp, type[Message]], int] = {}
        self.delivered = self.nobodys = 0

    def put(self, seen: Sequence[Seen]) -> None:
        """Return when all of it is on the bus. Raises BusError; the same may then be given again."""
        now = self._clock.now()
        lines: dict[Stamp, list[LogLine]] = {}
        messages: list[Message] = []
        nobodys = 0
        before = dict(self._sequences)
        for one in seen:
            stamps = self._jobs.stamps(one.whose, now)
            nobodys += not stamps
            for stamp in stamps:
                if isinstance(one, SeenLine):
                    lines.setdefault(stamp, []).append(one.line)
                else:
                    messages.append(self._measured(stamp, one, now))
        for stamp, records in lines.items():
            messages += self._batches(stamp, records, now)
        try:
            if messages:
                self._deliver([self._codec.encode(message) for message in messages])
        except BusError:
            self._sequences = before  # what is given again is the same message again
            raise
        self.delivered += len(messages)
        self.nobodys += nobodys

    def _measured(self, stamp: Stamp, one: Measured, now: float) -> DeviceMetrics:
        columns: dict[str, tuple[float | None, ...]] = {name: (value,) for name, value in one.columns.items()}
        return DeviceMetrics(
            job=stamp.job, attempt=stamp.attempt, rank=stamp.rank, node=stamp.node, at=now,
            sequence=self._next(stamp, DeviceMetrics), device=one.device, sampled_at=(one.at,), columns=columns,
            collector=self._collector,
        )  # fmt: skip

    def _batches(self, stamp: Stamp, records: Sequence[LogLine], now: float) -> list[Message]:
        batches: list[list[LogLine]] = [[]]
        chars = 0
        for record in records:
            if batches[-1] and (len(batches[-1]) >= BATCH_LINES_MAX or chars + len(record.text) > BATCH_CHARS_MAX):
                batches.append([])
                chars = 0
            batches[-1].append(record)
            chars += len(record.text)
        return [
            Logs(
                job=stamp.job, attempt=stamp.attempt, rank=stamp.rank, node=stamp.node, at=now,
                sequence=self._next(stamp, Logs), lines=tuple(batch), collector=self._collector,
            )
            for batch in batches
        ]  # fmt: skip

    def _next(self, stamp: Stamp, kind: type[Message]) -> int:
        key = (stamp, kind)
        sequence = self._sequences.get(key, self._first)
        if len(self._sequences) >= STREAMS_MAX and key not in self._sequences:
            self._sequences.pop(next(iter(self._sequences)))
        self._sequences[key] = sequence + 1
        return sequence
