"""A producer over kafka-python that never blocks the sender and never forgets what was not acknowledged."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .bus import BusError, BusFull, BusMisconfigured, BusUnavailable, refuse_oversized
from .clock import Clock
from .events import TOPICS, Topic
from .partitioning import key_bytes

CLOSE_FLUSH_SECONDS = 2.0
RETRY_SECONDS = 0.5


class _Message(NamedTuple):
    topic: str
    key: bytes
    headers: list[tuple[str, bytes]]
    value: bytes


class KafkaBusProducer:
    """Keeps every message until Kafka has acknowledged it; a thread of its own hands them to the library.

    The library retries by itself and keeps the order. What it gives up (`delivery_seconds`, a broken producer id) is
    sent again through a new connection once everything else in flight is decided: after such an event, and only
    then, a message may arrive twice or later than its successors.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        library: Any,
        clock: Clock,
        prefix: str,
        servers: str,
        buffered_max: int,
    ) -> None:
        self._connect = connect
        self._errors = library.errors
        self._clock = clock
        self._prefix = prefix
        self._servers = servers
        self._buffered_max = buffered_max
        self._kept: dict[int, _Message] = {}  # not acknowledged, oldest first
        self._waiting: deque[int] = deque()  # of those: not given to the library yet
        self._given_up: set[int] = set()  # of those: the library gave up
        self._sent = 0
        self._last_error = ""
        self._changed = threading.Condition()
        self._flush_waits = 0
        self._closed = False
        self._stopping = False
        self._kafka = connect()
        self._thread = threading.Thread(target=self._pump, name="kafka-bus-producer", daemon=True)
        self._thread.start()

    def send(self, topic: Topic, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        if topic not in TOPICS:
            raise BusMisconfigured(f"there is no topic {topic!r}; topics are {', '.join(TOPICS)}")
        refuse_oversized(topic, headers, value)
        message = _Message(f"{self._prefix}.{topic}", key_bytes(key), list(headers), value)
        with self._changed:
            if self._closed:
                raise BusMisconfigured("this producer is closed; make a new one")
            if len(self._kept) >= self._buffered_max:
                raise BusFull(
                    f"{self._buffered_max} messages wait for Kafka at {self._servers}; call flush, or drop this one"
                )
            self._sent += 1
            self._kept[self._sent] = message
            self._waiting.append(self._sent)
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> None:
        deadline = self._clock.monotonic() + timeout_seconds
        with self._changed:
            target = self._sent
            self._flush_waits += 1
            try:
                while self._kept and next(iter(self._kept)) <= target:
                    rest = deadline - self._clock.monotonic()
                    if rest <= 0:
                        raise self._unavailable(timeout_seconds)
                    self._changed.wait(rest)
            finally:
                self._flush_waits -= 1

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        try:
            self.flush(CLOSE_FLUSH_SECONDS)
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join(CLOSE_FLUSH_SECONDS)
            self._let_go(self._kafka)

    def _unavailable(self, timeout_seconds: float) -> BusUnavailable:
        reason = f" ({self._last_error})" if self._last_error else ""
        return BusUnavailable(
            f"Kafka at {self._servers} did not acknowledge {len(self._kept)} messages within {timeout_seconds:g} s"
            f"{reason}; they are kept and sent again"
        )

    # ---- our own thread

    def _pump(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and not self._next_step():
                    self._changed.wait()
                if self._stopping:
                    return
                number = None if self._given_up else self._waiting[0]
            if number is None:
                self._start_again()
            else:
                self._hand_over(number)

    def _next_step(self) -> bool:
        """Something to hand over; or something to start again with, once nothing is in flight any more."""
        if self._given_up:
            return len(self._kept) == len(self._waiting) + len(self._given_up)
        return bool(self._waiting)

    def _hand_over(self, number: int) -> None:
        message = self._kept[number]
        try:
            future = self._kafka.send(message.topic, value=message.value, key=message.key, headers=message.headers)
        except self._errors.KafkaTimeoutError:
            self._note(
                f"no metadata of {message.topic}: is a broker running, and has `transom topics create` been run?"
            )
            return
        except (self._errors.KafkaError, ValueError, RuntimeError) as error:
            # A producer that is closed or broken: everything through a new one.
            with self._changed:
                self._waiting.popleft()
            self._refused(number, error)
            return
        with self._changed:
            self._waiting.popleft()
        # May be called at once, and else from the library's thread.
        future.add_callback(self._acknowledged, number)
        future.add_errback(self._refused, number)

    def _start_again(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, RETRY_SECONDS)
        try:
            fresh = self._connect()
        except BusError as error:
            self._note(str(error))
            return
        self._let_go(self._kafka)
        self._kafka = fresh
        with self._changed:
            self._waiting.extendleft(sorted(self._given_up, reverse=True))
            self._given_up.clear()

    def _let_go(self, kafka: Any) -> None:
        # The library's close waits for what is undelivered, and when that fails leaves its threads running; so the
        # batches are aborted first. There is no public way to say that.
        kafka._sender.force_close()
        with contextlib.suppress(self._errors.KafkaError):
            kafka.close(timeout=1.0)

    def _acknowledged(self, number: int, _metadata: object) -> None:
        with self._changed:
            self._kept.pop(number, None)
            self._last_error = ""
            if self._flush_waits or self._given_up:
                self._changed.notify_all()

    def _refused(self, number: int, error: Exception) -> None:
        with self._changed:
            self._given_up.add(number)
            self._last_error = f"{type(error).__name__}: {error}"
            self._changed.notify_all()

    def _note(self, reason: str) -> None:
        with self._changed:
            self._last_error = reason
