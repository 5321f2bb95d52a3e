"""`Checkpointer.load` on another number of ranks from what memory holds: of this node, and of the nodes of the ring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.blocks import Shard
from ckpt_engine.errors import CheckpointDamaged, CheckpointNotFound, StateMismatch
from tests.ckpt_lab import Lab, engine_in_thread, eventually
from tests.ckpt_torch import NoShards, flip_memory, slot_of, together
from tests.reshard_lab import WHOLE, block, blocks, rank_of, save_all
from tests.ring_lab import backed_up, kept, ring_config, ring_of

NODES = ("n0", "n1", "n2")


def save_in_memory(
    labs: Sequence[Lab], states: list[dict[str, Any]], step: int = 10, attempt: int = 1, lost: int = -1
) -> None:
    """Rank after rank, spread over the nodes in blocks; all but the `lost` one."""
    for rank, state in enumerate(states):
        if rank == lost:
            continue
        lab = labs[rank * len(labs) // len(states)]
        checkpointer = rank_of(lab, rank, len(states), attempt)
        assert checkpointer.save(state, step).sealed.reached
        checkpointer.close()


def load_together(
    labs: Sequence[Lab], count: int, attempt: int, policy: Any = "newest", **more: Any
) -> list[tuple[int, str, dict[str, Any]]]:
    """(step, tier, state) of each rank; what they got is right."""

    def load(rank: int) -> tuple[int, str, dict[str, Any]]:
        into = blocks(count, step=0, **more)[rank]
        for tensor in (into["rows"].tensor, into["deep"]["columns"].tensor, into["same"]):
            tensor.zero_()
        checkpointer = rank_of(labs[rank * len(labs) // count], rank, count, attempt)
        try:
            report = checkpointer.load(into, policy)
        finally:
            checkpointer.close()
        assert report is not None
        assert report.verified
        assert torch.equal(into["rows"].tensor, block(rank, count).tensor)
        assert torch.equal(into["deep"]["columns"].tensor, block(rank, count, dim=1).tensor)
        assert torch.equal(into["same"], torch.ones(3))
        assert into["step"] == report.step
        return report.step, report.tier, into

    return together([lambda rank=rank: load(rank) for rank in range(count)])  # type: ignore[misc]


def load_one(lab: Lab, rank: int, count: int, attempt: int, into: dict[str, Any], policy: Any = "newest") -> str:
    """The tier that one rank by itself loads from; empty where there is nothing."""
    checkpointer = rank_of(lab, rank, count, attempt)
    try:
        report = checkpointer.load(into, policy)
    finally:
        checkpointer.close()
    return "" if report is None else report.tier


def rows(fill: float = 0.0) -> dict[str, Any]:
    """What a single rank wants: the whole, as one block."""
    return {"rows": Shard(torch.full((12, 10), fill), (12, 10), (0, 0))}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """An engine whose disk takes nothing."""
    with engine_in_thread(tmp_path, storage=NoShards()) as lab:
        yield lab


@contextlib.contextmanager
def ring(folder: Path, *names: str, storage: Any = None, **more: Any) -> Iterator[list[Lab]]:
    """Engines of a ring whose disks take nothing, if nothing else is said."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                engine_in_thread(folder, node=name, storage=storage or NoShards(), ring=ring_config(*NODES), **more)
            )
            for name in names
        ]


def test_four_ranks_become_two_and_then_three_out_of_one_nodes_memory(lab: Lab) -> None:
    save_in_memory([lab], blocks(4, step=10))
    assert [found[:2] for found in load_together([lab], 2, attempt=2)] == [(10, "memory")] * 2
    save_in_memory([lab], blocks(2, step=20), step=20, attempt=2)
    assert [found[:2] for found in load_together([lab], 3, attempt=3)] == [(20, "memory")] * 3
    assert [found[:2] for found in load_together([lab], 1, attempt=4)] == [(20, "memory")]


