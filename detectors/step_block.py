"""One step of many ranks as arrays: what as many messages of one step each would tell at the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ingest.events import Metrics

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBlock:
    """`values[i, j]` is the sample `names[j]` of rank `ranks[i]`, NaN where it has none; samples are finite.

    `ranks` ascend. `at` is when all of it had been told, `ended_at` when each rank had ended the step, UTC seconds;
    `sequence` counts each rank's messages as a message's stamp does. `nodes` is where each rank runs.
    """

    job: str
    attempt: int
    step: int
    at: float
    ranks: Ints
    nodes: tuple[str, ...]
    sequence: Ints
    ended_at: Floats
    names: tuple[str, ...]
    values: Floats

    def messages(self) -> Iterator[Metrics]:
        """The same as a message for each rank, in the order of the ranks."""
        columns = [
            [None if value != value else value for value in column] for column in self.values.T.tolist()
        ]  # fmt: skip
        ended_at, sequences = self.ended_at.tolist(), self.sequence.tolist()
        for row, rank in enumerate(self.ranks.tolist()):
            yield Metrics(
                job=self.job, attempt=self.attempt, rank=rank, node=self.nodes[row], sequence=sequences[row],
                at=self.at, phase="train", step=self.step, steps=(self.step,), ended_at=(ended_at[row],),
                columns={name: (column[row],) for name, column in zip(self.names, columns, strict=True)},
            )  # fmt: skip
