"""The services and jobs of one machine as real processes on a real broker, and what lies on the bus afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from detectors.verdict import Verdict
from ingest.bus import BusUnavailable, Record
from ingest.clock import SystemClock
from ingest.codec import Codec, Undecodable
from ingest.events import TOPICS, DeviceMetrics, Logs, Message, Metrics, NodeHeartbeat
from ingest.kafka_bus import KafkaBus
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.columns import NO_STEP
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.shapes import LedgerUnavailable
from pipelines.ledger.tables import STORY_TABLES, TABLE_OF_KIND
from pipelines.open_bus import own_command
from pipelines.places import Places
from pipelines.settings import load_settings
from recovery.action import RECOVERY_TYPES
from recovery.launcher.job_files import JobFiles
from tests.launcher_lab import wait_for

CLOCK = SystemClock()
# What a crowded machine may bring about and recovery only tells.
NOTICES = {"straggler", "contended_node", "job_slow", "data_stall", "numeric", "warning"}
DEADLINE_SECONDS = 90.0
Seen = TypeVar("Seen")

SETTINGS = """\
state_dir = "{state}"
[bus]
kind = "kafka"
bootstrap_servers = "{bootstrap}"
prefix = "{prefix}"
partitions = 2
[detect]
ensemble = false
node_silent_seconds = 3.0
state_seconds = {state_seconds}
[recover]
probation_steps = 5
probation_seconds = 1.0
stop_grace_seconds = 1.0
[record]
metrics_flush_seconds = 1.0
"""

# Trains nothing; steps, reports and prints until the file that is its argument is there.
SCRIPT = """
import sys, time
from pathlib import Path
import transom
run = transom.init()
step = 0
while not Path(sys.argv[1]).exists():
    step += 1
    time.sleep(0.05)
    run.log(step=step, loss=1.0 / step, tokens=float(step * 100))
    print("step", step, flush=True)
