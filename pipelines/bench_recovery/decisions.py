"""How fast recovery takes in and decides, with a hundred jobs of which one floods it; and what the others notice.

The loop is the service's own (poll, accept in one commit, tick, publish), over the embedded bus and a store that syncs;
only the backend is in memory, because its time is not recovery's.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

from detectors.verdict import Culprit, FaultClass, Verdict
from ingest.bus import Producer
from ingest.clock import Clock, SystemClock
from ingest.codec import Codec
from ingest.sqlite_bus import SqliteBus
from pipelines.bench_recovery.outcome import Outcome, Task, Tell
from pipelines.figures import Figure
from recovery.action import RECOVERY_TYPES, Action
from recovery.backend import NoCheckpoints, StartRequest
from recovery.backends.memory import MemoryBackend
from recovery.calls import Result
from recovery.controller import Controller
from recovery.policy_config import PolicyConfig
from recovery.store import RecoveryStore
from recovery.workers import ThreadWorkers

JOBS = 100
THROUGHPUT_VERDICTS = 4_000
FLOODED_VERDICTS = 2_000
FLOOD_PER_SECOND = 500.0
OTHERS_EVERY_SECONDS = 0.03
DECISIONS_TIMED = 3_000
RECORDS_MAX = 500
POLL_SECONDS = 0.01
FLUSH_SECONDS_MAX = 10.0
SECONDS_MAX = 120.0


def measure_decisions(task: Task, tell: Tell) -> Outcome:
    """Throughput, then waiting with and without a flood, then single decisions."""
    tell(f"{THROUGHPUT_VERDICTS:,} verdicts of {JOBS} jobs, one of which sends nine of ten")
    with _Recovery(task.folder / "throughput", task.seed) as recovery:
        rate = recovery.rate(_mixed(THROUGHPUT_VERDICTS, task.seed))
        tell(f"{DECISIONS_TIMED:,} decisions")
        decisions = recovery.decision_ms(DECISIONS_TIMED)
    waits: dict[str, list[float]] = {}
    for name, flood in (("quiet", 0), ("flooded", FLOODED_VERDICTS)):
        tell(f"how long the verdicts of {JOBS - 1} jobs wait, {name}")
        with _Recovery(task.folder / name, task.seed) as recovery:
            waits[name] = recovery.waits_ms(flood)
    p99 = statistics.quantiles(decisions, n=100)[98]
    medians = {name: statistics.median(values) for name, values in waits.items()}
    delay = medians["flooded"] - medians["quiet"]
    figures = [
        Figure("recovery.decide_p99_ms", round(p99, 3), "ms", n=len(decisions)),
        Figure("recovery.verdicts_per_second", round(rate), "verdicts/s", n=THROUGHPUT_VERDICTS),
        Figure("recovery.flood_delay_ms", round(delay, 2), "ms", n=len(waits["flooded"])),
    ]
    notes = [
        f"[decisions] the other jobs' verdicts wait {medians['quiet']:.1f} ms, and {medians['flooded']:.1f} ms "
        f"while one job sends {FLOOD_PER_SECOND:.0f} a second (medians)"
    ]
    return Outcome(figures, notes=notes, rounds={f"wait_ms_{name}": values for name, values in waits.items()})


class _Recovery:
    """The recover service's loop over jobs in memory."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self._clock: Clock = SystemClock()
        self._backend = MemoryBackend(self._clock)
        for number in range(JOBS):
            job = _job(number)
            self._backend.add_job(job, {"n0": 2, "n1": 2, "n2": 2}, nodes_wanted=2, nproc_per_node=2)
            self._backend.start(StartRequest(job, 1, "first"))
            self._backend.set_step(job, 100)
        self._bus = SqliteBus(folder / "bus.sqlite", clock=self._clock)
        self._bus.create_topics(1)
        self._codec = Codec(RECOVERY_TYPES)
        self._store = RecoveryStore(folder / "recovery.sqlite")
        workers: ThreadWorkers[Result] = ThreadWorkers()
        self._controller = Controller(
            self._store, self._backend, NoCheckpoints(), PolicyConfig(), random.Random(seed), workers
        )
        self._consumer = self._bus.consumer("recover", ("verdicts",))
        self._producer = self._bus.producer()
        self._decided: dict[str, float] = {}  # by verdict: when its action was on the bus
        self._taken = 0

    def __enter__(self) -> _Recovery:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._producer.close()
        self._bus.close()
        self._store.close()

    def turn(self) -> None:
        """One turn of the service."""
        records = self._consumer.poll(RECORDS_MAX, POLL_SECONDS)
        now = self._clock.now()
        if records:
            self._controller.accept_all([self._codec.decode(record.headers, record.value) for record in records], now)
            self._consumer.commit()
            self._taken += len(records)
        self._controller.tick(now)
        waiting = self._controller.pending_messages()
        if not waiting:
            return
        for entry in waiting:
            encoded = self._codec.encode(entry.message)
            self._producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
        self._producer.flush(FLUSH_SECONDS_MAX)
        self._controller.mark_published([entry.seq for entry in waiting])
        told_at = self._clock.now()
        for entry in waiting:
            if isinstance(entry.message, Action):
                self._decided.setdefault(entry.message.verdict_id, told_at)

    def rate(self, verdicts: Sequence[Verdict]) -> float:
        """Verdicts a second, from the bus to the last decision that is on the bus again."""
        self._send(self._producer, verdicts)
        began = self._clock.monotonic()
        while self._taken < len(verdicts) or self._store.new_verdicts(1) or self._store.waiting(1):
            if self._clock.monotonic() - began > SECONDS_MAX:
                raise TimeoutError(f"{self._taken} of {len(verdicts)} verdicts were taken in {SECONDS_MAX:.0f} s")
            self.turn()
        return len(verdicts) / (self._clock.monotonic() - began)

    def decision_ms(self, count: int) -> list[float]:
        """What single decisions take, with all that they read from the store."""
        known = [row.incident_id for row in self._store.unfinished()]
        taken = []
        now = self._clock.now()
        for number in range(count):
            began = self._clock.monotonic()
            self._controller.explain(known[number % len(known)], now)
            taken.append(1e3 * (self._clock.monotonic() - began))
        return taken

    def waits_ms(self, flood: int) -> list[float]:
        """From the sending of a verdict to the decision about it, of one verdict of each job but the flooding one."""
        sent: dict[str, float] = {}
        done = threading.Event()
        senders = [threading.Thread(target=self._send_others, args=(sent, done), daemon=True)]
        if flood:
            senders.append(threading.Thread(target=self._send_flood, args=(flood, done), daemon=True))
        for sender in senders:
            sender.start()
        give_up_at = self._clock.monotonic() + SECONDS_MAX
        while len(sent) < JOBS - 1 or any(verdict_id not in self._decided for verdict_id in list(sent)):
            if self._clock.monotonic() > give_up_at:
                raise TimeoutError(f"not all verdicts were decided in {SECONDS_MAX:.0f} s")
            self.turn()
        done.set()
        for sender in senders:
            sender.join()
        return [1e3 * (self._decided[verdict_id] - at) for verdict_id, at in sent.items()]

    def _send_others(self, sent: dict[str, float], done: threading.Event) -> None:
        producer = self._bus.producer()
        done.wait(0.5)  # the flood is under way
        for number in range(1, JOBS):
            verdict = _verdict(number, 0, "rank_lost", self._clock.now())
            self._send(producer, [verdict])
            sent[verdict.verdict_id] = self._clock.now()
            done.wait(OTHERS_EVERY_SECONDS)
        producer.close()

    def _send_flood(self, count: int, done: threading.Event) -> None:
        producer = self._bus.producer()
        sent, began = 0, self._clock.monotonic()
        while sent < count and not done.is_set():
            due = min(count, int((self._clock.monotonic() - began) * FLOOD_PER_SECOND))
            self._send(producer, [_verdict(0, number, "straggler", self._clock.now()) for number in range(sent, due)])
            sent = max(sent, due)
            done.wait(0.02)
        producer.close()

    def _send(self, producer: Producer, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            encoded = self._codec.encode(verdict)
            producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
        producer.flush(FLUSH_SECONDS_MAX)


def _mixed(count: int, seed: int) -> list[Verdict]:
    """Nine of ten of one job, the others dealt out; redeliveries and revisions among them, as on a real topic."""
    dice = random.Random(seed)
    now = SystemClock().now()
    verdicts: list[Verdict] = []
    for number in range(count):
        job = 0 if dice.random() < 0.9 else dice.randrange(1, JOBS)
        kind: FaultClass = "straggler" if job == 0 or dice.random() < 0.5 else "rank_lost"
        repeated = bool(verdicts) and dice.random() < 0.2
        verdicts.append(dice.choice(verdicts) if repeated else _verdict(job, number, kind, now))
    return verdicts


def _job(number: int) -> str:
    return f"job-{number}"


def _verdict(job: int, number: int, fault_class: FaultClass, at: float) -> Verdict:
    return Verdict(
        verdict_id=f"{_job(job)}/1/0/events/{number}", revision=1, job=_job(job), attempt=1, fault_class=fault_class,
        severity="error", settled=True, culprits=(Culprit(rank=1, node="n0"),), onset_at=at, at=at, onset_step=100,
        advice="notify" if fault_class == "straggler" else "restart_in_place", summary=f"{fault_class} of rank 1",
    )  # fmt: skip
