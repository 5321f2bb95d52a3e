"""How a simulated run ends: ranks that stop or die, what their launchers see, what their peers print, who goes when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

from ingest.events import AttemptEnded, ErrorRecord, LogLine, Logs, Message, RankExited, RankStalled
from pipelines.simulation.noise import Floats
from pipelines.simulation.scenario import HANGS, Scenario, SimulatedFault
from pipelines.simulation.telemetry import RankTelemetry, Stamps
from pipelines.simulation.training import SimulatedStep

INTO_STEP = 0.3  # of the step that is never ended, when the fault happens
SEEN_SECONDS = (0.05, 0.3)  # a launcher looks at /proc so often
FALL_SECONDS = (0.1, 1.5)  # from a rank's death to its peers' errors
EXIT_SECONDS = 0.1  # from an error to the exit
FINISH_SECONDS = 0.5

Due = tuple[int, float, Message]  # node, true time, message


class Endings:
    """Schedules what happens outside of steps; `due` gives it when its time has come."""

    def __init__(self, scenario: Scenario, stamps: Stamps, telemetry: RankTelemetry) -> None:
        self._scenario = scenario
        self._stamps = stamps
        self._telemetry = telemetry
        self._dice = np.random.default_rng(np.random.SeedSequence(scenario.seed, spawn_key=(6,)))
        self._planned: list[tuple[float, int, int, str, int]] = []  # time, order, rank (-1), what, node
        self._order = 0
        self._culprits: tuple[int, ...] = ()
        self.rank_gone_at: Floats = np.full(scenario.ranks, np.inf)
        self.node_gone_at: Floats = np.full(scenario.nodes, np.inf)

    def begin(self, fault: SimulatedFault, step: SimulatedStep) -> float:
        """A fatal fault happens in this step; returns when, true time."""
        scenario = self._scenario
        ranks = list(fault.ranks) if fault.ranks else list(scenario.ranks_of(fault.node or 0))
        at = float(step.begun_at[ranks].min()) + INTO_STEP * scenario.step_seconds
        silent = self._telemetry.silent_from
        if fault.kind in HANGS:
            if fault.kind != "hang_busy":
                silent[ranks] = at
            if fault.kind == "hang":
                for rank in ranks:
                    self._plan(at + self._uniform(SEEN_SECONDS), rank, "stalled")
        elif fault.kind == "node_lost":
            silent[ranks] = at
            self.node_gone_at[fault.node or 0] = at
        else:
            self._lose(ranks, at)
        return at

    def finish(self, ended_at: Floats) -> float:
        """All steps are trained: the ranks exit. Returns when the last is gone."""
        latest = 0.0
        for rank, end in enumerate(ended_at.tolist()):
            at = end + self._scenario.flush_seconds + float(self._dice.uniform(0.1, FINISH_SECONDS))
            self._telemetry.silent_from[rank] = at
            self._go(rank, at + 0.1, "finished")
            latest = max(latest, at)
        self._end_attempt("finished")
        return latest

    def due(self, until: float) -> Iterator[Due]:
        """What happens before `until`, in order."""
        while self._planned and self._planned[0][0] < until:
            at, _, rank, what, node = heapq.heappop(self._planned)
            yield node, at, self._message(at, rank, what, node)

    def _lose(self, ranks: list[int], at: float) -> None:
        """The kernel kills these ranks; their peers lose the connection one after another and exit with it."""
        self._culprits = tuple(ranks)
        for rank in range(self._scenario.ranks):
            if rank in ranks:
                self._telemetry.silent_from[rank] = at
                self._go(rank, at + self._uniform(SEEN_SECONDS) / 3.0, "killed")
                continue
            falls = at + self._uniform(FALL_SECONDS)
            self._telemetry.silent_from[rank] = falls
            self._plan(falls + 0.02, rank, "printed")
            self._go(rank, falls + EXIT_SECONDS, "failed")
        self._end_attempt("failed")

    def _go(self, rank: int, at: float, how: str) -> None:
        self.rank_gone_at[rank] = at
        self._plan(at, rank, how)

    def _end_attempt(self, outcome: str) -> None:
        for node in range(self._scenario.nodes):
            last = float(self.rank_gone_at[list(self._scenario.ranks_of(node))].max())
            self._plan(last + 0.01, -1, outcome, node)

    def _plan(self, at: float, rank: int, what: str, node: int | None = None) -> None:
        home = self._scenario.node_of(rank) if node is None else node
        self._order += 1
        heapq.heappush(self._planned, (at, self._order, rank, what, home))

    def _uniform(self, bounds: tuple[float, float]) -> float:
        return float(self._dice.uniform(*bounds))

    def _message(self, at: float, rank: int, what: str, node: int) -> Message:
        stamps = self._stamps
        counters = stamps.logs if what == "printed" else stamps.events if rank >= 0 else stamps.node_events
        index = rank if rank >= 0 else node
        stamp: dict[str, Any] = {
            "job": stamps.job, "attempt": 1, "rank": rank, "node": stamps.names[node], "sequence": counters[index],
            "at": stamps.at(node, at),
        }  # fmt: skip
        counters[index] += 1
        match what:
            case "stalled":
                return RankStalled(**stamp, state="T", since=stamps.at(node, at - SEEN_SECONDS[0]))
            case "killed":
                return RankExited(**stamp, signal=9)
            case "printed":
                return Logs(**stamp, lines=(LogLine(at=stamp["at"], stream="stderr", text=self._told(rank)),))
            case "failed" if rank >= 0:
                text = self._error()
                error = ErrorRecord(type="torch.distributed.DistBackendError", text=text)
                return RankExited(**stamp, exit_code=1, error=error, last_lines=(text,))
            case "finished" if rank >= 0:
                return RankExited(**stamp, exit_code=0)
            case "failed" | "finished":
                return AttemptEnded(**stamp, outcome=what)
        raise AssertionError(f"nothing is planned as {what}")

    def _error(self) -> str:
        peer = self._culprits[0] if self._culprits else 0
        host = 10 + self._scenario.node_of(peer)
        return (
            "NCCL error: remote process exited or there was a network error. ncclRemoteError: A call failed possibly "
            "due to a network error or a remote process exiting prematurely. Last error: socketProgress: Connection "
            f"closed by remote peer 10.0.{host // 250}.{host % 250}<{40_000 + peer}>"
        )

    def _told(self, rank: int) -> str:
        return f"[rank{rank}]: torch.distributed.DistBackendError: {self._error()}"
