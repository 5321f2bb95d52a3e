"""The whole chain on the embedded bus in one folder: `transom up`, `transom run` with scripts that need no torch."""

from __future__ import annotations

import json
import os
import shutil
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

from detectors.verdict import VERDICT_TYPES, Verdict
from ingest.bus import BusError
from ingest.clock import SystemClock
from ingest.codec import Codec
from ingest.events import MESSAGE_TYPES, TOPICS, AttemptStarted, Metrics
from ingest.sqlite_bus import SqliteBus
from ingest.sqlite_consumer import SqliteConsumer
from pipelines.ledger.client import LedgerClient
from recovery.action import RECOVERY_TYPES, Action, Incident
from recovery.launcher.procfs import all_processes

DEADLINE_SECONDS = 45.0
SETTINGS = """
[detect]
state_seconds = 0.3
node_silent_seconds = 2.5
ensemble = false
[recover]
probation_steps = 3
probation_seconds = 0.5
stop_grace_seconds = 0.3
evidence_seconds = 1.0
same_cause_max = 100
restarts_max = 100
budgets = { user = 100, unknown = 100, hang = 100, infra = 100 }
exits = { watch_seconds = 0.5, grace_seconds = GRACE }
[record]
metrics_flush_seconds = 0.5
"""
STEPS = """
import os, sys, time, transom
run = transom.init()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TRANSOM_ATTEMPT"])
print("rank", rank, "of attempt", attempt, flush=True)
def steps(count, seconds=0.03):
    for step in range(1, count + 1):
        time.sleep(seconds)
        run.log(step=step, loss=1.0 / step)
        yield step
"""
ENDLESS = STEPS + "for step in steps(1_000_000): pass\n"
# Nobody goes on before the others have come as far: what a collective does, through files.
TOGETHER = (
    STEPS
    + """
def place_of(number):
    return f"{sys.argv[0]}.{attempt}.{number}"
def reached(number):
    try:
        return int(open(place_of(number)).read() or 0)
    except OSError:
        return 0
for step in steps(1_000_000):
    with open(place_of(rank) + ".new", "w") as stream:
        stream.write(str(step))
    os.replace(place_of(rank) + ".new", place_of(rank))
    while min(map(reached, range(int(os.environ["WORLD_SIZE"])))) < step:
        time.sleep(0.005)
"""
)
Seen = TypeVar("Seen")


