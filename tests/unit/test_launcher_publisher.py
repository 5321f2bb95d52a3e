"""The publisher: one order, bounded, and a bus that is away is waited for, not lost to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from ingest.bus import BusFull, BusUnavailable
from ingest.clock import SystemClock
from ingest.codec import Encoded
from recovery.launcher.publisher import Publisher, dead_letter
from recovery.launcher.show import WAITING_BYTES_MAX, Shown
from tests.launcher_lab import wait_for


class TinyBus:
    """Remembers what is sent and flushed; can be away, and takes `buffer_max` between flushes."""

    def __init__(self, buffer_max: int = 1000) -> None:
        self.away = False
        self.flushed: list[tuple[str, bytes]] = []
        self.flushes = 0
        self._buffer: list[tuple[str, bytes]] = []
        self._buffer_max = buffer_max

    def producer(self) -> Any:
        if self.away:
            raise BusUnavailable("the bus is away")
        return self

    def send(self, topic: str, key: str, headers: Sequence[tuple[str, bytes]], value: bytes) -> None:
        if len(self._buffer) >= self._buffer_max:
            raise BusFull("full")
        self._buffer.append((topic, value))

    def flush(self, timeout_seconds: float) -> None:
        if self.away:
            raise BusUnavailable("the bus is away")
        self.flushes += 1
        self.flushed += self._buffer
        self._buffer.clear()

    def close(self) -> None:
        pass


def message(topic: Any, number: int, size: int = 10) -> Encoded:
    return Encoded(topic, "job", (), f"{number:0{size}d}".encode())


def publisher(bus: TinyBus, bytes_max: int = 1_000_000) -> tuple[Publisher, list[str]]:
    told: list[str] = []
    return Publisher(bus, SystemClock(), queue_bytes_max=bytes_max, warn=told.append), told  # type: ignore[arg-type]


def test_order_is_kept_over_all_topics_and_everything_is_flushed_at_the_end() -> None:
    bus = TinyBus(buffer_max=7)
    ours, _ = publisher(bus)
    topics = ("metrics", "logs", "events")
    for number in range(1000):
        ours.put(message(topics[number % 3], number))
    ours.start()
    assert ours.close(10.0)
    assert [int(value) for _, value in bus.flushed] == list(range(1000))


def test_what_came_before_an_event_is_durable_before_the_event_is_sent() -> None:
    bus = TinyBus()
    ours, _ = publisher(bus)
    seen: list[int] = []
    send = bus.send

    def spying(topic: str, key: str, headers: Any, value: bytes) -> None:
        if topic == "events":
            seen.append(len(bus.flushed))
        send(topic, key, headers, value)

    bus.send = spying  # type: ignore[method-assign]
    for number, topic in enumerate(("logs", "logs", "events", "events", "metrics", "events")):
        ours.put(message(topic, number))
    ours.start()
    assert ours.close(10.0)
    assert seen == [2, 2, 5]


def test_a_full_queue_loses_logs_before_metrics_before_events() -> None:
    bus = TinyBus()
    bus.away = True
    ours, _ = publisher(bus, bytes_max=100)
    for number in range(10):
        ours.put(message("events" if number % 2 else "logs", number))
    for number in range(10, 13):
        ours.put(message("metrics", number))
    assert ours.dropped == 3
    bus.away = False
    ours.start()
    assert ours.close(10.0)
    assert [int(value) for _, value in bus.flushed] == [1, 3, 5, 6, 7, 8, 9, 10, 11, 12]


def test_a_bus_that_comes_back_gets_what_was_kept_once() -> None:
    bus = TinyBus()
    bus.away = True
    ours, told = publisher(bus)
    ours.start()
    for number in range(5):
        ours.put(message("events", number))
    wait_for(lambda: told, "the user is told")
    assert "away" in told[0]
    bus.away = False
    assert ours.close(10.0)
    assert [int(value) for _, value in bus.flushed] == list(range(5))
    assert len(told) == 1


def test_closing_with_a_dead_bus_is_bounded_and_says_so() -> None:
    bus = TinyBus()
    bus.away = True
    ours, _ = publisher(bus)
    ours.start()
    ours.put(message("events", 1))
    assert not ours.close(0.1)


def test_an_empty_dead_letter_is_sent_like_any_other() -> None:
    bus = TinyBus()
    ours, _ = publisher(bus)
    ours.start()
    ours.put(dead_letter("job", "metrics.v1", b"", "empty", {"node": "n"}))
    assert ours.close(10.0)
    assert bus.flushed == [("dead-letters", b"")]


def test_a_paused_terminal_holds_up_nobody_and_the_loss_is_said() -> None:
    gate, shown = threading.Event(), []

    def sink(lines: bytes) -> None:
        gate.wait(30)
        shown.append(lines)

    ours = Shown(sink)
    ours.start()
    for _ in range(300):
        ours.put(b"x" * 99_999 + b"\n")
    gate.set()
    ours.close(10)
    assert b"bytes of output not shown" in b"".join(shown)
    assert sum(map(len, shown)) < 2 * WAITING_BYTES_MAX + 1000  # what was on its way, and what waited


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("closed")])
def test_a_reader_that_went_away_is_forgotten(error: Exception) -> None:
    def sink(_lines: bytes) -> None:
        raise error

    ours = Shown(sink)
    ours.start()
    ours.put(b"a\n")
    ours.close(10)
