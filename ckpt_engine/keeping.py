"""The engine's half of the keeper: hands every slot's descriptor over, fetches them after a restart, keeps one alive.

Handing over is one packet without an answer, sent before the slot is granted to anybody, so that there is no
moment at which a checkpoint depends on the engine alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import wire
from .clock import Clock, HostClock
from .errors import EngineUnavailable
from .process_watch import ProcessWatch, start_time_of

MEET_SECONDS_MAX = 20.0
ANSWER_SECONDS_MAX = 2.0
HAND_OVER_SECONDS_MAX = 1.0  # a keeper that takes nothing for so long is stopped or dead
PING_SECONDS = 5.0
RETRY_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.005
STARTS_MAX = 3  # of a keeper that ends at once
END_SECONDS_MAX = 2.0


class Keeping(Protocol):
    """What the slot table tells of its segments. It calls with its lock held."""

    def keep(self, shard: str, index: int, descriptor: int) -> None:
        """The slot has this segment now."""
        ...

    def drop(self, shard: str, index: int) -> None:
        """The slot has none any more."""
        ...


class NoKeeper:
    """For an engine whose memory only ranks share."""

    def keep(self, shard: str, index: int, descriptor: int) -> None:
        pass

    def drop(self, shard: str, index: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """`alone_seconds_max`: how long it stays without an engine. `guardian`: the process that would start the next
    engine; when that is gone too, the keeper goes. 0: nobody knows."""

    path: Path
    job: str
    alone_seconds_max: float
    guardian: int = 0


@dataclass(frozen=True, slots=True)
class KeptSlot:
    """A segment that the keeper held; the descriptor is the receiver's to close."""

    shard: str
    index: int
    descriptor: int


Holdings = Callable[[], Sequence[tuple[str, int, int]]]  # shard, index and descriptor of every slot, lock held
StartKeeper = Callable[[KeeperConfig], int]


def keeper_path(engine_socket: Path) -> Path:
    """Where the keeper of the engine at `engine_socket` listens."""
    return engine_socket.with_suffix(".keep")


def keeper_status(engine_socket: Path, timeout_seconds: float = ANSWER_SECONDS_MAX) -> wire.Fields:
    """What the keeper says of itself. Raises EngineUnavailable where none answers."""
    path = keeper_path(engine_socket)
    try:
        with contextlib.closing(wire.connect(path, timeout_seconds)) as sock:
            return _ask(sock, {"op": "status"})[0]
    except (OSError, wire.WireError) as error:
        raise EngineUnavailable(f"no keeper answers at {path}: {error}") from error


def start_keeper(config: KeeperConfig) -> int:
    """Start the process, without site-packages and in a session of its own; its id. Raises OSError."""
    room = str(Path(__file__).resolve().parents[1])
    program = f"import sys; sys.path.append({room!r}); from ckpt_engine.keeper import main; sys.exit(main())"
    path, seconds = str(config.path.absolute()), str(config.alone_seconds_max)
    command = [sys.executable, "-I", "-S", "-c", program, path, config.job, seconds]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    environ = {name: value for name, value in os.environ.items() if "TOKEN" not in name}  # it needs no secret
    return os.posix_spawn(sys.executable, command, environ, file_actions=nowhere)


