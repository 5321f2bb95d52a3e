"""What the judge makes of conditions and clocks: one incident per cause, causes before crashes, ties between nodes."""

from __future__ import annotations

import json

import pytest

from detectors.clock_skew import HEARTBEATS_MIN, Clocks
from detectors.clues import Clue, Condition, Place, Source
from detectors.judge.judge import Judge, JudgeConfig
from detectors.roster import RankState, Roster
from detectors.verdict import Culprit, Evidence, FaultClass, Verdict
from ingest.events import NodeHeartbeat

T0 = 1_000.0


def roster(world: int = 4, per_node: int = 2) -> Roster:
    known = Roster(attempt=1, started_at=0.0, world_size=world)
    for rank in range(world):
        node = f"node{rank // per_node}"
        known.ranks[rank] = RankState(rank=rank, node=node, step=7)
        known.node(node)
    return known


def source(rank: int, sequence: int = 0, topic: str = "events") -> Source:
    return Source(rank=rank, node=f"node{rank // 2}", topic=topic, sequence=sequence)


def condition(fault_class: FaultClass, rank: int, at: float, *, sequence: int = 0, summary: str = "") -> Condition:
    text = summary or f"Rank {rank} has {fault_class}."
    evidence = Evidence(kind="metric", text=text, at=at, rank=rank, metric="m", value=1.0)
    return Condition(
        key=f"{fault_class}/{rank}", fault_class=fault_class, culprits=(Culprit(rank=rank, node=f"node{rank // 2}"),),
        victims=3, onset_at=at, onset_step=None, summary=text, evidence=(evidence,),
        source=source(rank, sequence, "metrics"), detector="test",
    )  # fmt: skip


def killed(rank: int, at: float, *, signal: int | None = 9, fault_class: FaultClass = "rank_lost") -> Clue:
    text = f"Rank {rank} on node{rank // 2} ended."
    evidence = Evidence(kind="event", text=text, at=at, rank=rank)
    return Clue(
        kind="exit", role="root", fault_class=fault_class, at=at, rank=rank, node=f"node{rank // 2}",
        source=source(rank), evidence=(evidence,), summary=text, signal=signal, step=7,
    )  # fmt: skip


def said(judge: Judge, *clues: Clue, at: float = T0 + 10.0, known: Roster | None = None) -> Verdict:
    ranks = known or roster()
    for clue in clues:
        if clue.kind == "exit":
            ranks.ranks[clue.rank or 0].exited_at = clue.at
    verdicts = judge.hear(at, list(clues), ranks)
    assert verdicts
    return verdicts[-1]


def test_what_comes_back_within_a_minute_is_the_same_incident_and_later_it_is_a_new_one() -> None:
    judge = Judge("job", 1)
    (first,) = judge.begin(T0, condition("straggler", 3, T0))
    (closed,) = judge.end(T0 + 10, "straggler/3")
    (again,) = judge.begin(T0 + 69, condition("straggler", 3, T0 + 69, sequence=5, summary="Slow once more."))
    assert (closed.status, again.status) == ("closed", "open")
    assert (again.verdict_id, again.revision) == (first.verdict_id, 2)
    assert (again.summary, again.onset_at) == ("Slow once more.", first.onset_at)
    judge.end(T0 + 80, "straggler/3")
    assert judge.tick(T0 + 141) == []
    (other,) = judge.begin(T0 + 142, condition("straggler", 3, T0 + 142, sequence=9))
    assert (other.verdict_id != first.verdict_id, other.revision) == (True, 0)


def test_the_other_rank_is_another_incident() -> None:
    judge = Judge("job", 1)
    (first,) = judge.begin(T0, condition("straggler", 3, T0))
    judge.end(T0 + 10, "straggler/3")
    (other,) = judge.begin(T0 + 20, condition("straggler", 2, T0 + 20, sequence=3))
    assert other.verdict_id != first.verdict_id


def test_what_comes_and_goes_stays_open_until_it_has_been_quiet_for_a_minute() -> None:
    config = JudgeConfig(flaps_max=2)
    judge, at = Judge("job", 1, config), T0
    for _ in range(3):
        assert len(judge.begin(at, condition("throttled", 1, at))) == 1
        at += 10
        ended = judge.end(at, "throttled/1")
        at += 10
    assert ended == []
    judge = Judge.from_state("job", 1, json.loads(json.dumps(judge.to_state())), config)
    assert judge.begin(at, condition("throttled", 1, at)) == []  # it never was over
    assert judge.end(at + 5, "throttled/1") == []
    assert judge.tick(at + 64) == []
    assert [verdict.status for verdict in judge.tick(at + 66)] == ["closed"]


def test_memory_that_grew_before_a_sigkill_makes_the_memory_killer_suspected() -> None:
    judge = Judge("job", 1)
    judge.begin(T0, condition("memory_growth", 2, T0, summary="The memory of rank 2 grows by 12 MiB/s."))
    verdict = said(judge, killed(2, T0 + 9))
    assert (verdict.fault_class, verdict.advice) == ("host_oom", "restart_in_place")
    assert verdict.culprits == (Culprit(rank=2, node="node1", confidence=0.7),)
    assert "memory killer is suspected: The memory of rank 2 grows by 12 MiB/s." in verdict.summary
    assert [entry.metric for entry in verdict.evidence] == ["", "m"]


