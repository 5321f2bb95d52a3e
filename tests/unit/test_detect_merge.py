"""The merge: one order by producer time, whatever the arrival; late and repeated messages."""

from __future__ import annotations

import pytest

from detectors.clues import Place
from detectors.merge import Merge, MergeConfig
from ingest.events import Metrics, NodeHeartbeat


def metrics(at: float, rank: int = 0, sequence: int = 0, node: str = "node0") -> Metrics:
    return Metrics(job="j", attempt=1, rank=rank, node=node, sequence=sequence, at=at, phase="train", step=1)


def beat(at: float, node: str, sequence: int = 0) -> NodeHeartbeat:
    return NodeHeartbeat(job="j", attempt=1, rank=-1, node=node, sequence=sequence, at=at)


def test_nothing_is_released_before_a_heartbeat_promises_that_all_is_there() -> None:
    merge = Merge()
    merge.put(metrics(10.0))
    assert merge.take() == []
    merge.put(beat(10.2, "node0"))
    assert merge.take() == []  # 10.2 less the margin is before 10.0
    merge.put(beat(10.4, "node0", 1))
    assert [merged.message.at for merged in merge.take()] == [10.0]


def test_the_slowest_node_holds_the_order_back_until_it_has_been_silent_for_two_seconds() -> None:
    merge = Merge()
    merge.put(beat(10.0, "node0"))
    merge.put(beat(10.0, "node1"))
    merge.put(metrics(10.5))
    merge.put(beat(11.9, "node0", 1))
    assert not [merged for merged in merge.take() if isinstance(merged.message, Metrics)]
    merge.put(beat(12.1, "node0", 2))
    assert [merged.message.at for merged in merge.take() if isinstance(merged.message, Metrics)] == [10.5]


def test_a_message_older_than_what_was_released_comes_out_at_once_and_says_late() -> None:
    merge = Merge()
    merge.put(beat(20.0, "node0"))
    merge.take()
    merge.put(metrics(15.0))
    assert [(merged.message.at, merged.late) for merged in merge.take()] == [(15.0, True)]
    assert merge.late == 1


def test_a_redelivered_message_is_dropped_and_a_gap_in_the_sequence_is_not_waited_for_forever() -> None:
    merge = Merge(MergeConfig(gap_max=8))
    for sequence in (0, 1, 2, 2, 1, 0):
        merge.put(metrics(1.0 + sequence, sequence=sequence))
    assert merge.duplicates == 3
    for sequence in range(10, 60, 2):
        merge.put(metrics(100.0 + sequence, sequence=sequence))
    assert len(merge.to_state()["streams"]["1/0/node0/metrics"]["ahead"]) <= 60  # bounded by what is held
    before = merge.duplicates
    merge.put(metrics(158.0, sequence=58))
    assert merge.duplicates == before + 1


def test_a_topic_that_is_not_read_to_its_end_holds_the_order_back() -> None:
    merge = Merge()
    merge.put(metrics(10.0))
    merge.put(beat(30.0, "node0"))
    assert not merge.take(lagging=["metrics"])
    merge.put(metrics(12.0, sequence=1))
    assert [merged.message.at for merged in merge.take(lagging=["metrics"])] == [10.0]
    assert not merge.take(lagging=["logs"])  # nothing of it has been seen: anything may come
    assert [merged.message.at for merged in merge.take()] == [
        12.0,
    ]


def test_when_all_are_silent_wall_time_releases_what_is_held() -> None:
    merge = Merge()
    merge.put(metrics(10.0))
    merge.advance(12.9)
    assert not merge.take()
    merge.advance(13.1)
    assert [merged.message.at for merged in merge.take()] == [10.0]
    merge.put(metrics(50.0, sequence=1))
    merge.advance(50.1)  # somebody speaks: wall time says nothing
    assert not merge.take()


def test_more_than_the_bound_is_released_oldest_first() -> None:
    merge = Merge(MergeConfig(messages_max=3))
    for sequence in range(5):
        merge.put(metrics(10.0 + sequence, sequence=sequence))
    assert [merged.message.at for merged in merge.take()] == [10.0, 11.0]


def test_a_merge_restored_from_its_state_takes_held_messages_again_and_released_ones_not() -> None:
    merge = Merge()
    for sequence in range(6):
        merge.put(metrics(10.0 + sequence, sequence=sequence), Place("metrics", 0, 100 + sequence))
    merge.put(beat(13.0, "node0"), Place("events", 0, 7))
    released = [merged.message.at for merged in merge.take() if isinstance(merged.message, Metrics)]
    assert merge.held_offsets() == {("metrics", 0): 103, ("events", 0): 7}
    again = Merge.from_state(merge.to_state())
    for sequence in range(6):  # the bus delivers from somewhere before
        again.put(metrics(10.0 + sequence, sequence=sequence), Place("metrics", 0, 100 + sequence))
    again.put(beat(13.0, "node0"), Place("events", 0, 7))
    again.put(beat(20.0, "node0", 1))
    rest = [merged.message.at for merged in again.take() if isinstance(merged.message, Metrics)]
    assert released + rest == [10.0 + sequence for sequence in range(6)]
    assert again.duplicates == 3


