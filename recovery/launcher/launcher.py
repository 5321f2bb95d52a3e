"""The launcher of one node: a loop that owns the ranks, takes in what they say, and obeys."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingest.bus import Bus
from ingest.clock import Clock
from ingest.events import LAUNCHER_RANK, FaultInjected, Logs, Message, Metrics, NodeHeartbeat, StopNotice
from ingest.flight_recorder import Flight
from ingest.rank_socket import Hello

from .address import TcpAddress
from .checks import Checks
from .commands import Commands
from .config import LauncherConfig
from .control import Control, listen_tcp, listen_unix
from .job_files import BrokenJobFile, read_file, write_file
from .measures import MEASURE_SECONDS, Measures
from .outside_faults import OutsideFaults
from .procfs import start_time_of
from .proof import LauncherEnd
from .protocol import NodeFile, RankProcess
from .publisher import Publisher, dead_letter
from .rank import LocalRank
from .share import Share
from .show import Shown
from .stacks import STALL_DEADLINE_SECONDS, StackRound, StallWatch
from .telemetry import Telemetry
from .zygote_keeper import ZygoteKeeper

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_SECONDS = 0.05
SEE_OFF_SECONDS_MAX = 2.0
LEAVE_SECONDS_MAX = 15.0  # beyond the grace, for a rank that no signal reaches


class Launcher:
    """Runs until it is told that the job is over, or that it should stop. Call `run` from the main thread."""

    def __init__(self, config: LauncherConfig, bus: Bus, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.share: Share | None = None
        self.fenced_attempt = 0  # nothing of this attempt or an older one is started any more
        self.leaving = False
        self.checks = Checks(config, clock)
        self._selector = selectors.DefaultSelector()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._shown = Shown(config.show_output)
        self._publisher = Publisher(
            bus, clock, queue_bytes_max=config.limits.publish_queue_bytes_max, warn=self.tell_user
        )
        checkpoints = config.env.get("TRANSOM_CKPT_DIR")
        self.faults = OutsideFaults(clock, Path(checkpoints) if checkpoints else None, config.python)
        self._measures = Measures(clock, self.publish, Path(checkpoints) if checkpoints else None)
        self._stall = StallWatch()
        self._round: StackRound | None = None  # the question that nobody has asked
        self._idle_sequence = 0
        self._leave_by: float | None = None
        self._signals = 0
        self._parent = os.getppid()
        self._stop: threading.Event | None = None
        self._due: dict[str, float] = {}
        self._controls: list[Control] = []
        self._address = ""  # where it listens for other machines
        self._turned_away = 0

    def run(self, stop: threading.Event | None = None) -> int:
        """The launcher's life; returns the exit code. Without `stop`, it takes SIGTERM, SIGINT and SIGHUP.

        Raises CannotListen before anything was started.
        """
        self._stop = stop
        listener = self._listen_for_others()  # first: where it cannot, nothing has been started
        self._become_parent()
        self._adopt_fence()
        self._shown.start()
        self._publisher.start()
        self.zygote = ZygoteKeeper(self.config, self.clock, watch=self.watch, show=self._shown.put)
        self.zygote.start()
        self.telemetry = Telemetry(
            self.config.telemetry_socket, self, self.clock, slots=self.config.slots, watch=self.watch
        )
        self.commands = Commands(self)
        self._open_doors(listener)
        self.write_node_file()
        try:
            while not self._done():
                for key, _ in self._selector.select(TICK_SECONDS):
                    if self._keys.get(key.fd) is key:  # an earlier callback may have closed it
                        key.data()
                self._tick()
        finally:
            self._close()
        return 0

    def _listen_for_others(self) -> socket.socket | None:
        """Raises CannotListen."""
        config = self.config
        if config.listen is None:
            return None
        listener = listen_tcp(config.listen.host, config.listen.port)
        self._address = str(TcpAddress(config.host or config.listen.host, listener.getsockname()[1]))
        return listener

    def _open_doors(self, listener: socket.socket | None) -> None:
        """The control socket of this machine and, where it is wanted, the one for others."""
        answer, config = self.commands.answer, self.config
        self._controls = [Control(listen_unix(config.control_socket), answer, self.clock, watch=self.watch)]
        if listener is not None and config.listen is not None:
            key = config.listen.key
            door = Control(listener, answer, self.clock, watch=self.watch, prove=lambda: LauncherEnd(key, config.node))
            self._controls.append(door)

    # What others of the launcher ask of it

    def watch(self, source: Any, callback: Callable[[], object] | None, *, writing: bool = False) -> None:
        """Call back when `source` is ready; None: no more."""
        with suppress(KeyError):
            self._keys.pop(self._selector.unregister(source).fd)
        if callback is not None:
            events = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
            key = self._selector.register(source, events, callback)
            self._keys[key.fd] = key

    def tell_user(self, text: str) -> None:
        self._shown.put(f"transom: {self.config.node}: {text}\n".encode())

    def publish(self, message: Message) -> None:
        self._publisher.publish(message)

    def begin(self, share: Share) -> None:
        """A new attempt replaces the one that is gone."""
        self.checks.abandon("ranks were started")
        self.share, self._round = share, None
        self.fenced_attempt = max(self.fenced_attempt, share.attempt)

    def make_share(self, order: Any) -> Share:
        return Share(self.config, order, self.clock, publish=self.publish, show=self._shown.put, watch=self.watch)

    def leave(self, grace_seconds: float) -> None:
        """Stop what is left and go."""
        self.leaving = True
        leave_by = self.clock.monotonic() + grace_seconds + LEAVE_SECONDS_MAX
        self._leave_by = leave_by if self._leave_by is None else min(self._leave_by, leave_by)
        if self.share is not None:
            self.share.stop(grace_seconds)

    def write_node_file(self) -> None:
        """Say where we are and what runs, for whoever finds us dead."""
        config, share = self.config, self.share
        zygote_pid, zygote_start_time = self.zygote.process
        content = NodeFile(
            job=config.job,
            node=config.node,
            slots=config.slots,
            pid=os.getpid(),
            start_time=start_time_of(os.getpid()),
            zygote=RankProcess(rank=LAUNCHER_RANK, pid=zygote_pid, start_time=zygote_start_time)
            if zygote_pid
            else None,
            control_socket=str(config.control_socket),
            telemetry_socket=str(config.telemetry_socket),
            host=config.host,
            address=self._address,
            attempt=self.fenced_attempt,
            token=share.order.token if share else "",
            ranks=tuple(rank.process() for rank in share.alive) if share else (),
        )
        try:
            write_file(config.node_file, content, durable=False)
        except OSError as error:
            self.tell_user(f"{config.node_file} cannot be written ({error.strerror}); recovery may not find this node")

    # Audience of the telemetry socket

    def refuses(self, hello: Hello, session: int) -> str:
        if self.share is None:
            return f"hello of rank {hello.rank}, but no attempt runs here"
        return self.share.refuses(hello, session)

    def is_too_early(self, session: int) -> bool:
        return self.share is not None and self.share.is_too_early(session)

    def said_hello(self, hello: Hello) -> None:
        assert self.share is not None
        self.share.said_hello(hello)

    def said(self, message: Metrics | Logs | FaultInjected) -> None:
        if self.share is not None and message.attempt == self.share.attempt:
            self.share.said(message)

    def said_flight(self, rank: int, flight: Flight) -> None:
        if self.share is not None and rank in self.share.ranks:
            self.share.said_flight(rank, flight)

    def garbage(self, packet_type: str, body: bytes, reason: str, rank: int | None) -> None:
        source = {"node": self.config.node, "rank": "" if rank is None else rank}
        self._publisher.put(dead_letter(self.config.job, packet_type, body, reason, source))

    # The loop

    def _tick(self) -> None:
        now = self.clock.monotonic()
        limits = self.config.limits
        self._hear_zygote()
        self.telemetry.resume()
        share = self.share
        if share is not None:
            if self._is_due("look", now, limits.look_seconds):
                share.look()
            before = share.gone
            share.tick(self._before_close)
            if share.gone and not before:
                self.write_node_file()
        if self._is_due("heartbeat", now, limits.heartbeat_seconds):
            self._beat()
        elif share is not None and self._is_due("logs", now, limits.log_flush_seconds):
            share.flush_logs()
        if share is not None and not share.gone:
            self._witness(share, now)
        self.commands.tick()
        self.faults.tick()
        if self._is_due("idle", now, 5.0):
            self.telemetry.drop_silent()
            for control in self._controls:
                control.drop_idle()
            self._tell_strangers()

    def _witness(self, share: Share, now: float) -> None:
        """Measure what can be measured; gather evidence of a standstill before anybody stops anything."""
        if self._is_due("measure", now, MEASURE_SECONDS):
            self._measures.measure(share)
        if self._round is not None and self._round.look() is not None:
            self._round = None
        if self._round is None and not self.commands.waiting and self._stall.is_due(share, now):
            self._round = self.ask_stacks(share, STALL_DEADLINE_SECONDS)

    def _tell_strangers(self) -> None:
        turned_away = sum(control.turned_away for control in self._controls)
        if turned_away > self._turned_away:
            number = turned_away - self._turned_away
            self.tell_user(f"turned away {number} callers at {self._address} that do not know the job's token")
            self._turned_away = turned_away

    def ask_stacks(self, share: Share, deadline_seconds: float) -> StackRound:
        """Ask all ranks where they stand; who asks looks for the answer."""
        return StackRound(share, self.clock, deadline_seconds, self.publish, self.telemetry.ask_flight)

    def _hear_zygote(self) -> None:
        changed = self.zygote.attend(self.share, self.checks)
        self._reap_orphans()
        if changed:
            self.write_node_file()

    def _beat(self) -> None:
        """Everything that was sent before `at` is published first: `at` is a watermark."""
        at = self.clock.now()
        self.telemetry.sweep()
        share = self.share
        if share is not None:
            share.read_pipes()
            share.flush_logs()
            stamp = share.stamp(LAUNCHER_RANK, "events", at)
        else:
            stamp = {
                "job": self.config.job, "attempt": 0, "rank": LAUNCHER_RANK, "node": self.config.node,
                "sequence": self._idle_sequence, "at": at,
            }  # fmt: skip
            self._idle_sequence += 1
        alive = tuple(sorted(rank.rank for rank in share.alive)) if share else ()
        dropped = self._publisher.dropped + (share.dropped if share else 0)
        self.publish(NodeHeartbeat(ranks_alive=alive, dropped=dropped, **stamp))

    def _before_close(self, rank: LocalRank) -> None:
        self.telemetry.sweep(rank.rank)
        self.telemetry.hang_up(rank.rank)

    def _is_due(self, what: str, now: float, seconds: float) -> bool:
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + seconds
        return True

    def _done(self) -> bool:
        if self._stop is not None and self._stop.is_set():
            self._signals = max(1, self._signals)
        if self._signals:
            self._give_notice()
            self.leave(self.config.grace_seconds if self._signals == 1 else 0.0)
        if not self.leaving:
            return False
        late = self._leave_by is not None and self.clock.monotonic() >= self._leave_by
        return late or ((self.share is None or self.share.gone) and not self.commands.waiting)

    def _give_notice(self) -> None:
        """Somebody takes this node on purpose: said before the ranks are stopped, so that it is nobody's fault."""
        orphaned = self.config.die_with_parent and os.getppid() != self._parent
        if self.leaving or orphaned or self.share is None or self.share.gone:
            return  # whoever ends the whole job has said so, or is gone himself
        stamp = self.share.stamp(LAUNCHER_RANK, "events")
        self.publish(
            StopNotice(reason="the launcher was told to stop", grace_seconds=self.config.grace_seconds, **stamp)
        )

    # Birth and death

    def _become_parent(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if self.config.die_with_parent:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks of a dead zygote come to us, with their exit status
        if self._stop is None:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def _adopt_fence(self) -> None:
        """A launcher that replaces a killed one must not start what that one was already past."""
        before = None
        with suppress(BrokenJobFile):  # half written by a host that lost its power: no rank survived that
            before = read_file(self.config.node_file, NodeFile)
        if before is not None and before.job == self.config.job:
            self.fenced_attempt = before.attempt

    def _reap_orphans(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid == self.zygote.process[0]:
                return  # the zygote is reaped by its keeper
            os.waitpid(ended.si_pid, 0)
            by_signal = ended.si_code != os.CLD_EXITED
            if self.share is not None:
                self.share.exited(
                    ended.si_pid,
                    None if by_signal else ended.si_status,
                    ended.si_status if by_signal else None,
                )

    def _see_off(self, share: Share) -> None:
        """Tell the exits of ranks that the zygote took with it."""
        deadline = self.clock.monotonic() + SEE_OFF_SECONDS_MAX
        while not share.gone and self.clock.monotonic() < deadline:
            self._reap_orphans()
            share.tick(self._before_close)
            if not share.gone:
                self.clock.sleep(0.01)

    def _close(self) -> None:
        self.faults.close()
        self.checks.abandon("the launcher ends")
        self.zygote.close()  # and with it whatever rank is left
        if self.share is not None:
            self._see_off(self.share)
            self._beat()
        for control in self._controls:
            control.flush(1.0)
            control.close()
        self.config.control_socket.unlink(missing_ok=True)
        self.telemetry.close()
        if not self._publisher.close(self.config.limits.publish_drain_seconds):
            self.tell_user("the bus did not take the last messages in time; they are lost")
        self._shown.close(2.0)
        self.config.node_file.unlink(missing_ok=True)
        if self.share is not None:
            for rank in self.share.ranks.values():
                rank.close()
        self._selector.close()
