"""Checkpoints are proved by training that goes on after them: which, when, and what is never marked."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ckpt_engine.manifest import complete_steps
from ckpt_engine.rejection import Rejection, add_rejection
from ckpt_engine.storage import Storage
from ckpt_engine.verification import read_verifications
from ingest.clock import ManualClock
from ingest.memory_bus import MemoryBus
from pipelines.checkpoints import mark_in_folder, saved_in_folder
from pipelines.places import Places
from pipelines.proving import Proving, SavedStep, proved
from pipelines.recover import Recover
from pipelines.settings import Settings
from tests.ckpt_lab import eventually, put_step


def test_only_what_is_old_enough_and_was_trained_past_is_proved() -> None:
    saved = [SavedStep(10, 1, 100.0), SavedStep(20, 1, 200.0), SavedStep(30, 1, 300.0)]
    assert proved(saved, 350.0, 100.0) == saved[1]
    assert proved(saved, 299.0, 100.0) == saved[0]
    assert proved(saved, 150.0, 100.0) is None
    assert proved(saved, 9999.0, 100.0) == saved[1], "nothing has gone on from the last"
    assert proved(saved[:1], 9999.0, 100.0) is None
    assert proved([], 9999.0, 100.0) is None


def test_a_later_attempt_is_the_newer_whatever_its_step() -> None:
    saved = [SavedStep(30, 1, 100.0), SavedStep(20, 2, 200.0)]
    assert proved(saved, 9999.0, 100.0) == saved[0]


class Catalog:
    def __init__(self) -> None:
        self.saved = {"a": [SavedStep(10, 1, 100.0), SavedStep(20, 1, 200.0)], "b": [SavedStep(5, 3, 0.0)]}
        self.marked: list[tuple[str, int, int]] = []
        self.broken = ""

    def saved_steps(self, job: str) -> list[SavedStep]:
        if job == self.broken:
            raise OSError("the folder is away")
        return self.saved[job]

    def mark_verified(self, job: str, step: int, attempt: int, reason: str) -> None:
        assert "no incident open" in reason
        self.marked.append((job, step, attempt))


def test_each_is_marked_once_in_jobs_without_an_open_incident() -> None:
    catalog, quiet = Catalog(), ["a", "b"]
    proving = Proving(catalog, 100.0, lambda: quiet)
    for now in (250.0, 251.0, 300.0, 400.0):  # the second is too soon after the first
        proving.tick(now)
        eventually(lambda: proving._looking is None or proving._looking.done())
    assert catalog.marked == [("a", 10, 1)]
    catalog.saved["b"].append(SavedStep(9, 3, 300.0))
    quiet.remove("b")
    proving.tick(500.0)
    eventually(lambda: proving._looking is None or proving._looking.done())
    assert catalog.marked == [("a", 10, 1)], "something is wrong with b"
    quiet[:] = ["b"]
    proving.tick(600.0)
    proving.close()
    assert catalog.marked == [("a", 10, 1), ("b", 5, 3)]


def test_one_job_that_cannot_be_looked_at_keeps_no_other_from_it() -> None:
    catalog = Catalog()
    catalog.broken = "b"
    proving = Proving(catalog, 100.0, lambda: ["b", "a"])
    proving.tick(250.0)
    proving.close()
    assert catalog.marked == [("a", 10, 1)]


def test_0_seconds_is_never() -> None:
    catalog = Catalog()
    proving = Proving(catalog, 0.0, lambda: pytest.fail("nobody is asked"))
    proving.tick(9999.0)
    proving.close()
    assert catalog.marked == []


def test_a_real_folder_is_marked_and_what_is_rejected_is_not(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put_step(tmp_path, step)
    saved = saved_in_folder(tmp_path)
    assert [one.step for one in saved] == [10, 20, 30]
    found = proved(saved, saved[-1].saved_at + 1000.0, 500.0)
    assert found is not None
    mark_in_folder(tmp_path, found.step, found.attempt, "why")
    assert [(one.step, one.attempt, one.reason) for one in read_verifications(tmp_path)] == [(20, 1, "why")]
    add_rejection(tmp_path, Rejection(20, 1, "NaN"), Storage(), "n0")
    assert [one.step for one in saved_in_folder(tmp_path)] == [10] == [one.step for one in complete_steps(tmp_path)]
    mark_in_folder(tmp_path, 30, 1, "why")
    assert len(read_verifications(tmp_path)) == 1


def test_recover_leaves_out_jobs_that_are_over_or_in_trouble(tmp_path: Path) -> None:
    places, clock = Places(tmp_path, tmp_path), ManualClock(1000.0)
    for job in ("quiet", "over", "troubled"):
        (places.jobs / job).mkdir(parents=True)
        (places.jobs / job / "job.json").write_text("{}")
    (places.jobs / "over" / "outcome.json").write_text("{}")
    recover = Recover(Settings(state_dir=tmp_path), places, MemoryBus(clock=clock), clock, Random(0))
    with recover._store.transaction():
        recover._store.open_incident("troubled/1/x", "troubled", 1, clock.now())
    assert recover._quiet_jobs(places) == ["quiet"]
    recover._proving.close()
    recover._store.close()
