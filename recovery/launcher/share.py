"""This node's share of one attempt: its ranks from the fork until the last exit is told."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from ingest.clock import Clock
from ingest.events import (
    LAUNCHER_RANK,
    AttemptEnded,
    AttemptStarted,
    FaultInjected,
    Logs,
    Message,
    Metrics,
    RankExited,
    RankStalled,
    RankStarted,
    Topic,
)
from ingest.flight_recorder import Flight
from ingest.rank_socket import Hello

from .config import LauncherConfig
from .environment import cpus_of, environment_of
from .error_file import error_file, make_folder
from .output import PARTIAL_SECONDS
from .protocol import RankState, StartRanks
from .rank import STACKS_SIGNAL, STOPPED_STATES, LocalRank
from .zygote_link import ForkOrder

LOOKS_UNTIL_STALLED = 2

Publish = Callable[[Message], None]
Show = Callable[[bytes], None]
Watch = Callable[[Any, Callable[[], object] | None], None]


class Share:
    """The ranks of one attempt on one node. All methods are called from the launcher's loop."""

    def __init__(
        self,
        config: LauncherConfig,
        order: StartRanks,
        clock: Clock,
        *,
        publish: Publish,
        show: Show,
        watch: Watch,
    ) -> None:
        self._config = config
        self.order = order
        self.attempt = order.attempt
        self._clock = clock
        self._publish = publish
        self._show = show
        self._watch = watch
        self._sequences: Counter[tuple[int, Topic]] = Counter()
        self.stop_requested = False
        self._kill_at: float | None = None
        self._terminated: set[int] = set()
        self._ended = False
        places = [place for place in order.places if place.node == config.node]
        self.ranks: dict[int, LocalRank] = {}
        for place in places:
            left = error_file(config.node_file, order.attempt, place.rank)
            make_folder(left)
            self.ranks[place.rank] = LocalRank(place, left)
        self._by_pid: dict[int, LocalRank] = {}
        for rank in self.ranks.values():
            for stream, descriptor in rank.pipes.items():
                watch(descriptor, partial(self._read, rank, stream))
        if order.places[0].node == config.node:  # group rank 0 speaks for the attempt
            self._say_attempt_started()

    # What the outside asks

    @property
    def gone(self) -> bool:
        """No rank lives, and all exits are told."""
        return all(rank.closed for rank in self.ranks.values())

    @property
    def alive(self) -> list[LocalRank]:
        return [rank for rank in self.ranks.values() if rank.alive]

    @property
    def pending(self) -> list[LocalRank]:
        return [rank for rank in self.ranks.values() if rank.pending]

    @property
    def dropped(self) -> int:
        return sum(rank.log.dropped for rank in self.ranks.values())

    def views(self) -> tuple[RankState, ...]:
        return tuple(rank.view() for rank in self.ranks.values())

    def stamp(self, rank: int, topic: Topic, at: float | None = None) -> dict[str, Any]:
        """The stamp of the next message of this rank (LAUNCHER_RANK: of the node) on this topic."""
        sequence = self._sequences[rank, topic]
        self._sequences[rank, topic] += 1
        return {
            "job": self._config.job,
            "attempt": self.attempt,
            "rank": rank,
            "node": self._config.node,
            "sequence": sequence,
            "at": self._clock.now() if at is None else at,
        }

    # Starting

    def fork_orders(self) -> list[ForkOrder]:
        """What the zygote should fork, or fork again where it died before it did."""
        return [
            ForkOrder(
                order=rank.rank,
                name=f"rank {rank.rank}",
                env=environment_of(self._config, self.order, rank.place),
                cpus=cpus_of(rank.rank, self.order, pin=self._config.pin_cpus),
                stacks_signal=STACKS_SIGNAL,
                descriptors=rank.descriptors,
            )
            for rank in self.pending
        ]

    def forked(self, order: int, pid: int, pidfd: int) -> None:
        """A rank's process exists; where that rank was given up meanwhile it goes at once."""
        rank = self.ranks[order]
        if not rank.pending:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        rank.forked(pid, pidfd, self._clock.monotonic())
        self._by_pid[pid] = rank

    def refuse(self, reason: str, order: int | None = None) -> None:
        """Ranks that could not be forked are over."""
        for rank in self.pending:
            if order is None or rank.rank == order:
                rank.refusal = reason
                rank.stopped_by_us = self.stop_requested
                rank.ended(1, None, self._clock.monotonic(), self._clock.now())

    # Hearing

    def is_too_early(self, session: int) -> bool:
        """Whether this may be a rank that was faster than the news of its fork."""
        return session not in self._by_pid and any(rank.pending for rank in self.ranks.values())

    def refuses(self, hello: Hello, session: int) -> str:
        """Why a hello is not from one of our ranks; empty where it is."""
        rank = self.ranks.get(hello.rank)
        if hello.job != self._config.job or hello.attempt != self.attempt or rank is None:
            return f"hello of rank {hello.rank}, attempt {hello.attempt} of {hello.job}, which does not run here"
        if hello.token != self.order.token:
            return f"hello of rank {hello.rank} with a token that is not this attempt's"
        if session != rank.pid:
            return f"hello of rank {hello.rank} from a process that is not in that rank's session"
        return ""

    def said_hello(self, hello: Hello) -> None:
        rank = self.ranks[hello.rank]
        news = rank.hello is None or (hello.gpu_uuid or hello.pci_address, hello.role) != (
            rank.hello.gpu_uuid or rank.hello.pci_address,
            rank.hello.role,
        )
        rank.hello = hello
        if news:  # said again only where the rank knows its GPU better now, or its role
            self._say_started(rank)

    def said(self, message: Metrics | Logs | FaultInjected) -> None:
        """Pass on what a rank sent; its logs join what it prints, and we count its events with ours."""
        rank = self.ranks[message.rank]
        if isinstance(message, Logs):
            rank.log.add(message.lines)
        elif isinstance(message, Metrics):
            rank.step, rank.phase = message.step, message.phase
            self._publish(replace(message, node=self._config.node))
        else:
            stamp = self.stamp(message.rank, "events", message.at)
            self._publish(replace(message, node=stamp["node"], sequence=stamp["sequence"]))

    def said_flight(self, number: int, flight: Flight) -> None:
        """How far a rank's collectives got, which it tells when asked (and once unasked: that it can)."""
        rank = self.ranks[number]
        rank.flight, rank.flight_known = flight, True

    def exited(self, pid: int, code: int | None, number: int | None) -> None:
        """A process of somebody's has ended; ours are drained from now on."""
        rank = self._by_pid.get(pid)
        if rank is not None and rank.alive:
            rank.ended(code, number, self._clock.monotonic(), self._clock.now())

    def read_pipes(self) -> None:
        """Take in everything that has been printed before now."""
        for rank in self.ranks.values():
            for stream in rank.pipes:
                self._read(rank, stream)

    # In their time

    def look(self) -> None:
        """See in /proc whether ranks are stopped, or asleep for long where no signal reaches."""
        now = self._clock.now()
        for rank in self.alive:
            stat = rank.stat()
            if stat is None:
                continue
            letter = "T" if stat.state in STOPPED_STATES else stat.state if stat.state == "D" else "S"
            if letter != rank.first_look[0]:
                rank.first_look, rank.looks = (letter, now), 0
            rank.looks += 1
            long_enough = rank.looks >= LOOKS_UNTIL_STALLED and (
                letter != "D" or now - rank.first_look[1] >= self._config.limits.uninterruptible_seconds
            )
            if letter == "S" and rank.reported_state:
                self._say_stalled(rank, stat.state, now)
                rank.reported_state = ""
            elif letter != "S" and long_enough and rank.reported_state != letter:
                self._say_stalled(rank, letter, rank.first_look[1])
                rank.reported_state = letter

    def flush_logs(self) -> None:
        """Publish what ranks have said since the last flush."""
        now = self._clock.now()
        for rank in self.ranks.values():
            if not rank.closed:
                self._flush_log(rank, now)

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL after the grace. Asking again can only shorten it."""
        self.stop_requested = True
        kill_at = self._clock.monotonic() + grace_seconds
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self.refuse("the attempt was stopped before this rank was forked")
        self._press()

    def tick(self, before_close: Callable[[LocalRank], None]) -> None:
        """Everything that is due. `before_close` takes in the last telemetry of a rank that is gone."""
        if self._kill_at is not None:
            self._press()
        monotonic = self._clock.monotonic()
        limits = self._config.limits
        for rank in self.ranks.values():
            if rank.pid and not rank.announced and monotonic - rank.forked_at >= limits.hello_wait_seconds:
                self._say_started(rank)
            if rank.ended_at is not None and not rank.closed:
                if rank.pipes and monotonic - rank.ended_at < limits.drain_seconds and not rank.refusal:
                    continue  # children of it may still hold the pipes
                before_close(rank)
                self._close(rank)
        if self.gone and not self._ended:
            self._ended = True
            outcome = self._outcome()
            self._publish(AttemptEnded(outcome=outcome, **self.stamp(LAUNCHER_RANK, "events")))

    def _press(self) -> None:
        overdue = self._kill_at is not None and self._clock.monotonic() >= self._kill_at
        for rank in self.alive:
            stat = rank.stat()
            if overdue or (stat is not None and stat.state in STOPPED_STATES):
                rank.kill()  # SIGTERM would stay pending in a stopped process
            elif rank.rank not in self._terminated:
                self._terminated.add(rank.rank)
                rank.terminate()

    def _read(self, rank: LocalRank, stream: str) -> None:
        descriptor = rank.pipes.get(stream)
        if descriptor is None:
            return
        shown, still_open = rank.read(stream, self._clock.now())
        self._show(shown)
        if not still_open:
            self._watch(descriptor, None)
            rank.close_pipe(stream)

    def _flush_log(self, rank: LocalRank, now: float, *, final: bool = False) -> None:
        self._show(rank.flush_shown(float("inf") if final else now - PARTIAL_SECONDS))
        for lines in rank.log.take(now, final=final):
            self._publish(Logs(lines=lines, **self.stamp(rank.rank, "logs")))

    def _close(self, rank: LocalRank) -> None:
        """The last words, then the exit: nothing more of this rank will come."""
        for stream, descriptor in rank.pipes.items():
            self._read(rank, stream)
            if stream in rank.pipes:
                self._watch(descriptor, None)
        if rank.pid and not rank.announced:
            self._say_started(rank)
        self._flush_log(rank, self._clock.now(), final=True)
        exited = RankExited(
            exit_code=rank.exit_code,
            signal=rank.signal,
            stopped_by_launcher=rank.stopped_by_us,
            error=rank.error(),
            last_lines=rank.log.last_lines,
            **self.stamp(rank.rank, "events"),
        )
        rank.close()
        self._publish(exited)

    def _outcome(self) -> Literal["finished", "failed", "stopped"]:
        if any(rank.exit_code != 0 and not rank.stopped_by_us for rank in self.ranks.values()):
            return "failed"
        return "stopped" if any(rank.stopped_by_us for rank in self.ranks.values()) else "finished"

    def _say_attempt_started(self) -> None:
        order = self.order
        self._publish(
            AttemptStarted(
                world_size=len(order.places),
                places=order.places,
                spares=order.spares,
                resume_step=order.resume_step,
                **self.stamp(LAUNCHER_RANK, "events"),
            )
        )

    def _say_started(self, rank: LocalRank) -> None:
        rank.announced = True
        hello = rank.hello
        self._publish(
            RankStarted(
                pid=rank.pid,
                local_rank=rank.place.local_rank,
                gpu_uuid=hello.gpu_uuid if hello else None,
                pci_address=hello.pci_address if hello else None,
                scheduler_ids=hello.scheduler_ids if hello else {},
                role=hello.role if hello else "",
                **self.stamp(rank.rank, "events"),
            )
        )

    def _say_stalled(self, rank: LocalRank, letter: str, since: float) -> None:
        self._publish(RankStalled(state=letter, since=since, **self.stamp(rank.rank, "events")))
