"""A hang where telemetry itself is lost or late: who only has not been heard is not who is waited for."""

from __future__ import annotations

import pytest

from detectors.clues import Source
from detectors.gpu_work import GpuWork
from detectors.roster import NodeState, RankState, Roster
from detectors.silence.hang import look_for_hang
from detectors.silence.liveness import LivenessConfig, look_for_lost_node
from ingest.events import Metrics

NOW, RANKS = 1_000.0, 8
CONFIG = LivenessConfig()


def standing(still: float, phase: str = "collective", *, gap: float = 0.3) -> Roster:
    """Eight ranks on four nodes, heard just now, that have done no step for `still` seconds."""
    since = NOW - still
    return Roster(
        attempt=1, started_at=0.0, world_size=RANKS, moved_at=since, changed_at=since, newest_step=50,
        newest_at=since, step_seconds=[0.3] * 20, longest_step=0.4, trained_since=1.0, gap_seconds=gap,
        nodes={f"node{node}": NodeState(node=f"node{node}", heard_at=NOW - 0.2) for node in range(RANKS // 2)},
        known={
            rank: RankState(
                rank=rank, node=f"node{rank // 2}", phase=phase, step=50, heard_at=NOW - 0.2,
                last=Source(rank=rank, node=f"node{rank // 2}", topic="metrics", sequence=50),
            )
            for rank in range(RANKS)
        },
    )  # fmt: skip


def named(roster: Roster) -> list[int | None] | None:
    clue = look_for_hang(NOW, roster, CONFIG)
    return None if clue is None else [culprit.rank for culprit in clue.culprits]


def test_a_rank_not_heard_during_an_evaluation_is_waited_for_by_nobody() -> None:
    roster = standing(4.0, "eval")
    roster.ranks[3].phase, roster.ranks[3].heard_at = "train", NOW - 4.0  # what it said last; the rest is late
    assert named(roster) is None
    for rank in roster.ranks.values():
        rank.phase = "train"
    assert named(roster) == [3]


@pytest.mark.parametrize(("usual", "silent", "found"), [([], 30.0, None), ([2.0], 9.0, None), ([2.0], 11.0, [3])])
def test_a_rank_last_heard_in_a_checkpoint_is_waited_for_three_times_as_long_as_one_takes(
    usual: list[float], silent: float, found: list[int] | None
) -> None:
    roster = standing(silent)
    roster.phase_seconds["checkpoint"] = usual
    roster.ranks[3].phase, roster.ranks[3].heard_at = "checkpoint", NOW - silent
    assert named(roster) == found


@pytest.mark.parametrize(("spoke", "lost"), [(0.2, False), (6.0, True)])
def test_a_node_whose_ranks_speak_is_not_lost_though_its_heartbeats_are(spoke: float, lost: bool) -> None:
    roster = standing(0.2, "train")
    roster.nodes["node2"].heard_at = NOW - 6.0
    roster.nodes["node2"].last = Source(rank=-1, node="node2", topic="events", sequence=9)
    for rank in (4, 5):
        roster.ranks[rank].heard_at = NOW - spoke
    assert (look_for_lost_node(NOW, roster, CONFIG) is not None) is lost


@pytest.mark.parametrize(
    ("gap", "silent", "found"), [(0.3, 2.5, [5]), (4.0, 5.0, None), (4.0, 6.5, [5]), (60.0, 11.0, [5])]
)
def test_silence_is_longer_than_the_gaps_of_this_jobs_telemetry(
    gap: float, silent: float, found: list[int] | None
) -> None:
    roster = standing(silent, gap=gap)
    roster.ranks[5].heard_at = NOW - silent
    roster.ranks[5].phase = "train"
    assert named(roster) == found


def test_the_longest_gap_is_learned_from_what_ranks_send_and_forgotten_after_a_while() -> None:
    roster = Roster(attempt=1, started_at=0.0)
    for sequence, at in enumerate((1.0, 2.0, 6.0, 7.0)):
        roster.observe(told(sequence, at), None)
    assert roster.gap_seconds == 4.0
    roster.observe(told(4, 610.0 + 1.0), None)
    roster.observe(told(5, 610.0 + 2.0), None)
    assert roster.gap_seconds == 604.0
    roster.observe(told(6, 1_300.0), None)
    roster.observe(told(7, 1_301.0), None)
    assert roster.gap_seconds == 688.0
    roster.ranks[0].stalled = "T"
    roster.observe(told(8, 3_000.0), None)
    assert roster.gap_seconds == 688.0


def told(sequence: int, at: float) -> Metrics:
    return Metrics(job="job", attempt=1, rank=0, node="node0", sequence=sequence, at=at, phase="train", step=sequence)


def test_spinning_gpus_name_who_has_not_come_and_not_who_has_not_been_heard() -> None:
    roster = standing(6.0, gap=4.0)
    for rank in roster.ranks.values():
        rank.gpu = spinning()
    roster.ranks[2].heard_at = NOW - 3.0  # late, and no more
    roster.ranks[6].phase, roster.ranks[6].gpu = "train", working()
    assert named(roster) == [6]
    roster.ranks[6].phase = "collective"  # only its GPU tells
    assert named(roster) == [6]
    roster.ranks[6].gpu = spinning()
    assert named(roster) == []


def spinning() -> GpuWork:
    return gpu(spinning=True)


def working() -> GpuWork:
    return gpu(spinning=False)


def gpu(*, spinning: bool) -> GpuWork:
    work = GpuWork()
    for second in range(60):
        work.sample(NOW - 70.0 + second, 0.95, 400.0, moving=True)
    for second in range(4):
        work.sample(NOW - 4.0 + second, 0.99, 120.0 if spinning else 390.0, moving=False)
    return work
