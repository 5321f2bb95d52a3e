"""The least of a launcher: a SOCK_SEQPACKET server that keeps what ranks send and can inject."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ingest.events import Logs, Metrics
from ingest.rank_socket import PACKET_BYTES_MAX, Hello, unpack

DEADLINE_SECONDS = 30.0


class FakeLauncher:
    """Accepts every rank; `packets` holds (type, JSON bytes) in the order of arrival."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packets: list[tuple[str, bytes]] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._waker, self._wakened = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def environment(self, **more: str) -> dict[str, str]:
        """What a rank of this launcher is given; `more` is added."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRANSOM_")}
        ours = {
            "TRANSOM_SOCKET": str(self.path),
            "TRANSOM_JOB": "job",
            "TRANSOM_ATTEMPT": "3",
            "TRANSOM_NODE": "node-0",
            "TRANSOM_TOKEN": "secret",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return {**inherited, **ours, **more}

    def of(self, packet_type: str) -> list[Any]:
        """The bodies of one type, as plain JSON values."""
        return [json.loads(body) for kind, body in list(self.packets) if kind == packet_type]

    @property
    def hellos(self) -> list[Hello]:
        return self._decoded("hello.v1", Hello)

    def metrics(self, rank: int | None = None) -> list[Metrics]:
        return [m for m in self._decoded("metrics.v1", Metrics) if rank is None or m.rank == rank]

    def lines(self) -> list[str]:
        return [line.text for logs in self._decoded("logs.v1", Logs) for line in logs.lines]

    def rows(self, rank: int | None = None) -> dict[int, dict[str, float]]:
        """Step → samples, over all messages; a later message adds to an earlier one."""
        rows: dict[int, dict[str, float]] = {}
        for message in self.metrics(rank):
            for name in message.columns:
                for step, value in zip(message.steps, message.column(name), strict=True):
                    if value is not None:
                        rows.setdefault(step, {})[name] = value
        return rows

    def inject(self, **request: Any) -> None:
        """Send an injection to every rank."""
        packet = b"inject.v1\n" + json.dumps(request).encode()
        for connection in self.connections:
            connection.send(packet)

    def wait_for(self, condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> None:
        """Return when `condition` holds; fail after a generous deadline."""
        deadline = time.monotonic() + seconds
        while not condition():
            received = [(kind, body[:200]) for kind, body in self.packets[-3:]]
            assert time.monotonic() < deadline, f"not within {seconds} s; the last packets: {received}"
            time.sleep(0.01)

    def close(self) -> None:
        """Die as a launcher dies: every connection ends."""
        self._waker.close()
        self._thread.join()
        for connection in [*self.connections, self._listener, self._wakened]:
            connection.close()
        self.path.unlink(missing_ok=True)

    def _decoded(self, packet_type: str, kind: type[Any]) -> list[Any]:
        return [msgspec.json.decode(body, type=kind) for found, body in list(self.packets) if found == packet_type]

    def _serve(self) -> None:
        while True:
            with selectors.DefaultSelector() as selector:  # select() itself takes no descriptor beyond 1,023
                for source in (self._wakened, self._listener, *self.connections):
                    selector.register(source, selectors.EVENT_READ)
                readable = [key.fileobj for key, _ in selector.select()]
            if self._wakened in readable:
                return
            for ready in readable:
                assert isinstance(ready, socket.socket)
                if ready is self._listener:
                    self.connections.append(self._listener.accept()[0])
                else:
                    self._read(ready)

    def _read(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(2 * PACKET_BYTES_MAX)
        except ConnectionError:
            packet = b""
        if packet:
            self.packets.append(unpack(packet))
        else:
            self.connections.remove(connection)
            connection.close()
