"""A backend whose jobs live in a file: no processes, but it outlives its controller as launchers do.

Every effect is in the file before the call returns, and `effects.jsonl` lists the starts in the order they
took effect. A gate (`close_gate("before-start")`) makes a call wait at that place, so that a controller can
be killed exactly between what it wrote down and what it does.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from ingest.clock import Clock
from recovery.backend import Observation, StartRequest
from recovery.backends.memory import MemoryBackend, MemoryJob

Gate = Literal["before-stop", "after-stop", "before-start", "after-start"]
GATE_POLL_SECONDS = 0.002
GATE_SECONDS_MAX = 60.0
_decode_jobs = msgspec.json.Decoder(dict[str, MemoryJob]).decode
_decode_request = msgspec.json.Decoder(StartRequest).decode


class SimulatedBackend(MemoryBackend):
    """The memory backend over a folder that several processes may use, one call at a time."""

    name = "simulated"

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(clock)
        self._folder = folder
        self._threads = threading.RLock()
        self._inside = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add_job(self, job: str, nodes: Mapping[str, int], *, nodes_wanted: int, nproc_per_node: int) -> None:
        with self._file():
            super().add_job(job, nodes, nodes_wanted=nodes_wanted, nproc_per_node=nproc_per_node)

    def set_step(self, job: str, step: int, rank: int | None = None) -> None:
        with self._file():
            super().set_step(job, step, rank)

    def end_rank(
        self, job: str, rank: int, *, exit_code: int | None = None, signal: int | None = None, error: str = ""
    ) -> None:
        with self._file():
            super().end_rank(job, rank, exit_code=exit_code, signal=signal, error=error)

    def stall_rank(self, job: str, rank: int) -> None:
        with self._file():
            super().stall_rank(job, rank)

    def lose_node(self, job: str, node: str) -> None:
        with self._file():
            super().lose_node(job, node)

    def close_gate(self, gate: Gate) -> None:
        """Calls wait at this place from now on."""
        (self._folder / f"gate-{gate}").touch()

    def open_gate(self, gate: Gate) -> None:
        """Calls pass again."""
        (self._folder / f"gate-{gate}").unlink(missing_ok=True)
        (self._folder / f"waiting-{gate}").unlink(missing_ok=True)

    def waits_at(self, gate: Gate) -> bool:
        """Does a call wait at this place now?"""
        return (self._folder / f"waiting-{gate}").exists()

    def effective_starts(self) -> list[StartRequest]:
        """Starts that started ranks, over all lives of all controllers."""
        path = self._folder / "effects.jsonl"
        return [_decode_request(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def observe(self, job: str) -> Observation:
        with self._file():
            return super().observe(job)

    def start(self, request: StartRequest) -> Observation:
        self._pass("before-start")
        with self._file():
            before = len(self.starts)
            observation = super().start(request)
            if len(self.starts) > before:
                self._append_effect(request)
        self._pass("after-start")
        return observation

    def stop(self, job: str, attempt: int, *, grace_seconds: float, deadline_seconds: float) -> bool:
        self._pass("before-stop")
        with self._file():
            gone = super().stop(job, attempt, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds)
        self._pass("after-stop")
        return gone

    def finish(self, job: str, outcome: Literal["finished", "failed", "stopped"], reason: str) -> None:
        with self._file():
            super().finish(job, outcome, reason)

    def collect_evidence(self, job: str, attempt: int, *, deadline_seconds: float) -> dict[int, str]:
        with self._file():
            return super().collect_evidence(job, attempt, deadline_seconds=deadline_seconds)

    @contextmanager
    def _file(self) -> Iterator[None]:
        """The jobs as the file has them, and back into the file, under a lock that dies with its process."""
        path = self._folder / "jobs.json"
        with self._threads:
            if self._inside:  # a method of ours called another one
                yield
                return
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._inside = True
                self._jobs = _decode_jobs(path.read_bytes()) if path.exists() else {}
                yield
                aside = path.with_suffix(".new")
                aside.write_bytes(msgspec.json.encode(self._jobs))
                aside.replace(path)
            finally:
                self._inside = False
                os.close(lock)

    def _append_effect(self, request: StartRequest) -> None:
        with (self._folder / "effects.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(request) + b"\n")

    def _pass(self, gate: Gate) -> None:
        """Wait while the gate is closed, at most a minute, and let others see that we wait."""
        closed, waiting = self._folder / f"gate-{gate}", self._folder / f"waiting-{gate}"
        if not closed.exists():
            return
        waiting.touch()
        self._until(lambda: not closed.exists())

    def _until(self, condition: Callable[[], bool]) -> None:
        give_up_at = self._clock.monotonic() + GATE_SECONDS_MAX
        while not condition() and self._clock.monotonic() < give_up_at:
            self._clock.sleep(GATE_POLL_SECONDS)
