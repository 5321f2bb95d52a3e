"""The keeper of one engine: a tiny process that holds duplicates of its slots' descriptors, so that they outlive it.

    python -m ckpt_engine.keeper SOCKET JOB ALONE_SECONDS_MAX

It never maps a slot and knows nothing of what is in one. It ends when its engine or SIGTERM says so, and by
itself when no engine has been there for too long, or when nobody is left who would start one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import selectors
import signal
import socket
import sys
from pathlib import Path

from . import wire
from .clock import Clock, HostClock
from .process_watch import ProcessWatch

KEPT_MAX = 4096  # descriptors
CONNECTIONS_MAX = 8
SHARD_ID_CHARACTERS_MAX = 64
INDEX_MAX = 7
TICK_SECONDS = 0.5
ANSWER_SECONDS_MAX = 1.0
GUARDIAN_GONE_SECONDS = 2.0  # an engine whose guardian has just died is still about to tell us to end
NOFILE_MAX = 65_536

Key = tuple[str, int]  # logical shard id, slot index
Reply = tuple[wire.Fields, list[int]]


class Refused(Exception):
    """The request is understood, but not granted."""


class Holdings:
    """Descriptors by (shard id, slot index); those that an engine does not hand over again are let go."""

    def __init__(self) -> None:
        self._kept: dict[Key, int] = {}
        self._fresh: set[Key] = set()
        self.settled = False  # all that the present engine has is here

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in self._kept.values())

    def begin(self) -> None:
        """A new engine is there: what it does not `keep` before it says `settle` is not wanted any more."""
        self._fresh.clear()
        self.settled = False

    def keep(self, key: Key, descriptor: int) -> None:
        """Hold a duplicate of `descriptor`, in place of what was held for `key`. Raises Refused."""
        if key not in self._kept and len(self._kept) >= KEPT_MAX:
            raise Refused(f"the keeper holds {KEPT_MAX} descriptors already")
        try:
            fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise Refused(f"the descriptor cannot be kept: {error.strerror}") from error
        self.drop(key)
        self._kept[key] = duplicate
        self._fresh.add(key)

    def drop(self, key: Key) -> None:
        descriptor = self._kept.pop(key, -1)
        if descriptor >= 0:
            os.close(descriptor)
        self._fresh.discard(key)

    def settle(self) -> None:
        """The engine has handed over all it has."""
        self.settled = True
        for key in list(self._kept):
            if key not in self._fresh:
                self.drop(key)

    def entry(self, at: int) -> tuple[Key, int]:
        """The entry number `at` in a fixed order, and a descriptor of it that is the caller's. Raises Refused."""
        keys = sorted(self._kept)
        if not 0 <= at < len(keys):
            raise Refused(f"there is no entry {at}")
        return keys[at], fcntl.fcntl(self._kept[keys[at]], fcntl.F_DUPFD_CLOEXEC, 0)


