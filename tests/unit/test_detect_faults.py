"""Every kind of fault on a synthetic job: the right class, the right culprit, once; nothing at all on clean runs."""

from __future__ import annotations

import math

import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.verdict import Verdict
from ingest.events import Metrics
from tests.synthetic_job import GLOO, SyntheticJob, detect

PLAIN = DetectorConfig(ensemble=EnsembleConfig(on=False))
SEEDS = range(3)


def trained(seed: int, steps: int = 60) -> SyntheticJob:
    return SyntheticJob(seed=seed).start().train(steps)


def verdicts_of(job: SyntheticJob, until: float | None = None) -> list[Verdict]:
    return detect(job.ordered(), PLAIN, until=until)


def only(verdicts: list[Verdict]) -> Verdict:
    """The newest revision, all being of one incident with revisions counted from 0."""
    assert {verdict.verdict_id for verdict in verdicts} == {verdicts[0].verdict_id}
    assert [verdict.revision for verdict in verdicts] == list(range(len(verdicts)))
    return verdicts[-1]


def culprits(verdict: Verdict) -> list[tuple[int | None, str | None]]:
    return [(culprit.rank, culprit.node) for culprit in verdict.culprits]


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_run_of_400_steps_gives_no_verdict(seed: int) -> None:
    job = SyntheticJob(seed=100 + seed).start().train(200).train(3, checkpoint_at=[201]).idle(1.5, "checkpoint", 203)
    assert verdicts_of(job.train(197).end()) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [1.25, 1.5, 3.0])
def test_a_slow_rank_is_named_within_ten_steps_and_the_verdict_closes_when_it_recovers(
    seed: int, factor: float
) -> None:
    rank = seed % 4
    job = trained(seed).train(25, slow={rank: factor}).train(40).end()
    opened, closed = verdicts_of(job)
    assert (opened.fault_class, opened.severity, opened.advice) == ("straggler", "warning", "notify")
    assert opened.settled
    assert culprits(opened) == [(rank, f"node{rank // 2}")]
    assert opened.onset_step is not None
    assert 58 <= opened.onset_step <= 64
    metric = opened.evidence[0]
    assert (metric.metric, metric.unit) == ("train.compute.own", "s")
    assert metric.value is not None
    assert metric.peers_median is not None
    assert metric.value / metric.peers_median == pytest.approx(factor, rel=0.2)
    assert metric.offset is not None
    told = next(m for m in job.ordered() if getattr(m, "steps", ()) and m.rank == rank and 69 in m.steps)
    assert opened.at <= told.at + 1.0  # ten steps of the fault, and the watermark
    assert closed.status == "closed"


def test_a_slow_rank_without_own_time_is_found_by_wall_time() -> None:
    opened = verdicts_of(trained(4, 0 + 60).train(25, slow={1: 1.0}).end())
    assert opened == []
    job = SyntheticJob(seed=4).start().train(60, wall_only=True).train(25, slow={1: 2.0}, wall_only=True).end()
    opened = verdicts_of(job)[:1]
    assert [verdict.evidence[0].metric for verdict in opened] == ["train.compute.duration"]
    assert culprits(opened[0]) == [(1, "node0")]


def test_a_rank_that_is_slow_from_its_first_step_is_found_without_history() -> None:
    opened = verdicts_of(SyntheticJob(seed=5).start().train(20, slow={3: 1.8}).end())[0]
    assert (opened.fault_class, culprits(opened)) == ("straggler", [(3, "node1")])


def test_a_load_that_slows_all_ranks_blames_nobody() -> None:
    assert verdicts_of(trained(6).train(30, slow=dict.fromkeys(range(4), 1.5)).end()) == []


def test_a_slow_data_loader_is_a_data_stall_of_its_rank() -> None:
    opened = verdicts_of(trained(7).train(25, late_data={2: 0.04}).train(30).end())[0]
    assert (opened.fault_class, opened.advice, culprits(opened)) == ("data_stall", "notify", [(2, "node1")])


def test_a_contended_node_is_a_finding_of_its_own_and_blames_no_rank() -> None:
    opened, closed = verdicts_of(trained(8).train(40, contended=["node1"]).train(40).end())
    assert (opened.fault_class, opened.severity, opened.advice) == ("contended_node", "info", "none")
    assert culprits(opened) == [(None, "node1")]
    assert closed.status == "closed"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", [9, 11, 15])
