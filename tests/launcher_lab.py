"""A job on real launchers, each a process of its own, with scripts that need no torch.

Run as a program it is one launcher: `python launcher_lab.py CONFIG.json`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ingest.clock import SystemClock
from ingest.codec import Codec
from ingest.events import TOPICS, Message
from ingest.sqlite_bus import SqliteBus
from recovery.backend import RankView
from recovery.backends.local import LocalBackend
from recovery.launcher.config import LauncherConfig, LauncherLimits, Listen
from recovery.launcher.job_files import JobFiles
from recovery.launcher.launcher import Launcher
from recovery.launcher.procfs import is_alive
from recovery.launcher.proof import JobKey
from recovery.launcher.protocol import JobSpec, NodeFile

DEADLINE_SECONDS = 30.0
JOB = "job"
Seen = TypeVar("Seen")

SOCKET_CLIENT = """
import json, os, socket, time
E = os.environ
def connect(path=E["TRANSOM_SOCKET"]):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(path); return s
def send(s, kind, body):
    s.send(kind.encode() + b"\\n" + json.dumps(body).encode())
def hello(s, **other):
    send(s, "hello.v1", dict(job=E["TRANSOM_JOB"], attempt=int(E["TRANSOM_ATTEMPT"]), rank=int(E["RANK"]),
                             token=E["TRANSOM_TOKEN"], pid=os.getpid(), scheduler_ids={"slurm": "7"}) | other)
def stamp(sequence):
    return dict(job=E["TRANSOM_JOB"], attempt=int(E["TRANSOM_ATTEMPT"]), rank=int(E["RANK"]),
                node=E["TRANSOM_NODE"], sequence=sequence, at=time.time())
def metrics(s, sequence, step, **other):
    send(s, "metrics.v1", stamp(sequence) | dict(phase="train", step=step) | other)
"""


def wait_for(condition: Callable[[], Seen], what: str, seconds: float = DEADLINE_SECONDS) -> Seen:
    """Poll until `condition` is true and return what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        seen = condition()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


class Lab:
    """One job in one folder; everything it started is gone when the test is over."""

    def __init__(self, folder: Path, *, nodes: int = 1, per_node: int = 1, spares: int = 0) -> None:
        self.folder = folder
        self.jobs = folder / "jobs"
        self.files = JobFiles(self.jobs, JOB)
        self.bus_file = folder / "bus.sqlite"
        self.clock = SystemClock()
        self.node_names = [f"node{number}" for number in range(nodes + spares)]
        self.backend = LocalBackend(self.jobs, self.clock, random.Random(1))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.spec = JobSpec(job=JOB, script="", nodes=nodes, nproc_per_node=per_node)
        self.files.write_spec(self.spec)
        SqliteBus(self.bus_file, clock=self.clock).create_topics(1)

    def script(self, text: str, *, client: bool = False) -> Path:
        """A script of the user's, in a folder of its own."""
        path = self.folder / "user" / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text((SOCKET_CLIENT if client else "") + textwrap.dedent(text))
        return path

    def launch(
        self, script: Path | str, node: str = "node0", *, wait: bool = True, **config: Any
    ) -> subprocess.Popen[bytes]:
        """Start one launcher and (`wait`) wait until it can be asked."""
        content = {
            "job": JOB, "node": node, "slots": self.spec.nproc_per_node, "script": str(script),
            "control_socket": str(self.folder / f"{node}.c"),
            "telemetry_socket": str(self.folder / f"{node}.t"),
            "node_file": str(self.files.node_file(node)), "bus": str(self.bus_file), **config,
        }  # fmt: skip
        path = self.folder / f"{node}.json"
        path.write_text(json.dumps(content))
        with (self.folder / f"{node}.out").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(path)], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes[node] = process
        if wait:
            self.await_launcher(node)
        return process

    def await_launcher(self, node: str) -> None:
        wait_for(lambda: self.is_up(node, self.processes[node]), f"launcher of {node}: {self.shown(node)}")

    def is_up(self, node: str, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.shown(node)
        file = self.node_file(node)
        return file is not None and file.pid == process.pid

    def launch_all(self, script: Path | str, **config: Any) -> None:
        for node in self.node_names:
            self.launch(script, node, wait=False, **config)
        for node in self.node_names:
            self.await_launcher(node)

    def shown(self, node: str = "node0") -> str:
        """What that launcher has shown to the person who started it."""
        return (self.folder / f"{node}.out").read_text(errors="replace")

    def node_file(self, node: str = "node0") -> NodeFile | None:
        return self.files.nodes().get(node)

    def pids(self) -> dict[int, int]:
        """Living ranks and their process ids."""
        return {view.rank: view.pid for view in self.backend.observe(JOB).ranks if view.state != "exited"}

    def ranks_on(self, node: str) -> list[RankView]:
        return [view for view in self.backend.observe(JOB).ranks if view.node == node]

    def messages(self, *types: type[Message], topics: tuple[Any, ...] = ("metrics", "logs", "events")) -> list[Any]:
        """Everything on the bus so far, in order."""
        codec = Codec()
        return [
            message
            for record in self.records(topics)
            for message in [codec.decode(record.headers, record.value)]
            if not types or isinstance(message, types)
        ]

    def records(self, topics: tuple[Any, ...] = TOPICS) -> list[Any]:
        bus = SqliteBus(self.bus_file, clock=self.clock)
        consumer = bus.consumer(f"test-{os.urandom(6).hex()}", topics)
        try:
            found: list[Any] = []
            while batch := consumer.poll(5000, 0.0):
                found += batch
            return sorted(found, key=lambda record: (record.appended_at, topics.index(record.topic)))
        finally:
            consumer.close()
            bus.close()

    def lines(self) -> list[str]:
        """Text of all log records so far."""
        return [line.text for logs in self.messages(topics=("logs",)) for line in logs.lines]

    def close(self) -> None:
        processes = [file for file in self.files.nodes().values()]
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        for file in processes:
            for rank in file.ranks:
                wait_for(lambda rank=rank: not is_alive(rank.pid, rank.start_time), f"rank {rank} is gone")


@contextmanager
def lab_in_short_folder(**arguments: Any) -> Iterator[Lab]:
    """A lab whose socket paths are short enough."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        lab = Lab(Path(folder), **arguments)
        try:
            yield lab
        finally:
            lab.close()


def main() -> int:
    content = json.loads(Path(sys.argv[1]).read_text())
    clock = SystemClock()
    bus = SqliteBus(Path(content.pop("bus")), clock=clock)
    for name in ("control_socket", "telemetry_socket", "node_file"):
        content[name] = Path(content[name])
    content["limits"] = LauncherLimits(**content.get("limits", {}))
    content.setdefault("base_env", dict(os.environ))
    content.setdefault("preload_torch", False)
    token = content.pop("tcp_token", None)
    if token is not None:  # also for whoever asks over TCP
        content |= {"host": "127.0.0.1", "listen": Listen(host="127.0.0.1", port=0, key=JobKey(JOB, token.encode()))}
    config = LauncherConfig(show_output=1, **content)
    return Launcher(config, bus, clock).run()


if __name__ == "__main__":
    sys.exit(main())
