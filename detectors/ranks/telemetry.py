"""Telemetry that stops: a rank whose process lives in a job that moves tells of no step, or has lost a metric.

Absence is judged on closed steps, and only after longer than anything late takes to arrive; what came late is looked
up in the step matrix before anything is said. A rank that hangs stops the job, so steps that close prove it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from detectors.channel import Arrays, Ended, Told
from detectors.clues import Condition, Place
from detectors.roster import RankState, Roster
from detectors.steps import FEATURES, StepMatrix
from detectors.verdict import Culprit, Evidence
from ingest.events import Message, NodeHeartbeat

Shorts = npt.NDArray[np.int16]
Bools = npt.NDArray[np.bool_]
NAMES_MAX = 4
LONGEST = np.int16(np.iinfo(np.int16).max - 2)  # one step more can still be counted


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """How long nothing must come before it is a gap."""

    gap_seconds: float = 25.0
    gap_steps: int = 10
    known_steps: int = 10  # a rank must have told a metric so often before it can miss
    peers_told: float = 0.75  # of the ranks that know the metric
    back_steps: int = 3
    open_max: int = 8  # more at once are the bus's or the job's doing, not a rank's
    looked_up_steps: int = 8  # the oldest of a gap: what is late has come there by now
    steps_max: int = 256


class _Gap(msgspec.Struct):
    """One gap that was said: of these ranks; a metric's place in FEATURES, or -1 for all."""

    ranks: list[int]
    metrics: list[int]
    back: int = 0


class _State(msgspec.Struct):
    ranks: list[int] = []
    step: int = -1  # the newest closed step
    at: float = 0.0  # when it ended
    steps: list[int] = []  # the newest closed steps, oldest first
    looked: int = -1
    alive: dict[str, list[int]] = {}
    open: dict[str, _Gap] = {}


