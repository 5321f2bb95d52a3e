"""Serves the API on a Unix socket that only its owner can open, and on TCP where a token is set."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from .shapes import LedgerError

SOCKET_PATH_BYTES_MAX = 107  # sun_path of Linux, without its final NUL
BACKLOG = 128
REQUESTS_MAX = 200  # at once; more get 503
START_SECONDS = 30.0
STOP_SECONDS = 5


class CannotServe(LedgerError):
    """The API's address cannot be had."""


def unix_socket(path: Path) -> socket.socket:
    """A listening socket at `path`, 0600, in a folder that is made 0700. A left-over one is replaced.

    Only the holder of the ledger's lock may call this: whoever else listened there is gone.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise CannotServe(
            f"the socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes; set state_dir to a shorter one"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise CannotServe(f"{path} exists and is not a socket; move it away")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # so that it is 0600 from its first moment
        try:
            listener.bind(str(path))
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
    except OSError as error:
        raise CannotServe(
            f"the API's socket {path} cannot be made ({error.strerror}); give a folder that can be written"
        ) from error
    listener.listen(BACKLOG)
    return listener


def tcp_socket(host: str, port: int) -> socket.socket:
    """A listening socket at this address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise CannotServe(
            f"the API cannot listen on {host}:{port} ({why}); choose another port (record.port) or stop who has it"
        ) from error


class ApiServer:
    """uvicorn in a thread of its own, over sockets that are already open."""

    def __init__(self, app: FastAPI, listener: socket.socket, *, name: str) -> None:
        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                limit_concurrency=REQUESTS_MAX,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, name=name, daemon=True)

    def start(self) -> None:
        """Serve; connections made before uvicorn is up wait in the socket's backlog."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running requests for a few seconds, then end."""
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS + START_SECONDS)
        self._listener.close()
