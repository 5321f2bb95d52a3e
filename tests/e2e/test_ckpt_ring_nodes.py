"""Four nodes with a network of their own: one cut off in mid-transfer, one replaced, two neighbours lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ckpt_lab import eventually
from tests.ring_nodes import Network, Node, network

NODES = ("n0", "n1", "n2", "n3")


def weights(rank: int, step: int, size_bytes: int = 300_000) -> bytes:
    return random.Random(rank * 1000 + step).randbytes(size_bytes)


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(*NODES) as made:
        yield made


@contextmanager
def cluster(net: Network, folder: Path, **ring: Any) -> Iterator[dict[str, Node]]:
    """An engine on each node; a test may put others in their places."""
    nodes = {name: Node(net, folder, name, NODES, **ring) for name in NODES}
    try:
        for node in nodes.values():
            node.ready()
        yield nodes
    finally:
        for node in nodes.values():
            node.end()


def save_everywhere(nodes: dict[str, Node], step: int) -> None:
    """Rank k on node k; returns when the neighbours have it and the step is complete on disk."""
    for rank, name in enumerate(NODES):
        with nodes[name].rank(rank) as rawrank:
            rawrank.save(step, weights(rank, step))
            assert rawrank.durable(step) == ""
    for rank, name in enumerate(NODES):
        request = {"op": "wait", "rank": rank, "attempt": 1, "step": step, "what": "peer", "timeout_seconds": 20.0}
        with nodes[name].rank(rank, attempt=1) as rawrank:
            assert rawrank.link.ask_aside(request, 20.0) == {"settled": True, "reason": ""}
    eventually(lambda: any(node.told("complete", step, "disk") for node in nodes.values()), "a complete step")


def load(node: Node, rank: int, step: int) -> tuple[str, bool]:
    """The tier that rank gets its step from, and whether the bytes are right (on disk they are not looked at here)."""
    with node.rank(rank, attempt=2) as rawrank:
        answer = rawrank.load(step)
        return answer["tier"], answer.get("payload", weights(rank, step)) == weights(rank, step)


def test_a_node_that_is_cut_off_in_mid_transfer_holds_no_half_shard_and_holds_up_no_save(
    net: Network, tmp_path: Path
) -> None:
    with cluster(net, tmp_path, bytes_per_second_max=1_500_000) as nodes:
        first, second, third = nodes["n0"], nodes["n1"], nodes["n2"]
        with first.rank(0) as rank:
            rank.save(1, weights(0, 1))
            eventually(lambda: second.kept() == [(0, 1)], "the first copy")
            before = second.admin.status().peer_memory_bytes
            rank.save(2, weights(0, 2, 6_000_000))  # four seconds on their way
            eventually(lambda: second.admin.status().peer_memory_bytes > before, "the second copy to begin")
            try:
                net.cut("n1")
                assert second.kept() == [(0, 1)], "half of a shard is none"
                rank.save(3, weights(0, 3))
                rank.save(4, weights(0, 4))
                assert "n1" in eventually(lambda: first.told("failed"))[0]
                eventually(lambda: third.kept() == [(0, 4)], "the node behind it to take its place")
                assert second.kept() == [(0, 1)], "what was whole before is whole still"
            finally:
                net.join("n1")
            eventually(lambda: (0, 4) in second.kept(), "the ring to be as it was")


@pytest.mark.parametrize("name", ["n1", "n9"])
def test_a_node_is_replaced_and_the_ring_repaired(net: Network, tmp_path: Path, name: str) -> None:
    """By one of its own name, or by one that no engine has heard of: shards are found by rank and step."""
    with cluster(net, tmp_path) as nodes:
        save_everywhere(nodes, 5)
        assert [node.kept() for node in nodes.values()] == [[(3, 5)], [(0, 5)], [(1, 5)], [(2, 5)]]
        nodes["n1"].end()
        new = nodes["n1"] = Node(net, tmp_path, "n1", NODES, name).ready()
        assert load(new, 1, 5) == ("peer", True)
        if name == "n1":
            eventually(lambda: (0, 5) in new.kept(), "its predecessor to send again")
        else:
            eventually(lambda: (3, 5) in new.kept(), "the node before it in the ring to send to it")
            eventually(lambda: (0, 5) in nodes["n2"].kept(), "the copies of the lost node to move on")
            eventually(lambda: (1, 5) in nodes["n0"].kept(), "the shards of the new node to be copied")


@pytest.mark.parametrize(("replication", "tier"), [(1, "disk"), (2, "peer")])
def test_two_neighbours_are_lost(net: Network, tmp_path: Path, replication: int, tier: str) -> None:
    with cluster(net, tmp_path, replication=replication) as nodes:
        save_everywhere(nodes, 5)
        for name in ("n1", "n2"):
            nodes[name].end()
        for name in ("n1", "n2"):
            nodes[name] = Node(net, tmp_path, name, NODES, replication=replication)
        assert load(nodes["n1"].ready(), 1, 5) == (tier, True)
        assert load(nodes["n2"].ready(), 2, 5) == ("peer", True), "its neighbour n3 lives"
        eventually(lambda: (0, 5) in nodes["n1"].kept(), "the ring to be repaired")
        eventually(lambda: (2, 5) in nodes["n3"].kept(), "and the copies that were never lost to stay")
