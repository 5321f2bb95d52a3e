"""The way from a rank to the bus where there is no launcher of ours: a rank's packets as messages of the bus.

It is what a `RankSocket` is to the reporter, and used by the same one thread. Until the ranks have agreed who they
are, packets wait; each is stamped with the agreed job and attempt when it goes. It also says what a launcher of ours
would: that the attempt began and where its ranks are, that this rank's process is there, that its node lives, and
how it ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from .bus import BusError, BusMisconfigured, Producer
from .clock import Clock
from .codec import Codec, Undecodable
from .events import (
    LAUNCHER_RANK,
    AttemptEnded,
    AttemptStarted,
    ErrorRecord,
    Message,
    NodeHeartbeat,
    RankExited,
    RankPlace,
    RankStarted,
)
from .job_store import Agreement
from .rank_socket import FAULT_INJECTED, LOGS, METRICS, QUEUE_BYTES_MAX, QUEUE_PACKETS_MAX, Hello, unpack

BEAT_SECONDS = 0.5
BEAT_BEHIND_SECONDS = 0.5  # what other ranks of the node had said before is on the bus by now
FLUSH_SECONDS_MAX = 4.0  # a busy `record` takes seconds; to send the same again sooner only makes it busier
LAST_TRIES = 2
RETRY_SECONDS_MAX = 10.0
WAIT_SECONDS = 0.05
PACKETS = (METRICS, LOGS, FAULT_INJECTED)

logger = logging.getLogger("transom")


class BusLink:
    """See the module. `restarts_by`: who restarts this job; `leads`: whether this rank speaks for its node."""

    def __init__(
        self, hello: Hello, agreement: Agreement, open_producer: Callable[[], Producer], clock: Clock, *, node: str,
        local_rank: int, world_size: int, leads: bool, restarts_by: str,
    ) -> None:  # fmt: skip
        self._hello = hello
        self._agreement = agreement
        self._open = open_producer
        self._clock = clock
        self._node, self._local_rank, self._world = node, local_rank, world_size
        self._leads = leads
        self._restarts_by = restarts_by
        self._codec = Codec()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._producer: Producer | None = None
        self._unsent: deque[Message] = deque()  # of our own; few
        self._sequences: dict[type[Message], int] = {}
        self._begun = self._rolled = self._ended = self._given_up = False
        self._retry_at = float("-inf")
        self._retry_seconds = 0.5
        self._beat_at = float("-inf")
        self._unflushed = False
        self._told = ""
        self.finished = False  # set before the end: this rank has done its work
        self.error: ErrorRecord | None = None  # what ends it
        self.dropped = 0

    @property
    def connected(self) -> bool:
        return self._agreement.answer is not None and not self._given_up

    def put(self, packet: bytes) -> None:
        """Queue a packet, dropping the oldest where the queue is full."""
        self._queue.append(packet)
        self._queued_bytes += len(packet)
        while len(self._queue) > QUEUE_PACKETS_MAX or self._queued_bytes > QUEUE_BYTES_MAX:
            self._queued_bytes -= len(self._queue.popleft())
            self.dropped += 1

    def introduce(self, hello: Hello) -> None:
        """More is known of this rank: its process is told of again."""
        self._hello = hello
        if self._begun:
            self._unsent.append(self._rank_started())

    def pump(self) -> None:
        """One step towards agreement, and hand over what the bus takes."""
        if self._given_up:
            return
        self._agreement.look()
        if self._agreement.answer is None or self._clock.monotonic() < self._retry_at:
            return
        self._say_who_is_there()
        try:
            self._producer = self._producer or self._open()
            self._hand_over(self._producer)
        except BusMisconfigured as error:
            self._given_up = True
            logger.warning("transom: nothing is reported: %s", error)
        except BusError as error:
            self._retry_at = self._clock.monotonic() + self._retry_seconds
            self._retry_seconds = min(RETRY_SECONDS_MAX, self._retry_seconds * 2.0)
            if str(error) != self._told:
                self._told = str(error)
                logger.warning("transom: %s; keeping the newest until then", error)

    def drain(self, seconds: float) -> None:
        """At the end: what waits is handed over, as far as it goes at once."""
        if seconds < FLUSH_SECONDS_MAX:
            return  # between two flushes of the reporter, even the last: its rows come before the end
        deadline = self._clock.monotonic() + seconds / 2.0
        while self._agreement.answer is None and not self._agreement.over and self._clock.monotonic() < deadline:
            self._agreement.look()  # a short job
            self._clock.sleep(WAIT_SECONDS)
        if self._agreement.answer is not None and not self._given_up:
            self._say_who_is_there(at_last=True)
        self._say_the_end()
        for _ in range(LAST_TRIES):
            self._retry_at = float("-inf")
            self.pump()
            if not (self._queue or self._unsent or self._unflushed):
                break

    def receive(self) -> list[bytes]:
        """Nobody asks a rank anything by the bus."""
        return []

    def close(self) -> None:
        """Let go of the bus and of the job's store. May be called twice."""
        self._agreement.close()
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def abandon(self) -> None:
        """This is a forked child: the connections are the parent's."""
        producer: Any = self._producer
        self._producer, self._given_up = None, True
        if hasattr(producer, "abandon"):
            producer.abandon()

    # What a launcher would say

    def _say_who_is_there(self, *, at_last: bool = False) -> None:
        """`at_last`: this rank ends now, so that an attempt of which not all ranks have asked yet is told of, too."""
        now = self._clock.monotonic()
        if not self._begun:
            self._begun = True
            self._unsent.append(self._rank_started())
        if self._hello.rank == 0 and not self._rolled and (self._agreement.complete or at_last):
            self._rolled = True
            places = tuple(
                RankPlace(rank=one.rank, local_rank=one.local_rank, node=one.node) for one in self._agreement.members
            )
            self._unsent.append(
                AttemptStarted(
                    world_size=self._world, places=places, restarts_by=self._restarts_by,
                    **self._stamp(AttemptStarted, LAUNCHER_RANK),
                )
            )  # fmt: skip
        if self._leads and now >= self._beat_at and not self._ended:
            self._beat_at = now + BEAT_SECONDS
            stamp = self._stamp(NodeHeartbeat, LAUNCHER_RANK)
            stamp["at"] -= BEAT_BEHIND_SECONDS
            self._unsent.append(NodeHeartbeat(dropped=self.dropped, **stamp))

    def _say_the_end(self) -> None:
        if self._ended or self._agreement.answer is None:
            return
        self._ended = True
        if self.error is not None:
            self._unsent.append(
                RankExited(
                    exit_code=1, error=self.error, last_lines=tuple(self.error.traceback.splitlines()[-20:]),
                    **self._stamp(RankExited, self._hello.rank),
                )
            )  # fmt: skip
        elif self.finished:
            self._unsent.append(RankExited(exit_code=0, **self._stamp(RankExited, self._hello.rank)))
            if self._leads:
                self._unsent.append(AttemptEnded(outcome="finished", **self._stamp(AttemptEnded, LAUNCHER_RANK)))

    def _rank_started(self) -> RankStarted:
        hello = self._hello
        return RankStarted(
            pid=hello.pid, local_rank=self._local_rank, gpu_uuid=hello.gpu_uuid, pci_address=hello.pci_address,
            scheduler_ids=hello.scheduler_ids, role=hello.role, **self._stamp(RankStarted, hello.rank),
        )  # fmt: skip

    def _stamp(self, kind: type[Message], rank: int) -> dict[str, Any]:
        answer = self._agreement.answer
        assert answer is not None
        sequence = self._sequences.get(kind, 0)
        self._sequences[kind] = sequence + 1
        return {
            "job": answer.job, "attempt": answer.attempt, "rank": rank, "node": self._node, "sequence": sequence,
            "at": self._clock.now(),
        }  # fmt: skip

    def _hand_over(self, producer: Producer) -> None:
        """Metrics and logs before events, as a heartbeat says that they are there."""
        while self._queue:
            encoded = self._restamped(self._queue[0])
            if encoded is not None:
                producer.send(*encoded)
                self._unflushed = True
            self._queued_bytes -= len(self._queue.popleft())
        while self._unsent:
            if self._unflushed:
                producer.flush(FLUSH_SECONDS_MAX)
                self._unflushed = False
            producer.send(*self._codec.encode(self._unsent[0]))
            self._unsent.popleft()
            self._unflushed = not self._unsent  # the last one has yet to be flushed
        if self._unflushed:
            producer.flush(FLUSH_SECONDS_MAX)
            self._unflushed = False
        self._retry_seconds, self._told = 0.5, ""

    def _restamped(self, packet: bytes) -> Any:
        answer = self._agreement.answer
        assert answer is not None
        kind, body = unpack(packet)
        if kind not in PACKETS:
            return None
        try:
            message = self._codec.decode((("ce_type", kind.encode()),), body)
            return self._codec.encode(msgspec.structs.replace(message, job=answer.job, attempt=answer.attempt))
        except (Undecodable, ValueError):  # a mistake of ours costs one packet
            self.dropped += 1
            return None
