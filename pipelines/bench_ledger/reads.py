"""Reads over HTTP while a real `record` takes 1,000 verdicts a second and has a million."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from detectors.verdict import VERDICT_TYPES, Culprit, Verdict
from ingest.clock import SystemClock
from ingest.codec import Codec
from ingest.sqlite_bus import SqliteBus
from pipelines.children import Children
from pipelines.figures import Figure
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.engine import duckdb
from pipelines.ledger.ledger import Ledger
from pipelines.open_bus import own_command

JOB = "bench"
VERDICTS, REVISIONS = 1_000_000, 5
PER_SECOND, BURST = 1_000, 50
SECONDS, WARM_UP_SECONDS = 30.0, 3.0
READY_SECONDS_MAX = 180.0


def verdict(incident: int, revision: int, at: float) -> Verdict:
    """The revision of an incident that somebody could have told."""
    return Verdict(
        verdict_id=f"{JOB}/1/{incident % 1024}/metrics/{incident}", revision=revision, job=JOB, attempt=1,
        fault_class="straggler", severity="warning", settled=True, culprits=(Culprit(rank=incident % 1024, node="n"),),
        onset_at=at - 1.0, at=at, advice="notify", summary=f"Rank {incident % 1024} is 14 % slower than its peers.",
    )  # fmt: skip


def fill(folder: Path, verdicts: int) -> None:
    """A ledger with so many verdicts, each incident's revisions one after another, without the bus between."""
    template = msgspec.json.encode(verdict(7_777_777, 8_888_888, 1_000.0)).decode()
    with Ledger(folder, SystemClock()):
        pass
    with duckdb.connect(str(folder / "ledger.duckdb")) as connection:
        connection.execute(
            "INSERT INTO verdict SELECT i + 1, i + 1, 0, -1, 1000.0 + i / 1000, 1000.0 + i / 1000, $job, 1,"
            " 'verdict.v1',"
            " replace(replace($body, '7777777', (i // $revisions)::VARCHAR), '8888888', (i % $revisions)::VARCHAR),"
            " $job || '/1/' || ((i // $revisions) % 1024) || '/metrics/' || (i // $revisions), i % $revisions,"
            " 'straggler', 'warning', 'open' FROM range($count) t(i)",
            {"job": JOB, "body": template, "revisions": REVISIONS, "count": verdicts},
        )


class _Teller(threading.Thread):
    """Tells verdicts at a steady pace until told to stop."""

    def __init__(self, bus: SqliteBus, first: int) -> None:
        super().__init__(daemon=True)
        self._producer = bus.producer()
        self._first = first
        self.over = threading.Event()
        self.told = 0

    def run(self) -> None:
        codec, began, clock = Codec(VERDICT_TYPES), time.monotonic(), SystemClock()
        while not self.over.is_set():
            for _ in range(BURST):
                incident, revision = divmod(self.told, REVISIONS)
                self._producer.send(*codec.encode(verdict(self._first + incident, revision, clock.now())))
                self.told += 1
            self._producer.flush(10.0)
            self.over.wait(max(0.0, began + self.told / PER_SECOND - time.monotonic()))
        self._producer.close()


def measure_reads(
    folder: Path, tell: Callable[[str], None], verdicts: int = VERDICTS, seconds: float = SECONDS
) -> list[Figure]:
    """Fill, start `record`, tell verdicts, read one after another over its socket."""
    clock = SystemClock()
    tell(f"{verdicts:,} verdicts are written")
    fill(folder / "ledger", verdicts)
    bus = SqliteBus(folder / "bus.sqlite", clock=clock)
    bus.create_topics(1)
    with Children(folder / "logs", clock) as children:
        tell("record starts")
        children.start("record", own_command("record", "--state-dir", str(folder)))
        socket = folder / "run" / "record.sock"
        deadline = clock.monotonic() + READY_SECONDS_MAX
        while not socket.exists():
            children.check()
            assert clock.monotonic() < deadline, "record does not come up; its log is in the folder"
            clock.sleep(0.1)
        teller = _Teller(bus, verdicts // REVISIONS)
        with LedgerClient(socket) as client:
            client.health()
            teller.start()
            tell("reading")
            _read(client, WARM_UP_SECONDS)
            before = teller.told
            began = time.monotonic()
            taken = _read(client, seconds)
            pace = (teller.told - before) / (time.monotonic() - began)
            teller.over.set()
            teller.join()
    cuts = statistics.quantiles([each for of_one in taken.values() for each in of_one], n=100)
    worst = {name: round(statistics.quantiles(each, n=100)[98], 1) for name, each in taken.items()}
    count = sum(map(len, taken.values()))
    return [
        Figure("api.p50_ms", round(cuts[49], 2), "ms", n=count),
        Figure("api.p99_ms", round(cuts[98], 2), "ms", n=count),
        Figure("api.verdicts_per_second", round(pace), "verdicts/s", n=teller.told),
        *(Figure(f"api.p99_ms_{name}", value, "ms", n=len(taken[name])) for name, value in worst.items()),
    ]


def _read(client: LedgerClient, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each kind of read, in turn, as a console and a command line ask."""
    newest = client.incidents(limit=50)
    seen = {"incidents": newest.next, "verdicts": client.rows("verdicts", limit=50).next}
    one = newest.incidents[0].incident_id
    kinds: dict[str, Callable[[], object]] = {
        "jobs": client.jobs,
        "incidents": lambda: client.incidents(limit=50),
        "incidents_after": lambda: client.incidents(after=seen["incidents"], limit=50),
        "incident": lambda: client.incident(one),
        "verdicts": lambda: client.rows("verdicts", limit=50),
        "verdicts_after": lambda: client.rows("verdicts", job=JOB, after=seen["verdicts"], limit=50),
        "health": client.health,
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, ask in kinds.items():
            began = time.perf_counter()
            ask()
            taken[name].append(1e3 * (time.perf_counter() - began))
    return taken
