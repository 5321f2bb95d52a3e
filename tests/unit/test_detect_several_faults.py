"""Two faults at once, and faults that look like one another: who is named, who is not, and what is no fault at all."""

from __future__ import annotations

import msgspec

from detectors.clues import Clue
from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job_detector import JobDetector
from detectors.judge.judge import Judge
from detectors.logs.book import LogBook
from detectors.logs.rule_book import RuleBook
from detectors.roster import Roster
from detectors.silence.hang import look_for_hang
from detectors.silence.liveness import LivenessConfig
from detectors.verdict import Verdict
from ingest.events import DeviceMetrics, LogLine, Logs, Metrics, RankStalled
from tests.synthetic_job import SyntheticJob, detect
from tests.unit.test_judge_conditions import T0, clocks, killed, roster, said
from tests.unit.test_stack_groups import LINE

PLAIN = DetectorConfig(ensemble=EnsembleConfig(on=False))
LINK_DOWN = "mlx5_core 0000:3b:00.0 ens1f0np0: Link down"


def verdicts_of(job: SyntheticJob) -> list[Verdict]:
    return detect(job.ordered(), PLAIN)


def names(verdict: Verdict) -> list[tuple[int | None, str | None]]:
    return [(culprit.rank, culprit.node) for culprit in verdict.culprits]


def trained(world: int = 8, steps: int = 40) -> SyntheticJob:
    return SyntheticJob(seed=1, world=world).start().train(steps)


def stopped(*ranks: int, apart: float = 0.0) -> list[Verdict]:
    job = trained()
    for number, rank in enumerate(ranks):
        at = job.at + 0.25 + apart * number
        job.say(RankStalled(**job.stamp(rank, "events", at), state="T", since=round(at - 0.2, 6)))
    return verdicts_of(job.idle(8.0, "collective", job.step, silent=ranks))


def test_ranks_stopped_on_two_nodes_at_once_are_both_named() -> None:
    verdict = stopped(1, 4)[-1]
    assert (verdict.fault_class, names(verdict), verdict.victims) == ("hang", [(1, "node0"), (4, "node2")], 6)
    assert verdict.summary == "Rank 1 on node0 and rank 4 on node2 hang in step 40: their processes are stopped."


def test_a_node_whose_ranks_are_all_stopped_is_named_beside_the_rank_of_another() -> None:
    verdict = stopped(2, 3, 6)[-1]
    assert (names(verdict), verdict.victims) == ([(None, "node1"), (6, "node3")], 5)
    assert names(stopped(2, 3)[-1]) == [(None, "node1")]


def test_a_second_rank_that_is_stopped_a_little_later_joins_the_verdict() -> None:
    said_of_them = stopped(1, 4, apart=1.5)
    assert len({verdict.verdict_id for verdict in said_of_them}) == 1
    assert names(said_of_them[0]) == [(1, "node0")]
    assert names(said_of_them[-1]) == [(1, "node0"), (4, "node2")]


def test_a_second_node_that_falls_silent_a_little_later_joins_the_verdict() -> None:
    job = trained().idle(0.2, "train", 40)
    job.silent_nodes.add("node1")
    job.idle(1.0, "train", 40)
    job.silent_nodes.add("node3")
    verdict = verdicts_of(job.idle(12.0, "train", 40))[-1]
    assert (verdict.fault_class, names(verdict)) == ("node_lost", [(None, "node1"), (None, "node3")])


def test_ranks_of_several_nodes_killed_in_one_blow_are_all_named_and_a_node_for_two_of_its_ranks() -> None:
    verdict = said(Judge("job", 1), killed(0, T0), killed(1, T0 + 0.1), killed(5, T0 + 0.2), known=roster(world=8))
    assert names(verdict) == [(None, "node0"), (5, "node2")]
    assert "node node0 and rank 5 on node2" in verdict.summary


