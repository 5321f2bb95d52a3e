"""The checkpoint engine of one node: keeps what the ranks save in memory, brings it to disk, hands it back.

One process per node. It holds the segments, so what a rank has saved outlives the rank; the ranks hold them
too, so it also outlives the engine. Training never waits for the disk, and goes on when the engine is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import selectors
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import wire
from .budget import LookForRoom, MemoryBudget
from .clock import Clock, HostClock
from .counters import Counters
from .downloading import Downloader
from .errors import EngineRefused
from .event import EngineEvent, EventState
from .keeping import KeeperConfig, keeper_path
from .memory_room import tightest_room
from .objecttier import open_objects
from .persist import PersistConfig, Persister
from .priority import IoClass
from .ring import Ring
from .ring_config import RingConfig
from .segment import JOB_BYTES_MAX, SlotHeader
from .session import EngineParts, Session
from .slots import SlotTable
from .storage import Storage
from .survival import Survival
from .uploading import UploadConfig, Uploader

EVENTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. `directory` is the job's checkpoint folder, on a file system that all nodes of the job share.

    `keeper_seconds_max`: how long its keeper holds the memory when the engine has died and none follows; 0: no keeper.
    `guardian`: the process that starts the next engine if this one dies, 0 where that is not known.
    `ring`: copies on other nodes; None: off, and `ring_off` says why.
    """

    job: str
    node: str
    socket_path: Path
    directory: Path
    memory_bytes_max: int = 8 << 30
    retention_steps: int = 3
    connections_max: int = 256
    retry_seconds_min: float = 0.5
    retry_seconds_max: float = 30.0
    stop_seconds_max: float = 60.0
    keeper_seconds_max: float = 0.0
    guardian: int = 0
    keep_every_steps: int = 0
    persist_bytes_per_second_max: float = 0.0
    persist_io_class: IoClass = "best-effort"
    deduplicate: bool = True
    objects_url: str = ""
    objects_retention_steps: int = 3
    objects_bytes_per_second_max: float = 0.0
    ring: RingConfig | None = None
    ring_off: str = "the ring is off: no token is given"

    def __post_init__(self) -> None:
        if not self.job or len(self.job.encode()) > JOB_BYTES_MAX:
            raise ValueError(f"the job's name must have 1 to {JOB_BYTES_MAX} bytes, not {len(self.job.encode())}")
        if self.retention_steps < 1 or self.memory_bytes_max < 1 or self.connections_max < 1:
            raise ValueError("retention_steps, memory_bytes_max and connections_max must be at least 1")
        if self.socket_path == keeper_path(self.socket_path):
            raise ValueError(f"the socket path {self.socket_path} is that of a keeper; choose another ending")
        longest = max(len(os.fsencode(path)) for path in (self.socket_path, keeper_path(self.socket_path)))
        if longest > wire.SOCKET_PATH_BYTES_MAX:
            raise ValueError(
                f"the socket path {self.socket_path} is longer than the {wire.SOCKET_PATH_BYTES_MAX} bytes "
                "that a Unix socket can have; put it into a shorter folder"
            )