class Keeper:
    """Serves one engine, and tools that ask how it is. `run` returns when it is time to end."""

    def __init__(self, path: Path, job: str, alone_seconds_max: float, clock: Clock | None = None) -> None:
        self._path = path
        self._job = job
        self._alone_seconds_max = alone_seconds_max
        self._clock: Clock = clock or HostClock()
        self._holdings = Holdings()
        self._connections: list[socket.socket] = []
        self._engine: socket.socket | None = None
        self._guardian: ProcessWatch | None = None
        self._alone_since = self._clock.monotonic()
        self._ending = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until the end. Raises OSError where another keeper serves this path, or it cannot be served."""
        with contextlib.ExitStack() as stack:
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener = stack.enter_context(self._listen())
            stack.callback(self._close)
            self._selector.register(listener, selectors.EVENT_READ)
            while not self._is_over():
                for key, _ in self._selector.select(None if self._engine is not None else TICK_SECONDS):
                    if key.fileobj is listener:
                        self._admit(listener)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                        self._serve(key.fileobj)

    def answer(self, sock: socket.socket, fields: wire.Fields, descriptors: list[int]) -> Reply | None:
        """The reply to one request, None where it wants none. Raises Refused and WireError."""
        operation = wire.text(fields, "op")
        if operation == "status":
            return self._status(), []
        if operation == "end":
            self._ending = True
            return {}, []
        if operation == "hello":
            return self._hello(sock, fields), []
        if sock is not self._engine:
            raise Refused("only the engine may do that, and it says hello first")
        if operation == "fetch":
            (shard, index), descriptor = self._holdings.entry(wire.whole(fields, "at"))
            return {"shard": shard, "index": index}, [descriptor]
        if operation == "ping":
            return {"kept": len(self._holdings)}, []
        if operation == "settle":
            self._holdings.settle()
            return None
        key = _key(fields)
        if operation == "drop":
            self._holdings.drop(key)
            return None
        if operation == "keep" and len(descriptors) == 1:
            self._holdings.keep(key, descriptors[0])
            return None
        raise Refused(f"operation {operation!r:.40} is not known to the keeper, or lacks its descriptor")

    def _hello(self, sock: socket.socket, fields: wire.Fields) -> wire.Fields:
        if wire.whole(fields, "protocol") != wire.PROTOCOL:
            raise Refused(f"the keeper speaks protocol {wire.PROTOCOL}; end it, or start the engine of that version")
        if wire.text(fields, "job") != self._job:
            raise Refused(f"this keeper serves job {self._job!r}")
        guardian, start_time = wire.whole(fields, "guardian"), wire.optional_whole(fields, "guardian_start_time")
        if self._engine is not None and self._engine is not sock:
            self._drain(self._engine)
        if self._engine is not None and self._engine is not sock:
            raise Refused(f"another engine, process {wire.peer_pid(self._engine)}, is connected")
        self._engine = sock
        if self._guardian is not None:
            self._guardian.close()
        self._guardian = ProcessWatch(guardian, start_time) if guardian > 0 else None
        self._holdings.begin()
        return {"kept": len(self._holdings)}

    def _status(self) -> wire.Fields:
        return {
            "job": self._job,
            "pid": os.getpid(),
            "kept": len(self._holdings),
            "settled": self._holdings.settled,
            "size_bytes": self._holdings.size_bytes,
            "engine": 0 if self._engine is None else wire.peer_pid(self._engine),
        }

    def _drain(self, sock: socket.socket) -> None:
        """Hear all that an engine has sent before it died."""
        while sock in self._connections and wire.readable((sock.fileno(),), 0.0):
            self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            fields, descriptors = wire.receive(sock)
            try:
                reply = self.answer(sock, fields, descriptors)
            except Refused as error:
                reply = {"error": str(error)}, []
            finally:
                wire.close_all(descriptors)
            if reply is not None:
                try:
                    wire.send(sock, *reply)
                finally:
                    wire.close_all(reply[1])
        except (wire.WireError, OSError):
            self._hang_up(sock)

    def _admit(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # the peer has gone, or we are out of descriptors
        sock.settimeout(ANSWER_SECONDS_MAX)
        if wire.peer_uid(sock) not in (os.getuid(), 0) or len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        self._connections.append(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _hang_up(self, sock: socket.socket) -> None:
        self._connections.remove(sock)
        self._selector.unregister(sock)
        sock.close()
        if sock is self._engine:
            self._engine = None
            self._alone_since = self._clock.monotonic()

    def _is_over(self) -> bool:
        if self._ending or self._engine is not None:
            return self._ending
        alone = self._clock.monotonic() - self._alone_since
        nobody = self._guardian is not None and self._guardian.ended() and alone >= GUARDIAN_GONE_SECONDS
        return nobody or alone >= self._alone_seconds_max

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        for sock in list(self._connections):
            self._hang_up(sock)
        self._holdings.begin()
        self._holdings.settle()
        self._selector.close()
        if self._guardian is not None:
            self._guardian.close()

    def _listen(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()  # of a keeper that was killed: it has left a socket, but no lock
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        previous = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(previous)
        listener.listen(CONNECTIONS_MAX)
        listener.setblocking(False)
        return listener


def main(arguments: list[str] | None = None) -> int:
    """Run a keeper; its exit code: 0 ended as it should, 1 it could not serve."""
    path, job, alone = sys.argv[1:4] if arguments is None else arguments
    with contextlib.suppress(OSError):
        os.setsid()  # a signal for the engine's terminal or group is not for us
    os.chdir("/")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = NOFILE_MAX if hard == resource.RLIM_INFINITY else min(hard, NOFILE_MAX)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        Keeper(Path(path), job, float(alone)).run()
    except OSError as error:
        sys.stderr.write(f"transom: the keeper cannot serve {path}: {error.strerror}\n")
        return 1
    return 0


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _key(fields: wire.Fields) -> Key:
    shard, index = wire.text(fields, "shard"), wire.whole(fields, "index")
    if not 0 < len(shard) <= SHARD_ID_CHARACTERS_MAX or not 0 <= index <= INDEX_MAX:
        raise Refused("a slot is named by a shard id and a small number")
    return shard, index


if __name__ == "__main__":
    sys.exit(main())
