"""What Slurm prints, read: jobs, nodes and our mark, and nothing is made of an answer that is cut off."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.backends.slurm_text import (
    LAUNCHERS_LOST,
    PHASES,
    Mark,
    UnreadableAnswer,
    fields_of,
    job_of,
    mark_of,
    node_of,
)

JOB = (
    "JobId=7 JobName=train UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:00:07 TimeLimit=1-00:00:00 TimeMin=N/A SubmitTime=2026-11-30T22:22:37 "
    "EligibleTime=2026-11-30T22:22:37 Partition=main AllocNode:Sid=vm:4662 ReqNodeList=(null) ExcNodeList=n3 "
    "NodeList=n[1-2] BatchHost=n1 NumNodes=2-4 NumCPUs=2 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 "
    "Command=/home/ada/my job=x.sh WorkDir=/home/ada Comment=t:train:3:abcd:requeued:2  StdErr=/dev/null Power= \n"
)
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=20)


def test_a_job_as_scontrol_tells_it() -> None:
    job = job_of(JOB)
    assert (job.job_id, job.name, job.state, job.phase, job.reason) == (7, "train", "RUNNING", "running", "")
    assert (job.restarts, job.requeue, job.held, job.nodes, job.nodes_wanted) == (2, True, False, "n[1-2]", 2)
    assert (job.excluded, job.requested, job.partition, job.user) == ("n3", "", "main", "ada(1000)")
    assert mark_of(job.comment) == Mark("train", 3, "abcd", "requeued", 2)


@pytest.mark.parametrize(
    ("change", "held", "phase"),
    [
        (("JobState=RUNNING", "JobState=PENDING"), False, "pending"),
        (("Priority=4294901759", "Priority=0"), True, "running"),
        (("JobState=RUNNING", "JobState=COMPLETING"), False, "ending"),
        (("JobState=RUNNING", "JobState=NODE_FAIL"), False, "ended"),
        (("JobState=RUNNING", "JobState=RUNNING,COMPLETING"), False, "running"),
    ],
)
def test_states_are_phases(change: tuple[str, str], held: bool, phase: str) -> None:
    job = job_of(JOB.replace(*change))
    assert (job.held, job.phase) == (held, phase)


@pytest.mark.parametrize(
    ("state", "reason", "run_time", "restarts", "over"),
    [
        ("COMPLETED", "None", "00:10:00", 0, True),
        ("CANCELLED", "None", "00:10:00", 0, True),
        ("FAILED", "NonZeroExitCode", "00:10:00", 1, True),
        ("FAILED", "NonZeroExitCode", "00:00:00", 0, True),
        ("FAILED", "NonZeroExitCode", "00:00:00", 1, False),  # a slurmd refused to launch what was requeued
        ("FAILED", "JobLaunchFailure", "00:10:00", 0, False),  # the host of the batch script died
        ("NODE_FAIL", "NodeDown", "00:10:00", 0, False),
        ("TIMEOUT", "TimeLimit", "00:10:00", 0, False),
        ("PREEMPTED", "None", "00:10:00", 0, False),
        ("RUNNING", "None", "00:10:00", 0, False),
    ],
)
def test_an_end_that_slurm_made_is_not_the_jobs_own(
    state: str, reason: str, run_time: str, restarts: int, over: bool
) -> None:
    text = JOB.replace("JobState=RUNNING Reason=None", f"JobState={state} Reason={reason}")
    text = text.replace("RunTime=00:00:07", f"RunTime={run_time}").replace("Restarts=2", f"Restarts={restarts}")
    assert job_of(text).is_over is over


@pytest.mark.parametrize("cut", range(0, len(JOB) - 1, 7))
def test_an_answer_that_is_cut_off_is_not_an_answer(cut: int) -> None:
    with pytest.raises(UnreadableAnswer):
        job_of(JOB[:cut])


def test_a_job_whose_launchers_are_gone_and_that_nobody_has_ended_may_come_back() -> None:
    text = JOB.replace("JobState=RUNNING Reason=None", "JobState=FAILED Reason=NonZeroExitCode")
    assert job_of(text.replace("ExitCode=0:0", "ExitCode=1:0")).is_over
    assert not job_of(text.replace("ExitCode=0:0", f"ExitCode={LAUNCHERS_LOST}:0")).is_over


def test_a_state_that_nobody_knows_is_not_guessed() -> None:
    with pytest.raises(UnreadableAnswer):
        job_of(JOB.replace("JobState=RUNNING", "JobState=LEVITATING"))


@pytest.mark.parametrize(
    ("told", "state", "flags", "answers", "draining"),
    [
        ("IDLE", "IDLE", set(), True, False),
        ("MIXED+DRAIN", "MIXED", {"DRAIN"}, True, True),
        ("DOWN*", "DOWN", {"NOT_RESPONDING"}, False, False),
        ("DOWN*+DRAIN", "DOWN", {"NOT_RESPONDING", "DRAIN"}, False, True),
        ("IDLE+NOT_RESPONDING", "IDLE", {"NOT_RESPONDING"}, False, False),
        ("ALLOCATED+COMPLETING", "ALLOCATED", {"COMPLETING"}, True, False),
        ("IDLE~", "IDLE", {"POWERED_DOWN"}, False, False),
        ("DOWN", "DOWN", set(), False, False),
        ("UNKNOWN", "UNKNOWN", set(), False, False),
    ],
)
def test_a_node_as_scontrol_tells_it(told: str, state: str, flags: set[str], answers: bool, draining: bool) -> None:
    node = node_of(f"NodeName=n1 Arch=x86_64 State={told} SlurmdStartTime=2026-11-30T22:22:37 Reason=a b [root@x]\n")
    assert (node.name, node.state, node.flags) == ("n1", state, flags)
    assert (node.answers, node.draining) == (answers, draining)
    assert node.reason == "a b [root@x]"


@given(WORDS, st.integers(0, 10**9), WORDS, st.sampled_from(["", "requeueing", "requeued"]), st.integers(0, 9999))
def test_a_mark_comes_back_as_it_was_written(job: str, attempt: int, token: str, stage: str, restarts: int) -> None:
    mark = Mark(job, attempt, token, stage, restarts if stage else 0)  # type: ignore[arg-type]
    assert mark_of(mark.text()) == mark


@given(st.text(max_size=80))
def test_a_persons_comment_is_no_mark_of_ours_and_breaks_nothing(comment: str) -> None:
    mark = mark_of(comment)
    assert mark is None or comment.strip().startswith("t:")


@given(st.text(max_size=300))
def test_whatever_is_printed_is_a_job_or_unreadable(text: str) -> None:
    for parse in (job_of, node_of):
        with suppress(UnreadableAnswer):
            parse(text)


def test_a_key_in_a_path_does_not_change_the_first() -> None:
    assert fields_of("A=1 WorkDir=/x A=2 B=3")["A"] == "1"


def test_every_state_that_the_manual_names_has_a_phase() -> None:
    names = (
        "BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING "
        "PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT "
        "STAGE_OUT STOPPED SUSPENDED TIMEOUT"
    )
    assert set(names.split()) <= set(PHASES)