def test_a_killed_rank_is_lost_and_its_peers_are_victims(seed: int, number: int) -> None:
    rank = (seed + 1) % 4
    verdict = only(verdicts_of(trained(seed, 30).kill(rank, number)))
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("rank_lost", "critical", "restart_in_place")
    assert culprits(verdict) == [(rank, f"node{rank // 2}")]
    assert verdict.settled
    assert verdict.revision == 0  # settled in its first word
    assert verdict.victims == 3
    assert verdict.summary == f"Rank {rank} on node{rank // 2} was killed by signal {number} at step 30."


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("seen", [True, False])
def test_a_stopped_rank_hangs_the_job_and_is_named_in_seconds(seed: int, seen: bool) -> None:
    job = trained(seed, 40)
    begun = job.at
    verdict = only(verdicts_of(job.stop(3, seen=seen)))
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("hang", "critical", "restart_in_place")
    assert culprits(verdict) == [(3, "node1")]
    assert verdict.settled
    assert verdict.at - begun <= (1.75 if seen else 2.5)
    assert verdict.verdict_id.endswith("/silence") == (not seen)


def test_a_hang_closes_when_the_rank_goes_on_and_a_second_one_is_a_new_incident() -> None:
    job = trained(1, 40).stop(3, seconds=4.0)
    job.say(msg_awake(job))
    first, closed, second = verdicts_of(job.train(20).stop(1, seconds=4.0))
    assert (closed.status, closed.verdict_id) == ("closed", first.verdict_id)
    assert culprits(second) == [(1, "node0")]
    assert second.verdict_id != first.verdict_id


def test_a_peer_that_still_ends_its_step_does_not_end_the_hang_of_a_stopped_rank() -> None:
    job = trained(1, 40).stop(3, seconds=3.0)
    late = Metrics(
        **job.stamp(0, "metrics", job.at), phase="collective", step=job.step + 1, steps=(job.step,),
        ended_at=(job.at - 0.05,), columns={"train.step.duration": (1.0,)},
    )  # fmt: skip
    job.say(late)
    job.step += 1
    verdict = only(verdicts_of(job.idle(6.0, "collective", job.step, silent=[3])))
    assert (verdict.fault_class, culprits(verdict), verdict.status) == ("hang", [(3, "node1")], "open")


def msg_awake(job: SyntheticJob):
    from ingest.events import RankStalled

    return RankStalled(**job.stamp(3, "events", job.at), state="S", since=job.at)


def test_a_pause_without_stop_or_silence_waits_for_the_ceiling_and_then_names_the_odd_rank() -> None:
    job = trained(2, 40)
    begun = job.at
    verdict = only(verdicts_of(job.idle(75.0, "collective", 40, phases={1: "train"})))
    assert (verdict.fault_class, culprits(verdict)) == ("hang", [(1, "node0")])
    assert 60.0 <= verdict.at - begun <= 61.0


def test_a_frozen_job_in_which_nobody_stands_out_has_an_unknown_culprit() -> None:
    verdict = only(verdicts_of(trained(2, 40).idle(70.0, "collective", 40)))
    assert (verdict.fault_class, culprits(verdict), verdict.victims) == ("hang", [], 4)


@pytest.mark.parametrize("phase", ["checkpoint", "eval"])
def test_a_long_checkpoint_or_evaluation_is_no_hang_even_with_a_silent_rank(phase: str) -> None:
    job = trained(3, 40).idle(0.5, phase, 40).idle(90.0, phase, 40, silent=[2]).idle(0.5, "train", 40)
    assert verdicts_of(job.train(10).end()) == []


def test_a_slow_start_is_no_hang_before_five_minutes_and_one_after() -> None:
    assert verdicts_of(SyntheticJob().start().idle(250.0, "init", -1).train(5).end()) == []
    verdict = only(verdicts_of(SyntheticJob().start().idle(310.0, "init", -1)))
    assert (verdict.fault_class, culprits(verdict)) == ("hang", [])
    assert "has trained a step" in verdict.summary


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_is_averaged", [False, True])
def test_nan_blames_the_rank_whose_gradient_had_it_first(seed: int, loss_is_averaged: bool) -> None:
    job, rank = trained(seed, 30), (seed + 2) % 4
    bad = job.step + 5
    job.norms[(rank, bad)] = math.nan
    for other in range(4):
        for step in range(bad if loss_is_averaged else bad + 1, bad + 20):
            job.losses[(other, step)] = math.nan
            if step > bad:
                job.norms[(other, step)] = math.nan
    verdicts = verdicts_of(job.train(25).end())
    verdict = only(verdicts)
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("nan", "critical", "rollback_restart")
    assert culprits(verdict) == [(rank, f"node{rank // 2}")]
    assert verdict.first_bad_step == bad
    assert verdict.settled
    assert ("possible silent data corruption" in verdict.summary) is not loss_is_averaged


