"""SIGKILL to launcher or zygote at any instant: no rank is left over, and nothing is started twice."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.events import RankExited
from recovery.backend import BackendError, StartRequest
from recovery.launcher.procfs import all_processes
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for

MARK = "LAUNCHER_LAB_MARK"
SLEEPER = """
import subprocess, time
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_in_short_folder(per_node=3) as lab:
        yield lab


def marked(lab: Lab) -> list[int]:
    """Living processes that inherited this lab's mark: zygote and ranks."""
    wanted = f"{MARK}={lab.folder}".encode()
    found = []
    for stat in all_processes():
        try:
            environ = Path(f"/proc/{stat.pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0") and stat.state != "Z":
            found.append(stat.pid)
    return found


def launch(lab: Lab) -> None:
    lab.launch(lab.script(SLEEPER), base_env={**os.environ, MARK: str(lab.folder)})


def start_in_background(lab: Lab, attempt: int) -> threading.Thread:
    def start() -> None:
        try:
            lab.backend.start(StartRequest(JOB, attempt, f"token-{attempt}"))
        except BackendError:
            return

    thread = threading.Thread(target=start)
    thread.start()
    return thread


def test_a_launcher_killed_at_any_instant_of_a_start_leaves_no_rank(lab: Lab) -> None:
    dice = random.Random(7)
    for attempt in range(1, 9):
        launch(lab)
        starting = start_in_background(lab, attempt)
        time.sleep(dice.uniform(0.0, 0.15))
        lab.processes["node0"].kill()
        lab.processes["node0"].wait()
        starting.join()
        wait_for(lambda: not marked(lab), f"nothing is left of attempt {attempt}")
        assert lab.backend.stop(JOB, attempt, grace_seconds=0, deadline_seconds=5)


def test_a_zygote_killed_at_any_instant_of_a_start_leaves_one_set_of_ranks_or_their_exits(lab: Lab) -> None:
    dice = random.Random(11)
    launch(lab)
    for attempt in range(1, 9):
        file = wait_for(lambda: (found := lab.node_file()) and found.zygote and found, "a zygote")
        starting = start_in_background(lab, attempt)
        time.sleep(dice.uniform(0.0, 0.1))
        os.kill(file.zygote.pid, signal.SIGKILL)
        starting.join()
        seen = lab.backend.observe(JOB)
        assert (seen.attempt, len(seen.ranks)) == (attempt, 3)
        assert lab.backend.stop(JOB, attempt, grace_seconds=0, deadline_seconds=10)
        wait_for(lambda: len(marked(lab)) <= 1, "no rank is left, only a zygote")
        told = wait_for(
            lambda attempt=attempt: len(x := [m for m in lab.messages(RankExited) if m.attempt == attempt]) >= 3 and x,
            "each exit is told",
        )
        assert sorted(exit.rank for exit in told) == [0, 1, 2]
