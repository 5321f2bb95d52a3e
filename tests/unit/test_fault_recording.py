"""How runs of a corpus are made and left alone: the driving, with a session that only says what a real one would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pipelines.fault_corpus.record as recording
from ingest.bus import Record
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.events import AttemptEnded, FaultInjected, Message, Metrics
from pipelines.errors import StatedError
from pipelines.evaluate.fault_runs import labelled_runs
from pipelines.fault_corpus.corpus import NoCorpus, corpus_runs, is_recorded
from pipelines.fault_corpus.plan import PlannedRun
from pipelines.fault_corpus.session import WORLD, Progress
from pipelines.recording import read_recording, read_run

SLOW = PlannedRun("held-out", "slow", "middle", 2, "w64x3", 1001)
KILL = PlannedRun("tuning", "kill", "strong", 1, "w96x3", 5)
CLEAN = PlannedRun("held-out", "clean", "strong", 0, "w64x3", 1501, clean_steps=30)
FULL_DISK = PlannedRun("tuning", "disk_full", "strong", 1, "w96x3", 6)


class FakeSession:
    """Trains ten steps of 0.1 s in every poll; an injected fault is told with the next poll."""

    steps_max = 10**6
    obeys = True

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.attempt, self.step, self.offset = clock, 0, 0, 0
        self.told: list[str] = []
        self.arguments: list[list[str]] = []
        self.progress = Progress()
        self._pending: FaultInjected | None = None
        self._codec = Codec()

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("closed")

    def start(self, arguments: list[str]) -> None:
        self.attempt, self.step, self.progress = self.attempt + 1, 0, Progress()
        self.arguments.append(arguments)
        steps = arguments[arguments.index("--steps") + 1] if "--steps" in arguments else self.steps_max
        self.last_step = min(int(steps), self.steps_max)

    def stop(self) -> None:
        self.told.append("stopped")
        self._put_end = True

    def inject(self, rank: int, fault: str, parameters: dict[str, float]) -> None:
        self.told.append(f"{fault} {rank} {sorted(parameters)}")
        if self.obeys:
            self._pending = FaultInjected(fault=fault, parameters=parameters, **self._stamp(rank))

    def records(self, done: Callable[[], bool], seconds_max: float) -> Iterator[Record]:
        deadline = self.clock.monotonic() + seconds_max
        while not done() and self.clock.monotonic() < deadline:
            yield from self._poll()

    def last_records(self) -> Iterator[Record]:
        yield self._record(AttemptEnded(outcome="stopped", **self._stamp(-1)))

    def _poll(self) -> Iterator[Record]:
        self.clock.advance(1.0)
        fresh = tuple(range(self.step + 1, min(self.step + 10, self.last_step) + 1))
        self.step = fresh[-1] if fresh else self.step
        now = self.clock.now()
        for rank in range(WORLD):
            ends = tuple(now - 0.1 * (len(fresh) - index) for index in range(len(fresh)))
            yield self._record(Metrics(phase="train", step=self.step, steps=fresh, ended_at=ends, **self._stamp(rank)))
        if self._pending is not None:
            yield self._record(self._pending)
            self._pending = None
        if self.step >= self.last_step:
            for _ in range(2):
                yield self._record(AttemptEnded(outcome="finished", **self._stamp(-1)))

    def _stamp(self, rank: int) -> dict[str, Any]:
        return {"job": "faults", "attempt": self.attempt, "rank": rank, "node": f"node{max(0, rank) // 2}",
                "sequence": 0, "at": self.clock.now()}  # fmt: skip

    def _record(self, message: Message) -> Record:
        self.progress.see(message)
        encoded = self._codec.encode(message)
        self.offset += 1
        return Record(encoded.topic, 0, self.offset, "faults", encoded.headers, encoded.value, self.clock.now())


class NoDisk:
    """Nobody may mount here."""

    reason = "a full disk needs a tmpfs of its own, which only root may mount"

    def __init__(self, folder: Path) -> None:
        pass

    def __enter__(self) -> NoDisk:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession(ManualClock(1_000.0))
    monkeypatch.setattr(recording, "Session", lambda *_: session)
    monkeypatch.setattr(recording, "SmallDisk", NoDisk)
    return session


def record(session: FakeSession, folder: Path, *plan: PlannedRun) -> tuple[int, list[str]]:
    return recording.record_faults(folder, plan, session.clock, random.Random(1), Console(quiet=True))


def test_a_run_is_recorded_with_what_was_done_to_it_and_when(session: FakeSession, tmp_path: Path) -> None:
    assert record(session, tmp_path, SLOW, KILL) == (2, [])
    runs = {place.name: run for place, run in corpus_runs(tmp_path)}
    slow, kill = runs["slow-middle-r2-w64x3-s1001"], runs["kill-strong-r1-w96x3-s5"]
    assert slow.fault is not None
    assert kill.fault is not None
    assert (slow.fault.fault, slow.fault.rank, slow.fault.node) == ("slow", 2, "node1")
    assert (slow.part, slow.severity, slow.size, slow.seed) == ("held-out", 0.5, "w64x3", 1001)
    assert slow.ended_at == slow.fault.at + 7.0
    assert slow.stopped_at is not None
    assert slow.stopped_at > slow.ended_at
    assert slow.step_seconds == pytest.approx(0.1)
    assert (kill.ended_at, kill.severity) == (None, 1.0)
    folder = tmp_path / SLOW.name
    assert [label.fault for label in read_run(folder).labels] == ["slow"]
    before = [r for r in read_recording(folder) if r.topic == "metrics" and r.appended_at <= slow.fault.at]
    assert len(before) >= WORLD * recording.BASE_STEPS / 10
    assert "--seed" in session.arguments[0]


def test_a_clean_run_has_its_steps_and_no_label(session: FakeSession, tmp_path: Path) -> None:
    record(session, tmp_path, CLEAN)
    ((place, run),) = labelled_runs(tmp_path)
    assert run is not None
    assert (place.name, run.fault, run.severity) == ("clean-30-w64x3-s1501", None, 0.0)
    assert session.told == ["stopped", "closed"]


def test_what_is_there_is_left_and_what_was_begun_is_made_anew(session: FakeSession, tmp_path: Path) -> None:
    record(session, tmp_path, SLOW)
    begun = tmp_path / "tuning" / "kill-strong-r1-w96x3-s5.partial"
    begun.mkdir(parents=True)
    (begun / "messages.jsonl.gz").write_bytes(b"torn")
    assert record(session, tmp_path, SLOW, KILL) == (1, [])
    assert record(session, tmp_path, SLOW, KILL) == (0, [])
    assert is_recorded(tmp_path / KILL.name)
    assert not begun.exists()


def test_a_fault_that_nobody_does_is_an_error_and_leaves_no_run(session: FakeSession, tmp_path: Path) -> None:
    session.obeys = False
    with pytest.raises(StatedError, match="rank 2 never said that it did slow"):
        record(session, tmp_path, SLOW)
    assert not is_recorded(tmp_path / SLOW.name)


def test_a_job_that_does_not_train_is_an_error(session: FakeSession, tmp_path: Path) -> None:
    session.steps_max = 20
    with pytest.raises(StatedError, match="did not reach step 60"):
        record(session, tmp_path, SLOW)
    with pytest.raises(StatedError, match="a clean run must not fail"):
        record(session, tmp_path, CLEAN)


def test_without_a_small_disk_a_full_one_is_left_out_with_its_reason(session: FakeSession, tmp_path: Path) -> None:
    made, (note,) = record(session, tmp_path, FULL_DISK, SLOW)
    assert made == 1
    assert "which only root may mount" in note


def test_a_folder_without_runs_says_how_they_are_made(tmp_path: Path) -> None:
    for read in (corpus_runs, labelled_runs):
        with pytest.raises(NoCorpus, match="transom record-faults"):
            list(read(tmp_path))


def test_the_steps_of_an_attempt_are_those_that_every_rank_has_done() -> None:
    progress = Progress()
    for rank in range(WORLD):
        assert progress.steps == 0
        progress.see(metrics(rank, (5, 6, 7) if rank else (5, 6)))  # rank 0 is a step behind
    assert progress.steps == 2


def metrics(rank: int, steps: tuple[int, ...]) -> Metrics:
    return Metrics(
        job="faults", attempt=1, rank=rank, node="n", sequence=0, at=1.0, phase="train", step=steps[-1], steps=steps,
        ended_at=tuple(float(step) for step in steps),
    )  # fmt: skip
