"""The thread of a rank that talks: every 0.2 s the rows since the last flush, the heartbeat, and log lines.

Nothing here blocks or raises into the training thread; whatever has a bound drops its oldest and counts it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from .clock import Clock
from .events import FaultInjected, LogLine, Logs, Message, Metrics, Phase, split_non_finite
from .flight_recorder import Flight
from .identity import RankIdentity
from .rank_socket import (
    FAULT_INJECTED,
    FLIGHT,
    FLIGHT_WANTED,
    INJECT,
    LOGS,
    METRICS,
    PACKET_BYTES_MAX,
    Hello,
    RankLink,
    pack,
    unpack,
)
from .step_rows import FinishedRow, StepRows

FLUSH_SECONDS = 0.2
LAST_WORDS_SECONDS = 0.5
ROWS_PER_MESSAGE_MAX = 200
ROWS_PER_FLUSH_MAX = 2_000
LINES_MAX = 2_000
LINES_PER_MESSAGE_MAX = 100
LINE_CHARS_MAX = 8_192
FAULTS_MAX = 64
HELD_PACKETS_MAX = 2_000

Part = TypeVar("Part")
Kind = TypeVar("Kind", bound=Message)

logger = logging.getLogger("transom")


class FaultFired(NamedTuple):
    """An injected fault that fires."""

    at: float
    fault: str
    parameters: Mapping[str, float]


class Reporter:
    """Turns rows, lines and the phase into messages, and hands them to the launcher from a daemon thread."""

    def __init__(
        self,
        identity: RankIdentity,
        rows: StepRows,
        socket: RankLink,
        phase: Callable[[], Phase],
        clock: Clock,
        *,
        on_inject: Callable[[bytes], None] = lambda body: None,
        last_words_seconds: float = LAST_WORDS_SECONDS,
    ) -> None:
        self._identity = identity
        self._rows = rows
        self._socket = socket
        self._phase = phase
        self._clock = clock
        self._on_inject = on_inject
        self._last_words_seconds = last_words_seconds
        self._flight: Callable[[], Flight | None] | None = None
        self._flight_told = False
        self._lines: deque[LogLine] = deque()
        self._faults: deque[FaultFired] = deque(maxlen=FAULTS_MAX)
        self._better_hello: Hello | None = None
        self._dropped = 0  # here; the socket and the rows count their own
        self._drop_until = self._hold_until = float("-inf")  # monotonic: injected faults of telemetry
        self._hold_seconds = 0.0
        self._held: deque[tuple[float, bytes]] = deque(maxlen=HELD_PACKETS_MAX)  # and when each may go
        self._sequences = {METRICS: 0, LOGS: 0, FAULT_INJECTED: 0}
        self._encoder = msgspec.json.Encoder()
        self._wake = threading.Event()
        self._stopping = False
        self._complained = False
        self._thread = threading.Thread(target=self._work, name="transom-reporter", daemon=True)

    def start(self) -> None:
        """Start the thread; it says hello at once."""
        self._thread.start()

    def add_line(self, line: LogLine) -> None:
        """Queue one log record. Called from any thread."""
        text = line.text
        if len(text) > LINE_CHARS_MAX:
            text = text[:LINE_CHARS_MAX] + " …"
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no JSON text
        if text is not line.text:
            line = msgspec.structs.replace(line, text=text)
        self._lines.append(line)
        if len(self._lines) > LINES_MAX:
            self._lines.popleft()
            self._dropped += 1

    def add_fault(self, fault: str, parameters: Mapping[str, float]) -> None:
        """Tell that an injected fault fires now: the label of a recorded run."""
        self._faults.append(FaultFired(self._clock.now(), fault, parameters))

    def drop_all(self, seconds: float) -> None:
        """An injected fault: for `seconds` what is reported is lost on its way, labels of faults excepted."""
        self._drop_until = self._clock.monotonic() + seconds

    def hold_back(self, delay_seconds: float, seconds: float) -> None:
        """An injected fault: for `seconds` everything is reported `delay_seconds` late, in its order."""
        self._hold_seconds = delay_seconds
        self._hold_until = self._clock.monotonic() + seconds

    def watch_flight(self, flight: Callable[[], Flight | None]) -> None:
        """From now on the launcher may ask how far our collectives got; `flight` is called from our thread."""
        self._flight, self._flight_told = flight, False

    def introduce(self, hello: Hello) -> None:
        """Say hello again, knowing more."""
        self._better_hello = hello

    @property
    def dropped(self) -> int:
        """Messages (rows, lines) that nobody took, so far."""
        return self._dropped + self._rows.dropped + self._socket.dropped

    def stop(self) -> None:
        """Send what is there and end the thread, within about half a second, to a slow bus ten."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._last_words_seconds + 0.1)

    def abandon(self) -> None:
        """Let go of the parent's connection: this is a forked child, in which the thread does not exist."""
        self._socket.abandon()

    def tick(self) -> None:
        """One flush."""
        hello, self._better_hello = self._better_hello, None
        if hello is not None:
            self._socket.introduce(hello)
        self._socket.pump()
        self._queue_metrics()
        self._queue_faults()
        self._queue_lines()
        self._let_go(self._clock.monotonic())
        if self._flight is not None and not self._flight_told:
            self._flight_told = True
            self._socket.put(pack(FLIGHT, self._encoder.encode(Flight())))  # we can be asked
        self._socket.pump()
        for packet in self._socket.receive():
            self._obey(packet)

    def _work(self) -> None:
        while not self._stopping:
            self._tick_harmlessly()
            self._socket.drain(FLUSH_SECONDS)  # returns at once unless the launcher is slow to take a backlog
            self._wake.wait(FLUSH_SECONDS)
        self._tick_harmlessly()
        self._let_go(float("inf"))
        self._socket.drain(self._last_words_seconds)
        self._socket.close()

    def _tick_harmlessly(self) -> None:
        try:
            self.tick()
        except Exception:  # a mistake of ours must cost telemetry, never the training run or its heartbeat
            self._dropped += 1
            if not self._complained:
                logger.exception("transom: a flush of telemetry failed; training goes on")
            self._complained = True

    def _queue_metrics(self) -> None:
        rows = self._rows.take(ROWS_PER_FLUSH_MAX)
        for start in range(0, len(rows), ROWS_PER_MESSAGE_MAX):
            self._put_metrics(rows[start : start + ROWS_PER_MESSAGE_MAX])
        if not rows and self._socket.connected:  # a heartbeat that nobody hears now would only push out a row
            self._put_metrics(())

    def _put_metrics(self, rows: Sequence[FinishedRow]) -> None:
        names = dict.fromkeys(name for row in rows for name in row.samples)
        columns, non_finite = split_non_finite({name: [row.samples.get(name) for row in rows] for name in names})
        message = self._message(
            METRICS,
            Metrics,
            phase=self._phase(),
            step=self._rows.step,
            steps=tuple(row.step for row in rows),
            ended_at=tuple(row.ended_at for row in rows),
            columns=columns,
            non_finite=non_finite,
            dropped=self.dropped,
        )
        if not self._put(METRICS, message):
            self._in_halves(rows, self._put_metrics)

    def _queue_lines(self) -> None:
        while self._lines:
            batch = [self._lines.popleft() for _ in range(min(len(self._lines), LINES_PER_MESSAGE_MAX))]
            self._put_lines(batch)

    def _put_lines(self, lines: Sequence[LogLine]) -> None:
        if not self._put(LOGS, self._message(LOGS, Logs, lines=tuple(lines))):
            self._in_halves(lines, self._put_lines)

    def _queue_faults(self) -> None:
        while self._faults:
            fired = self._faults.popleft()
            message = self._message(FAULT_INJECTED, FaultInjected, fault=fired.fault, parameters=dict(fired.parameters))
            self._put(FAULT_INJECTED, msgspec.structs.replace(message, at=fired.at))

    def _in_halves(self, parts: Sequence[Part], put: Callable[[Sequence[Part]], None]) -> None:
        """Send what was too large for one packet in two; what cannot be divided is dropped."""
        if len(parts) < 2:
            self._dropped += 1
            return
        middle = len(parts) // 2
        put(parts[:middle])
        put(parts[middle:])

    def _put(self, packet_type: str, message: Message) -> bool:
        """Whether the message fitted into a packet."""
        body = self._encoder.encode(message)
        if len(packet_type) + 1 + len(body) > PACKET_BYTES_MAX:
            return False
        self._sequences[packet_type] += 1
        self._send(packet_type, pack(packet_type, body))
        return True

    def _send(self, packet_type: str, packet: bytes) -> None:
        """To the socket; or where a fault of telemetry was asked for, later or never."""
        now = self._clock.monotonic()
        if packet_type == FAULT_INJECTED:
            self._socket.put(packet)
        elif now < self._drop_until:
            return
        elif now < self._hold_until or self._held:
            self._held.append((now + (self._hold_seconds if now < self._hold_until else 0.0), packet))
        else:
            self._socket.put(packet)

    def _let_go(self, now: float) -> None:
        while self._held and self._held[0][0] <= now:
            self._socket.put(self._held.popleft()[1])

    def _message(self, packet_type: str, kind: type[Kind], **fields: object) -> Kind:
        identity = self._identity
        return kind(
            job=identity.job,
            attempt=identity.attempt,
            rank=identity.rank,
            node=identity.node,
            sequence=self._sequences[packet_type],
            at=self._clock.now(),
            **fields,
        )

    def _obey(self, packet: bytes) -> None:
        try:
            packet_type, body = unpack(packet)
        except ValueError:
            return
        if packet_type == INJECT:
            self._on_inject(body)
        elif packet_type == FLIGHT_WANTED and self._flight is not None:
            self._socket.put(pack(FLIGHT, self._encoder.encode(self._flight() or Flight())))
