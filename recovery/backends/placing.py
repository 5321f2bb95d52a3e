"""Which nodes an attempt runs on: pure, and stable, so that surviving nodes keep their ranks and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ingest.events import RankPlace


def choose_nodes(last: Sequence[str], usable: Sequence[str], wanted: int) -> tuple[str, ...] | None:
    """`wanted` nodes in group-rank order, or None where there are too few.

    A node of the last attempt keeps its place; a fresh node takes the place of one that cannot be used. Where fewer
    are wanted than there were, those of the places that fall away are fresh too, after all others.
    """
    places = last[:wanted]
    can, before = frozenset(usable), frozenset(last)
    fallen = [node for node in last[wanted:] if node in can]
    fresh = iter([*(node for node in usable if node not in before), *fallen])
    chosen: list[str] = []
    for position in range(wanted):
        keeps = position < len(places) and places[position] in can
        node = places[position] if keeps else next(fresh, None)
        if node is None:
            return None
        chosen.append(node)
    return tuple(chosen)


def places_on(nodes: Iterable[str], per_node: int) -> tuple[RankPlace, ...]:
    """Ranks node by node, in group-rank order."""
    return tuple(
        RankPlace(rank=group * per_node + local, local_rank=local, node=node)
        for group, node in enumerate(nodes)
        for local in range(per_node)
    )
