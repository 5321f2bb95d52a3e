"""Whom to name of several ranks: each of them, or their node where it has more than one among them."""

from __future__ import annotations

from collections.abc import Iterable

from detectors.roster import Roster
from detectors.verdict import Culprit

CULPRITS_MAX = 8


def whom(ranks: Iterable[int], roster: Roster, confidence: float, *, whole: bool = False) -> tuple[Culprit, ...]:
    """`ranks` as culprits, at most `CULPRITS_MAX`, in the order of their numbers.

    In a job of several nodes a node stands for two or more of its ranks (`whole`: only where all of its ranks are
    among them).
    """
    of_node: dict[str | None, list[int]] = {}
    for rank in sorted(ranks):
        of_node.setdefault(roster.node_of(rank), []).append(rank)
    several = len({state.node for state in roster.ranks.values()}) > 1
    named: list[Culprit] = []
    for node, mine in of_node.items():
        enough = len(roster.ranks_of(node or "")) if whole else 2
        if several and len(mine) > 1 and len(mine) >= enough:
            named.append(Culprit(node=node, confidence=confidence))
        else:
            named += [Culprit(rank=rank, node=node, confidence=confidence) for rank in mine]
    return tuple(named[:CULPRITS_MAX])


def names_of(culprits: Iterable[Culprit], shown_max: int = 4) -> str:
    """`rank 3 on node1 and node node2`, in words."""
    all_of_them = list(culprits)
    words = [
        f"rank {culprit.rank} on {culprit.node}" if culprit.rank is not None else f"node {culprit.node}"
        for culprit in all_of_them[:shown_max]
    ]
    more = len(all_of_them) - shown_max
    return " and ".join([*words, f"{more} more"] if more > 0 else words)
