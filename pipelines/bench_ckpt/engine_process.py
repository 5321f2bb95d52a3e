"""A real checkpoint engine in a process and a session of its own, as `transom ckpt serve` runs it: at the lowest
priority, for measurements."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.event import EngineEvent
from pipelines.own_process import PARENT_VARIABLE, go_with_parent, step_back

JOB, NODE = "bench", "n0"
END_SECONDS_MAX = 90.0
MEMORY_BYTES_MAX = 16 << 30


class EngineProcess:
    """The process. Its folder has the socket, the checkpoints and the engine's story, one event a line."""

    def __init__(self, folder: Path, node: str = NODE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket, self.directory, self.log = folder / "engine.sock", folder / "steps", folder / "events.jsonl"
        command = [sys.executable, "-P", "-m", "pipelines.bench_ckpt.engine_process"]
        paths = [str(self.socket), str(self.directory), str(self.log)]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        self.process = subprocess.Popen(
            [*command, *paths, node], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            self.end(signal.SIGKILL)
            raise RuntimeError("the checkpoint engine did not start; what it says is above")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)  # its keeper ends with it

    @property
    def admin(self) -> EngineAdmin:
        return EngineAdmin(self.socket)

    @property
    def place(self) -> dict[str, Any]:
        """What a `Checkpointer` of rank 0 of one is given besides its attempt."""
        return {
            "socket": str(self.socket), "directory": None, "job": JOB, "rank": 0, "world_size": 1, "node": NODE,
        }  # fmt: skip

    def events(self, state: str, tier: str = "") -> list[EngineEvent]:
        """What it told of this state (and tier), oldest first."""
        if not self.log.exists():
            return []
        told = [EngineEvent(**json.loads(line)) for line in self.log.read_text(encoding="utf-8").splitlines()]
        return [event for event in told if event.state == state and tier in ("", event.tier)]

    def end(self, number: int) -> None:
        """Send a signal and wait until it is gone."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _serve(socket: str, directory: str, log: str, node: str) -> None:
    go_with_parent(os.environ)
    step_back()
    with Path(log).open("a", buffering=1, encoding="utf-8") as file:

        def tell(event: EngineEvent) -> None:
            fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
            file.write(json.dumps(fields) + "\n")

        config = EngineConfig(
            job=JOB, node=node, socket_path=Path(socket), directory=Path(directory), memory_bytes_max=MEMORY_BYTES_MAX
        )
        Engine(config, tell).run(lambda: print("ready", flush=True))  # noqa: T201 - the parent waits for it


if __name__ == "__main__":
    _serve(*sys.argv[1:5])
