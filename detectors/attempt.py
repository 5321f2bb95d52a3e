"""Everything that is known of one attempt of a job, and who watches it."""

from __future__ import annotations

from typing import Any

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
        matrix, ranks = self.matrix, self.roster.ranks
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