class TelemetryChannel:
    """Says `telemetry_gap` of a rank, or of a node whose ranks all have one; it ends when they tell again."""

    wants: ClassVar[tuple[type[Message], ...]] = (NodeHeartbeat,)

    def __init__(self, config: TelemetryConfig | None = None) -> None:
        self.config = config or TelemetryConfig()
        self._state = _State()
        self._known: Shorts = np.zeros((0, len(FEATURES)), dtype=np.int16)  # steps in which it was told
        self._missing: Shorts = np.zeros((0, len(FEATURES)), dtype=np.int16)  # steps in a row in which it was not
        self._since: npt.NDArray[np.float64] = np.full((0, len(FEATURES)), np.nan)
        self._matrix: StepMatrix | None = None

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        """Whose processes live, as their launchers see it."""
        assert isinstance(message, NodeHeartbeat)
        self._state.alive[message.node] = list(message.ranks_alive)

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        """Count, for each rank and metric, since when it is missing."""
        state = self._state
        if state.ranks != matrix.ranks:
            self._resize(matrix.ranks)
        self._matrix = matrix
        there, at = matrix.told(step), matrix.ended_at(step)
        if there is None or at is None:
            return
        state.step, state.at = step, at
        state.steps = [*state.steps[-(self.config.steps_max - 1) :], step]
        self._known += there & (self._known < self.config.known_steps)
        np.minimum(self._missing, LONGEST, out=self._missing)
        self._missing += 1
        self._missing[there], self._since[there] = 0, np.nan
        self._since[~there & np.isnan(self._since)] = at

    def look(self, now: float, roster: Roster) -> list[Told]:
        """Gaps that begin and end, once for each closed step."""
        state = self._state
        if state.step == state.looked or self._matrix is None:
            return []
        state.looked = state.step
        told: list[Told] = list(self._ended(roster))
        gaps = self._gaps(roster)
        columns = np.flatnonzero(gaps.any(axis=1))
        spoken = {rank for gap in state.open.values() for rank in gap.ranks}
        fresh = [column for column in columns.tolist() if state.ranks[column] not in spoken]
        if not fresh or len(columns) > max(self.config.open_max, len(state.ranks) // 4):
            return told
        by_node: dict[str, list[int]] = {}
        for column in fresh:
            by_node.setdefault(roster.ranks[state.ranks[column]].node, []).append(column)
        for node, mine in sorted(by_node.items()):
            whole = len(mine) > 1 and len(mine) == sum(rank.live for rank in roster.ranks_of(node))
            for group in [mine] if whole else [[column] for column in mine]:
                if len(state.open) < self.config.open_max:
                    told += self._begin(group, gaps, roster, node if whole else "")
        return told

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        built: dict[str, Any] = msgspec.to_builtins(self._state)
        return built, {"known": self._known, "missing": self._missing, "since": self._since}

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._state = msgspec.convert(state, _State)
        self._known, self._missing = arrays["known"].copy(), arrays["missing"].copy()
        self._since = arrays["since"].copy()

    def _resize(self, ranks: Sequence[int]) -> None:
        shape = (len(ranks), len(FEATURES))
        self._state.ranks = list(ranks)
        self._known = np.zeros(shape, dtype=np.int16)
        self._missing = np.zeros(shape, dtype=np.int16)
        self._since = np.full(shape, np.nan)

    def _gaps(self, roster: Roster) -> Bools:
        """rank × metric: missing for long, although the rank had told it, its peers tell it and its process lives."""
        config, state = self.config, self._state
        known = self._known >= config.known_steps
        telling = (known & (self._missing == 0)).sum(axis=0) >= config.peers_told * known.sum(axis=0)
        with np.errstate(invalid="ignore"):
            long = (self._missing >= config.gap_steps) & (state.at - self._since >= config.gap_seconds)
        gaps: Bools = known & telling & long
        for column in np.flatnonzero(gaps.any(axis=1)).tolist():
            if not self._lives(roster.ranks[state.ranks[column]]):
                gaps[column] = False
            else:
                gaps[column] &= ~self._came_late(column)
        return gaps

    def _lives(self, rank: RankState) -> bool:
        alive = self._state.alive.get(rank.node)
        return rank.live and not rank.stalled and (alive is None or rank.rank in alive)

    def _came_late(self, column: int) -> Bools:
        """Metrics of which late messages have told since their steps closed: those are only slow to arrive."""
        assert self._matrix is not None
        late: Bools = np.zeros(len(FEATURES), dtype=np.bool_)
        known = self._known[column] >= self.config.known_steps
        run = int(self._missing[column][known].max())
        for step in self._state.steps[-run:][: self.config.looked_up_steps]:
            there = self._matrix.told(step)
            if there is not None:
                late |= there[column] & (self._missing[column] >= run - self.config.gap_steps)
        self._missing[column, late], self._since[column, late] = 0, self._state.at
        return late

    def _begin(self, columns: list[int], gaps: Bools, roster: Roster, node: str) -> list[Told]:
        state = self._state
        ranks = [state.ranks[column] for column in columns]
        first = roster.ranks[ranks[0]]
        if first.last is None:
            return []
        known = self._known >= self.config.known_steps
        everything = all(bool((gaps[column] | ~known[column]).all()) for column in columns)
        metrics = [-1] if everything else np.flatnonzero(gaps[columns].any(axis=0)).tolist()
        key = f"telemetry_gap/node/{node}" if node else f"telemetry_gap/{ranks[0]}"
        state.open[key] = _Gap(ranks=ranks, metrics=metrics)
        since = float(np.nanmin(self._since[columns][gaps[columns]]))
        steps = int(self._missing[columns][gaps[columns]].max())
        who = f"Node {node}, all {len(ranks)} ranks of it," if node else f"Rank {ranks[0]} on {first.node}"
        names = "its steps" if everything else _listed([FEATURES[index] for index in metrics])
        text = f"no word of {names} for {state.at - since:.0f} s ({steps:,} steps)"
        evidence = Evidence(
            kind="silence", text=text, at=since, rank=None if node else ranks[0], node=first.node, topic="metrics",
            step=state.step, metric="" if everything else FEATURES[metrics[0]],
        )  # fmt: skip
        return [
            Condition(
                key=key, fault_class="telemetry_gap", victims=0, onset_at=since, onset_step=None,
                culprits=(Culprit(rank=None if node else ranks[0], node=first.node, confidence=0.9),),
                summary=f"{who} gives {text}, though the job trains and its process lives.",
                evidence=(evidence,), source=msgspec.structs.replace(first.last, silence=True), detector="telemetry",
            )
        ]  # fmt: skip

    def _ended(self, roster: Roster) -> list[Ended]:
        """Gaps whose ranks tell again, or have ended."""
        state, ended = self._state, []
        place = {rank: column for column, rank in enumerate(state.ranks)} if state.open else {}
        for key, gap in list(state.open.items()):
            columns = [place[rank] for rank in gap.ranks if rank in place]
            wanted = self._known[columns] >= self.config.known_steps
            if gap.metrics != [-1]:
                wanted[:, [index for index in range(len(FEATURES)) if index not in gap.metrics]] = False
            back = bool((~wanted | (self._missing[columns] == 0)).all())
            gap.back = gap.back + 1 if back else 0
            gone = all(not roster.ranks[rank].live for rank in gap.ranks)
            if gap.back >= self.config.back_steps or gone:
                del state.open[key]
                ended.append(Ended(key))
        return ended


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_MAX])
    return shown if len(names) <= NAMES_MAX else f"{shown} and {len(names) - NAMES_MAX} more"
