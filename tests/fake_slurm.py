"""A fake Slurm: commands on a PATH of their own that ask one server, with the faults that a test wants."""

from __future__ import annotations

import os
import socketserver
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recovery.backends.slurm_cli import SlurmCommands, SlurmTimes
from tests.fake_slurm_commands import ENDED, FakeController, Refused

COMMANDS = ("sbatch", "scontrol", "squeue", "sinfo", "scancel", "srun")
# connect: nobody answers. denied: not allowed. lost answer: done, and an error all the same. cut: half an answer.
# slow: nothing done before `seconds` are over. late answer: done at once, answered after `seconds`.
Kind = Literal["connect", "denied", "lost answer", "cut", "slow", "late answer"]
COMMAND = """\
#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port} || exit 1
printf '%s\\n' {name} "$LC_ALL" "$#" "$@" >&3
[ {name} = sbatch ] && cat >&3
printf '\\n%s\\n' "end of input" >&3
read -r code <&3
IFS= read -r error <&3
[ -z "$error" ] || printf '%s\\n' "{name}: error: $error" >&2
cat <&3
exit "$code"
"""


@dataclass
class Fault:
    command: str
    kind: Kind
    times: int
    seconds: float


class FakeSlurm:
    """Nodes n1 … nN that run nothing."""

    def __init__(self, folder: Path, nodes: int = 4) -> None:
        self.controller = FakeController(nodes)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._calls: list[str] = []
        self._closing = threading.Event()
        fake = self

        class Request(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                fake.serve(self)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Request)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        folder.mkdir(parents=True)
        for name in COMMANDS:
            command = folder / name
            command.write_text(COMMAND.format(port=self._server.server_address[1], name=name), encoding="utf-8")
            command.chmod(0o700)
        self.environ = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "LC_ALL": "de_DE.UTF-8",  # as the person's shell has it
        }
        self.commands = SlurmCommands(self.environ)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def commands_within(self, times: SlurmTimes) -> SlurmCommands:
        return SlurmCommands(self.environ, times)

    # What a test does to it

    def fault(self, command: str, kind: Kind, *, times: int = 1, seconds: float = 60.0) -> None:
        """The next `times` commands that begin so ("scontrol requeuehold") end so."""
        self._faults.append(Fault(command, kind, times, seconds))

    def calls(self, beginning: str = "") -> list[str]:
        """Commands so far, in order, without their options."""
        return [call for call in self._calls if call.startswith(beginning)]

    def take_down(self, node: str) -> None:
        """Given up: a job that it has goes on without it (--no-kill)."""
        with self._lock:
            self.controller.nodes[node]["state"] = "DOWN"
            for job in self.controller.jobs.values():
                job["nodes"] = [name for name in job["nodes"] if name != node]

    def bring_up(self, node: str) -> None:
        with self._lock:
            self.controller.nodes[node].update(state="IDLE", drain=False)

    def clear(self) -> None:
        """No job is left, every node is idle, and nothing goes wrong any more."""
        with self._lock:
            self._faults.clear()
            self._calls.clear()
            for job in self.controller.jobs.values():
                job["state"] = job["state"] if job["state"] in ENDED else "CANCELLED"
            for node in self.controller.nodes.values():
                node.update(state="IDLE", drain=False, reason="")

    # One command

    def serve(self, request: Any) -> None:
        """Read what was typed, do it, and answer: exit code, one line of error, output."""
        read = request.rfile.readline
        name, language, count = (read().decode().rstrip("\n") for _ in range(3))
        arguments = [read().decode().rstrip("\n") for _ in range(int(count))]
        script = "".join(iter(lambda: read().decode(), "end of input\n"))
        line = " ".join([name, *(argument for argument in arguments if not argument.startswith("--"))])
        with self._lock:
            self._calls.append(line)
            fault = self._fault_of(line)
            code, error, out = self._do(name, language, arguments, script, fault)
        if fault is not None and fault.kind in ("slow", "late answer"):
            self._closing.wait(fault.seconds)
        try:
            request.wfile.write(f"{code}\n{error}\n{out}".encode())
        except OSError:
            return  # whoever asked has been killed

    def _do(
        self, name: str, language: str, arguments: list[str], script: str, fault: Fault | None
    ) -> tuple[int, str, str]:
        kind, controller = fault.kind if fault is not None else "", self.controller
        controller.language = language
        out = ""
        if name == "srun":
            return 1, "the nodes of this fake run nothing", ""
        try:
            if kind in ("connect", "denied"):
                raise Refused(controller.message(kind))
            if kind != "slow":
                controller.schedule()
                out = getattr(controller, name)(arguments, script)
                controller.schedule()
            if kind == "lost answer":
                raise Refused(controller.message("lost"))
        except Refused as error:
            return 1, str(error), ""
        return 0, "", out[: len(out) // 2] if kind == "cut" else out

    def _fault_of(self, line: str) -> Fault | None:
        """The first that fits, one use of it taken away."""
        if line.startswith("scontrol show hostnames"):
            return None  # done without a controller
        for fault in self._faults:
            if line.startswith(fault.command) and fault.times > 0:
                fault.times -= 1
                return fault
        return None