class Engine:
    """Serves ranks and tools on a Unix socket until SIGTERM or `stop()`. `emit` is called from one thread of
    ours."""

    def __init__(
        self,
        config: EngineConfig,
        emit: Callable[[EngineEvent], None],
        clock: Clock | None = None,
        storage: Storage | None = None,
        look_for_room: LookForRoom = tightest_room,
    ) -> None:
        self.config = config
        self._deliver = emit
        self._clock: Clock = clock or HostClock()
        storage = storage or Storage()
        self._events: queue.Queue[EngineEvent | None] = queue.Queue(EVENTS_MAX)
        self._counters = Counters()
        self._budget = MemoryBudget(config.memory_bytes_max, look_for_room)
        self._table = SlotTable(config.job, self._budget, self._clock, self._tell)
        keeper = None
        if config.keeper_seconds_max > 0:
            path = keeper_path(config.socket_path)
            keeper = KeeperConfig(path, config.job, config.keeper_seconds_max, config.guardian)
        self._survival = Survival(keeper, self._table, config.directory, self._emit, self._clock)
        writer = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in config.node)
        persist = PersistConfig(
            config.directory,
            writer,
            config.retention_steps,
            config.retry_seconds_min,
            config.retry_seconds_max,
            keep_every_steps=config.keep_every_steps,
            bytes_per_second_max=config.persist_bytes_per_second_max,
            io_class=config.persist_io_class,
            deduplicate=config.deduplicate,
        )
        objects = open_objects(config.objects_url, config.job) if config.objects_url else None
        self._uploader = None if objects is None else Uploader(self._upload_config(), objects, self._emit, self._clock)
        downloader = None if objects is None else Downloader(config.directory, writer, storage, objects, self._clock)
        self._persister = Persister(persist, self._table, storage, self._emit, self._clock, self._uploader)
        self.ring: Ring | None = None
        if config.ring is not None:
            self.ring = Ring(
                config.ring, config.job, config.node, config.directory, self._table, self._budget, self._emit,
                self._clock,
            )  # fmt: skip
        self._parts = EngineParts(
            config.job, config.node, config.directory, writer,
            self._table, self._persister, storage, self._emit, self._clock, downloader,
            metrics=self.metrics, keeper_state=self._survival.state, ring=self.ring, ring_off=config.ring_off,
        )  # fmt: skip
        self._sessions: dict[int, tuple[Session, threading.Thread]] = {}
        self._sessions_lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until stopped; then bring to disk what memory holds. `ready` is called once connections are
        taken."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_wake)
            listener = stack.enter_context(self._listen())
            stack.callback(self._unlink_socket)
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    previous = signal.signal(number, lambda *_: self.stop())
                    stack.callback(signal.signal, number, previous)
            courier = threading.Thread(target=self._deliver_events, name="events", daemon=True)
            courier.start()
            stack.callback(self._survival.end, drained=False)  # where we do not come to the end
            self._survival.begin()
            self._persister.start()
            if self._uploader is not None:
                self._uploader.start()
            if self.ring is not None:
                stack.callback(self.ring.stop)  # before the ring is left, the disk has all that memory holds
                self.ring.start()
            ready()
            self._accept(listener)
            self._close_sessions()
            drained = self._persister.stop(self.config.stop_seconds_max) and self._persister.idle()
            self._survival.end(drained=drained)
            if self._uploader is not None:
                self._uploader.stop(self.config.stop_seconds_max)
            self._events.put(None)
            courier.join(self.config.stop_seconds_max)

    def stop(self) -> None:
        """Ask `run` to return. Safe in a signal handler and from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def metrics(self) -> str:
        """What it has done and holds, in Prometheus' text format."""
        table, room = self._table, self._budget.room()
        with self._sessions_lock:
            connections = len(self._sessions)
        gauges: dict[str, tuple[str, float]] = {
            "memory_bytes": ("Bytes of slots", table.memory_bytes),
            "memory_max_bytes": ("Bytes that slots may take", table.memory_bytes_max),
            "sealed_shards": ("Shards in memory that could be loaded", len(table.sealed())),
            "connections": ("Ranks and tools that are connected", connections),
            "persist_failing": ("1 while the disk does not take what memory holds", int(bool(self._persister.error))),
            "keeper_up": ("1 while a keeper holds the memory too", int(self._survival.alive)),
        }
        if room is not None:
            gauges["room_bytes"] = ("Bytes that the tightest memory cgroup or the host has left", room.free_bytes)
        if self.ring is not None:
            store = self.ring.store
            gauges["peer_memory_bytes"] = ("Bytes of shards kept for other nodes", store.memory_bytes)
            gauges["peer_memory_max_bytes"] = ("Bytes that those may take", store.memory_bytes_max)
        return self._counters.text({"job": self.config.job, "node": self.config.node}, gauges)

    def _listen(self) -> socket.socket:
        path = self.config.socket_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Held until the process ends, however it ends: an engine that was killed leaves a socket but no lock.
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip() or "?"
            os.close(self._lock)
            sentence = f"another engine serves {path} (process {pid}); stop it or choose another socket"
            raise EngineRefused(sentence) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        previous = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        listener.listen(128)
        listener.setblocking(False)
        return listener

    def _unlink_socket(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.config.socket_path.unlink()
        os.close(self._lock)

    def _upload_config(self) -> UploadConfig:
        config = self.config
        return UploadConfig(
            config.directory,
            config.objects_retention_steps,
            config.keep_every_steps,
            config.objects_bytes_per_second_max,
        )

    def _close_wake(self) -> None:
        """A late `stop` must not write into whatever gets the number next."""
        reading, writing, self._wake_write = self._wake_read, self._wake_write, -1
        os.close(reading)
        os.close(writing)

    def _accept(self, listener: socket.socket) -> None:
        number = 0
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_read in ready:
                    return
                try:
                    connection, _ = listener.accept()
                except OSError:
                    continue  # the peer has gone, or we are out of descriptors: the next may succeed
                number += 1
                self._admit(connection, number)

    def _admit(self, connection: socket.socket, number: int) -> None:
        connection.setblocking(True)
        if wire.peer_uid(connection) not in (os.getuid(), 0):
            connection.close()
            return
        with self._sessions_lock:
            full = len(self._sessions) >= self.config.connections_max
        if full:
            with contextlib.suppress(OSError):
                wire.send(connection, {"error": f"the engine has {self.config.connections_max} connections already"})
            connection.close()
            return
        session = Session(number, connection, self._parts)
        thread = threading.Thread(target=self._serve, args=(session,), name=f"session-{number}", daemon=True)
        with self._sessions_lock:
            self._sessions[number] = (session, thread)
        thread.start()

    def _serve(self, session: Session) -> None:
        try:
            session.serve()
        finally:
            with self._sessions_lock:
                self._sessions.pop(session.number, None)

    def _close_sessions(self) -> None:
        self._table.close()
        with self._sessions_lock:
            entries = list(self._sessions.values())
        for session, _ in entries:
            session.close()
        for _, thread in entries:
            thread.join(self.config.stop_seconds_max)

    def _tell(self, state: EventState, header: SlotHeader, reason: str) -> None:
        """What the table has seen happen to a shard in memory."""
        at, size = self._clock.now(), header.payload_bytes
        self._emit(
            EngineEvent(state, header.step, header.attempt, header.rank, "memory", at, size_bytes=size, reason=reason)
        )

    def _emit(self, event: EngineEvent) -> None:
        """Hand over without waiting; with a listener that slow, the oldest story is the one to lose."""
        self._counters.observe(event)
        while True:
            try:
                self._events.put_nowait(event)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._events.get_nowait()

    def _deliver_events(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._deliver(event)
            except Exception as error:  # noqa: BLE001 - the listener is not ours; whatever it raises, checkpoints go on
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
