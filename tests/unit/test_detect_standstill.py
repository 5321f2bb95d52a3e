"""Hangs with evidence beside them: stacks, sequence numbers, GPUs that spin, and how long a phase may stand still."""

from __future__ import annotations

import json

import pytest

from detectors.config import DetectorConfig
from detectors.job_detector import JobDetector
from detectors.roster import RankState, Roster
from detectors.silence.hang import look_for_hang
from detectors.silence.liveness import LivenessConfig
from detectors.verdict import Verdict
from ingest.events import CheckpointEvent, DeviceMetrics, Message, Metrics, RankStacks, RankStalled
from tests.synthetic_job import SyntheticJob, detect
from tests.unit.test_stack_groups import LINE, LOADS, WAITS, WORK

CEILING_SECONDS = 12.0  # of this file's jobs, so that they need few messages
PLAIN = DetectorConfig(liveness=LivenessConfig(ceiling_seconds=CEILING_SECONDS, ceiling_steps=1.0))


def trained(seed: int = 1, steps: int = 40, world: int = 4) -> SyntheticJob:
    return SyntheticJob(seed=seed, world=world).start().train(steps)


def verdicts_of(job: SyntheticJob) -> list[Verdict]:
    return detect(job.ordered(), PLAIN)


def names(verdict: Verdict) -> list[tuple[int | None, str | None, float]]:
    return [(culprit.rank, culprit.node, culprit.confidence) for culprit in verdict.culprits]


def stacks(job: SyntheticJob, rank: int, text: str, *, after: float = 0.0, state: str = "S", **numbers: int) -> None:
    job.say(RankStacks(**job.stamp(rank, "stacks", job.at + after), stacks=text, state=state, **numbers))


def hang_with_stacks(loads: tuple[int, ...], *, world: int = 4, silent: tuple[int, ...] = ()) -> SyntheticJob:
    """A job that stands still in a collective; after a while its launchers publish where the ranks stand."""
    job = trained(world=world).idle(4.0, "collective", 40)
    for rank in range(world):
        stacks(job, rank, "" if rank in silent else LOADS if rank in loads else WAITS, after=0.01 * rank)
    return job.idle(10.0, "collective", 40)


def test_a_hang_in_which_nobody_stands_out_is_blamed_on_the_rank_whose_stack_is_odd() -> None:
    said = verdicts_of(hang_with_stacks((2,)))
    verdict = said[-1]
    assert (verdict.fault_class, verdict.victims, verdict.settled) == ("hang", 3, True)
    assert names(verdict) == [(2, "node1", 0.7)]
    assert "rank 2 stands in dataloader.py:_try_get_data, 3 others in all_reduce" in verdict.summary
    shown = [entry.text.split("\n") for entry in verdict.evidence if entry.kind == "stack"]
    assert shown[0] == ["rank 2 stands in dataloader.py:_try_get_data, 3 others in all_reduce"]
    assert [lines[0] for lines in shown[1:]] == [
        "ranks 0-1, 3 in all_reduce", "rank 2 in dataloader.py:_try_get_data",
    ]  # fmt: skip
    assert "train.py:main" in shown[1]


def test_the_stacks_revise_a_verdict_that_was_said_before_they_came() -> None:
    job = trained().idle(12.5, "collective", 40)
    for rank in range(4):
        stacks(job, rank, LOADS if rank == 1 else WAITS)
    first, revised = verdicts_of(job.idle(5.0, "collective", 40))
    assert names(first) == []
    assert (revised.verdict_id, revised.revision) == (first.verdict_id, 1)
    assert names(revised) == [(1, "node0", 0.7)]


def test_two_odd_ranks_of_one_node_are_the_node_and_the_larger_side_is_nobody() -> None:
    verdict = verdicts_of(hang_with_stacks((2, 3), world=8))[-1]
    assert names(verdict) == [(None, "node1", 0.7)]
    unknown = verdicts_of(hang_with_stacks((0, 1, 2, 3, 4), world=8))[-1]
    assert names(unknown) == []
    assert any(entry.kind == "stack" for entry in unknown.evidence)


def test_a_rank_that_gives_no_stack_is_named() -> None:
    verdict = verdicts_of(hang_with_stacks((), silent=(3,)))[-1]
    assert names(verdict) == [(3, "node1", 0.9)]
    assert "not answer" in verdict.summary