def test_nan_on_all_ranks_at_once_is_the_numbers_doing() -> None:
    job = trained(1, 30)
    for rank in range(4):
        for step in range(35, 50):
            job.norms[(rank, step)] = math.nan
    verdict = only(verdicts_of(job.train(25).end()))
    assert (verdict.fault_class, culprits(verdict), verdict.first_bad_step) == ("numeric", [], 35)


def test_a_loss_scalers_single_infinite_gradient_is_nobodys_fault() -> None:
    job = trained(1, 30)
    job.norms[(2, 35)] = math.inf
    assert verdicts_of(job.train(25).end()) == []


def test_many_overflows_do_not_hide_the_nan_that_comes_after_them() -> None:
    job = trained(1, 30)
    for step in range(35, 35 + 5 * 20, 5):
        job.norms[(2, step)] = math.inf
    job.norms[(2, 150)] = math.nan
    verdict = only(verdicts_of(job.train(130).end())[:1])
    assert (verdict.fault_class, culprits(verdict), verdict.first_bad_step) == ("nan", [(2, "node1")], 150)


XID = "NVRM: Xid (PCI:0000:02:00): 79, pid=4002, name=python3, GPU has fallen off the bus."


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("speaker", "signal"), [(-1, 9), (2, 6), (-1, 6)])
def test_a_lost_gpu_blames_the_node_and_the_exit_settles_it(seed: int, speaker: int, signal: int) -> None:
    job = trained(seed, 30).log(speaker, XID, node="node1", stream="kernel" if speaker < 0 else "stderr")
    job.exits(2, after=0.8, signal=signal).peers_fall(after=0.9).idle(6.0, "train", 30)
    verdict = only(verdicts_of(job))
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("gpu_lost", "critical", "restart_exclude_node")
    assert culprits(verdict) == [(None, "node1")]
    assert verdict.settled
    assert any(entry.kind == "log" and entry.rank == 2 and entry.rule == "xid_off_bus" for entry in verdict.evidence)


def test_a_lost_gpu_without_an_exit_is_settled_after_three_seconds() -> None:
    job = trained(1, 30).log(-1, XID, node="node1", stream="kernel")
    first, settled = verdicts_of(job.idle(5.0, "train", 30))
    assert (first.settled, settled.settled) == (False, True)
    assert 3.0 <= settled.at - first.at <= 3.25


def test_an_xid_that_arrives_after_the_exit_it_explains_changes_the_class_under_the_same_id() -> None:
    job = trained(1, 30).exits(2, after=0.02, signal=9).log(-1, XID, node="node1", stream="kernel", after=0.8)
    verdicts = verdicts_of(job.peers_fall(after=0.3).idle(6.0, "train", 30))
    assert [verdict.fault_class for verdict in verdicts] == ["rank_lost", "gpu_lost"]
    assert culprits(only(verdicts)) == [(None, "node1")]


def test_a_memory_kill_is_confirmed_by_the_kernel_line_that_names_the_rank() -> None:
    job = trained(1, 30).exits(2, after=0.02, signal=9)
    job.log(
        -1, "Out of memory: Killed process 4002 (python3) total-vm:53312244kB", node="node1", stream="kernel", after=1.0
    )
    verdict = only(verdicts_of(job.peers_fall(after=0.3).idle(6.0, "train", 30)))
    assert (verdict.fault_class, culprits(verdict), verdict.advice) == ("host_oom", [(2, "node1")], "stop")


def test_a_memory_kill_of_another_process_confirms_nothing() -> None:
    job = trained(1, 30).exits(2, after=0.02, signal=9)
    job.log(
        -1, "Out of memory: Killed process 77 (chrome) total-vm:53312244kB", node="node0", stream="kernel", after=1.0
    )
    assert only(verdicts_of(job.peers_fall(after=0.3).idle(6.0, "train", 30))).fault_class == "rank_lost"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("error", [("RuntimeError", "shape mismatch in user code"), ("ValueError", "bad batch")])