@pytest.mark.parametrize(("rank", "signal", "ended"), [(1, 9, None), (2, 11, None), (2, 9, T0 - 100.0)])
def test_another_rank_another_signal_or_long_ago_suspects_nothing(rank: int, signal: int, ended: float | None) -> None:
    judge = Judge("job", 1)
    judge.begin(T0 - 200.0, condition("memory_growth", 2, T0 - 200.0))
    if ended is not None:
        judge.end(ended, "memory_growth/2")
    verdict = said(judge, killed(rank, T0 + 9, signal=signal))
    assert verdict.fault_class == "rank_lost"


def test_a_gpu_with_memory_errors_is_why_its_rank_died_of_a_signal() -> None:
    judge = Judge("job", 1)
    judge.begin(T0, condition("gpu_ecc", 2, T0))
    verdict = said(judge, killed(2, T0 + 9, signal=6))
    assert (verdict.fault_class, verdict.advice) == ("gpu_ecc", "restart_exclude_node")
    assert verdict.culprits == (Culprit(node="node1", confidence=0.9),)


def test_other_conditions_of_the_culprit_are_named_beside_the_cause() -> None:
    judge = Judge("job", 1)
    judge.begin(T0, condition("throttled", 2, T0, summary="GPU 2 is throttled."))
    verdict = said(judge, killed(2, T0 + 9))
    assert verdict.fault_class == "rank_lost"
    assert verdict.summary.endswith("Before it: GPU 2 is throttled.")


def test_a_straggler_whose_gpu_is_throttled_says_why_it_may_be_slow() -> None:
    judge = Judge("job", 1)
    judge.begin(T0, condition("throttled", 2, T0, summary="GPU 2 is throttled."))
    (slow,) = judge.begin(T0 + 5, condition("straggler", 2, T0 + 5, sequence=3))
    assert slow.summary.endswith("The cause may be: GPU 2 is throttled.")
    assert len(slow.evidence) == 2
    (other,) = judge.begin(T0 + 5, condition("straggler", 3, T0 + 5, sequence=4))
    assert "throttled" not in other.summary


def clocks(**delays: float) -> Clocks:
    known = Clocks()
    for node, delay in delays.items():
        for beat in range(20):
            known.note(node, delay + 0.01 * (beat % 3))
    return known


def test_a_node_whose_clock_runs_behind_is_set_right_before_causes_are_ordered() -> None:
    known = roster(world=8)
    known.clocks = clocks(node0=0.02, node1=5.02, node2=0.02, node3=0.02)  # node1 is five seconds behind
    first = killed(0, T0, signal=None, fault_class="user_error")
    second = killed(2, T0 - 2.0, signal=None, fault_class="user_error")  # by its own clock it was first
    verdict = said(Judge("job", 1), first, second, known=known)
    assert verdict.culprits[0].rank == 0
    assert known.clocks.offset("node1") == 5.0
    unknown = said(Judge("job", 1), first, second, known=roster(world=8))
    assert unknown.culprits[0].rank == 2


def test_two_nodes_within_what_their_clocks_agree_have_an_unknown_culprit() -> None:
    known = roster()
    known.clocks = clocks(node0=0.02, node1=0.02)
    first = killed(0, T0, signal=None, fault_class="user_error")
    verdict = said(Judge("job", 1), first, killed(2, T0 + 0.03, signal=None, fault_class="oom"), known=known)
    assert verdict.culprits == ()
    assert "who was first is unknown" in verdict.summary
    same = said(Judge("job", 1), first, killed(1, T0 + 0.03, signal=None, fault_class="oom"), known=known)
    assert same.culprits[0].rank == 0  # one node has one clock
    later = said(Judge("job", 1), first, killed(2, T0 + 0.3, signal=None, fault_class="oom"), known=known)
    assert later.culprits[0].rank == 0


def test_a_tie_is_decided_by_the_heavier_evidence() -> None:
    known = roster()
    known.clocks = clocks(node0=0.02, node1=0.02)
    exception = killed(0, T0, signal=None, fault_class="user_error")
    verdict = said(Judge("job", 1), exception, killed(2, T0 + 0.03), known=known)
    assert (verdict.fault_class, verdict.culprits[0].rank) == ("rank_lost", 2)


def test_a_clock_is_not_spoken_of_before_it_is_known_and_noise_is_no_skew() -> None:
    known = Clocks()
    for _ in range(HEARTBEATS_MIN - 1):
        known.note("node0", 3.0)
        known.note("node1", 0.0)
    assert (known.offset("node0"), known.uncertainty("node0", "node1")) == (0.0, 0.0)
    noisy = clocks(node0=0.02, node1=0.05)
    assert (noisy.offset("node0"), noisy.offset("node1")) == (0.0, 0.0)
    assert noisy.uncertainty("node0", "node1") >= 0.05


def test_a_backlog_after_an_outage_does_not_move_the_floor() -> None:
    known = clocks(node0=0.02, node1=0.02)
    for late in range(100):
        known.note("node1", 30.0 - 0.2 * late)
    assert known.offset("node1") == 0.0


def test_a_heartbeats_delay_is_the_buss_time_less_the_nodes_and_without_it_nothing_is_known() -> None:
    def heard(delays: dict[str, float] | None) -> Clocks:
        known = roster()
        for beat in range(20):
            for node in ("node0", "node1"):
                at = T0 + 0.2 * beat
                message = NodeHeartbeat(job="job", attempt=1, rank=-1, node=node, sequence=beat, at=at)
                known.observe(message, Place("events", 0, beat, None if delays is None else at + delays[node]))
        return known.clocks

    assert heard(None).offset("node1") == 0.0
    known = heard({"node0": 0.0, "node1": 4.0})
    assert (known.offset("node0"), known.offset("node1")) == (-2.0, 2.0)
