"""Hands a launcher's messages to the bus from a thread of its own: in order, bounded, never waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ingest.bus import Bus, BusError, BusFull, Producer
from ingest.clock import Clock
from ingest.codec import Codec, Encoded
from ingest.events import Message

BATCH_MAX = 500
FLUSH_SECONDS_MAX = 5.0
RETRY_SECONDS = 0.25
DROP_ORDER = ("logs", "metrics", "other")  # what a full queue loses first


@dataclass(frozen=True, slots=True)
class Queued:
    """One message and its place in the launcher's order."""

    order: int
    encoded: Encoded


class Publisher:
    """A queue per kind, so that a full one loses logs before metrics before events; sent in one order."""

    def __init__(self, bus: Bus, clock: Clock, *, queue_bytes_max: int, warn: Callable[[str], None]) -> None:
        self._bus = bus
        self._clock = clock
        self._codec = Codec()
        self._queue_bytes_max = queue_bytes_max
        self._warn = warn
        self._queues: dict[str, deque[Queued]] = {kind: deque() for kind in DROP_ORDER}
        self._bytes = 0
        self._count = 0
        self._order = 0
        self._sending = 0  # taken from the queues and not yet durable
        self._unflushed = False  # metrics or logs since the last flush
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        self._thread.start()

    def publish(self, message: Message) -> None:
        """Queue a message behind all others; a full queue loses the oldest of its least wanted kind."""
        try:
            encoded = self._codec.encode(message)
        except ValueError as error:  # larger than any message may be; our own batches are not
            self.dropped += 1
            self._warn(str(error))
            return
        self.put(encoded)

    def put(self, encoded: Encoded) -> None:
        """Queue bytes that are already a message, or a dead letter."""
        kind = encoded.topic if encoded.topic in self._queues else "other"
        with self._changed:
            self._queues[kind].append(Queued(self._order, encoded))
            self._order += 1
            self._bytes += len(encoded.value)
            self._count += 1
            while self._bytes > self._queue_bytes_max:
                victim = next(queue for queue in self._queues.values() if queue)
                self._bytes -= len(victim.popleft().encoded.value)
                self._count -= 1
                self.dropped += 1
            self._changed.notify()

    def close(self, drain_seconds: float) -> bool:
        """Send what is queued for at most `drain_seconds`, then stop; True when everything is on the bus."""
        deadline = self._clock.monotonic() + drain_seconds
        with self._changed:
            self._closing = True
            self._changed.notify()
            while (self._count or self._sending) and self._thread.is_alive():
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.1))
        self._thread.join(max(0.0, deadline - self._clock.monotonic()) + 0.1)
        return True

    def _run(self) -> None:
        producer: Producer | None = None
        told = ""
        while True:
            batch = self._take()
            if not batch:
                break
            while batch or self._sending:
                try:
                    producer = producer or self._bus.producer()
                    self._send(producer, batch)
                    told = ""
                except BusError as error:
                    if str(error) != told:
                        told = str(error)
                        self._warn(f"the bus does not take messages ({told}); keeping the newest until it does")
                    with self._changed:
                        self._changed.wait(RETRY_SECONDS)
        if producer is not None:
            producer.close()

    def _take(self) -> list[Queued]:
        with self._changed:
            while not self._count:
                if self._closing:
                    return []
                self._changed.wait()
            batch: list[Queued] = []
            while len(batch) < BATCH_MAX and (heads := [queue for queue in self._queues.values() if queue]):
                batch.append(min(heads, key=lambda queue: queue[0].order).popleft())
            self._bytes -= sum(len(queued.encoded.value) for queued in batch)
            self._count -= len(batch)
            self._sending = len(batch)
            return batch

    def _send(self, producer: Producer, batch: list[Queued]) -> None:
        """Send and flush; what the producer has accepted leaves `batch`, so that it is not sent twice.

        Topics have no common order on a bus. A heartbeat and an exit say that all before them is there: so it is
        made durable before an event is sent.
        """
        while batch:
            encoded = batch[0].encoded
            try:
                if encoded.topic == "events" and self._unflushed:
                    producer.flush(FLUSH_SECONDS_MAX)
                    self._unflushed = False
                producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
            except BusFull:
                producer.flush(FLUSH_SECONDS_MAX)
                continue
            batch.pop(0)
            self._unflushed = self._unflushed or encoded.topic != "events"
        producer.flush(FLUSH_SECONDS_MAX)
        self._unflushed = False
        with self._changed:
            self._sending = 0
            self._changed.notify()


def dead_letter(job: str, packet_type: str, body: bytes, reason: str, source: dict[str, Any]) -> Encoded:
    """Bytes that are no message, with why and from whom in the headers."""
    headers = [
        ("ce_type", packet_type.encode("utf-8", "replace")),
        ("transom_reason", reason.encode("utf-8", "replace")),
    ]
    headers += [(f"transom_{name}", str(value).encode()) for name, value in source.items()]
    return Encoded("dead-letters", job, tuple(headers), body)