def test_an_exception_of_user_code_is_a_user_error_of_its_rank(seed: int, error: tuple[str, str]) -> None:
    job = trained(seed, 30).log(1, f"Traceback (most recent call last):\n  File train.py\n{error[0]}: {error[1]}")
    job.exits(1, after=0.1, code=1, error=error).peers_fall(after=0.2).idle(6.0, "train", 30)
    verdict = only(verdicts_of(job))
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("user_error", "error", "stop")
    assert culprits(verdict) == [(1, "node0")]
    assert verdict.settled
    assert error[1] in verdict.summary
    assert error[1] in "".join(entry.text for entry in verdict.evidence)


def test_the_same_exception_on_all_ranks_before_the_first_step_is_the_workload() -> None:
    job = SyntheticJob().start()
    for rank in range(4):
        job.exits(rank, after=0.1 + 0.2 * rank, code=1, error=("KeyError", "'learning_rate'"))
    verdict = only(verdicts_of(job.idle(5.0, "init", -1)))
    assert (verdict.fault_class, culprits(verdict), verdict.advice) == ("user_error", [], "stop")


@pytest.mark.parametrize(
    ("text", "fault_class"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
        ("CUDA error: uncorrectable ECC error encountered", "gpu_ecc"),
        ("[Errno 28] No space left on device", "disk_full"),
    ],
)
def test_an_exception_that_a_rule_knows_has_that_rules_class(text: str, fault_class: str) -> None:
    name = "torch.OutOfMemoryError" if fault_class == "oom" else "RuntimeError"
    job = trained(1, 20).exits(2, after=0.1, code=1, error=(name, text)).peers_fall(after=0.2).idle(5.0, "train", 20)
    assert only(verdicts_of(job)).fault_class == fault_class


def test_a_caught_exception_in_the_log_does_not_explain_a_kill_of_the_same_rank() -> None:
    job = trained(1, 30).log(2, "ValueError: a bad sample was skipped").kill(2)
    verdict = only(verdicts_of(job))
    assert verdict.fault_class == "rank_lost"


def test_a_line_that_was_survived_for_two_steps_explains_nothing() -> None:
    job = trained(1, 30).log(1, "RuntimeError: CUDA error: unknown error").train(5)
    job.exits(1, after=0.1, code=1, error=("ZeroDivisionError", "division by zero")).peers_fall(after=0.2).idle(
        5.0, "train", 35
    )
    assert only(verdicts_of(job)).fault_class == "user_error"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_silent_launcher_is_a_lost_node_and_nothing_is_said_of_its_victims_before(seed: int) -> None:
    job = trained(seed, 30)
    job.silent_nodes.add("node1")
    begun = job.at
    for index, rank in enumerate((0, 1)):
        job.exits(rank, after=0.2 + 0.8 * index, code=1, error=("RuntimeError", GLOO))
    verdict = only(verdicts_of(job.idle(12.0, "train", 30)))
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("node_lost", "critical", "restart_exclude_node")
    assert culprits(verdict) == [(None, "node1")]
    assert verdict.revision == 0
    assert verdict.settled
    assert verdict.at - begun <= 5.75


def test_a_launcher_that_speaks_again_ends_the_loss_of_its_node_and_hides_no_later_fault() -> None:
    job = trained(1, 30)
    job.silent_nodes.add("node1")  # it was stopped, and its ranks went on
    job.train(90)
    job.silent_nodes.clear()
    job.train(40).kill(3).idle(4.0, "train", job.step)
    said = verdicts_of(job)
    assert [(v.fault_class, v.status) for v in said] == [
        ("node_lost", "open"), ("node_lost", "closed"), ("rank_lost", "open"),
    ]  # fmt: skip
    assert said[0].verdict_id == said[1].verdict_id
    assert culprits(said[2]) == [(3, "node1")]


def test_when_all_fall_silent_wall_time_says_so_and_names_nobody() -> None:
    job = trained(1, 30)
    assert verdicts_of(job, until=job.at + 5.0) == []
    verdict = only(verdicts_of(job, until=job.at + 20.0))
    assert (verdict.fault_class, culprits(verdict), verdict.advice) == ("node_lost", [], "notify")


