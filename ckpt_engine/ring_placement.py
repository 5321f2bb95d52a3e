"""Which nodes hold the copies of a node's shards: the next ones in a ring, of other fault groups where there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def successors(
    nodes: Sequence[str], me: str, replication: int, groups: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The `replication` nodes after `me`, fewer where there are fewer; the same wherever the ring is cut open.

    A node whose group already has a copy (or the original) comes only after all others: what takes a group
    away, a rack or a switch, should take one copy. A node without a group is a group of its own.
    """
    ring = _after(list(dict.fromkeys(nodes)), me)
    group_of = groups or {}
    taken = {group_of.get(me, f"\0{me}")}
    apart: list[str] = []
    for node in ring:
        group = group_of.get(node, f"\0{node}")
        if group not in taken and len(apart) < replication:
            taken.add(group)
            apart.append(node)
    beside = [node for node in ring if node not in apart]
    mine = group_of.get(me)
    beside.sort(key=lambda node: mine is not None and group_of.get(node) == mine)  # stable: still in the ring's order
    return tuple((apart + beside)[: max(replication, 0)])


def _after(nodes: list[str], me: str) -> list[str]:
    if me not in nodes:
        return nodes
    at = nodes.index(me)
    return nodes[at + 1 :] + nodes[:at]
