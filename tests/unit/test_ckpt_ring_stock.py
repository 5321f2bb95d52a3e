"""Memory that is ready before a lost node's ranks come, and slots that an engine fills itself: always counted."""

from __future__ import annotations

from pathlib import Path

from ckpt_engine.budget import MemoryBudget
from ckpt_engine.clock import HostClock
from ckpt_engine.ring_stock import SLACK_BYTES_MIN, Stock
from ckpt_engine.slots import SlotTable
from tests.ckpt_lab import Lab, RawRank, eventually
from tests.ring_lab import backed_up, ring_engine, ring_engines

PAYLOAD = bytes(range(256)) * 1000
LARGE = PAYLOAD * 8


def make_stock(bytes_max: int) -> tuple[Stock, MemoryBudget]:
    budget = MemoryBudget(bytes_max)
    return Stock(SlotTable("job", budget, HostClock()), budget), budget


def test_what_is_ready_is_counted_and_whoever_takes_it_has_it_counted() -> None:
    stock, budget = make_stock(1 << 30)
    stock.fill([5 << 20, 3 << 20])
    counted = budget.used_bytes
    assert counted >= 8 << 20
    segment = stock.take(5 << 20)
    assert segment is not None
    assert segment.size_bytes == 6 << 20, "the smallest that is large enough"
    assert budget.used_bytes == counted
    stock.clear()
    assert budget.used_bytes == segment.size_bytes
    segment.discard()


def test_nothing_is_made_ready_where_it_would_take_the_room_of_slots() -> None:
    size = 8 << 20
    stock, budget = make_stock(3 * (size + SLACK_BYTES_MIN) - 1)
    stock.fill([size])
    assert budget.used_bytes == 0
    stock, budget = make_stock(3 * (size + SLACK_BYTES_MIN))
    stock.fill([size])
    assert budget.used_bytes == size + SLACK_BYTES_MIN


def test_a_segment_that_is_far_too_large_is_not_given_away() -> None:
    stock, _ = make_stock(1 << 30)
    stock.fill([8 << 20])
    assert stock.take(1 << 20) is None
    assert stock.take(10 << 20) is None
    stock.clear()


def fetched(lab: Lab, step: int, attempt: int = 2) -> tuple[str, bytes]:
    with RawRank(lab.socket, attempt=attempt, world_size=2) as rank:
        answer = rank.load(step)
        return answer["tier"], answer["payload"]


def test_a_new_node_has_memory_ready_uses_it_and_lets_the_rest_go_with_the_first_save(tmp_path: Path) -> None:
    nodes = ("n0", "n1", "n2")
    with ring_engines(tmp_path, *nodes[:2]) as (first, _):
        for rank in (0, 1):
            with RawRank(first.socket, rank=rank, world_size=2) as rawrank:
                rawrank.save(7, LARGE)
        assert backed_up(first, 0, 1, 7) == backed_up(first, 1, 1, 7) == ""
        with ring_engine(tmp_path, "n2", *nodes) as third:
            ready = 2 * (len(LARGE) + SLACK_BYTES_MIN)
            eventually(lambda: third.admin.status().memory_bytes >= ready, "memory for both ranks")
            before = third.admin.status().memory_bytes
            assert fetched(third, 7) == ("peer", LARGE)
            assert third.admin.status().memory_bytes == before, "what was ready has become the slot"
            with RawRank(third.socket, attempt=2, world_size=2) as rank:
                rank.save(8, PAYLOAD)
            assert third.engine.ring is not None
            third.engine.ring._puller.make_ready()
            assert third.engine.ring._puller.stock._ready == []


def test_a_rank_whose_slots_both_have_memory_gets_the_shard_in_the_older_one(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1") as (first, second):
        with RawRank(first.socket, world_size=2) as rank:
            rank.save(7, PAYLOAD)
        assert backed_up(first, 0, 1, 7) == ""
        with RawRank(second.socket, world_size=2, attempt=2) as rank:
            for step in (3, 4):
                rank.save(step, PAYLOAD[:1000])
        assert fetched(second, 7, attempt=3) == ("peer", PAYLOAD)
        assert [(shard.attempt, shard.step) for shard in second.admin.status().shards] == [(2, 4), (1, 7)]


def test_without_room_the_peer_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    with (
        ring_engine(tmp_path, "n0", "n0", "n1") as first,
        ring_engine(tmp_path, "n1", "n0", "n1", engine={"memory_bytes_max": 100_000}) as second,
    ):
        with RawRank(first.socket, world_size=2) as rank:
            rank.save(7, PAYLOAD)
        with RawRank(second.socket, attempt=2, world_size=2) as rank:
            assert rank.load(7)["tier"] == ""
        assert "memory_bytes_max" in eventually(lambda: second.told("failed", 7, "peer"))[0].reason
        assert second.admin.status().memory_bytes == 0
