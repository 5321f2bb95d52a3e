"""What any placement of copies must hold, for all rings: never at home, never twice, spread, and fair."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.ring_placement import successors

RINGS = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=12, unique=True)
FACTORS = st.integers(1, 5)
FEW = settings(max_examples=40)


@FEW
@given(RINGS, FACTORS, st.data())
def test_copies_are_on_other_nodes_each_once_and_as_many_as_there_can_be(
    nodes: list[str], replication: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(nodes))
    groups = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from("xyz")))
    chosen = successors(nodes, me, replication, groups)
    assert me not in chosen
    assert len(set(chosen)) == len(chosen) == min(replication, len(nodes) - 1)
    assert set(chosen) <= set(nodes)


@FEW
@given(RINGS, FACTORS, st.integers(0, 11), st.data())
def test_where_the_ring_is_cut_open_does_not_matter(
    nodes: list[str], replication: int, cut: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(nodes))
    groups = data.draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from("xyz")))
    at = cut % len(nodes)
    turned = nodes[at:] + nodes[:at]
    assert successors(turned, me, replication, groups) == successors(nodes, me, replication, groups)


@FEW
@given(RINGS, FACTORS)
def test_every_node_keeps_as_much_as_every_other(nodes: list[str], replication: int) -> None:
    kept = Counter(target for node in nodes for target in successors(nodes, node, replication))
    assert set(kept.values()) <= {min(replication, len(nodes) - 1)}


@FEW
@given(RINGS, FACTORS, st.data())
def test_a_group_is_used_twice_only_where_no_other_is_left(
    nodes: list[str], replication: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(nodes))
    groups = data.draw(st.fixed_dictionaries({node: st.sampled_from("wxyz") for node in nodes}))
    chosen = successors(nodes, me, replication, groups)
    used = {groups[me], *(groups[node] for node in chosen)}
    there = set(groups.values())
    assert len(used) == min(len(there), len({groups[me]}) + len(chosen)), "as many groups as copies allow"


@FEW
@given(RINGS, FACTORS, st.data())
def test_a_node_that_goes_moves_only_the_copies_it_kept(
    nodes: list[str], replication: int, data: st.DataObject
) -> None:
    me, gone = data.draw(st.sampled_from(nodes)), data.draw(st.sampled_from(nodes))
    if gone == me:
        return
    before = successors(nodes, me, replication)
    after = successors([node for node in nodes if node != gone], me, replication)
    assert [node for node in before if node != gone] == list(after[: len(before) - (gone in before)])


def test_the_next_nodes_of_the_ring_are_taken() -> None:
    assert successors(["a", "b", "c", "d"], "c", 1) == ("d",)
    assert successors(["a", "b", "c", "d"], "c", 2) == ("d", "a")


def test_the_next_node_of_another_rack_comes_before_a_neighbour_of_ours() -> None:
    racks = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}
    assert successors(["a", "b", "c", "d"], "a", 1, racks) == ("c",)
    assert successors(["a", "b", "c", "d"], "a", 2, racks) == ("c", "d"), "a third rack there is not"


def test_a_node_that_the_list_does_not_know_begins_with_the_first() -> None:
    assert successors(["a", "b"], "new", 1) == ("a",)


def test_alone_there_is_nobody() -> None:
    assert successors(["a"], "a", 3) == ()
    assert successors([], "a", 1) == ()