def test_a_step_by_its_number_needs_nobody_else(lab: Lab) -> None:
    save_in_memory([lab], blocks(4, step=10))
    into = {"rows": block(1, 2)}
    into["rows"].tensor.zero_()
    assert load_one(lab, 1, 2, 2, into, 10) == "memory"
    assert torch.equal(into["rows"].tensor, block(1, 2).tensor)


def test_a_step_of_which_memory_lacks_one_rank_is_not_offered(lab: Lab) -> None:
    save_in_memory([lab], blocks(4, step=10), lost=3)
    assert load_one(lab, 0, 1, 2, {"same": torch.zeros(3)}) == ""
    with pytest.raises(CheckpointNotFound):
        load_one(lab, 0, 1, 3, {"same": torch.zeros(3)}, 10)


def test_the_own_number_of_ranks_is_as_ever_and_the_newer_attempt_wins(lab: Lab) -> None:
    save_in_memory([lab], blocks(2, step=10))
    save_in_memory([lab], blocks(4, step=10), attempt=2)
    assert [found[:2] for found in load_together([lab], 2, attempt=3)] == [(10, "memory")] * 2
    save_in_memory([lab], blocks(2, step=30), step=30, attempt=3)
    assert [found[:2] for found in load_together([lab], 2, attempt=4)] == [(30, "memory")] * 2


def test_a_rejected_step_is_not_cut_from_memory_either(lab: Lab) -> None:
    save_in_memory([lab], blocks(4, step=10))
    lab.admin.reject_from(10, 1, "NaN")
    assert load_one(lab, 0, 1, 2, {"same": torch.zeros(3)}) == ""


def test_what_differs_and_does_not_say_why_is_refused_from_memory_too(lab: Lab) -> None:
    states = blocks(2, step=10)
    for rank, state in enumerate(states):
        state["random"] = torch.full((700,), rank, dtype=torch.uint8)
    save_in_memory([lab], states)
    into = {**rows(), "random": torch.zeros(700, dtype=torch.uint8)}
    with pytest.raises(StateMismatch, match="random is not the same on ranks 0 and 1 of the 2 that saved step 10"):
        load_one(lab, 0, 1, 2, into, 10)
    del into["random"]
    assert load_one(lab, 0, 1, 3, into, 10) == "memory"
    assert torch.equal(into["rows"].tensor, WHOLE)


@pytest.mark.parametrize("damaged", [0, 3])
def test_a_damaged_shard_of_another_rank_sends_the_load_to_the_disk(tmp_path: Path, damaged: int) -> None:
    """Rank 0 of 2 wants rows of ranks 0 and 1 of 4, and columns of all, so each of them is looked at."""
    with engine_in_thread(tmp_path) as lab:
        save_all(lab, blocks(4, step=10))
        flip_memory(lab, 10, rank=damaged, at=5)
        into = blocks(2, step=0)[0]
        into["rows"].tensor.zero_()
        assert load_one(lab, 0, 2, 2, into, 10) == "disk"
        assert torch.equal(into["rows"].tensor, block(0, 2).tensor)
        (event,) = eventually(lambda: lab.told("damaged", 10, "memory"))
        assert event.rank == damaged
        assert "step 10 in memory" in eventually(lambda: lab.told("fallback", 10))[0].reason


def test_where_memory_alone_has_it_and_it_is_damaged_nothing_is_written(lab: Lab) -> None:
    save_in_memory([lab], blocks(4, step=10))
    load_together([lab], 2, attempt=2)  # the checksums are known from here on
    flip_memory(lab, 10, rank=2, at=5)
    into = rows(7.0)
    with pytest.raises(CheckpointDamaged):
        load_one(lab, 0, 1, 3, into, 10)
    assert torch.equal(into["rows"].tensor, torch.full((12, 10), 7.0))