def test_one_blow_that_takes_all_ranks_of_all_nodes_blames_none_of_them() -> None:
    verdict = said(Judge("job", 1), *(killed(rank, T0 + 0.01 * rank, fault_class="storage_error") for rank in range(4)))
    assert (verdict.fault_class, verdict.culprits, verdict.victims) == ("storage_error", (), 0)
    assert verdict.summary.startswith("All 4 ranks ended")


def test_ends_without_a_word_whose_order_no_clock_tells_blame_nobody() -> None:
    known = roster()
    known.clocks = clocks(node0=0.02, node1=0.02)

    def aborted(*ends: tuple[int, float]) -> Verdict:
        clues = [msgspec.structs.replace(killed(rank, at, signal=6), role="weak") for rank, at in ends]
        judge = Judge("job", 1)
        assert judge.hear(T0 + 0.5, clues, known) == []
        (verdict,) = judge.hear(T0 + 3.0, [], known)
        return verdict

    both = aborted((0, T0), (2, T0 + 0.02))
    assert (both.fault_class, both.culprits) == ("rank_lost", ())
    assert "who was first is unknown" in both.summary
    assert names(aborted((0, T0), (2, T0 + 0.4))) == [(0, "node0")]


def kernel(text: str, node: str, at: float, known: Roster) -> Clue:
    line = LogLine(at=at, stream="kernel", text=text)
    message = Logs(job="job", attempt=1, rank=-1, node=node, sequence=0, at=at, lines=(line,))
    clues, _ = LogBook(RuleBook.shipped()).read(message, None, known)
    return clues[0]


def test_a_kernels_line_that_its_node_survived_is_not_to_blame_for_what_befalls_another() -> None:
    known = roster()
    judge = Judge("job", 1)
    assert judge.hear(T0, [kernel(LINK_DOWN, "node1", T0, known)], known) == []
    for rank in known.ranks.values():
        rank.step += 40
    verdict = said(judge, killed(0, T0 + 30.0, signal=None, fault_class="user_error"), at=T0 + 31.0, known=known)
    assert (verdict.fault_class, names(verdict)) == ("user_error", [(0, "node0")])


def test_a_kernels_line_after_which_nobody_went_on_is_to_blame_and_one_that_was_survived_explains_an_end_on_its_node(
) -> None:  # fmt: skip
    known = roster()
    down = kernel(LINK_DOWN, "node1", T0, known)
    verdict = said(Judge("job", 1), down, killed(0, T0 + 20.0, signal=None, fault_class="unknown"), known=known)
    assert (verdict.fault_class, names(verdict)) == ("network_error", [(None, "node1")])
    locked = kernel("watchdog: BUG: soft lockup - CPU#37 stuck for 22s! [python3:4242]", "node1", T0, known)
    for rank in known.ranks.values():
        rank.step += 3
    verdict = said(Judge("job", 1), locked, killed(2, T0 + 9.0), known=known)
    assert (verdict.fault_class, names(verdict)) == ("node_lost", [(None, "node1")])


def test_the_rank_that_said_nothing_outranks_one_that_is_a_collective_behind_those_who_spoke() -> None:
    job = trained(world=4)
    for rank in (0, 1, 2):
        job.log(rank, LINE.format(rank=rank, number=1579 if rank == 1 else 1580), after=0.05 * rank)
        job.exits(rank, after=0.5 + 0.05 * rank, signal=6)
    verdict = verdicts_of(job.idle(6.0, "train", 40))[-1]
    assert (verdict.fault_class, names(verdict)) == ("collective_timeout", [(3, "node1")])


def roster_in(phase: str, *, behind: tuple[int, ...] = ()) -> Roster:
    """Eight ranks of four nodes that have trained and stand still in `phase` since second 20."""
    known = Roster(attempt=1, started_at=0.0)
    for step in range(20):
        for rank in range(8):
            tell(known, rank, float(step), "train", step)
    for rank in range(8):
        tell(known, rank, 20.0, phase, 19 if rank in behind else 20)
    return known


