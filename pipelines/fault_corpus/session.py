"""Launchers that stay up while one run after another is made with them: each run is an attempt of one job.

Nothing detects and nothing recovers here: the job suffers, and what its launchers put on the bus is kept.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from types import TracebackType

import msgspec

from ingest.bus import Record
from ingest.clock import Clock
from ingest.codec import Codec
from ingest.events import JOB_TOPICS, AttemptEnded, FaultInjected, Message, Metrics, RankExited
from pipelines.children import Children
from pipelines.errors import StatedError
from pipelines.open_bus import open_bus, own_command
from pipelines.own_process import stepped_back
from pipelines.places import Places
from pipelines.run import RunOptions, node_names, register_job
from pipelines.settings import Settings
from recovery.backend import StartRequest
from recovery.backends.local import LocalBackend
from recovery.launcher.protocol import JobSpec

JOB = "faults"
NODES, RANKS_PER_NODE = 2, 2
WORLD = NODES * RANKS_PER_NODE
LAUNCHERS_SECONDS_MAX = 180.0
ENGINES_SECONDS_MAX = 30.0
STOP_GRACE_SECONDS, STOP_SECONDS_MAX = 0.5, 15.0
ENDED_SECONDS_MAX = 5.0  # for the last words of the launchers
RECORDS_PER_POLL = 2_000
POLL_SECONDS = 0.1
SCRIPT = Path(__file__).with_name("seeded_job.py")


class _Stamped(msgspec.Struct):
    attempt: int = -1


_attempt_of = msgspec.json.Decoder(_Stamped)


class Progress:
    """How far the ranks of the current attempt are, from what they say."""

    def __init__(self) -> None:
        self.highest: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}  # of rank 0's steps
        self.label: FaultInjected | None = None
        self.exits: list[RankExited] = []
        self.nodes_ended = 0

    @property
    def steps(self) -> int:
        """Steps that every rank has done."""
        if len(self.highest) < WORLD:
            return 0
        return min(self.highest[rank] - self.first[rank] + 1 for rank in self.highest)

    @property
    def step_seconds(self) -> float:
        """The median of the last steps of rank 0; 0.0 before there are two."""
        ends = [at for _, at in sorted(self.ended_at.items())][-40:]
        gaps = [later - earlier for earlier, later in pairwise(ends)]
        return statistics.median(gaps) if gaps else 0.0

    def see(self, message: Message) -> None:
        """Take in one message of the attempt."""
        if isinstance(message, Metrics) and message.steps:
            self.first.setdefault(message.rank, message.steps[0])
            self.highest[message.rank] = max(message.steps[-1], self.highest.get(message.rank, -1))
            if message.rank == 0:
                self.ended_at.update(zip(message.steps, message.ended_at, strict=True))
        elif isinstance(message, FaultInjected):
            self.label = self.label or message
        elif isinstance(message, RankExited):
            self.exits.append(message)
        elif isinstance(message, AttemptEnded):
            self.nodes_ended += 1


class Session:
    """Two virtual nodes of two ranks each. Enter it from the main thread; one run at a time."""

    def __init__(self, settings: Settings, clock: Clock, random: Random, arguments: list[str]) -> None:
        self._settings = settings
        self._clock = clock
        self._given = arguments  # that give our processes the same settings
        self._places = Places.of(settings)
        self._arguments = self._places.state / "arguments"
        self._backend = LocalBackend(self._places.jobs, clock, random)
        self._spec = JobSpec(
            job=JOB, script=str(SCRIPT), argv=(str(self._arguments),), nodes=NODES, nproc_per_node=RANKS_PER_NODE
        )
        self._options = RunOptions(pin_cpus=True, allow_inject=True, show_output=False, keep_complete=2)
        self._children = Children(self._places.logs, clock)
        self._bus = open_bus(settings, clock, client="record-faults")
        self._consumer = self._bus.consumer("record-faults", JOB_TOPICS)
        self._codec = Codec()
        self.attempt = 0
        self.progress = Progress()
        self._exit = ExitStack()

    @property
    def checkpoints(self) -> Path:
        """Where the job's checkpoints lie."""
        return self._places.checkpoints(JOB)

    def __enter__(self) -> Session:
        for closing in (self._bus.close, self._children.stop, self._consumer.close):
            self._exit.callback(closing)
        self._arguments.mkdir(mode=0o700)
        register_job(self._places, self._spec, self._options)
        environ = {"OMP_NUM_THREADS": "1"}
        for node in node_names(self._spec, self._options):
            self._children.start(
                f"{JOB}-{node}", own_command("launcher", "--job", JOB, "--node", node, *self._given), environ=environ
            )
        self._exit.enter_context(stepped_back())  # only now: ranks inherit the priority of the launchers
        if not self._backend.wait_for_launchers(JOB, LAUNCHERS_SECONDS_MAX):
            raise StatedError(f"the launchers did not answer in {LAUNCHERS_SECONDS_MAX:.0f} s; see {self._places.logs}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.close()

    def start(self, arguments: list[str]) -> None:
        """A new attempt of train.py with these arguments, from scratch, with empty checkpoint engines."""
        self.attempt += 1
        self.progress = Progress()
        self._restart_engines()
        written = self._arguments / f"{self.attempt}.json"
        written.write_text(json.dumps(arguments), encoding="utf-8")
        self._backend.start(StartRequest(JOB, self.attempt, secrets.token_hex(8)))

    def stop(self) -> None:
        """End the attempt; nothing of it lives afterwards."""
        gone = self._backend.stop(
            JOB, self.attempt, grace_seconds=STOP_GRACE_SECONDS, deadline_seconds=STOP_SECONDS_MAX
        )
        if not gone:
            raise StatedError(f"the ranks of attempt {self.attempt} are still there; see {self._places.logs}")

    def inject(self, rank: int, fault: str, parameters: dict[str, float]) -> None:
        """Break one rank. Raises StatedError with the launcher's reason where it does not."""
        refusal = self._backend.inject(JOB, rank, fault, parameters)
        if refusal:
            raise StatedError(refusal)

    def records(self, done: Callable[[], bool], seconds_max: float) -> Iterator[Record]:
        """What the attempt puts on the bus until `done()`, or for so long; `progress` keeps up with it."""
        deadline = self._clock.monotonic() + seconds_max
        while not done() and self._clock.monotonic() < deadline:
            self._children.check()
            yield from self._poll()

    def last_records(self) -> Iterator[Record]:
        """What is still under way after the end."""
        yield from self.records(lambda: self.progress.nodes_ended >= NODES, ENDED_SECONDS_MAX)
        yield from self._poll()
        self._consumer.commit()

    def _poll(self) -> Iterator[Record]:
        for record in self._consumer.poll(RECORDS_PER_POLL, POLL_SECONDS):
            if _attempt_of.decode(record.value).attempt != self.attempt:
                continue  # a launcher between two runs
            self.progress.see(self._codec.decode(record.headers, record.value))
            yield record

    def _restart_engines(self) -> None:
        """Engines without a memory of earlier runs, over an empty folder."""
        nodes = node_names(self._spec, self._options)
        for node in nodes:
            if f"{JOB}-{node}-ckpt" in self._children.running():
                self._children.stop(f"{JOB}-{node}-ckpt")
        for entry in self.checkpoints.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for node in nodes:
            self._places.socket(JOB, node, "ckpt").unlink(missing_ok=True)
            self._children.start(
                f"{JOB}-{node}-ckpt", own_command("ckpt", "serve", "--job", JOB, "--node", node, *self._given)
            )
        deadline = self._clock.monotonic() + ENGINES_SECONDS_MAX
        while not all(self._places.socket(JOB, node, "ckpt").exists() for node in nodes):
            self._children.check()
            if self._clock.monotonic() > deadline:
                raise StatedError(f"the checkpoint engines did not start; see {self._places.logs}")
            self._clock.sleep(0.05)