def test_a_stopped_process_needs_no_stacks_and_gets_them_as_evidence_under_the_same_id() -> None:
    job = trained().stop(3, seconds=3.0)
    for rank in range(4):
        stacks(job, rank, "" if rank == 3 else WAITS, state="T" if rank == 3 else "S")
    said = verdicts_of(job.idle(4.0, "collective", 40, silent=[3]))
    assert {verdict.verdict_id for verdict in said} == {said[0].verdict_id}
    assert names(said[-1]) == [(3, "node1", 1.0)]
    assert said[-1].summary == said[0].summary
    assert any(entry.kind == "stack" for entry in said[-1].evidence)


def test_stacks_of_a_standstill_that_is_over_are_forgotten() -> None:
    job = trained().idle(4.0, "collective", 40)
    for rank in range(4):
        stacks(job, rank, LOADS if rank == 1 else WAITS)
    job.idle(1.5, "collective", 40).train(30)
    verdict = verdicts_of(job.idle(20.0, "collective", 70))[-1]
    assert names(verdict) == []
    assert all(entry.kind != "stack" for entry in verdict.evidence)


def test_flight_recorder_numbers_name_the_rank_that_is_behind() -> None:
    job = trained().idle(4.0, "collective", 40)
    for rank in range(4):
        number = 1041 if rank == 2 else 1203
        stacks(job, rank, WAITS, enqueued=number, completed=number - 1)
    verdict = verdicts_of(job.idle(10.0, "collective", 40))[-1]
    assert names(verdict) == [(2, "node1", 0.8)]
    assert "stopped at collective 1041" in verdict.summary


def test_two_watchdog_lines_carry_all_the_evidence_and_no_printer_is_blamed() -> None:
    job = trained()
    for rank in (0, 3):
        job.log(rank, LINE.format(rank=rank, number=63 if rank == 3 else 1580), after=0.1 * rank)
        job.exits(rank, after=0.4 + 0.1 * rank, signal=6)
    verdict = verdicts_of(job.idle(6.0, "train", 40))[-1]
    assert verdict.fault_class == "collective_timeout"
    assert names(verdict) == [(3, "node1", 0.8)]


def test_a_timeout_that_all_ranks_print_names_nobody_and_one_that_all_but_one_print_suspects_that_one() -> None:
    for printers, expected in ((range(4), []), (range(3), [(3, "node1", 0.5)])):
        job = trained()
        for rank in printers:
            job.log(rank, LINE.format(rank=rank, number=1580) + "\n" + WORK, after=0.05 * rank)
            job.exits(rank, after=0.5 + 0.05 * rank, signal=6)
        verdict = verdicts_of(job.idle(6.0, "train", 40))[-1]
        assert verdict.fault_class == "collective_timeout"
        assert names(verdict) == expected


def gpu(job: SyntheticJob, seconds: float, busy: dict[int, tuple[float, float]], begin: float) -> None:
    """A sample a second of each rank's GPU: utilization and power."""
    for second in range(int(seconds)):
        at = begin + second
        for rank, (utilization, power) in busy.items():
            stamp = job.stamp(rank, "devices", at + 0.3)
            job.say(
                DeviceMetrics(
                    **stamp, device=f"gpu:{rank}", sampled_at=(at,),
                    columns={"hw.gpu.utilization": (utilization,), "hw.gpu.power": (power,)},
                )
            )  # fmt: skip


def spinning(culprit: tuple[float, float]) -> tuple[SyntheticJob, float]:
    job = SyntheticJob(seed=3, own_seconds=0.3).start()
    begin = job.at
    job.train(40)
    gpu(job, job.at - begin, dict.fromkeys(range(4), (0.97, 640.0)), begin)
    stopped = job.at
    job.idle(14.0, "collective", 40)
    gpu(job, 14, {0: (1.0, 95.0), 1: culprit, 2: (1.0, 98.0), 3: (1.0, 101.0)}, stopped + 0.2)
    return job, stopped


def test_gpus_that_are_busy_at_a_fraction_of_their_power_without_a_step_are_a_hang_in_seconds() -> None:
    job, stopped = spinning((1.0, 99.0))
    verdict = verdicts_of(job)[0]
    assert (verdict.fault_class, names(verdict), verdict.settled) == ("hang", [], True)
    assert verdict.at - stopped <= 8.0
    power = verdict.evidence[0]
    assert (power.metric, power.value, power.peers_median, power.unit) == ("hw.gpu.power", 95.0, 640.0, "W")


def test_the_rank_whose_gpu_has_nothing_to_do_meanwhile_is_named() -> None:
    job, _ = spinning((0.0, 70.0))
    assert names(verdicts_of(job)[0]) == [(1, "node0", 0.6)]