"""


def eventually(condition: Callable[[], Seen], what: str) -> Seen:
    """What `condition` gives once it is true."""
    return wait_for(condition, what, DEADLINE_SECONDS)


class Chain:
    """One transom.toml, the processes started with it, and the bus seen from outside."""

    def __init__(self, folder: Path, bootstrap: str, prefix: str, *, state_seconds: float = 1.0) -> None:
        self.folder = folder
        self.config = folder / "transom.toml"
        self.config.write_text(
            SETTINGS.format(state=folder / "state", bootstrap=bootstrap, prefix=prefix, state_seconds=state_seconds)
        )
        self.places = Places.of(load_settings(self.config))
        self.without_torch = folder / "without_torch"
        self.without_torch.mkdir()
        (self.without_torch / "torch.py").write_text(
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
        )
        self.script = folder / "train.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.bus = KafkaBus(bootstrap, clock=CLOCK, prefix=prefix, client_id="chain-test")
        self.bus.create_topics(2)
        self.reader = self.bus.consumer("reader", TOPICS)
        self.seen: list[Record] = []
        self.messages: list[tuple[Record, Any]] = []  # of those: what can be read
        self.unreadable: list[Record] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Start `transom ARGUMENTS` under a name of ours; in an environment without torch, which takes seconds."""
        with self.log(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(
                own_command(arguments[0], "--config", str(self.config), *arguments[1:]),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=self.folder, start_new_session=True, env={**os.environ, "PYTHONPATH": str(self.without_torch)},
            )  # fmt: skip

    def run_job(self, job: str, *, nodes: int, per_node: int) -> None:
        self.start(
            job, "run", "--job", job, "--virtual-nodes", str(nodes), "--nproc-per-node", str(per_node),
            "--no-checkpoints", "--quiet", str(self.script), str(self.folder / f"{job}.stop"),
        )  # fmt: skip

    def end_jobs(self, *jobs: str) -> None:
        """Let the script come to its end; returns when the jobs are over, which must be well."""
        for job in jobs:
            (self.folder / f"{job}.stop").touch()
        for job in jobs:
            assert self.processes.pop(job).wait(DEADLINE_SECONDS) == 0, self.log(job).read_text()

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        assert process.poll() is None, f"{name} had ended by itself: {self.log(name).read_text()}"
        process.send_signal(number)
        code = process.wait(DEADLINE_SECONDS)
        assert code == (0 if number == signal.SIGTERM else -number), self.log(name).read_text()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def check(self) -> None:
        """None of our processes has ended by itself."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name}: {self.log(name).read_text()}"

    def eventually(self, condition: Callable[[], Seen], what: str) -> Seen:
        def checked() -> Seen:
            self.check()
            return condition()

        return eventually(checked, what)

    def pid_of(self, job: str, rank: int) -> int:
        """The process of a rank, as its launcher's file names it."""
        nodes = JobFiles(self.places.jobs, job).nodes().values()
        return next(process.pid for node in nodes for process in node.ranks if process.rank == rank)

    def look(self) -> list[Record]:
        """Read on from the bus; nothing where the broker is away."""
        try:
            fresh = self.reader.poll(5_000, 0.2)
        except BusUnavailable:
            fresh = []
        self.seen += fresh
        good, bad = decoded(fresh)
        self.messages += good
        self.unreadable += bad
        return fresh

    def reached(self, job: str, attempt: int, step: int) -> bool:
        """Whether a rank of this attempt has told that step."""
        self.look()
        return any(
            isinstance(message, Metrics) and (message.job, message.attempt) == (job, attempt) and step in message.steps
            for _, message in self.messages
        )

    def said(self, kind: type[Seen], job: str) -> list[Seen]:
        """Messages of a type so far."""
        return [message for _, message in self.messages if isinstance(message, kind) and message.job == job]

    def read_to_the_end(self) -> list[Record]:
        """Everything that lies on the bus, when nobody writes any more."""

        def at_end() -> bool:
            return not self.look() and bool(self.reader.assignment()) and not any(self.reader.lag().values())

        eventually(at_end, "the bus is read to its end")
        return self.seen

    def ledger_knows(self, job: str) -> bool:
        self.look()
        try:
            with LedgerClient(self.places.api_socket) as ledger:
                return job in {view.job for view in ledger.jobs()}
        except LedgerUnavailable:
            return False

    def ledger_has_all(self) -> bool:
        """Whether `record` has looked at the bus just now and found nothing more on it."""
        now = CLOCK.now()
        try:
            with LedgerClient(self.places.api_socket) as ledger:
                health = eventually(lambda: (found := ledger.health()).data_at > now and found, "record looks")
        except LedgerUnavailable:
            return False
        return not any(health.lag.values())

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.reader.close()
        self.bus.close()


@contextmanager
def chain(folder: Path, bootstrap: str, prefix: str, **options: Any) -> Iterator[Chain]:
    made = Chain(folder, bootstrap, prefix, **options)
    try:
        yield made
    finally:
        made.close()


def decoded(records: list[Record]) -> tuple[list[tuple[Record, Any]], list[Record]]:
    """What can be read, and what cannot."""
    codec, good, bad = Codec(RECOVERY_TYPES), [], []
    for record in records:
        try:
            good.append((record, codec.decode(record.headers, record.value)))
        except Undecodable:
            bad.append(record)
    return good, bad


def verdicts_among(messages: list[Any]) -> dict[str, Verdict]:
    """Verdicts by id#revision. Two of one name must say the same: a redelivery, no second opinion."""
    found: dict[str, Verdict] = {}
    for message in messages:
        if isinstance(message, Verdict):
            assert found.setdefault(message.message_id, message) == message
    return found


def culprits_of(verdicts: dict[str, Verdict]) -> dict[str, list[tuple[str, list[int | None]]]]:
    """By job: class and culprits of each incident that is more than a notice, as its newest revision has them."""
    newest = {verdict.verdict_id: verdict for verdict in sorted(verdicts.values(), key=lambda each: each.revision)}
    found: dict[str, list[tuple[str, list[int | None]]]] = {}
    for verdict in sorted(newest.values(), key=lambda each: each.onset_at):
        if verdict.fault_class not in NOTICES:
            ranks = [culprit.rank for culprit in verdict.culprits]
            found.setdefault(verdict.job, []).append((verdict.fault_class, ranks))
    return found


def sequence_faults(messages: list[Any]) -> dict[str, str]:
    """Producers whose counters on the bus have a gap or a double."""
    counters: dict[str, list[int]] = {}
    for message in messages:
        if isinstance(message, Message):
            topic = type(message).__name__ if isinstance(message, Metrics | DeviceMetrics | Logs) else "events"
            key = f"{message.job}/{message.attempt}/{message.rank}/{message.node}/{topic}"
            counters.setdefault(key, []).append(message.sequence)
    return {
        key: f"{len(seen)} messages, {len(set(seen))} sequences, {min(seen)} to {max(seen)}"
        for key, seen in counters.items()
        if sorted(seen) != list(range(min(seen), min(seen) + len(seen)))
    }


class LedgerRows:
    """What is in a ledger that nobody serves any more, in the shape in which `expected` says what should be."""

    def __init__(self, folder: Path) -> None:
        with Ledger(folder, CLOCK) as ledger, ledger.cursor() as cursor:
            self.story = Counter(
                row
                for table in STORY_TABLES
                for row in cursor.execute(
                    f"SELECT kind, source_partition, source_offset, body FROM {table.name}"
                ).fetchall()
            )
            self.lines = Counter(
                cursor.execute("SELECT source_partition, source_offset, line, text FROM log_line").fetchall()
            )
            paths = [str(ledger.parts.folder / part.path) for part in ledger.parts.held().parts]
        self.samples: Counter[Any] = Counter()
        if paths:
            self.samples.update(
                duckdb.execute(
                    "SELECT job, attempt, rank, step, metric, value FROM read_parquet(?)", [paths]
                ).fetchall()
            )


class ExpectedRows:
    """What the ledger should hold of these messages, each once."""

    def __init__(self, messages: list[tuple[Record, Any]]) -> None:
        self.story: Counter[Any] = Counter()
        self.lines: Counter[Any] = Counter()
        self.samples: Counter[Any] = Counter()
        told: set[tuple[str, str]] = set()
        kinds = {type_: kind for kind, (_, type_) in RECOVERY_TYPES.items()}
        identities = {table.name: table.identity for table in STORY_TABLES}
        for record, message in messages:
            if record.topic == "dead-letters":
                continue
            if isinstance(message, Metrics):
                for name in message.columns:
                    for step, value in zip(message.steps, message.column(name), strict=True):
                        if value is not None:
                            self.samples[message.job, message.attempt, message.rank, step, name, value] += 1
            elif isinstance(message, DeviceMetrics):
                for name, values in message.columns.items():
                    for value in values:
                        if value is not None:
                            self.samples[message.job, message.attempt, message.rank, NO_STEP, name, value] += 1
            elif isinstance(message, Logs):
                for index, line in enumerate(message.lines):
                    self.lines[record.partition, record.offset, index, line.text] += 1
            elif not isinstance(message, NodeHeartbeat):
                kind = kinds[type(message)]
                identity = identities[TABLE_OF_KIND[kind]]
                if identity is not None:
                    name = (TABLE_OF_KIND[kind], identity(message))
                    if name in told:
                        continue
                    told.add(name)
                self.story[kind, record.partition, record.offset, record.value.decode()] += 1