def test_ends_that_only_suffer_stay_without_a_culprit() -> None:
    verdicts = verdicts_of(trained(1, 30).peers_fall(after=0.1).idle(6.0, "train", 30))
    verdict = only(verdicts)
    assert (verdict.fault_class, culprits(verdict), verdict.settled) == ("unknown", [], True)
    assert verdict.at - verdicts[0].onset_at <= 3.5


def test_a_root_that_is_told_after_its_victims_still_gets_the_blame() -> None:
    job = trained(1, 30)
    job.exits(0, after=0.1, code=1, error=("RuntimeError", GLOO))
    job.exits(3, after=1.2, code=1, error=("TypeError", "unsupported operand"))
    job.peers_fall(after=1.3).idle(6.0, "train", 30)
    verdict = only(verdicts_of(job))
    assert (verdict.fault_class, culprits(verdict)) == ("user_error", [(3, "node1")])


def test_an_exit_without_a_word_is_suspected_only_after_nobody_else_has_spoken() -> None:
    job = trained(1, 30).exits(2, after=0.1, code=3).peers_fall(after=0.3).idle(6.0, "train", 30)
    verdict = only(verdicts_of(job))
    assert (verdict.fault_class, culprits(verdict), verdict.culprits[0].confidence) == ("unknown", [(2, "node1")], 0.5)


def test_both_ranks_of_a_node_killed_together_are_the_node() -> None:
    job = trained(1, 30)
    for rank in (2, 3):
        job.exits(rank, after=0.05 + 0.02 * rank, signal=9)
    verdict = only(verdicts_of(job.peers_fall().idle(5.0, "train", 30)))
    assert (verdict.fault_class, culprits(verdict), verdict.victims) == ("rank_lost", [(None, "node1")], 2)


def test_what_we_stop_ourselves_or_a_person_interrupts_is_no_fault() -> None:
    job = trained(1, 30)
    for rank in range(4):
        if rank < 2:
            job.exits(rank, after=0.1 * rank, signal=15, stopped=True)
        else:
            job.exits(rank, after=0.1 * rank, code=1, error=("KeyboardInterrupt", ""))
    assert verdicts_of(job.idle(8.0, "train", 30)) == []


def test_a_rank_that_finishes_and_exits_badly_afterwards_is_no_fault() -> None:
    from ingest.events import Metrics

    job = trained(1, 30)
    for rank in range(4):
        job.say(Metrics(**job.stamp(rank, "metrics", job.at + 0.05), phase="finished", step=30))
        job.exits(rank, after=0.3, code=1, error=("RuntimeError", GLOO))
    assert verdicts_of(job.idle(8.0, "finished", 30)) == []


def test_a_restart_closes_what_was_open_and_begins_with_nothing_learned() -> None:
    job = trained(1, 60).train(15, slow={1: 2.0}).kill(2).restart(50)
    verdicts = verdicts_of(job.train(60).end())
    by_id: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_id.setdefault(verdict.verdict_id, []).append(verdict)
    assert sorted(revisions[-1].fault_class for revisions in by_id.values()) == ["rank_lost", "straggler"]
    assert all(revisions[-1].status == "closed" for revisions in by_id.values())
    assert all(verdict.attempt == 1 for verdict in verdicts)


def test_the_slow_first_steps_after_a_restart_blame_nobody() -> None:
    job = trained(1, 40).kill(2).restart(35).train(4, slow={0: 4.0, 3: 2.0}).train(60).end()
    assert [verdict.fault_class for verdict in verdicts_of(job)] == ["rank_lost", "rank_lost"]


def test_messages_of_an_older_attempt_are_only_counted() -> None:
    job = trained(1, 20).restart(10).train(20)
    job.attempt = 1
    job.exits(2, after=0.1, signal=9)
    job.attempt = 2
    job.gone.clear()
    assert verdicts_of(job.train(20).end()) == []


def test_a_death_long_after_the_numbers_went_bad_is_an_incident_of_its_own() -> None:
    job = trained(1, 30)
    job.norms[(1, 35)] = math.nan
    verdicts = verdicts_of(job.train(250).kill(2))
    assert [(verdict.fault_class, verdict.status) for verdict in verdicts] == [("nan", "open"), ("rank_lost", "open")]


