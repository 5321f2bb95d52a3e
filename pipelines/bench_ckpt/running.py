"""`transom bench ckpt` from outside: which processes measure what, one after another, and what they found together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pipelines.bench_ckpt.asked import ASKED
from pipelines.bench_ckpt.outcome import CASES, Line, Outcome, Task
from pipelines.own_process import PARENT_VARIABLE

TIMED_BY_CASE = ("save", "fenced")
THREADS = (1, 0)  # one, and torch's own default


def planned(groups: list[str], folder: Path, cases: tuple[str, ...] = CASES, **sizes: int) -> Iterator[Task]:
    """One task for each process that will measure."""
    number = 0
    for group in groups:
        if group in TIMED_BY_CASE:
            settings = [(case, threads) for case in cases for threads in THREADS]
        elif group == "load":
            settings = [(cases[0], threads) for threads in THREADS]
        else:
            settings = [(cases[0], 0)]
        for case, threads in settings:
            number += 1
            yield Task(
                group=group, folder=str(folder / f"{number}-{group}"), case=case, threads=threads, **sizes
            )  # fmt: skip


def run_task(task: Task, told: Callable[[str], object], python: str = sys.executable) -> Outcome:
    """Measure in a process of its own. A process that fails leaves its reason with every figure of its group."""
    folder = Path(task.folder)
    folder.mkdir(parents=True)
    reading, writing = os.pipe()
    command = [python, "-P", "-m", "pipelines.bench_ckpt.worker", str(writing)]
    outcome: Outcome | None = None
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            start_new_session=True,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
        os.close(writing)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(task))
            process.stdin.close()
            with os.fdopen(reading, "rb") as lines:
                for raw in lines:
                    line = msgspec.json.decode(raw, type=Line)
                    outcome = line.outcome or outcome
                    if line.told:
                        told(line.told)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if outcome is None:
        outcome = Outcome(values=[], missing={"": _last_words(folder / "output.log")}, notes=[], rounds={})
    return _spread_out(outcome, task)


def _spread_out(outcome: Outcome, task: Task) -> Outcome:
    """A reason that names no figure is one for all figures of the group."""
    reason = outcome.missing.pop("", None)
    if reason is not None:
        outcome.notes.append(f"[{task.group}, {task.label}] {reason}")
        outcome.missing |= {asked.name: reason for asked in ASKED if asked.group == task.group}
    return outcome


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the measuring process ended without an answer: {lines[-1] if lines else 'it said nothing'}"[:300]
