"""Which findings of the rank channel are open, about whom, and what closes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from detectors.ranks.excess import DATA, DELAY, OPTIMIZER, WAIT
from detectors.ranks.finding import Finding, Kind, Subject, describe, subject_key
from detectors.ranks.hysteresis import Bools
from detectors.ranks.node_view import NodeView
from detectors.steps import Ints, StepMatrix

KIND_OF: dict[str, Kind] = {
    "compute": "straggler", "optimizer": "straggler", "data": "data_stall", "link": "link_degraded",
    "delay": "contended_node",
}  # fmt: skip
METRIC_OF = {"data": DATA, "optimizer": OPTIMIZER, "link": WAIT, "delay": DELAY}


class Opened(msgspec.Struct):
    """One finding that is open, and what closes it."""

    name: str  # of the evidence: compute, optimizer, data, link, delay
    column: int  # of the rank; of the node where `whole_node`
    whole_node: bool = False
    counted: bool = False  # by evidence on several scales; else by the rules of few peers
    scale: int = 0
    threshold: float = 0.0
    calm: int = 0
    since: int = 0  # steps scored when it opened

    @property
    def kind(self) -> Kind:
        return KIND_OF[self.name]


class Seen(NamedTuple):
    """What a finding is described from."""

    matrix: StepMatrix
    roles: Ints
    scored: Sequence[int]  # the newest scored steps, oldest first
    metric: str  # of the computation
    steps: int = 0  # scored so far
    odd: Sequence[int] = ()  # columns of ranks that were odd from the beginning
    waits: bool = False  # collective waits are worth a word


class OpenFindings:
    """At most `open_max` at a time; one of a kind for each rank, none for a rank whose node has it."""

    def __init__(self, ranks: list[int], nodes: list[str], view: NodeView, open_max: int) -> None:
        self._ranks, self._nodes, self._view, self._open_max = ranks, nodes, view, open_max
        self._open: dict[str, Opened] = {}

    def __len__(self) -> int:
        return len(self._open)

    def items(self) -> list[tuple[str, Opened]]:
        return list(self._open.items())

    def columns(self, *, whole_node: bool, before: int) -> list[int]:
        """Of the ranks, or of the nodes, that something has been open about since `before` so many steps."""
        mine = [opened for opened in self._open.values() if opened.whole_node == whole_node]
        return [opened.column for opened in mine if opened.since <= before]

    def covers(self, kind: Kind, column: int) -> bool:
        """The rank, or its node as a whole, is open already."""
        node = self._view.names[int(self._view.of_rank[column])]
        return _key(kind, self._ranks[column], node) in self._open or _key(kind, None, node) in self._open

    def open_rank(self, opened: Opened, mask: Bools, seen: Seen) -> list[Finding]:
        """`mask`: which of the newest scored steps exceeded. Nothing of a rank that computes hardly longer than its
        peers: it has lost a lead, or was quick by chance while its normal was learned, and nobody waits for it."""
        key = _key(opened.kind, self._ranks[opened.column], "")
        if key in self._open or len(self._open) >= self._open_max:
            return []
        found = self._describe(opened, np.array([opened.column]), mask, seen)
        if opened.name == "compute" and found.value < (1.0 + opened.threshold / 2) * found.peers_median:
            return []
        opened.since = seen.steps
        self._open[key] = opened
        return [found]

    def open_node(self, opened: Opened, mask: Bools, seen: Seen) -> list[Finding]:
        """What is open about the node's ranks is over: it is the node's."""
        key = _key(opened.kind, None, self._view.names[opened.column])
        if key in self._open or len(self._open) >= self._open_max:
            return []
        members, found = self._view.members(opened.column), []
        for column in members.tolist():
            found += self.end(_key(opened.kind, self._ranks[column], ""))
        opened.since = seen.steps
        self._open[key] = opened
        return [*found, self._describe(opened, members, mask, seen)]

    def end(self, key: str) -> list[Finding]:
        """It is over; nothing where it is not open."""
        opened = self._open.pop(key, None)
        return [] if opened is None else [Finding(kind=opened.kind, subject=key.partition("/")[2], open=False)]

    def to_state(self) -> dict[str, Any]:
        return {key: msgspec.to_builtins(opened) for key, opened in self._open.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._open = msgspec.convert(state, dict[str, Opened])

    def _describe(self, opened: Opened, members: Ints, mask: Bools, seen: Seen) -> Finding:
        """Its peers are all others of its role."""
        peers = np.flatnonzero(np.isin(seen.roles, seen.roles[members]))
        peers = peers[~np.isin(peers, members)]
        rank = None if opened.whole_node else self._ranks[opened.column]
        from_start = not opened.whole_node and opened.column in seen.odd
        subject = Subject(rank, self._nodes[int(members[0])], members, peers, from_start)
        metric = METRIC_OF.get(opened.name, seen.metric)
        waits = seen.waits and opened.kind == "straggler"
        return describe(seen.matrix, opened.kind, metric, subject, seen.scored, mask, waits=waits)


def _key(kind: Kind, rank: int | None, node: str) -> str:
    return f"{kind}/{subject_key(kind, rank, node)}"
