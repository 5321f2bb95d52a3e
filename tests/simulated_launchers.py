"""Simulated launchers: the real control socket over TCP with its proofs, in this process; ranks are numbers."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from ingest.clock import SystemClock
from recovery.allocation import LauncherAddress
from recovery.launcher.control import Control, Respond, listen_tcp
from recovery.launcher.proof import JobKey, LauncherEnd
from recovery.launcher.protocol import (
    CollectStacks,
    FindPort,
    Finish,
    LauncherState,
    RankState,
    Reply,
    Request,
    StartRanks,
    StopRanks,
)

TOKEN = b"0123456789abcdef0123456789abcdef"


def key(job: str = "job", token: bytes = TOKEN) -> JobKey:
    return JobKey(job, token)


class SimulatedLauncher:
    """One launcher of one node. `starts` counts the starts that took effect; `silent`: it reads and never answers."""

    def __init__(self, node: str, job: str = "job", *, slots: int = 2, host: str = "127.0.0.1") -> None:
        self.node, self.job, self.slots, self.host = node, job, slots, host
        self.attempt, self.token, self.fenced = 0, "", 0
        self.ranks: dict[int, RankState] = {}
        self.order: StartRanks | None = None
        self.starts: list[int] = []
        self.silent = self.immortal = self.finished = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(1))
        self._keys: dict[int, Any] = {}
        self._stop = False
        listener = listen_tcp("127.0.0.1", 0)
        self.address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        self.control = Control(
            listener, self._answer, SystemClock(), watch=self._watch, prove=lambda: LauncherEnd(key(job), node)
        )
        self._thread = threading.Thread(target=self._loop, name=f"simulated-{node}")
        self._thread.start()

    @property
    def where(self) -> LauncherAddress:
        return LauncherAddress(self.node, self.address, self.slots)

    @property
    def living(self) -> list[int]:
        return [rank for rank, state in self.ranks.items() if state.state != "exited"]

    def end_ranks(self, *, exit_code: int | None = None, signal: int | None = None) -> None:
        self.ranks = {
            rank: RankState(
                rank=rank, local_rank=0, pid=os.getpid(), state="exited", exit_code=exit_code, signal=signal
            )
            for rank in self.ranks
        }

    def kill(self) -> None:
        """The launcher is gone, and its ranks with it."""
        self._stop = True
        self._wake.send(b"x")
        self._thread.join()
        self.end_ranks(signal=9)
        self.control.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _answer(self, request: Request, respond: Respond) -> None:
        if self.silent:
            return
        match request:
            case StartRanks():
                respond(self._start(request))
            case StopRanks():
                self.fenced = max(self.fenced, request.attempt)
                if self.attempt <= request.attempt and not self.immortal:
                    self.end_ranks(signal=15)
                respond(Reply(gone=self.attempt > request.attempt or not self.living, state=self._state()))
            case FindPort():
                respond(Reply(port=request.candidates[0]))
            case CollectStacks():
                respond(Reply(stacks={rank: f"stack of {rank}" for rank in self.living}))
            case Finish():
                self.end_ranks(signal=15)
                self.finished = True
                respond(Reply(gone=True, state=self._state()))
            case _:
                respond(Reply(state=self._state()))

    def _start(self, order: StartRanks) -> Reply:
        if (self.attempt, self.token) != (order.attempt, order.token):
            if order.attempt <= max(self.fenced, self.attempt) or self.living:
                return Reply(refusal="conflict", text=f"attempt {order.attempt} is not newer", state=self._state())
            self.attempt, self.token, self.order = order.attempt, order.token, order
            self.starts.append(order.attempt)
            self.ranks = {
                place.rank: RankState(rank=place.rank, local_rank=place.local_rank, pid=os.getpid(), state="running")
                for place in order.places
                if place.node == self.node
            }
        return Reply(state=self._state())

    def _state(self) -> LauncherState:
        return LauncherState(
            job=self.job, node=self.node, slots=self.slots, host=self.host,
            fenced_attempt=max(self.fenced, self.attempt), attempt=self.attempt, token=self.token,
            stop_requested=self.fenced >= self.attempt > 0, ranks=tuple(self.ranks.values()),
        )  # fmt: skip

    def _watch(self, source: Any, callback: Callable[[], object] | None, *, writing: bool = False) -> None:
        known = self._selector.get_map().get(source.fileno()) if source.fileno() >= 0 else None
        if known is not None:
            self._selector.unregister(source)
        if callback is not None:
            self._selector.register(source, selectors.EVENT_WRITE if writing else selectors.EVENT_READ, callback)

    def _loop(self) -> None:
        while not self._stop:
            for found, _ in self._selector.select():
                if self._selector.get_map().get(found.fd) is found:
                    found.data()
