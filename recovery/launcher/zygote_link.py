"""The launcher's side of its zygote: starts it, asks it for ranks, hears of exits, and counts its failures.

Everything is called from the launcher's main thread: the kernel ties the zygote's parent-death signal to the
thread that started it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import LauncherConfig
from .procfs import kill_session, start_time_of

ZYGOTE_PATH = Path(__file__).resolve().parent.parent / "torch_side" / "zygote.py"
RECEIVED_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """One process to fork; the descriptors stay ours, the zygote gets copies. `run`: in place of the rank's script."""

    order: int  # a rank's number; of a check, a negative one
    name: str
    env: dict[str, str]
    cpus: tuple[int, ...]
    stacks_signal: int
    descriptors: tuple[int, int, int, int]  # stdout, stderr, stacks file, error file
    run: Mapping[str, Any] | None = None

    def frame(self) -> bytes:
        return pack_frame(
            {
                "fork": self.order,
                "name": self.name,
                "run": self.run,
                "env": self.env,
                "cpus": self.cpus,
                "stacks_signal": self.stacks_signal,
            }
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """The zygote has imported what it should; `problems` in words."""

    problems: tuple[str, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Forked:
    """A rank's process exists; `pidfd` is now the receiver's."""

    order: int
    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class ForkRefused:
    order: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child of the zygote has ended: exactly one of `code` and `signal`."""

    pid: int
    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class ZygoteGone:
    """It ended, or its socket did; its ranks end with it."""


News = Ready | Forked | ForkRefused | Exited | ZygoteGone


def pack_frame(content: Mapping[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    return struct.pack(">I", len(body)) + body


def rank_environment(config: LauncherConfig) -> dict[str, str]:
    """What every rank of this node inherits; torch reads its number of threads when it is imported."""
    return {"OMP_NUM_THREADS": "1", **config.base_env, **config.env}


class ZygoteLink:
    """One zygote process and the socket to it."""

    def __init__(self, config: LauncherConfig) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = subprocess.Popen(
                [config.python, "-P", str(ZYGOTE_PATH), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=rank_environment(config),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.connection = ours
        self.connection.setblocking(False)
        self.pid = self._process.pid
        self.start_time = start_time_of(self.pid)
        self.ready = False
        self.gone = False
        self._buffer = b""
        self._descriptors: list[int] = []
        settings = {
            "script": config.script,
            "module": config.module,
            "argv": list(config.argv),
            "preload": list(config.preload),
            "torch": config.preload_torch,
        }
        self._send(pack_frame({"settings": settings}), ())

    def fork(self, order: ForkOrder) -> bool:
        """Ask for one rank; False where the zygote takes nothing any more."""
        return self._send(order.frame(), order.descriptors)

    def receive(self) -> list[News]:
        """Everything the zygote has said since."""
        news: list[News] = []
        while True:
            try:
                chunk, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                chunk, descriptors = b"", []
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._descriptors += descriptors
            if not chunk:
                self.gone = True
                break
            self._buffer += chunk
            news += self._parse()
        if self.gone:
            news.append(ZygoteGone())
        return news

    def poll(self) -> bool:
        """Reap the process; True when it has ended."""
        if self._process.poll() is not None:
            self.gone = True
        return self.gone

    def kill(self) -> None:
        """SIGKILL, and let go of everything; its ranks end with it."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        kill_session(self.pid, self.start_time)  # a fork that was not yet tied to it
        self.gone = True
        self.connection.close()
        self.output.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _send(self, frame: bytes, descriptors: tuple[int, ...]) -> bool:
        # A frame is far smaller than the socket's buffer; a zygote that leaves that full is stuck.
        try:
            sent = socket.send_fds(self.connection, [frame], list(descriptors))
        except OSError:
            return False
        return sent == len(frame)

    def _parse(self) -> list[News]:
        news: list[News] = []
        while len(self._buffer) >= 4:
            (size,) = struct.unpack(">I", self._buffer[:4])
            if size > RECEIVED_BYTES_MAX:
                self.gone = True
                break
            if len(self._buffer) < 4 + size:
                break
            content = json.loads(self._buffer[4 : 4 + size])
            self._buffer = self._buffer[4 + size :]
            news.append(self._read(content))
        return news

    def _read(self, content: dict[str, Any]) -> News:
        if "ready" in content:
            self.ready = True
            return Ready(tuple(content["problems"]), content["threads"])
        if "forked" in content:
            return Forked(content["forked"], content["pid"], self._descriptors.pop(0))
        if "refused" in content:
            return ForkRefused(content["refused"], content["reason"])
        return Exited(content["exited"], content.get("code"), content.get("signal"))
