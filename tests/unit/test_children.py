"""Our child processes: one that ended is started again, at once and then later and later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ingest.clock import ManualClock
from pipelines.children import Child, Children
from pipelines.places import Places
from tests.ckpt_lab import eventually


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000.0)


def ended(child: Child) -> None:
    child.process.wait(30)


def test_a_child_that_ended_is_started_again_as_it_was_and_waits_longer_after_each_fall(
    tmp_path: Path, clock: ManualClock
) -> None:
    said: list[str] = []
    children = Children(tmp_path / "logs", clock)
    child = children.start(
        "falls", [sys.executable, "-c", "import os; print(os.environ['MARK']); raise SystemExit(3)"],
        environ={"MARK": "as it was"},
    )  # fmt: skip
    other = children.start("ended too", [sys.executable, "-c", ""])
    waits = []
    for _ in range(5):
        ended(child)
        before, waited = child.process.pid, 0.0
        while child.process.pid == before:
            children.revive(said.append, but=[other])
            if child.process.pid == before:
                clock.advance(1.0)
                waited += 1.0
        waits.append(waited)
    ended(child)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert said[0] == f"falls ended with exit code 3; starting it again (see {child.log})"
    assert said[1] == f"falls ended with exit code 3; starting it again in 1 s (see {child.log})"
    assert len(said) == 5  # each fall once
    assert child.log.read_text() == "as it was\n" * 6
    assert other.process.poll() == 0
    children.stop()


def test_who_needs_longer_to_end_well_is_given_it_and_others_are_killed(tmp_path: Path, clock: ManualClock) -> None:
    """Both would take a while; on their clock no time passes but that which they are allowed."""
    children = Children(tmp_path / "logs", clock)
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), print('written'), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    started = [
        children.start(name, [sys.executable, "-c", program], stop_seconds_max=seconds)
        for name, seconds in (("patient", 60.0), ("hasty", 0.0))
    ]
    for child in started:
        eventually(lambda child=child: "up" in child.log.read_text(), "its start")  # type: ignore[misc]
    children.stop()
    assert [child.process.returncode for child in started] == [0, -9]
    assert "written" in started[0].log.read_text()


def test_a_long_life_wipes_out_earlier_falls(tmp_path: Path, clock: ManualClock) -> None:
    said: list[str] = []
    children = Children(tmp_path / "logs", clock)
    child = children.start("falls", [sys.executable, "-c", ""])
    for _ in range(2):
        ended(child)
        clock.advance(100.0)
        children.revive(said.append)
    ended(child)
    assert [line.split(";")[1] for line in said] == [f" starting it again (see {child.log})"] * 2
    children.stop()


@pytest.mark.parametrize("kind", ["control", "telemetry", "ckpt"])
def test_jobs_with_names_alike_at_both_ends_have_sockets_of_their_own(tmp_path: Path, kind: str) -> None:
    places = Places(tmp_path, tmp_path)
    one, two = (places.socket(f"experiment-{letter}-2024-01", "node0", kind) for letter in "ab")
    assert one != two
    assert len(one.name) < 45
