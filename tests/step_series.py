"""Numbers of whole steps, given to a channel as the job detector gives them: one message for each rank and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from detectors.channel import Channel, Ended, Told
from detectors.clues import Condition, Place
from detectors.roster import RankState, Roster
from detectors.steps import StepMatrix
from ingest.events import Metrics

Floats = npt.NDArray[np.float64]
START_AT = 1000.0


class Series:
    """A job of `ranks` ranks, `per_node` on a node, whose steps a test writes down."""

    def __init__(self, channel: Channel, ranks: int = 4, per_node: int = 1) -> None:
        self.channel = channel
        self.roster = Roster(attempt=1, started_at=START_AT, world_size=ranks)
        for rank in range(ranks):
            self.roster.ranks[rank] = RankState(rank=rank, node=f"node{rank // per_node}")
        self.matrix = StepMatrix(list(range(ranks)))
        self.step, self.at = 0, START_AT
        self.told: list[tuple[int, Told]] = []

    def feed(self, columns: Mapping[str, Floats], phases: Mapping[int, str] | None = None) -> Series:
        """`columns[name]` is steps, or steps × ranks; `phases` by step, counted from the first one fed."""
        count = len(next(iter(columns.values())))
        wide = {
            name: np.broadcast_to(values.reshape(count, -1), (count, len(self.matrix.ranks))).tolist()
            for name, values in columns.items()
        }
        for row in range(count):
            self.at += float(np.nanmax(wide.get("train.step.duration", [[1.0]] * count)[row]))
            phase = (phases or {}).get(row, "train")
            for rank in self.matrix.ranks:
                message = Metrics(
                    job="job", attempt=1, rank=rank, node=f"node{rank}", sequence=self.step, at=self.at,
                    phase=phase, step=self.step, steps=(self.step,), ended_at=(self.at,),
                    columns={name: (_plain(values[row][rank]),) for name, values in wide.items()},
                )  # fmt: skip
                place = Place("metrics", 0, self.step * len(self.matrix.ranks) + rank)
                self.matrix.add(message, place)
                self.channel.observe(message, place, self.roster)
            for step in self.matrix.close(self.at, set(self.matrix.ranks)):
                self.channel.closed(step, self.matrix, self.roster)
                self.told += [(step, told) for told in self.channel.look(self.at, self.roster)]
            self.step += 1
        return self

    @property
    def conditions(self) -> list[Condition]:
        return [told for _, told in self.told if isinstance(told, Condition)]

    @property
    def classes(self) -> list[str]:
        return [condition.fault_class for condition in self.conditions]

    def said_at(self, fault_class: str) -> int:
        """The step at whose end the first condition of this class was said."""
        return next(s for s, told in self.told if isinstance(told, Condition) and told.fault_class == fault_class)

    def ended_at(self, key: str) -> int:
        return next(step for step, told in self.told if isinstance(told, Ended) and told.key == key)


def step_parts(
    own: Floats, data: Floats | float = 0.001, transfer: Floats | float = 0.1, optimizer: float = 0.05
) -> dict[str, Floats]:
    """The columns of a synchronous step, from own compute (steps × ranks): who is early waits for the last."""
    own = own if own.ndim == 2 else own[:, None]
    late = np.broadcast_to(np.asarray(data, dtype=float), own.shape) if np.ndim(data) < 2 else np.asarray(data)
    arrived = own + late
    last = arrived.max(axis=1, keepdims=True)
    moved = np.asarray(transfer, dtype=float).reshape(-1, 1)
    return {
        "train.step.duration": (last + moved + optimizer) + 0.0 * own,
        "train.data.duration": late,
        "train.compute.duration": own,
        "train.compute.own": own,
        "train.collective.wait": last - arrived + moved,
        "train.optimizer.duration": np.full(own.shape, optimizer),
    }


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def noise(seed: int, shape: int | Sequence[int], sigma: float) -> Floats:
    """Log-normal factors around 1."""
    return np.asarray(np.exp(np.random.default_rng(seed).normal(0.0, sigma, shape)))
