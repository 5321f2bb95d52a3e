"""Receivers of notifications: a real HTTP server that answers as it is told, and waiting for what others do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEADLINE_SECONDS = 60.0


def wait_for(seen: Callable[[], object]) -> None:
    """Until `seen` holds; the time-out only ends a dead test."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not seen():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@dataclass
class Receiver:
    """What has come in, and the answers to give: the last one again and again. `release` ends a silence (status 0)."""

    url: str = ""
    answers: list[int] = field(default_factory=lambda: [200])
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)


@contextmanager
def receiver(*answers: int) -> Iterator[Receiver]:
    """A server on a free port of this machine; a status of 0 says nothing until it is released."""
    lab = Receiver(answers=list(answers) or [200])

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = lab.answers.pop(0) if len(lab.answers) > 1 else lab.answers[0]
            lab.headers.append({name.lower(): value for name, value in self.headers.items()})
            lab.bodies.append(body)
            if status == 0:
                lab.release.wait(DEADLINE_SECONDS)
                status = 200
            self.send_response(status)
            if status == 307:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    lab.url = f"http://127.0.0.1:{server.server_port}/secret-path"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield lab
    finally:
        lab.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
