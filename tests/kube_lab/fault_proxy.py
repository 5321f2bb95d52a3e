"""A proxy before a real API server that, when told to, answers as a healthy one never does."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import urllib3

FaultKind = Literal[
    "429", "500", "410", "reset", "time_out_after_effect", "reset_after_effect", "truncated", "cut_watch"
]
HEADERS = ("Authorization", "Content-Type", "Accept")


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests of that method whose path, with its query, has `path` in it."""

    kind: FaultKind
    method: str
    path: str
    times: int = 1
    met: int = field(default=0)

    def hits(self, method: str, path: str) -> bool:
        return self.met < self.times and method == self.method and re.search(self.path, path) is not None


class FaultProxy:
    """`address` is where to ask; `faults` may be added to at any time; `seen` lists (method, path without query)."""

    def __init__(self, upstream: str, authority: str) -> None:
        self._upstream = upstream
        self._pool = urllib3.PoolManager(ca_certs=authority, maxsize=16, retries=False)
        self._lock = threading.Lock()
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.let_go = threading.Event()  # of requests that are held back
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @contextmanager
    def running(self) -> Iterator[FaultProxy]:
        self._thread.start()
        try:
            yield self
        finally:
            self.let_go.set()
            self._server.shutdown()
            self._server.server_close()
            self._pool.clear()

    def add(self, kind: FaultKind, method: str, path: str, times: int = 1) -> Fault:
        fault = Fault(kind, method, path, times)
        with self._lock:
            self.faults.append(fault)
        return fault

    def count(self, method: str, path: str) -> int:
        return sum(one == method and re.search(path, where) is not None for one, where in self.seen)

    def _fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append((method, urlsplit(path).path))
            for fault in self.faults:
                if fault.hits(method, path):
                    fault.met += 1
                    return fault
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return

            def serve(self) -> None:
                fault = proxy._fault_for(self.command, self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if fault is not None and proxy._refuses(self, fault):
                    return
                proxy._forward(self, body, fault)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = serve

        return Handler

    def _refuses(self, asked: BaseHTTPRequestHandler, fault: Fault) -> bool:
        """Answer in place of the server, which hears nothing."""
        if fault.kind == "reset":
            _reset(asked)
            return True
        told = {
            "429": ("TooManyRequests", "the server has received too many requests"),
            "500": ("InternalError", "etcdserver: request timed out"),
            "410": ("Expired", "too old resource version: 1 (2)"),
        }.get(fault.kind)
        if told is None:
            return False
        status = {"kind": "Status", "status": "Failure", "reason": told[0], "message": told[1], "code": int(fault.kind)}
        _answer(asked, int(fault.kind), json.dumps(status).encode())
        return True

    def _forward(self, asked: BaseHTTPRequestHandler, body: bytes, fault: Fault | None) -> None:
        headers = {name: asked.headers[name] for name in HEADERS if asked.headers.get(name)}
        watching = parse_qs(urlsplit(asked.path).query).get("watch") == ["true"]
        answer = self._pool.request(
            asked.command, self._upstream + asked.path, body=body or None, headers=headers, preload_content=False,
            timeout=urllib3.Timeout(connect=5, read=60),
        )  # fmt: skip
        try:
            if watching and answer.status == 200:
                self._stream(asked, answer, cut=fault is not None and fault.kind == "cut_watch")
                return
            content = answer.read()
        finally:
            answer.close()
        if fault is None:
            _answer(asked, answer.status, content)
        elif fault.kind == "truncated":
            _answer(asked, answer.status, content[: len(content) // 2], length=len(content))
        elif fault.kind == "time_out_after_effect":
            self.let_go.wait(60)
            _reset(asked)
        else:
            _reset(asked)

    def _stream(self, asked: BaseHTTPRequestHandler, answer: urllib3.BaseHTTPResponse, *, cut: bool) -> None:
        asked.send_response(200)
        asked.send_header("Content-Type", "application/json")
        asked.send_header("Transfer-Encoding", "chunked")
        asked.end_headers()
        try:
            for chunk in answer.stream(amt=None, decode_content=False):
                asked.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                asked.wfile.flush()
                if cut:
                    _reset(asked)
                    return
            asked.wfile.write(b"0\r\n\r\n")
        except (OSError, urllib3.exceptions.HTTPError):
            asked.close_connection = True


def _answer(asked: BaseHTTPRequestHandler, status: int, content: bytes, *, length: int | None = None) -> None:
    try:
        asked.send_response(status)
        asked.send_header("Content-Type", "application/json")
        asked.send_header("Content-Length", str(len(content) if length is None else length))
        asked.end_headers()
        asked.wfile.write(content)
    except OSError:
        asked.close_connection = True
    if length is not None:
        asked.close_connection = True


def _reset(asked: BaseHTTPRequestHandler) -> None:
    """The connection ends with RST and no answer."""
    asked.close_connection = True
    asked.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    asked.connection.close()
