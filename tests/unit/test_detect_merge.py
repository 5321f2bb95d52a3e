"""The merge: one order by producer time, whatever the arrival; late and repeated messages."""

from __future__ import annotations

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
