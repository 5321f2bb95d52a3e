"""Everything that is known of one attempt of a job, and who watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from detectors.channel import Channel
from detectors.channels import make_channels
from detectors.clues import Clue, Condition
from detectors.config import DetectorConfig
from detectors.ensemble.ensemble import Ensemble
from detectors.ensemble.watch import Watch
from detectors.job.numbers import JobChannel
from detectors.judge.judge import Judge
from detectors.logs.book import LogBook
from detectors.ranks.channel import RankChannel
from detectors.roster import Roster
from detectors.step_block import StepBlock
from detectors.steps import StepMatrix

BY_STEPS = frozenset(("rank_channel", "ensemble", "job_channel/pace", "job_channel/loss", "telemetry"))  # detectors
COUNTING = frozenset(("pace", "loss", "telemetry"))  # channels that know the steps by their numbers


class Attempt:
    """It dies with the attempt: a newer one carries nothing of it over."""

    def __init__(self, job: str, roster: Roster, config: DetectorConfig, book: LogBook) -> None:
        self.config = config
        self.roster = roster
        self.numbers = JobChannel(config.job)
        self.judge = Judge(job, roster.attempt, config.judge)
        self.book = book
        self.matrix: StepMatrix | None = None
        self.channel: RankChannel | None = None
        self.watch: Watch | None = None
        self.clues: list[Clue] = []
        self.warnings: list[Condition] = []
        self._take(make_channels(config))

    @property
    def counts_anew(self) -> bool:
        """The job has gone back to earlier steps, or ranks tell that nobody had announced when the matrix was made."""
        matrix, ranks = self.matrix, self.roster.known
        if matrix is None:
            return False
        joined = len(ranks) > len(matrix.ranks) and any(
            rank.heard_at is not None and not matrix.has(rank.rank) for rank in ranks.values()
        )
        return joined or matrix.astray

    def begin_steps(self, ensemble: Ensemble, now: float) -> StepMatrix:
        """Whoever watches step by step begins, or begins anew, with all ranks that are known."""
        roster, config = self.roster, self.config
        if self.matrix is not None:
            made = make_channels(config)
            self._take({name: made[name] if name in COUNTING else kept for name, kept in self.channels.items()})
            roster.recount(now)
        ranks = sorted(roster.ranks)
        nodes = [roster.ranks[rank].node for rank in ranks]
        self.matrix = StepMatrix(ranks, config.steps)
        self.channel = RankChannel(ranks, nodes, config.rank, [roster.ranks[rank].role for rank in ranks])
        self.watch = Watch(ensemble, ranks, nodes)
        return self.matrix

    def observe_block(self, block: StepBlock) -> bool:
        """Take in a step of many ranks where all of them tell of it at once, and of nothing else; else do nothing."""
        matrix = self.matrix
        if matrix is None or block.attempt != self.roster.attempt or not matrix.takes_block(block):
            return False
        self.roster.heard_block(block)  # no channel wants messages of plain training
        self.numbers.observe_block(block)
        matrix.add_block(block)
        return True

    def to_state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """JSON-able fields, and arrays for an npz file."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        held: dict[str, Any] = {
            "roster": self.roster.to_state(), "numbers": self.numbers.to_state(),
            "judge": self.judge.to_state(), "book": self.book.to_state(), "matrix": None,
            "clues": msgspec.to_builtins(self.clues), "warnings": msgspec.to_builtins(self.warnings),
        }  # fmt: skip
        held["channels"], parts = self.channel_states()
        arrays |= {f"channels.{name}": array for name, array in parts.items()}
        if self.matrix is not None and self.channel is not None:
            held["matrix"], parts = self.matrix.to_state()
            arrays |= {f"matrix.{name}": array for name, array in parts.items()}
            held["channel"], parts = self.channel.to_state()
            held["nodes"] = self.channel.nodes
            arrays |= {f"channel.{name}": array for name, array in parts.items()}
        if self.watch is not None:
            held["watch"], parts = self.watch.to_state()
            arrays |= {f"watch.{name}": array for name, array in parts.items()}
        return held, arrays

    def channel_states(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """The states of the channels by their names; arrays are named `<channel>.<array>`."""
        states: dict[str, Any] = {}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, channel in self.channels.items():
            states[name], parts = channel.to_state()
            arrays |= {f"{name}.{array}": values for array, values in parts.items()}
        return states, arrays

    def _take(self, channels: dict[str, Channel]) -> None:
        self.channels = channels
        self.listening = {
            kind: [channel for channel in channels.values() if kind in channel.wants]
            for kind in {kind for channel in channels.values() for kind in channel.wants}
        }


def part_of(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays whose names begin so, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
