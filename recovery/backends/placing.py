"""Which nodes an attempt runs on: pure, and stable, so that surviving nodes keep their ranks and memory."""

from __future__ import annotations

from collections.abc import Sequence


def choose_nodes(last: Sequence[str], usable: Sequence[str], wanted: int) -> tuple[str, ...] | None:
    """`wanted` nodes in group-rank order, or None where there are too few.

    A node of the last attempt keeps its place; a fresh node takes the place of one that cannot be used.
    """
    fresh = iter([node for node in usable if node not in last])
    chosen: list[str] = []
    for position in range(wanted):
        keeps = position < len(last) and last[position] in usable
        node = last[position] if keeps else next(fresh, None)
        if node is None:
            return None
        chosen.append(node)
    return tuple(chosen)
