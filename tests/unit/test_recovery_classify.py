"""Ends that no verdict explains: what each is taken for, and in which order the sources are believed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.backend import Observation, RankView
from recovery.classify import classify, code_of, synthesized
from recovery.policy_config import ExitRules

RULES = ExitRules()


def ended(rank: int = 0, *, at: float | None = 1.0, **fields: Any) -> RankView:
    return replace(RankView(rank, f"n{rank // 2}", 100 + rank, "exited", 7, ended_at=at), **fields)


def seen(*ranks: RankView, reason: str = "") -> Observation:
    return Observation("job", 1, "token", "failed", ranks, reason=reason)


@pytest.mark.parametrize(
    ("error", "fault_class"),
    [
        ("ValueError: bad label", "user_error"),
        ("ImportError: no module named flash", "user_error"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "oom"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal_memory_access"),
        ("RuntimeError: CUDA error: unspecified launch failure", "cuda_error"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("StartFailure: fork failed", "start_failure"),
    ],
)
def test_an_error_file_says_what_it_was(error: str, fault_class: str) -> None:
    found = classify(seen(ended(exit_code=1, error=error)), RULES)
    assert found.fault_class == fault_class
    assert error in found.text


@pytest.mark.parametrize(
    ("code", "signal", "fault_class"),
    [
        (1, None, "user_error"), (42, None, "user_error"), (127, None, "user_error"), (93, None, "user_error"),
        (None, 6, "unknown"), (134, None, "unknown"), (None, 9, "rank_lost"), (137, None, "rank_lost"),
        (139, None, "rank_lost"), (201, None, "gpu_lost"), (202, None, "start_failure"), (247, None, "host_oom"),
        (255, None, "unknown"),
    ],
)  # fmt: skip
def test_without_a_word_the_exit_code_says_it(code: int | None, signal: int | None, fault_class: str) -> None:
    assert classify(seen(ended(exit_code=code, signal=signal)), RULES).fault_class == fault_class


def test_the_first_failure_by_time_is_believed() -> None:
    late = ended(0, at=5.0, exit_code=1, error="KeyError: 'x'")
    early = ended(3, at=4.0, exit_code=1, error="ValueError: bad label")
    found = classify(seen(late, early), RULES)
    assert found.rank is early
    assert found.fault_class == "user_error"


def test_who_was_told_to_stop_or_lost_its_peers_is_a_victim() -> None:
    culprit = ended(2, at=9.0, signal=9)
    victims = (
        ended(0, at=1.0, exit_code=1, error="torch.distributed.DistBackendError: NCCL error"),
        ended(1, at=2.0, signal=15),
        ended(3, at=3.0, exit_code=1, error="ValueError: x", stopped_by_us=True),
        ended(4, at=3.5, exit_code=143),
    )
    found = classify(seen(*victims, culprit), RULES)
    assert (found.fault_class, found.rank) == ("rank_lost", culprit)
    alone = classify(seen(*victims), RULES)
    assert (alone.fault_class, alone.rule) == ("unknown", "only victims")


def test_a_code_of_the_whole_job_that_lies_does_not_hide_what_a_file_says() -> None:
    """Slurm says 143 for the job: the largest of the codes of ranks that it ended itself."""
    job = seen(ended(0, exit_code=143), ended(1, exit_code=42, error="RuntimeError: user code 42"))
    found = classify(job, RULES)
    assert (found.fault_class, found.rank) == ("user_error", job.ranks[1])


@pytest.mark.parametrize(
    ("reason", "fault_class"),
    [
        ("NODE_FAIL", "node_lost"), ("OUT_OF_MEMORY", "host_oom"), ("OOMKilled", "host_oom"),
        ("PREEMPTED", "preempted"), ("TIMEOUT", "preempted"), ("DisruptionTarget: EvictionByEvictionAPI", "preempted"),
    ],
)  # fmt: skip
def test_the_scheduler_is_asked_before_exit_codes_and_after_error_files(reason: str, fault_class: str) -> None:
    assert classify(seen(ended(exit_code=1), reason=reason), RULES).fault_class == fault_class
    told = classify(seen(ended(exit_code=1, error="ValueError: x"), reason=reason), RULES)
    assert told.fault_class == "user_error"


def test_codes_are_configurable_and_go_before_words() -> None:
    rules = replace(RULES, recover_codes=frozenset({7}), planned_codes=frozenset({8}), stop_codes=frozenset({137}))
    said = "ValueError: x"
    assert classify(seen(ended(exit_code=7, error=said)), rules).fault_class == "unknown"
    assert classify(seen(ended(exit_code=8, error=said)), rules).fault_class == "preempted"
    assert classify(seen(ended(signal=9)), rules).fault_class == "user_error"


def test_nothing_known_is_unknown() -> None:
    assert classify(seen(), RULES).fault_class == "unknown"
    assert classify(seen(ended(exit_code=0)), RULES).fault_class == "unknown"
    assert code_of(ended()) == 0


def test_the_verdict_that_is_made_of_it_is_settled_and_carries_the_error() -> None:
    job = seen(ended(1, at=5.0, exit_code=1, error="ValueError: bad label"), ended(0, at=6.0, signal=15))
    verdict = synthesized(job, RULES, "job/1/recovery/exit", 21.0)
    assert (verdict.fault_class, verdict.settled, verdict.onset_at, verdict.at) == ("user_error", True, 5.0, 21.0)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert verdict.evidence[0].text == "ValueError: bad label"
    assert (verdict.advice, verdict.detector, verdict.onset_step) == ("stop", "recovery", 7)


ranks = st.builds(
    RankView,
    rank=st.integers(0, 9),
    node=st.sampled_from(("n0", "n1")),
    pid=st.integers(1, 9),
    state=st.sampled_from(("running", "stopped", "exited")),
    step=st.integers(-1, 9),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    stopped_by_us=st.booleans(),
    error=st.text(max_size=20) | st.sampled_from(("NCCL", "ValueError: x")),
    ended_at=st.none() | st.floats(0.0, 10.0),
)


@given(st.lists(ranks, max_size=6), st.text(max_size=10))
def test_whatever_ranks_and_schedulers_say_there_is_one_answer(views: list[RankView], reason: str) -> None:
    job = seen(*views, reason=reason)
    assert classify(job, RULES) == classify(job, RULES)
    assert synthesized(job, RULES, "id", 20.0).summary
