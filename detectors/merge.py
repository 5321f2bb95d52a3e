"""One merged order of a job's messages by producer time, released by the watermark of its nodes' heartbeats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import msgspec

from detectors.clues import TOPIC_OF, Place
from ingest.bus import TopicPartition
from ingest.events import AttemptStarted, DeviceMetrics, Logs, Message, Metrics, NodeHeartbeat, Topic

COLLECTED = frozenset((DeviceMetrics, Logs))  # a collector beside the rank counts for itself
PROMPT = frozenset((Metrics, NodeHeartbeat))  # sent as soon as they are stamped


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """How long the merge waits for whom."""

    margin_seconds: float = 0.25  # below the heartbeats: what another topic may still be carrying
    node_silent_seconds: float = 2.0  # of event time; a node silent for longer holds nothing back
    lateness_seconds: float = 3.0  # of wall time; when everything is silent, order is settled this far behind now
    outage_seconds: float = 2.0  # a node's messages that are so much later than its last ones were held up by the bus
    reconnect_seconds: float = 10.0  # of bus time: so long after an outage no silence means anything
    messages_max: int = 200_000  # held back at most; beyond it the oldest are released early
    gap_max: int = 256  # sequences of one stream seen ahead of a gap before the gap is given up


class Merged(msgspec.Struct, frozen=True, gc=False):
    """One message in its place in the order. `late`: it is older than what had been released before it came."""

    message: Message
    place: Place | None
    late: bool


class _Stream(msgspec.Struct):
    """Which sequences of one producer have been seen: all up to `floor` but those in `again`, and those in `ahead`."""

    floor: int = -1
    ahead: list[int] = []
    again: list[int] = []  # held back when the state was saved: the bus brings them once more
    delay: float | None = None  # of its last message, where it is prompt: the bus's time less the producer's

    def has(self, sequence: int) -> bool:
        return (sequence <= self.floor and sequence not in self.again) or sequence in self.ahead

    def add(self, sequence: int, gap_max: int) -> None:
        if sequence in self.again:
            self.again.remove(sequence)
            return
        self.ahead.append(sequence)
        if sequence != self.floor + 1 and len(self.ahead) <= gap_max:
            return
        self.ahead.sort()
        if len(self.ahead) > gap_max:  # what is missing was dropped by its producer and will not come
            self.floor = self.ahead[gap_max // 2]
        kept = [number for number in self.ahead if number > self.floor]
        while kept and kept[0] == self.floor + 1:
            self.floor = kept.pop(0)
        self.ahead = kept


class _State(msgspec.Struct):
    """What survives a restart of the service; messages held back are read from the bus again."""

    watermark: float | None = None
    heartbeats: dict[str, float] = {}
    attempt: int = 0
    newest_at: float = 0.0
    streams: dict[str, _Stream] = {}
    duplicates: int = 0
    late: int = 0
    bus_at: float = 0.0  # the bus's time of the last message
    reconnecting_until: float = 0.0  # of bus time


class Merge:
    """Messages go in as they arrive and come out by (at, rank, topic, sequence): the same order whatever the arrival.

    The watermark is the oldest "last heartbeat" of the job's live nodes, less a margin. A topic that the consumer
    has not yet read to its end (`lagging`) holds the watermark at the newest message seen of it.

    Messages that lay with their producers while the bus was away come back node by node. Who is not back yet is not
    silent: for a while after an outage every node that the watermark has not passed is waited for.
    """

    def __init__(self, config: MergeConfig | None = None) -> None:
        self.config = config or MergeConfig()
        self._state = _State()
        self._held: list[tuple[float, int, str, str, int, int, Merged]] = []  # sorted when some of it is taken
        self._streams: dict[tuple[int, int, str, type[Message]], _Stream] = {}  # those of the state, quicker to find
        self._late: list[Merged] = []
        self._newest_of: dict[Topic, float] = dict.fromkeys(TOPIC_OF.values(), float("-inf"))
        self._count = 0
        self._reconnecting = False
        self._silent_until = 0.0  # by the wall

    @property
    def watermark(self) -> float | None:
        """Everything up to here has been released; None before the first heartbeat."""
        return self._state.watermark

    @property
    def heard_until(self) -> float | None:
        """By the bus's clock: up to when it is known what was said, and what was not. None where that is not told."""
        return max(self._state.bus_at, self._silent_until) if self._state.bus_at > 0.0 else None

    @property
    def duplicates(self) -> int:
        return self._state.duplicates

    @property
    def late(self) -> int:
        return self._state.late

    def put(self, message: Message, place: Place | None = None, appended_at: float | None = None) -> None:
        """Take one message; a sequence that its producer's stream has shown already is dropped and counted.

        `appended_at` is when the bus took it.
        """
        # The hot path: every message comes by here.
        state, kind, at, rank, node = self._state, type(message), message.at, message.rank, message.node
        attempt, sequence, topic = message.attempt, message.sequence, TOPIC_OF[kind]
        if at > self._newest_of[topic]:
            self._newest_of[topic] = at
            state.newest_at = max(state.newest_at, at)
        if attempt > state.attempt:
            self._begin_attempt(attempt)
        if kind in COLLECTED and message.collector:  # type: ignore[attr-defined]
            node = f"{node}/{message.collector}"  # type: ignore[attr-defined]
        stream = self._streams.get((attempt, rank, node, kind))
        if stream is None:
            stream = state.streams.setdefault(_stream_key(message, topic), _Stream())
            self._streams[attempt, rank, node, kind] = stream
        if appended_at is not None:
            if appended_at > state.bus_at:
                state.bus_at = appended_at
            if kind in PROMPT:
                self._note_delay(appended_at, appended_at - at, stream)
        if sequence == stream.floor + 1 and not stream.ahead:
            stream.floor = sequence
        elif stream.has(sequence):
            state.duplicates += 1
            return
        else:
            stream.add(sequence, self.config.gap_max)
        if topic == "events":
            self._note_nodes(message)
        if state.watermark is not None and at <= state.watermark:
            state.late += 1
            self._late.append(Merged(message, place, True))
            return
        self._count += 1  # only breaks ties that no two producers can make
        self._held.append((at, rank, topic, node, sequence, self._count, Merged(message, place, False)))

    def take(self, lagging: Collection[Topic] = ()) -> list[Merged]:
        """What may be released now: late messages first, then the order up to the watermark."""
        target = self._heartbeat_watermark()
        if target is not None:
            self._raise_to(self._limit(target, lagging))
        released = sorted(self._late, key=_order)
        self._late = []
        self._held.sort()  # nearly in order already, and then it costs a comparison each
        count = len(self._held) - self.config.messages_max
        if count > 0:
            self._raise_to(self._held[count - 1][0])
        if self._state.watermark is not None:
            count = bisect_right(self._held, self._state.watermark, key=itemgetter(0))
            released += [entry[-1] for entry in self._held[:count]]
            del self._held[:count]
        return released

    def advance(self, now: float, lagging: Collection[Topic] = ()) -> None:
        """Wall time is `now`: when nothing has come for the lateness, stop waiting for it. Event time goes on from the
        newest heartbeat by as much as the bus was silent, for the job's clocks need not be ours."""
        state = self._state
        bus_now = state.bus_at if lagging else now  # who catches up with an old outage waits as one did then
        self._reconnecting = bus_now < state.reconnecting_until
        if self._reconnecting:
            return
        newest, spoke_at = state.newest_at, state.newest_at
        if state.bus_at > 0.0:
            newest, spoke_at = max(state.heartbeats.values(), default=newest), state.bus_at
        late = now - spoke_at - self.config.lateness_seconds
        if late >= 0.0:
            self._silent_until = now
            self._raise_to(self._limit(newest + late, lagging))

    def held_offsets(self) -> dict[TopicPartition, int]:
        """The lowest offset of what is held back, by partition: where to read again from after a restart."""
        lowest: dict[TopicPartition, int] = {}
        for merged in [*self._late, *(entry[-1] for entry in self._held)]:
            if merged.place is not None:
                key = TopicPartition(merged.place.topic, merged.place.partition)
                lowest[key] = min(lowest.get(key, merged.place.offset), merged.place.offset)
        return lowest

    def to_state(self) -> dict[str, Any]:
        """JSON-able, without what is held back: read on from `held_offsets`, or behind the last record read."""
        state = msgspec.convert(msgspec.to_builtins(self._state), _State)
        for merged in [*self._late, *(entry[-1] for entry in self._held)]:
            stream = state.streams.get(_stream_key(merged.message, TOPIC_OF[type(merged.message)]))
            if stream is not None:
                _forget(stream, merged.message.sequence)
        built: dict[str, Any] = msgspec.to_builtins(state)
        return built

    @classmethod
    def from_state(cls, state: dict[str, Any], config: MergeConfig | None = None) -> Merge:
        merge = cls(config)
        merge._state = msgspec.convert(state, _State)
        return merge

    def _note_delay(self, appended_at: float, delay: float, stream: _Stream) -> None:
        """See the end of an outage: a delay that has grown at once. A difference, so that the producer's clock may be
        wrong; of one producer, for one that is always late is no outage."""
        before, stream.delay = stream.delay, delay
        if before is not None and delay - before > self.config.outage_seconds:
            self._state.reconnecting_until = appended_at + self.config.reconnect_seconds
            self._reconnecting = True

    def _begin_attempt(self, attempt: int) -> None:
        state = self._state
        state.attempt = attempt
        prefix = f"{attempt}/"
        state.streams = {key: stream for key, stream in state.streams.items() if key.startswith(prefix)}
        self._streams = {}

    def _note_nodes(self, message: Message) -> None:
        state = self._state
        if isinstance(message, NodeHeartbeat):
            state.heartbeats[message.node] = max(state.heartbeats.get(message.node, message.at), message.at)
        elif isinstance(message, AttemptStarted):
            for node in {place.node for place in message.places}:
                state.heartbeats.setdefault(node, message.at)

    def _heartbeat_watermark(self) -> float | None:
        beats = self._state.heartbeats.values()
        if not beats:
            return None
        passed = self._state.watermark
        if self._reconnecting and passed is not None:
            return min((at for at in beats if at > passed), default=passed) - self.config.margin_seconds
        newest = max(beats)
        return min(at for at in beats if at >= newest - self.config.node_silent_seconds) - self.config.margin_seconds

    def _limit(self, target: float, lagging: Collection[Topic]) -> float:
        for topic in lagging:
            target = min(target, self._newest_of[topic] - self.config.margin_seconds)
        return target

    def _raise_to(self, watermark: float) -> None:
        if watermark > float("-inf"):
            current = self._state.watermark
            self._state.watermark = watermark if current is None else max(current, watermark)


def _stream_key(message: Message, topic: Topic) -> str:
    """Events by type: a launcher and a checkpoint engine both speak for a rank, each with a counter of its own; so do
    a rank and the launcher that measures its process."""
    kind = type(message).__name__ if topic == "events" or type(message) is DeviceMetrics else topic
    collector = getattr(message, "collector", "")
    return f"{message.attempt}/{message.rank}/{message.node}/{kind}" + (f"/{collector}" if collector else "")


def _order(merged: Merged) -> tuple[float, int, str, str, int]:
    message = merged.message
    return (message.at, message.rank, TOPIC_OF[type(message)], message.node, message.sequence)


def _forget(stream: _Stream, sequence: int) -> None:
    """Take one sequence out of what has been seen."""
    if sequence <= stream.floor:
        stream.again.append(sequence)
    elif sequence in stream.ahead:
        stream.ahead.remove(sequence)