def tell(known: Roster, rank: int, at: float, phase: str, step: int) -> None:
    stamp = {"job": "job", "attempt": 1, "rank": rank, "node": f"node{rank // 2}", "sequence": int(at), "at": at}
    known.observe(Metrics(**stamp, phase=phase, step=step, steps=(step,), ended_at=(at,)), None)


def test_two_ranks_of_one_node_behind_all_others_are_the_node_and_two_of_two_nodes_are_nobody() -> None:
    clue = look_for_hang(90.0, roster_in("collective", behind=(4, 5)), LivenessConfig())
    assert clue is not None
    assert [(culprit.rank, culprit.node) for culprit in clue.culprits or ()] == [(None, "node2")]
    clue = look_for_hang(90.0, roster_in("collective", behind=(3, 5)), LivenessConfig())
    assert clue is not None
    assert clue.culprits == ()


def test_gpus_that_wait_for_a_checkpoint_are_no_hang() -> None:
    known = roster_in("collective")
    for rank in range(8):
        for second in range(40):
            power = (640.0,) if second < 20 else (95.0,)
            stamp = {"job": "job", "attempt": 1, "rank": rank, "node": f"node{rank // 2}", "sequence": second}
            columns = {"hw.gpu.utilization": (1.0,), "hw.gpu.power": power}
            told = {"device": f"gpu:{rank}", "sampled_at": (second,), "columns": columns}
            known.observe(DeviceMetrics(**stamp, at=second + 0.5, **told), None)
    assert look_for_hang(40.0, known, LivenessConfig()) is not None
    tell(known, 0, 20.5, "checkpoint", 20)
    assert look_for_hang(40.0, known, LivenessConfig()) is None


def test_a_long_checkpoint_does_not_lengthen_how_long_training_may_stand_still() -> None:
    known = roster_in("collective")
    for rank in range(8):
        tell(known, rank, 20.5, "checkpoint", 20)
    for rank in range(8):
        tell(known, rank, 420.0, "train", 21)
    assert known.longest_step < 2.0
    assert look_for_hang(490.0, known, LivenessConfig()) is not None


def test_the_first_steps_of_an_attempt_may_compile_for_as_long_as_its_start_may_take() -> None:
    known = Roster(attempt=1, started_at=0.0)
    for step in range(3):
        for rank in range(8):
            tell(known, rank, 100.0 + step, "collective", step)
    assert look_for_hang(250.0, known, LivenessConfig()) is None
    assert look_for_hang(403.0, known, LivenessConfig()) is not None


def test_a_warning_that_is_not_said_again_ends_after_an_hour_and_one_that_is_goes_on() -> None:
    known, book, judge = roster(), LogBook(RuleBook.shipped()), Judge("job", 1)
    text = "NVRM: Xid (PCI:0000:c5:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 17 (0x04084507)"

    def say(at: float) -> list[Verdict]:
        line = LogLine(at=at, stream="kernel", text=text)
        message = Logs(job="job", attempt=1, rank=-1, node="node1", sequence=int(at), at=at, lines=(line,))
        _, warnings = book.read(message, None, known)
        return [verdict for warning in warnings for verdict in judge.begin(at, warning)]

    (opened,) = say(T0)
    assert say(T0 + 3_000.0) == []
    assert judge.tick(T0 + 6_000.0) == []
    (closed,) = judge.tick(T0 + 6_601.0)
    assert (closed.verdict_id, closed.status) == (opened.verdict_id, "closed")
    assert say(T0 + 9_000.0)[0].verdict_id != opened.verdict_id
    state = judge.to_state()
    assert Judge.from_state("job", 1, state).tick(T0 + 13_000.0)[0].status == "closed"


def test_a_node_with_a_gpu_at_the_same_place_of_two_domains_names_the_right_one() -> None:
    known = roster()
    known.ranks[0].pci_address, known.ranks[1].pci_address = "0008:01:00.0", "00000009:01:00.0"
    clue = kernel("NVRM: Xid (PCI:0009:01:00): 79, pid=1, GPU has fallen off the bus.", "node0", T0, known)
    assert clue.evidence[0].rank == 1


