"""Jobs that count their steps anew, and ranks that nobody announced: who watches by steps begins anew with them."""

from __future__ import annotations

import pytest

from detectors import attempt
from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.steps import StepMatrix
from detectors.verdict import Verdict
from ingest.events import AttemptStarted, Message, Metrics, RankStarted
from tests.synthetic_job import SyntheticJob, detect

PLAIN = DetectorConfig(ensemble=EnsembleConfig(on=False))


def stragglers(said: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in said if verdict.fault_class == "straggler"]


def unannounced(messages: list[Message]) -> list[Message]:
    """What is known where the launchers' words are lost."""
    return [message for message in messages if not isinstance(message, AttemptStarted | RankStarted)]


def test_a_job_that_counts_its_steps_anew_in_each_epoch_is_watched_in_each() -> None:
    job = SyntheticJob(seed=3).start().train(200)
    job.step = 0
    job.train(40, slow={1: 1.8}).train(60)
    first, *rest = stragglers(detect(job.ordered(), PLAIN))
    assert [culprit.rank for culprit in first.culprits] == [1]
    assert first.onset_step is not None
    assert first.onset_step < 40
    assert rest[-1].status == "closed"


def test_what_was_open_by_steps_is_over_when_they_are_counted_anew() -> None:
    job = SyntheticJob(seed=3).start().train(60).train(30, slow={1: 1.8})
    job.step = 0
    said = stragglers(detect(job.train(30).ordered(), PLAIN))
    assert [verdict.status for verdict in said] == ["open", "closed"]


def test_a_finding_does_not_outlive_the_comparison_that_a_newcomer_ends() -> None:
    job = SyntheticJob(seed=3).start().train(60).train(30, slow={1: 1.8})
    came_at = job.at
    messages = unannounced(job.train(60).ordered())
    said = stragglers(detect([m for m in messages if m.rank != 3 or m.at > came_at], PLAIN))
    assert [verdict.status for verdict in said] == ["open", "closed"]


def test_ranks_that_nobody_announced_make_few_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(StepMatrix):
        def __init__(self, ranks: list[int], *rest: object) -> None:
            made.append(len(ranks))
            super().__init__(ranks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attempt, "StepMatrix", Counted)
    job = SyntheticJob(seed=3, world=64, per_node=8).start().train(10)
    messages = unannounced(job.ordered())
    assert not stragglers(detect([m for m in messages if isinstance(m, Metrics) or m.rank < 0], PLAIN))
    assert made[-1] == 64
    assert len(made) < 8
