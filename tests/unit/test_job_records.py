"""The records of a job in a shared folder and in memory: whoever writes at once, a placement is never overtaken."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from recovery.allocation import JobRecords
from recovery.backend import Conflict, Unavailable
from recovery.backends.simulated_allocation import MemoryRecords
from recovery.backends.view import Written
from recovery.launcher.job_files import JobFiles
from recovery.launcher.protocol import JobEnd, JobSpec, Placement

SPEC = JobSpec(job="job", script="x")


@pytest.fixture(params=["files", "memory"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> JobRecords:
    if request.param == "memory":
        return MemoryRecords(SPEC)
    files = JobFiles(tmp_path, "job")
    files.write_spec(SPEC)
    return files


def placement(attempt: int, token: str) -> Placement:
    return Placement(attempt=attempt, token=token, places=(), master_port=20_000)


def test_of_many_that_place_one_attempt_at_once_one_does(records: JobRecords) -> None:
    won: list[str] = []
    ready = threading.Barrier(8)

    def place(token: str) -> None:
        ready.wait()
        try:
            records.write_placement(placement(2, token))
        except Conflict:
            return
        won.append(token)

    threads = [threading.Thread(target=place, args=(f"token-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert records.placement() == placement(2, won[0])


def test_of_many_ends_the_first_stays(records: JobRecords) -> None:
    first = JobEnd(outcome="failed", reason="first", at=1.0)
    records.write_end(first)
    records.write_end(JobEnd(outcome="finished", reason="second", at=2.0))
    assert records.end() == first


def test_a_file_system_without_locks_is_said_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    files = JobFiles(tmp_path, "job")
    with pytest.raises(Unavailable, match="cannot be locked"):
        files.write_placement(placement(1, "t"))
    assert files.placement() is None


def test_records_that_cannot_be_read_say_nothing_of_the_job(tmp_path: Path) -> None:
    files = JobFiles(tmp_path, "job")
    assert Written.of(files) is None
    files.write_spec(SPEC)
    (files.folder / "placement.json").write_text("{")
    with pytest.raises(Unavailable, match=r"placement\.json"):
        Written.of(files)