def test_a_hang_long_after_the_numbers_went_bad_is_an_incident_of_its_own_and_one_soon_after_is_not() -> None:
    job = trained(1, 30)
    job.norms[(1, 35)] = math.nan
    verdicts = verdicts_of(job.train(250).stop(2))
    assert [(verdict.fault_class, verdict.status) for verdict in verdicts] == [("nan", "open"), ("hang", "open")]
    job = trained(1, 30)
    job.norms[(1, 35)] = math.nan
    assert [verdict.fault_class for verdict in verdicts_of(job.train(10).stop(2))] == ["nan"]


def test_two_findings_that_begin_in_one_message_have_two_ids() -> None:
    job = trained(1, 60).train(25, slow={2: 1.6}, late_data={2: 0.05}).train(30).end()
    opened = [verdict for verdict in verdicts_of(job) if verdict.revision == 0]
    assert sorted(verdict.fault_class for verdict in opened) == ["data_stall", "straggler"]
    assert len({verdict.verdict_id for verdict in opened}) == 2


def test_a_warning_line_opens_one_warning_of_its_node_until_the_attempt_is_over() -> None:
    line = "NVRM: Xid (PCI:0000:c5:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 17 (0x04084507)"
    job = (
        trained(1, 30)
        .log(-1, line, node="node1", stream="kernel")
        .train(40)
        .log(-1, line, node="node1", stream="kernel")
    )
    opened, closed = verdicts_of(job.train(5).end())
    assert (opened.fault_class, opened.severity, opened.advice, opened.status) == ("warning", "info", "none", "open")
    assert closed.status == "closed"


def test_one_rank_alone_is_trained_without_peers_and_detection_says_so() -> None:
    from detectors.job_detector import JobDetector

    job = SyntheticJob(world=1, per_node=1).start().train(60).train(20, slow={0: 3.0}).end()
    detector = JobDetector("job", PLAIN)
    for message in job.ordered():
        detector.observe(message)
    verdicts = detector.advance(job.at)  # that it is slower is known, by its own history; that a rank is odd is not
    assert {verdict.fault_class for verdict in verdicts} <= {"job_slow"}
    assert all(verdict.culprits == () for verdict in verdicts)
    assert detector.limits() == (
        "peer comparison is off: the job has one rank",
        "the ensemble is switched off by configuration",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_sixteen_ranks_are_compared_by_median_and_mad(seed: int) -> None:
    job = SyntheticJob(seed=seed, world=16, per_node=4).start().train(120)
    assert detect(job.ordered(), PLAIN) == []
    verdicts = verdicts_of(job.train(25, slow={5: 1.4}).train(40).end())
    assert [(verdict.fault_class, verdict.status) for verdict in verdicts] == [
        ("straggler", "open"),
        ("straggler", "closed"),
    ]
    assert culprits(verdicts[0]) == [(5, "node1")]


def test_roles_come_with_the_ranks_start_and_a_role_of_one_is_said_to_have_no_peers() -> None:
    from detectors.job_detector import JobDetector

    job = SyntheticJob(seed=1, world=4, roles=("first", "rest", "rest", "rest"), burst_share=0.0).start()
    job.train(60).train(25, slow={0: 3.0}).end()
    assert [verdict for verdict in verdicts_of(job) if verdict.fault_class == "straggler"] == []
    detector = JobDetector("job", PLAIN)
    for message in job.ordered()[:200]:
        detector.observe(message)
    assert detector.limits()[0].startswith("peer comparison is off for 1 ranks that have a role of their own, rank 0")


def test_a_rank_that_falls_silent_while_another_has_just_exited_is_on_its_way_out_and_not_hung() -> None:
    job = trained(1, 40).exits(3, after=0.1, code=0).idle(2.6, "collective", 40, silent=[2])
    assert verdicts_of(job.end()) == []


def test_a_slow_rank_is_not_learned_away_while_it_is_slow() -> None:
    verdicts = verdicts_of(trained(2, 40).train(200, slow={1: 1.3}))
    assert [(verdict.fault_class, verdict.status) for verdict in verdicts] == [("straggler", "open")]


def test_a_few_milliseconds_more_for_data_are_no_stall() -> None:
    assert verdicts_of(trained(7).train(40, late_data={2: 0.006}).end()) == []


def test_a_rank_on_a_crowded_core_is_not_called_slow() -> None:
    """Its wall time rises by half, its own time does not."""
    verdicts = verdicts_of(trained(9).train(11, contended=["node1"]).train(40).end())
    assert verdicts == []