def test_after_the_loss_of_a_node_fewer_ranks_go_on_from_the_copies_of_its_neighbour(tmp_path: Path) -> None:
    with ring(tmp_path, "n0") as (first,):
        with ring(tmp_path, "n1") as (second,):
            save_in_memory([first, second], blocks(4, step=10))
            assert [backed_up(second, rank, 1, 10) for rank in (2, 3)] == ["", ""]
        assert {(home, rank) for home, rank, _ in kept(first)} == {("n1", 2), ("n1", 3)}
        assert [found[:2] for found in load_together([first], 2, attempt=2)] == [(10, "peer")] * 2


def test_ranks_on_a_new_node_fetch_what_they_cut_and_keep_none_of_it(tmp_path: Path) -> None:
    with ring(tmp_path, "n0", "n1") as (first, second):
        save_in_memory([first, second], blocks(4, step=10))
        with ring(tmp_path, "n2") as (third,):
            before = third.admin.status().memory_bytes
            assert [found[:2] for found in load_together([third], 3, attempt=2)] == [(10, "peer")] * 3
            assert third.admin.status().memory_bytes <= max(before, 3 * 2 * (1 << 20)), "given back"
            assert not [shard for shard in third.admin.status().shards if shard.world_size == 4]


def test_ranks_on_two_nodes_agree_on_what_both_can_have(tmp_path: Path) -> None:
    with ring(tmp_path, "n0", "n1") as labs:
        save_in_memory(labs, blocks(4, step=10))
        save_in_memory(labs, blocks(4, step=20), step=20, lost=3)  # rank 3 did not come to it
        assert [found[:2] for found in load_together(labs, 2, attempt=2)] == [(10, "peer")] * 2


def test_a_copy_that_decayed_is_passed_over_for_the_home_of_the_shard(tmp_path: Path) -> None:
    with ring(tmp_path, "n0", "n1") as (first, second):
        save_in_memory([first, second], blocks(4, step=10))
        assert [backed_up(second, rank, 1, 10) for rank in (2, 3)] == ["", ""]
        slot, header = next(entry for entry in ring_of(first).store.whole() if entry[1].rank == 3)
        assert slot.segment is not None
        slot.segment.view[header.payload_offset + 9] ^= 4
        assert [found[:2] for found in load_together([first], 2, attempt=2)] == [(10, "peer")] * 2
        assert eventually(lambda: first.told("damaged", 10, "peer"))[0].rank == 3
        assert ("n1", 3, 10) not in kept(first), "it is never handed out again"


def test_a_shard_that_changed_at_its_home_is_found_there_and_not_handed_out(tmp_path: Path) -> None:
    """In its values, which only the slot's header has a checksum of."""
    with ring(tmp_path, "n0", "n1") as (first, second):
        save_in_memory([second], blocks(2, step=10))
        for rank in (0, 1):
            assert backed_up(second, rank, 1, 10) == ""
        for lab in (first, second):  # the copy and the original
            slots = [(slot.segment, header) for slot, header in ring_of(lab).store.whole()]
            slots += [(slot.segment, header) for slot, header in [slot_of(lab, 10, 1)]] if lab is second else []
            for segment, header in slots:
                assert segment is not None
                if header.rank == 1:
                    segment.view[header.values_offset + 3] ^= 1
        with pytest.raises(CheckpointDamaged, match="n1 refused: the slot header's checksum does not match its bytes"):
            load_one(first, 0, 1, 2, {"same": torch.zeros(3)})
        assert eventually(lambda: second.told("damaged", 10, "memory"))


def test_without_room_for_a_foreign_shard_the_disk_is_read(tmp_path: Path) -> None:
    small = {"memory_bytes_max": 4096, "ring": ring_config(*NODES, memory_bytes_max=1)}
    with (
        engine_in_thread(tmp_path, node="n0", ring=ring_config(*NODES)) as first,
        engine_in_thread(tmp_path, node="n2", **small) as third,
    ):
        save_all(first, blocks(2, step=10))
        into = rows()
        assert load_one(third, 0, 1, 2, into, 10) == "disk"
        assert torch.equal(into["rows"].tensor, WHOLE)
        assert third.admin.status().memory_bytes == 0