def test_the_same_gpus_while_steps_are_made_are_no_hang() -> None:
    job = SyntheticJob(seed=3, own_seconds=0.3).start()
    begin = job.at
    job.train(30)
    gpu(job, job.at - begin, dict.fromkeys(range(4), (0.97, 640.0)), begin)
    begin = job.at
    job.train(30)
    gpu(job, job.at - begin, dict.fromkeys(range(4), (1.0, 99.0)), begin)
    assert verdicts_of(job.end()) == []


def test_a_stopped_rank_that_nobody_waits_for_is_a_warning_that_ends_when_it_goes_on() -> None:
    job = trained(seed=2)
    job.say(RankStalled(**job.stamp(3, "events", job.at + 0.2), state="T", since=job.at + 0.1))
    job.gone.add(3)  # no telemetry of it, and the others train on
    job.train(60)
    job.say(RankStalled(**job.stamp(3, "events", job.at), state="S", since=job.at))
    opened, closed = (v for v in verdicts_of(job.train(10)) if v.fault_class == "warning")
    assert (names(opened), opened.severity, opened.status) == ([(3, "node1", 1.0)], "warning", "open")
    assert closed.status == "closed"


@pytest.mark.parametrize(("usual", "ceiling"), [(20.0, 600.0), (390.0, 1170.0)])
def test_the_ceiling_of_a_phase_is_three_times_what_it_usually_takes_and_ten_minutes_at_least(
    usual: float, ceiling: float
) -> None:
    roster, at = Roster(attempt=1, started_at=0.0), 0.0

    def tell(phase: str, step: int) -> None:
        stamp = {"job": "job", "attempt": 1, "rank": 0, "node": "n", "sequence": int(at), "at": at}
        roster.observe(Metrics(**stamp, phase=phase, step=step, steps=(step,), ended_at=(at,)), None)

    for step in range(3):
        for number in range(10 * step, 10 * step + 10):
            tell("train", number)
            at += 0.1
        tell("checkpoint", 10 * step + 9)
        at += 1.0
        tell("checkpoint", 10 * step + 9)  # a second beginning of what is there already
        at += usual - 1.0
    tell("train", 30)
    tell("checkpoint", 30)
    assert look_for_hang(at + ceiling - 1.0, roster, LivenessConfig()) is None
    assert look_for_hang(at + ceiling + 1.0, roster, LivenessConfig()) is not None


def test_a_phase_whose_beginning_nobody_saw_has_no_length() -> None:
    roster = Roster(attempt=1, started_at=0.0)
    rank = roster.ranks[0] = RankState(rank=0, node="n", phase="checkpoint")
    roster.enter_phase(rank, "train", 900.0)
    assert roster.phase_p99("checkpoint") == 0.0


def said_of(messages: list[Message], *, restart_every: int | None) -> list[Verdict]:
    """What a detector says of messages in their order, saved and loaded after every so many."""
    detector, said = JobDetector("job", PLAIN), []
    for index, message in enumerate(messages):
        detector.observe(message)
        said += detector.advance(message.at - 0.01)
        if restart_every is not None and index % restart_every == 0:
            state, arrays = detector.to_state()
            detector = JobDetector.from_state(
                "job", PLAIN, None, json.loads(json.dumps(state, allow_nan=False)), arrays
            )
    return said + detector.advance(messages[-1].at + 5.0)


def test_a_detector_that_is_restarted_while_it_gathers_evidence_says_the_same() -> None:
    job = SyntheticJob(seed=3, own_seconds=0.3).start()
    begin = job.at
    job.train(30)
    gpu(job, job.at - begin, dict.fromkeys(range(4), (0.97, 640.0)), begin)
    tell = {"size_bytes": 1, "step": 20, "tier": "disk"}
    job.say(CheckpointEvent(**job.stamp(1, "checkpoints", job.at), state="failed", reason="[Errno 28] full", **tell))
    job.train(3)
    job.say(CheckpointEvent(**job.stamp(1, "checkpoints", job.at), state="durable", **tell))
    job.idle(4.0, "collective", 33)
    for rank in range(4):
        stacks(job, rank, LOADS if rank == 2 else WAITS, enqueued=9 if rank == 2 else 12)
    messages = job.idle(10.0, "collective", 33).ordered()
    said = said_of(messages, restart_every=None)
    assert {verdict.fault_class for verdict in said} == {"checkpoint_failed", "hang"}
    assert said_of(messages, restart_every=7) == said