def test_a_launchers_and_an_engines_counters_for_one_rank_do_not_hide_each_other() -> None:
    from ingest.events import CheckpointEvent, RankExited

    merge = Merge()
    merge.put(
        CheckpointEvent(
            job="j", attempt=1, rank=0, node="node0", sequence=3, at=1.0, state="sealed", step=1, tier="memory"
        )
    )
    merge.put(RankExited(job="j", attempt=1, rank=0, node="node0", sequence=3, at=1.1, signal=9))
    assert merge.duplicates == 0


def told(merge: Merge, node: str, times: list[float], appended_at: float | None = None) -> None:
    """Heartbeats of a node, taken by the bus at once or all at one time."""
    for at in times:
        merge.put(beat(at, node, round(at * 10)), appended_at=at if appended_at is None else appended_at)


def after_an_outage() -> Merge:
    """Two nodes up to 10.0, then the bus is away until 18.0, when node0 brings what it had kept."""
    merge = Merge()
    for node in ("node0", "node1"):
        told(merge, node, [9.6, 9.8, 10.0])
    merge.take()
    told(merge, "node0", [10.2, 14.0, 18.0], appended_at=18.0)
    merge.advance(18.0)
    merge.take()
    return merge


def test_after_an_outage_of_the_bus_a_node_that_is_not_back_yet_is_waited_for() -> None:
    merge = after_an_outage()
    assert merge.watermark == 9.75  # node1 is behind by 8 s, and not silent
    merge.put(metrics(12.0, rank=2, node="node1"), appended_at=19.5)
    told(merge, "node1", [10.2, 14.0, 18.0, 19.4], appended_at=19.5)
    told(merge, "node0", [19.4])
    merge.advance(19.5)
    assert [entry.late for entry in merge.take() if isinstance(entry.message, Metrics)] == [False]
    assert merge.watermark == 19.4 - 0.25


def test_so_long_after_an_outage_a_node_that_says_nothing_is_silent() -> None:
    merge = after_an_outage()
    told(merge, "node0", [28.0])
    merge.advance(28.1)
    merge.take()
    assert merge.watermark == 27.75


def test_a_job_that_comes_back_after_an_outage_is_not_hurried_by_the_wall_clock() -> None:
    merge = after_an_outage()
    merge.advance(27.9)
    merge.take()
    assert merge.watermark == 9.75
    merge.advance(28.1)
    assert merge.watermark == 28.1 - 3.0


def test_who_catches_up_with_an_old_outage_waits_as_one_did_then() -> None:
    merge = after_an_outage()
    merge.advance(5_000.0, {"events"})
    merge.take({"events"})
    assert merge.watermark == 9.75
    restored = Merge.from_state(merge.to_state())
    restored.advance(5_000.0, {"events"})
    restored.take({"events"})
    assert restored.watermark == 9.75


def test_a_node_that_was_silent_before_the_outage_is_not_waited_for() -> None:
    merge = Merge()
    told(merge, "node1", [5.0])
    told(merge, "node0", [9.8, 10.0])
    merge.take()
    told(merge, "node0", [10.2, 18.0], appended_at=18.0)
    merge.advance(18.0)
    merge.take()
    assert merge.watermark == 17.75


def test_a_clock_that_is_wrong_and_a_node_that_falls_silent_are_no_outage() -> None:
    merge = Merge()
    for at in (10.0, 10.2, 10.4):
        merge.put(beat(at - 60.0, "node1", round(at * 10)), appended_at=at)
    merge.advance(15.0)
    assert merge.watermark == pytest.approx(15.0 - 60.0 - 3.0)
    told(merge, "node0", [10.0, 10.2, 10.4, 17.0, 17.2])
    merge.advance(17.2)
    merge.take()
    assert merge.watermark == 17.2 - 0.25


def test_sequences_that_lie_far_apart_cost_no_memory_when_what_is_held_is_saved() -> None:
    merge = Merge(MergeConfig(gap_max=8))
    sequences = [index * 10**12 for index in range(40)]
    for index, sequence in enumerate(sequences):
        merge.put(metrics(10.0 + index, sequence=sequence))
    again = Merge.from_state(merge.to_state())
    for index, sequence in enumerate(sequences):
        again.put(metrics(10.0 + index, sequence=sequence))
    again.put(metrics(10.0, sequence=sequences[0]))
    assert again.duplicates == 1
    again.put(beat(100.0, "node0"))
    assert len(again.take()) == 40


def test_a_rank_whose_words_come_late_for_long_is_no_outage_and_hides_no_lost_node() -> None:
    merge = Merge()
    for tick in range(150):
        at = 10.0 + 0.2 * tick
        for node in ("node0", "node1") if tick < 60 else ("node0",):
            merge.put(beat(at, node, tick), appended_at=at)
        merge.put(metrics(at - (4.0 if tick > 20 else 0.0), sequence=tick), appended_at=at)
        merge.advance(at)
        merge.take()
    assert merge.watermark == at - 0.25


@pytest.mark.parametrize("behind", [20.0, -20.0])
def test_a_job_whose_clocks_are_not_ours_is_neither_hurried_nor_waited_for(behind: float) -> None:
    merge = Merge()
    for tick in range(50):
        at = 100.0 + 0.2 * tick
        merge.put(beat(at - behind, "node0", tick), appended_at=at)
        merge.advance(at + 0.1)
        merge.take()
        assert merge.watermark == at - behind - 0.25
    merge.advance(at + 8.0)
    assert merge.watermark == pytest.approx(at - behind + 5.0)
