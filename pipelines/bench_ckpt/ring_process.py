"""An engine of a ring of three in a process of its own, without torch, for measurements of what comes from a peer."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.ring_config import RingConfig
from ingest.clock import Clock

JOB, HOME, HOLDER, NEW = "bench", "home", "holder", "new"
TOKEN = b"a token for the measurement alone"
END_SECONDS_MAX = 90.0
READY_SECONDS_MAX = 60.0
MEMORY_BYTES_MAX = 8 << 30


class RingProcess:
    """The process. All of one folder share their checkpoints and know each other; `order` is that of the ring, and
    nodes that are named in `together` get no copies of each other's shards while there are others."""

    def __init__(
        self,
        folder: Path,
        node: str,
        number: int = 0,
        *,
        order: Sequence[str] = (HOME, HOLDER, NEW),
        together: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.node = node
        self.socket = folder / f"{node}-{number}.sock"
        command = [sys.executable, "-P", "-m", "pipelines.bench_ckpt.ring_process"]
        self.directory = folder / "steps"
        arguments = [str(self.socket), str(self.directory), node, ",".join(order), ",".join(together)]
        self._process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.end()
            raise RuntimeError("the checkpoint engine did not start; what it says is above")

    def await_ready(self, size_bytes: int, clock: Clock) -> None:
        """Return when it has made memory ready for so much, as a node does before ranks of a lost one come to it."""
        deadline = clock.monotonic() + READY_SECONDS_MAX
        while EngineAdmin(self.socket).status().memory_bytes < size_bytes:
            if clock.monotonic() > deadline:
                raise RuntimeError(f"the engine made no memory ready within {READY_SECONDS_MAX:g} s")
            clock.sleep(0.05)

    def end(self) -> None:
        """Lose the node, with all of its memory."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(END_SECONDS_MAX)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _serve(socket: str, directory: str, node: str, order: str, together: str) -> None:
    # The new one keeps nothing for others: a copy that had come before anybody asked would be no restore.
    keeps_bytes_max = 1 if node == NEW else MEMORY_BYTES_MAX
    groups = dict.fromkeys(filter(None, together.split(",")), "one rack")
    ring = RingConfig(token=TOKEN, nodes=tuple(order.split(",")), groups=groups, memory_bytes_max=keeps_bytes_max)
    config = EngineConfig(
        job=JOB, node=node, socket_path=Path(socket), directory=Path(directory), memory_bytes_max=MEMORY_BYTES_MAX,
        ring=ring,
    )  # fmt: skip
    Engine(config, lambda event: None).run(lambda: print("ready", flush=True))  # noqa: T201 - the parent waits for it


if __name__ == "__main__":
    _serve(*sys.argv[1:6])
