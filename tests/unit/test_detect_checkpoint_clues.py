"""A checkpoint that fails is told once, with its reason, until the next one is whole."""

from __future__ import annotations

import pytest

from detectors.verdict import Verdict
from ingest.events import CheckpointEvent
from tests.synthetic_job import SyntheticJob
from tests.unit.test_detect_standstill import verdicts_of


def tell(job: SyntheticJob, state: str, step: int, *, rank: int = 2, reason: str = "", tier: str = "disk") -> None:
    stamp = job.stamp(rank, "checkpoints", job.at, "node1")
    job.say(CheckpointEvent(**stamp, state=state, step=step, tier=tier, reason=reason))


def said_of(reason: str, *later: tuple[str, int, int]) -> list[Verdict]:
    job = SyntheticJob(seed=1).start().train(20)
    tell(job, "failed", 20, reason=reason)
    job.train(10)
    tell(job, "failed", 20, reason=reason)  # the next try
    job.train(10)
    for state, step, rank in later:
        tell(job, state, step, rank=rank)
    return verdicts_of(job.train(10))


def test_a_full_disk_says_so_and_names_its_node_once() -> None:
    (verdict,) = said_of("step 20 of rank 2 could not be written: [Errno 28] No space left on device")
    assert (verdict.fault_class, verdict.severity, verdict.advice) == ("checkpoint_failed", "error", "notify")
    assert [(culprit.rank, culprit.node) for culprit in verdict.culprits] == [(None, "node1")]
    assert "there is no space left on node1" in verdict.summary
    assert verdict.onset_step == 20


@pytest.mark.parametrize(("state", "rank"), [("durable", 2), ("complete", -1)])
def test_it_is_over_with_the_next_whole_one(state: str, rank: int) -> None:
    opened, closed = said_of("Stale file handle", (state, 25, rank))
    assert "Stale file handle" in opened.summary
    assert (closed.verdict_id, closed.status) == (opened.verdict_id, "closed")


def test_an_older_step_that_becomes_durable_does_not_end_it() -> None:
    assert len(said_of("Stale file handle", ("durable", 15, 2))) == 1


def test_a_copy_on_another_node_ends_the_failure_of_that_tier_and_no_other() -> None:
    job = SyntheticJob(seed=1).start().train(20)
    tell(job, "failed", 20, reason="node2 cannot be reached", tier="peer")
    job.train(10)
    tell(job, "durable", 25)
    job.train(10)
    assert [verdict.status for verdict in verdicts_of(job)] == ["open"]
    tell(job, "backed_up", 30, tier="peer")
    assert [verdict.status for verdict in verdicts_of(job.train(10))][-1] == "closed"