def eventually(condition: Callable[[], Seen], what: str, seconds: float = DEADLINE_SECONDS) -> Seen:
    """Poll until `condition` is true and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (seen := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return seen


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


class Chain:
    """One state folder; every process in it carries a mark, so that what is left over is found and ended."""

    def __init__(self, folder: Path, settings: str = "", exit_grace_seconds: float = 300.0) -> None:
        """Detection has so long to explain an exit: a slow machine that has just lost its detector needs some."""
        self.folder = folder
        self.state = folder / "s"
        self.config = folder / "transom.toml"
        self.config.write_text(
            f'state_dir = "{self.state}"\n' + SETTINGS.replace("GRACE", str(exit_grace_seconds)) + settings
        )
        self.clock = SystemClock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._codec = Codec({**MESSAGE_TYPES, **VERDICT_TYPES, **RECOVERY_TYPES})
        self._consumer: SqliteConsumer | None = None
        self._heard: list[Any] = []
        self._mark = f"CHAIN_MARK={folder}".encode()
        # A module of that name on the path: torch is not found, and a launcher is ready at once.
        self.without_torch = folder / "without" / "torch"
        self.without_torch.mkdir(parents=True)
        (self.without_torch / "__init__.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')")

    # Processes

    def transom(self, *arguments: str, torch: bool = False, **more: Any) -> subprocess.Popen[bytes]:
        """Start `transom <arguments>` in this folder; its output goes to `<first argument>.out`."""
        environ = {**os.environ, "CHAIN_MARK": str(self.folder), "OMP_NUM_THREADS": "1"}
        if not torch:
            environ["PYTHONPATH"] = str(self.without_torch.parent)
        with (self.folder / f"{arguments[0]}.out").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines", *arguments],
                cwd=self.folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, **more,
            )  # fmt: skip
        self._started.append(process)
        return process

    def up(self, seconds: float = DEADLINE_SECONDS) -> subprocess.Popen[bytes]:
        """All services, once they answer."""
        process = self.transom("up", "--no-console", "--config", str(self.config))
        eventually(
            lambda: "record, detect and recover run" in self.shown("up") or process.poll() is not None,
            "services", seconds,
        )  # fmt: skip
        assert process.poll() is None, self.shown("up")
        return process

    def run(
        self, job: str, script: str | Path, *, ranks: int = 2, nodes: int = 1, more: tuple[str, ...] = (),
        torch: bool = False, arguments: tuple[str, ...] = (), checkpoints: bool = False,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """`transom run` of a script, or of the text of one."""
        if isinstance(script, str):
            path = self.folder / f"{job}.py"
            path.write_text(textwrap.dedent(script))
            script = path
        given = ["--config", str(self.config), "--job", job, "--nproc-per-node", str(ranks)]
        given += ["--virtual-nodes", str(nodes), *(() if checkpoints else ("--no-checkpoints",)), *more]
        return self.transom("run", *given, str(script), *arguments, torch=torch)

    def call(self, *arguments: str) -> str:
        """A command of `transom` that ends by itself; what it printed."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pipelines", *arguments, "--config", str(self.config)],
            capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False, cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, command: str) -> str:
        path = self.folder / f"{command}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def log(self, service: str) -> str:
        path = self.state / "logs" / f"{service}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pids(self, *words: str) -> list[int]:
        """Living processes of this folder whose command line has all of `words`."""
        found = []
        for stat in all_processes():
            if stat.state != "Z" and self._mark in environment_of(stat.pid).split(b"\0"):
                command = command_of(stat.pid)
                if all(word in command for word in words):
                    found.append(stat.pid)
        return found

    def service(self, name: str) -> int:
        """The process of a service as it runs now."""
        return eventually(lambda: self.pids("pipelines", name), f"{name} runs")[0]

    def kill(self, name: str) -> int:
        """SIGKILL to a service, which `up` starts again; returns the process that takes its place."""
        old = self.service(name)
        os.kill(old, signal.SIGKILL)
        return eventually(lambda: [pid for pid in self.pids("pipelines", name) if pid != old], f"{name} again")[0]

    # Files and the bus

    def ranks(self, job: str) -> dict[int, int]:
        """Living ranks of a job and their process ids, as launchers wrote them down."""
        found = {}
        for file in (self.state / "jobs" / job / "nodes").glob("*.json"):
            try:
                found |= {rank["rank"]: rank["pid"] for rank in json.loads(file.read_bytes())["ranks"]}
            except (OSError, ValueError):
                continue
        return found

    def launcher(self, job: str, node: str = "node0") -> int:
        pid: int = json.loads((self.state / "jobs" / job / "nodes" / f"{node}.json").read_bytes())["pid"]
        return pid

    def messages(self, *types: type[Any], job: str = "") -> list[Any]:
        """Everything of these types on the bus so far, oldest first within a topic."""
        try:
            if self._consumer is None:
                bus = SqliteBus(self.state / "bus.sqlite", clock=self.clock)
                self._consumer = bus.consumer(f"test-{os.urandom(6).hex()}", TOPICS)
            while batch := self._consumer.poll(5000, 0.0):
                self._heard += [
                    self._codec.decode(record.headers, record.value)
                    for record in batch
                    if record.topic != "dead-letters"
                ]
        except BusError:  # it does not exist yet, or its disk is full
            pass
        return [one for one in self._heard if isinstance(one, types or object) and job in ("", one.job)]

    def rows(self, what: str, job: str) -> list[Any]:
        """The messages of one table of the ledger, as its API serves them."""
        with LedgerClient(self.state / "run" / "record.sock") as client:
            return [row.message for row in client.rows(what, job=job, limit=1000).rows]

    def attempts(self, job: str) -> list[int]:
        return sorted({message.attempt for message in self.messages(AttemptStarted, job=job)})

    def verdicts(self, job: str) -> list[Verdict]:
        return self.messages(Verdict, job=job)

    def actions(self, job: str) -> list[Action]:
        return self.messages(Action, job=job)

    def states(self, job: str) -> list[str]:
        """The states of all incidents of a job, in order."""
        return [message.state for message in self.messages(Incident, job=job)]

    def steps(self, job: str, attempt: int) -> int:
        """The step that all ranks of an attempt have reached."""
        reached: dict[int, int] = {}
        for message in self.messages(Metrics, job=job):
            if message.attempt == attempt:
                reached[message.rank] = max(reached.get(message.rank, 0), message.step)
        return min(reached.values(), default=0)

    def await_steps(self, job: str, attempt: int, steps: int) -> None:
        eventually(lambda: self.steps(job, attempt) >= steps, f"step {steps} of attempt {attempt} of {job}")

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        for process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self._started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def embedded_chain(
    settings: str = "", folder: Path | None = None, exit_grace_seconds: float = 300.0
) -> Iterator[Chain]:
    """A chain whose socket paths are short enough; nothing of it is left afterwards."""
    own = Path(tempfile.mkdtemp(prefix="chain-")) if folder is None else folder
    lab = Chain(own, settings, exit_grace_seconds)
    try:
        yield lab
    finally:
        lab.close()
        shutil.rmtree(own, ignore_errors=folder is not None)