class KeeperLink:
    """`open` first, then `watch`; `keep` and `drop` from any thread with `lock` held; at last `end` or `leave`."""

    def __init__(
        self,
        config: KeeperConfig,
        lock: AbstractContextManager[Any],
        start: StartKeeper = start_keeper,
        clock: Clock | None = None,
    ) -> None:
        self.error = ""  # why there is no keeper now
        self.pid = 0
        self._config = config
        self._lock = lock
        self._start = start
        self._clock: Clock = clock or HostClock()
        self._holdings: Holdings = lambda: ()
        self._met: socket.socket | None = None  # has heard hello, but not yet all that there is
        self._sock: socket.socket | None = None
        self._child = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def alive(self) -> bool:
        """Whether a keeper holds all that the engine holds."""
        return self._sock is not None

    def open(self) -> list[KeptSlot]:
        """Meet the keeper that an earlier engine has left, or start one; what it holds. `error` says if there is
        none: the engine works without it, and tries again."""
        kept: list[KeptSlot] = []
        try:
            self._met, count = self._meet()
            kept.extend(self._fetch(self._met, at) for at in range(count))
        except (OSError, EngineUnavailable) as error:
            self._failed(error)
        return kept

    def watch(self, holdings: Holdings) -> None:
        """Hand over what there is, and from now on start another keeper whenever one is gone."""
        self._holdings = holdings
        self._hand_over()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)
        self._thread.start()

    def keep(self, shard: str, index: int, descriptor: int) -> None:
        self._tell({"op": "keep", "shard": shard, "index": index}, (descriptor,))

    def drop(self, shard: str, index: int) -> None:
        self._tell({"op": "drop", "shard": shard, "index": index})

    def end(self) -> None:
        """There is nothing left to keep: end the keeper, and return when it is gone."""
        self._stop_watching()
        sock = self._sock or self._met
        if sock is not None:
            with ProcessWatch(self.pid) as process, contextlib.suppress(OSError, wire.WireError):
                sock.settimeout(END_SECONDS_MAX)
                wire.send(sock, {"op": "end"})
                deadline = self._clock.monotonic() + END_SECONDS_MAX
                while not (self._reap() and process.ended()) and self._clock.monotonic() < deadline:
                    threading.Event().wait(LOOK_SECONDS)
        self.leave()

    def leave(self) -> None:
        """Let go of the keeper and leave it with what it holds."""
        self._stop_watching()
        for sock in (self._sock, self._met):
            if sock is not None:
                sock.close()
        self._sock = self._met = None
        self._reap()
        for descriptor in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._wake_read = self._wake_write = -1

    def _tell(self, fields: wire.Fields, descriptors: Sequence[int] = ()) -> None:
        sock = self._sock
        if sock is None:
            return  # the next keeper is told of everything
        try:
            wire.send(sock, fields, descriptors)
        except (OSError, wire.WireError):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that watches it
            self._sock, self._met = None, sock

    def _hand_over(self) -> None:
        sock = self._met
        if sock is None:
            return
        try:
            with self._lock:
                for shard, index, descriptor in self._holdings():
                    wire.send(sock, {"op": "keep", "shard": shard, "index": index}, (descriptor,))
                wire.send(sock, {"op": "settle"})
                self._met, self._sock, self.error = None, sock, ""
        except (OSError, wire.WireError) as error:
            self._failed(error)

    def _watch(self) -> None:
        wait_seconds, asked = LOOK_SECONDS, False
        while not self._stopping.is_set():
            sock = self._sock
            if sock is None:
                asked = False
                self._let_go()
                try:
                    self._met, _ = self._meet()
                    self._hand_over()
                    wait_seconds = LOOK_SECONDS
                except (OSError, EngineUnavailable) as error:
                    self._failed(error)
                    self._pause(wait_seconds)
                    wait_seconds = min(max(2 * wait_seconds, 0.5), RETRY_SECONDS_MAX)
                continue
            ready = wire.readable((sock.fileno(), self._wake_read), PING_SECONDS)
            if sock.fileno() in ready:
                self._hear(sock)
                asked = False
            elif not ready and asked:
                self._lose(sock)
            elif not ready:
                asked = True
                with contextlib.suppress(OSError, wire.WireError):
                    wire.send(sock, {"op": "ping"})

    def _hear(self, sock: socket.socket) -> None:
        try:
            fields, descriptors = wire.receive(sock)
        except (OSError, wire.WireError):
            self._lose(sock)
            return
        wire.close_all(descriptors)
        self.error = str(fields.get("error", ""))

    def _lose(self, sock: socket.socket) -> None:
        with self._lock:
            if self._sock is sock:
                self._sock, self._met = None, sock

    def _let_go(self) -> None:
        sock, self._met = self._met, None
        if sock is not None:
            sock.close()
        self._reap()

    def _meet(self) -> tuple[socket.socket, int]:
        """A connection to a keeper that has heard hello, and how many slots it holds. Raises OSError and
        EngineUnavailable.

        One that does not answer may have been stopped. It is killed only where we hold all that it holds.
        """
        deadline = self._clock.monotonic() + MEET_SECONDS_MAX
        cures = iter((signal.SIGCONT,) if self._thread is None else (signal.SIGCONT, signal.SIGKILL))
        said, starts = "it does not come up", 0
        while not self._stopping.is_set():
            try:
                sock = wire.connect(self._config.path, ANSWER_SECONDS_MAX)
            except (FileNotFoundError, ConnectionRefusedError):
                if self._reap():
                    if starts == STARTS_MAX:
                        raise EngineUnavailable(f"there is no keeper at {self._config.path}: {said}") from None
                    starts += 1
                    self._child = self._start(self._config)
            else:
                self.pid = wire.peer_pid(sock)
                try:
                    fields = _ask(sock, self._hello())[0]
                    if "error" not in fields:
                        count = wire.whole(fields, "kept")
                        sock.settimeout(HAND_OVER_SECONDS_MAX)
                        return sock, count
                    said = str(fields["error"])
                except TimeoutError:
                    said = "it does not answer"
                    cure = next(cures, None)
                    if cure is not None and self.pid > 0:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(self.pid, cure)
                except (OSError, wire.WireError) as error:
                    said = str(error)  # it was about to end
                sock.close()
            if self._clock.monotonic() > deadline:
                raise EngineUnavailable(f"there is no keeper at {self._config.path}: {said}")
            self._pause(LOOK_SECONDS)
        raise EngineUnavailable("the engine is going")

    def _hello(self) -> wire.Fields:
        guardian = self._config.guardian
        return {
            "op": "hello",
            "protocol": wire.PROTOCOL,
            "job": self._config.job,
            "guardian": guardian,
            "guardian_start_time": start_time_of(guardian) if guardian > 0 else None,
        }

    def _fetch(self, sock: socket.socket, at: int) -> KeptSlot:
        sock.settimeout(ANSWER_SECONDS_MAX)
        fields, descriptors = _ask(sock, {"op": "fetch", "at": at})
        sock.settimeout(HAND_OVER_SECONDS_MAX)
        if "error" in fields or len(descriptors) != 1:
            wire.close_all(descriptors)
            raise EngineUnavailable(f"the keeper did not hand over slot {at}: {fields.get('error', 'no descriptor')}")
        try:
            return KeptSlot(wire.text(fields, "shard"), wire.whole(fields, "index"), descriptors[0])
        except wire.WireError:
            wire.close_all(descriptors)
            raise

    def _failed(self, error: Exception) -> None:
        self.error = f"no keeper holds this memory: {error}"
        self._let_go()

    def _reap(self) -> bool:
        """Whether no child of ours is a keeper, or about to be one."""
        if self._child:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                    return False
            self._child = 0
        return True

    def _pause(self, seconds: float) -> None:
        if self._wake_read >= 0:
            wire.readable((self._wake_read,), seconds)

    def _stop_watching(self) -> None:
        self._stopping.set()
        if self._wake_write >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _ask(sock: socket.socket, fields: wire.Fields) -> tuple[wire.Fields, list[int]]:
    wire.send(sock, fields)
    return wire.receive(sock)