def test_a_hang_that_is_open_while_the_detector_is_restarted_still_grows() -> None:
    job = trained()
    for number, rank in enumerate((1, 4)):
        at = job.at + 0.25 + 1.5 * number
        job.say(RankStalled(**job.stamp(rank, "events", at), state="T", since=round(at - 0.2, 6)))
    messages = job.idle(8.0, "collective", job.step, silent=(1, 4)).ordered()
    detector, heard, restarted = JobDetector("job", PLAIN), [], False
    for message in messages:
        detector.observe(message)
        heard += detector.advance(message.at - 0.01)
        if heard and not restarted:
            restarted, detector = True, JobDetector.from_state("job", PLAIN, None, *detector.to_state())
    assert names(heard[-1]) == [(1, "node0"), (4, "node2")]


def test_what_a_node_survived_long_before_gives_way_to_what_befell_it_just_before() -> None:
    known = roster()
    mount = kernel("nfs: server 10.0.0.16 not responding, still trying", "node1", T0 - 60.0, known)
    for rank in known.ranks.values():
        rank.step += 40
    oom = kernel("Out of memory: Killed process 4141 (python3) total-vm:53312244kB", "node1", T0 - 0.5, known)
    verdict = said(Judge("job", 1), mount, oom, killed(2, T0), known=known)
    assert (verdict.fault_class, names(verdict)) == ("host_oom", [(None, "node1")])
    own = killed(2, T0, signal=None, fault_class="user_error")
    verdict = said(Judge("job", 1), mount, own, known=known)
    assert (verdict.fault_class, names(verdict)) == ("user_error", [(2, "node1")])


def test_a_rank_that_writes_the_result_when_all_others_are_done_is_no_hang_and_one_that_waits_for_them_is() -> None:
    for phase, hangs in (("train", False), ("collective", True)):
        known = roster_in(phase)
        for rank in range(1, 8):
            tell(known, rank, 20.2, "finished", 20)
        assert (look_for_hang(100.0, known, LivenessConfig()) is not None) == hangs
        assert look_for_hang(700.0, known, LivenessConfig()) is not None


def test_a_worker_that_died_is_no_lost_peer_though_python_says_connection_reset() -> None:
    frames = (
        '[rank2]:   File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 86, in get_connection',
        "[rank2]:     c = Client(address, authkey=process.current_process().authkey)",
    )
    reset = ("ConnectionResetError", "[Errno 104] Connection reset by peer")
    job = trained(world=4).exits(2, after=0.1, code=1, error=reset, last_lines=frames)
    verdict = verdicts_of(job.peers_fall(after=0.2).idle(3.0, "collective", job.step))[-1]
    assert (verdict.fault_class, names(verdict)) == ("rank_lost", [(2, "node1")])
    job = trained(world=4).exits(2, after=0.1, code=1, error=reset)
    assert verdicts_of(job.peers_fall(after=0.2).idle(3.0, "collective", job.step))[-1].fault_class == "unknown"


def test_steps_told_just_after_a_rank_stopped_do_not_mean_that_the_others_go_on() -> None:
    job = trained(world=4)
    job.say(RankStalled(**job.stamp(1, "events", job.at + 0.05), state="T", since=job.at - 0.2))
    for rank in (0, 2, 3):  # quick steps that were on their way
        steps = tuple(range(job.step, job.step + 6))
        job.say(
            Metrics(
                **job.stamp(rank, "metrics", job.at + 0.1), phase="collective", step=steps[-1] + 1, steps=steps,
                ended_at=(job.at,) * 6, columns={"train.step.duration": (0.02,) * 6},
            )
        )  # fmt: skip
    job.step += 6
    told = verdicts_of(job.idle(8.0, "collective", job.step, silent=[1]))
    assert {verdict.fault_class for verdict in told} == {"hang"}
