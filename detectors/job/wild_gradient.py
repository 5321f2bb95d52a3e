"""One rank's gradient that is far beyond all others': its own before the reduction, and everybody's afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from detectors.clues import six_digits
from detectors.steps import Floats


@dataclass(frozen=True, slots=True)
class WildConfig:
    """How far is far: ranks see different samples, and experts different loads."""

    ratio_min: float = 20.0  # over the largest of the others
    usual_factor: float = 3.0  # its logarithm over the largest of the last steps
    steps_min: int = 20  # before that nothing is usual
    steps_max: int = 200


class WildGradient(msgspec.Struct, frozen=True):
    """The norm of `rank`'s own gradient, and the largest of the others'."""

    rank: int
    norm: float
    others: float


def wild_gradient(
    norms: Floats | None, ranks: Sequence[int], widest: list[float], config: WildConfig
) -> WildGradient | None:
    """The one rank whose norm stands alone in this step. `widest` is the memory of what is usual, and is kept up."""
    if norms is None:
        return None
    told = np.flatnonzero(np.isfinite(norms) & (norms > 0.0))
    if len(told) < 2:
        return None
    others = norms[told]
    place = len(told) - 1 - int(np.argmax(others[::-1]))  # of two as large, the later one
    others[place] = -np.inf
    first, second = told[place], told[len(told) - 1 - int(np.argmax(others[::-1]))]
    above = math.log(norms[first]) - math.log(norms[second])
    known = len(widest) >= config.steps_min
    if known and above > max(math.log(config.ratio_min), config.usual_factor * max(widest)):
        return WildGradient(ranks[int(first)], six_digits(float(norms[first])), six_digits(float(norms[second])))
    widest.append(round(above, 6))
    del widest[: -config.steps_max]
    return None
