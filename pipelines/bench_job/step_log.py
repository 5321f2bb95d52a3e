"""What the ranks of a bench's job say of themselves, in one file: when each began, and when each step ended.

One line for each event, written in one go: `kind attempt rank step pid at`. The same file under every launcher,
so that times of different launchers are the times of the same thing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["began", "step", "fault"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FILE_NAME = "steps.log"


@dataclass(frozen=True, slots=True)
class Line:
    """One event of one rank. `attempt` counts from 1; `step` is 0 where a rank has begun and trained nothing yet."""

    kind: Kind
    attempt: int
    rank: int
    step: int
    pid: int
    at: float


@dataclass(slots=True)
class RankStory:
    """One rank of one attempt, so far."""

    pid: int = 0
    began_at: float = 0.0
    first_step: int = 0
    first_step_at: float = 0.0
    step: int = 0


@dataclass(slots=True)
class AttemptLog:
    """One attempt, by rank."""

    ranks: dict[int, RankStory] = field(default_factory=dict)


class StepWriter:
    """The rank's side: whole lines, appended."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._file = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._attempt = attempt
        self._rank = rank

    def write(self, kind: Kind, step: int, at: float) -> None:
        os.write(self._file, f"{kind} {self._attempt} {self._rank} {step} {os.getpid()} {at:.6f}\n".encode())


class StepLog:
    """The bench's side: reads what has come since the last time."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._path = folder / FILE_NAME
        self._offset = 0
        self.world_size = world_size
        self.attempts: dict[int, AttemptLog] = {}
        self.faults: list[Line] = []
        self.ended_at: list[float] = []  # of the steps of rank 0, those that were trained again too

    def read(self) -> list[Line]:
        """New lines, oldest first."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = [_line(row) for row in whole.decode("ascii").splitlines()]
        for line in fresh:
            self._note(line)
        return fresh

    def _note(self, line: Line) -> None:
        story = self.attempts.setdefault(line.attempt, AttemptLog()).ranks.setdefault(line.rank, RankStory())
        if line.kind == "began":
            story.pid, story.began_at = line.pid, line.at
        elif line.kind == "fault":
            self.faults.append(line)
        else:
            if not story.first_step_at:
                story.first_step, story.first_step_at = line.step, line.at
            story.step = line.step
            if line.rank == 0:
                self.ended_at.append(line.at)

    @property
    def attempt(self) -> int:
        """The newest that a rank has begun; 0 before the first."""
        return max(self.attempts, default=0)

    def pids(self, attempt: int) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: story.pid for rank, story in self._ranks(attempt).items() if story.pid}

    def began_at(self, attempt: int) -> float | None:
        """When the last of the ranks began; None before all have."""
        times = [story.began_at for story in self._ranks(attempt).values() if story.began_at]
        return max(times) if len(times) == self.world_size else None

    def first_step_at(self, attempt: int) -> float | None:
        """When the last of the ranks ended its first step of this attempt; None before all have."""
        times = [story.first_step_at for story in self._ranks(attempt).values() if story.first_step_at]
        return max(times) if len(times) == self.world_size else None

    def step(self, attempt: int) -> int:
        """The highest step that all ranks have ended in this attempt; 0 before the first."""
        steps = [story.step for story in self._ranks(attempt).values()]
        return min(steps) if len(steps) == self.world_size else 0

    def steps_made(self, attempt: int) -> int:
        """How many steps all ranks have ended in this attempt."""
        first = [story.first_step for story in self._ranks(attempt).values() if story.first_step]
        return max(0, self.step(attempt) - min(first) + 1) if len(first) == self.world_size else 0

    def _ranks(self, attempt: int) -> dict[int, RankStory]:
        known = self.attempts.get(attempt)
        return known.ranks if known is not None else {}


def _line(row: str) -> Line:
    kind, attempt, rank, step, pid, at = row.split()
    return Line(next(one for one in KINDS if one == kind), int(attempt), int(rank), int(step), int(pid), float(at))
