"""A finding of the rank channel in numbers: who, which steps, its own median and its peers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from detectors.ranks.excess import WAIT
from detectors.ranks.hysteresis import Bools
from detectors.steps import Floats, Ints, StepMatrix

STEPS_LOOKED_AT = 16  # the newest of a finding's steps, behind its medians

Kind = Literal["straggler", "data_stall", "contended_node", "link_degraded"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rank or a node begins or ceases to be odd."""

    kind: Kind
    subject: str  # what the condition's key says: the rank's number, or the node
    open: bool
    rank: int | None = None  # None: the node as a whole
    node: str = ""
    steps: tuple[int, ...] = ()  # where it exceeded, oldest first
    of_steps: int = 0
    metric: str = ""
    value: float = 0.0
    peers_median: float = 0.0
    excess: float = 0.0
    from_start: bool = False  # it was odd before its normal could be learned
    wait: float | None = None  # its collective wait in those steps, and its peers': a culprit's is the shorter
    wait_peers: float | None = None


class Subject(NamedTuple):
    """Whom a finding is about: columns of the step matrix, and those it was held against."""

    rank: int | None  # None: the node as a whole
    node: str
    members: Ints
    peers: Ints
    from_start: bool = False


def describe(
    matrix: StepMatrix, kind: Kind, metric: str, subject: Subject, scored: Sequence[int], mask: Bools, *, waits: bool
) -> Finding:
    """The finding that opens. `mask`: which of the newest `scored` steps exceeded; `waits`: what its collective wait
    was beside its peers' is part of it."""
    recent = scored[-len(mask) :]
    hits = [step for step, hit in zip(recent, mask[-len(recent) :], strict=True) if hit]
    steps = [step for step in hits if matrix.values(step, metric) is not None] or hits[-1:]  # others are forgotten
    value, beside = _medians(matrix, steps, metric, subject)
    wait, wait_peers = _medians(matrix, steps, WAIT, subject) if waits else (np.nan, np.nan)
    told = bool(np.isfinite(wait) and np.isfinite(wait_peers))
    return Finding(
        kind=kind, subject=subject_key(kind, subject.rank, subject.node), open=True, rank=subject.rank,
        node=subject.node, steps=tuple(steps), of_steps=len(recent), metric=metric, value=value, peers_median=beside,
        excess=value / beside - 1.0 if beside > 0.0 else 0.0, from_start=subject.from_start,
        wait=wait if told else None, wait_peers=wait_peers if told else None,
    )  # fmt: skip


def subject_key(kind: Kind, rank: int | None, node: str) -> str:
    """The subject's part of a condition's key: a node may be called `3`, as a rank may."""
    if rank is not None:
        return str(rank)
    return node if kind == "contended_node" else f"node/{node}"


def _medians(matrix: StepMatrix, steps: list[int], metric: str, subject: Subject) -> tuple[float, float]:
    """Medians over the newest of these steps of the subject's ranks and of its peers."""
    own, others = [], []
    for step in steps[-STEPS_LOOKED_AT:]:
        values = matrix.values(step, metric)
        if values is not None:
            own.append(_median(values[subject.members]))
            others.append(_median(values[subject.peers]))
    return _median(np.array(own)), _median(np.array(others))


def _median(values: Floats) -> float:
    """Median of the finite values; NaN when there are none (numpy would warn)."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
