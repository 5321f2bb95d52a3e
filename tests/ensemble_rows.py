"""Clean rows and windows for tests of the ensemble: correlated timings with a heavy tail, in spreads of the peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from detectors.ensemble.watch import Seen, Watch
from detectors.roster import Roster
from detectors.steps import TIMINGS
from ingest.events import AttemptStarted, RankPlace

FEATURES = len(TIMINGS)
OWN, DATA, QUEUE = (TIMINGS.index(f"train.{name}") for name in ("compute.own", "data.duration", "run_queue.delay"))
COMPUTE = tuple(TIMINGS.index(f"train.{name}") for name in ("compute.own", "compute.duration", "forward.duration"))


def rows(dice: np.random.Generator, count: int) -> np.ndarray:
    """row × feature; the parts of the computation move together, `train.compute.cpu` was never measured."""
    own = dice.standard_t(6, (count, FEATURES)) * 0.3
    own[:, COMPUTE] += dice.standard_t(6, (count, 1)) * 0.3
    own[:, TIMINGS.index("train.compute.cpu")] = np.nan
    own[:, TIMINGS.index("train.step.duration")] = 0.25  # constant: PCA alone would answer infinity
    return own


def windows(seed: int, count: int, steps: int = 8) -> np.ndarray:
    """window × step × feature."""
    return rows(np.random.default_rng(seed), count * steps).reshape(count, steps, FEATURES).astype(np.float32)


class Report(NamedTuple):
    at: float
    sequence: int
    partition: int | None = None
    offset: int | None = None


class FakeMatrix:
    """Steps of half a second of compute; a rank that is odd takes `factor` times as long."""

    def __init__(self, ranks: int) -> None:
        self.ranks = list(range(ranks))
        self.factor = np.ones(ranks)
        self.late = np.zeros(ranks)
        self.queue = np.zeros(ranks)

    def rows(self, step: int) -> np.ndarray:
        table = np.full((len(self.ranks), FEATURES), 0.5)
        table[:, COMPUTE] *= self.factor[:, None]
        table[:, DATA] = 0.001 + self.late
        table[:, QUEUE] = 0.001 + self.queue
        return table

    def values(self, step: int, name: str) -> np.ndarray:
        return self.rows(step)[:, TIMINGS.index(name)]

    def report(self, step: int, rank: int) -> Report:
        return Report(1000.0 + step, step)


class FakeChannel:
    """Deviations made up: clean ones, and more of chosen features for chosen ranks."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.dice, self.count = np.random.default_rng(seed), ranks
        self.roles = np.zeros(ranks, dtype=np.int64)
        self.added: dict[tuple[int, int], float] = {}

    def deviations(self, step: int, *, from_mates: bool) -> np.ndarray:
        z = rows(self.dice, self.count)
        for (rank, feature), more in self.added.items():
            z[rank, feature] += more
        return np.clip(z, -20.0, 20.0).astype(np.float32)


class FakeJob:
    """A watch over made-up steps."""

    def __init__(self, watch: Watch, ranks: int, seed: int = 3) -> None:
        self.watch, self.matrix, self.channel = watch, FakeMatrix(ranks), FakeChannel(ranks, seed)
        self.roster = Roster(attempt=1, started_at=0.0)
        self.step = 0
        places = tuple(RankPlace(rank=rank, local_rank=rank % 8, node=f"n{rank // 8}") for rank in range(ranks))
        self.roster.observe(
            AttemptStarted(
                job="job", attempt=1, rank=-1, node="n0", sequence=0, at=1.0, world_size=ranks, places=places
            ),
            None,
        )

    def train(self, steps: int, *, busy: Sequence[str] = (), quiet: bool = True) -> list[object]:
        told: list[object] = []
        for _ in range(steps):
            seen = Seen(self.step, self.matrix, self.channel, self.roster, busy, quiet and not busy)
            self.watch.closed(seen)
            told += self.watch.take()
            self.step += 1
        return told

    def slow(self, rank: int, z: float = 8.0) -> None:
        for feature in COMPUTE:
            self.channel.added[rank, feature] = z
        self.matrix.factor[rank] = 1.2
