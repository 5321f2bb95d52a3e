"""Verdicts held against labels: what counts as found, as blamed rightly, as said for no reason."""

from __future__ import annotations

import math

import pytest

from detectors.verdict import Culprit, Verdict
from ingest.events import FaultInjected
from pipelines.evaluate.expectations import RIGHT, label_of
from pipelines.evaluate.matching import Label, Right, Story, Tally, match, stories_of, tally

STRAGGLER = Right(frozenset(("straggler",)), tolerated=frozenset(("job_slow",)))


def label(right: Right = STRAGGLER, onset: float = 100.0, ended: float | None = 108.0, rank: int = 2) -> Label:
    return Label("slow", right, onset, ended, (rank,), "node1", 0.5)


def story(at: float, fault_class: str | None = "straggler", rank: int | None = 2, node: str = "node1") -> Story:
    return Story(at, fault_class, (Culprit(rank=rank, node=node),))  # type: ignore[arg-type]


def verdict(name: str, revision: int, fault_class: str, at: float, rank: int | None = 2) -> Verdict:
    return Verdict(
        verdict_id=name, revision=revision, job="job", attempt=1, fault_class=fault_class,  # type: ignore[arg-type]
        severity="warning", culprits=() if rank is None else (Culprit(rank=rank, node="node1"),), onset_at=at, at=at,
        advice="notify", summary=f"{name} {revision}",
    )  # fmt: skip


def test_revisions_are_one_story_whose_last_word_counts() -> None:
    verdicts = [
        verdict("a", 0, "unknown", 101.0, rank=None), verdict("b", 0, "straggler", 102.0),
        verdict("a", 1, "rank_lost", 103.0, rank=1), verdict("a", 2, "rank_lost", 104.0, rank=1),
    ]  # fmt: skip
    first, second = stories_of(verdicts, [101.5, 102.5, 103.5, 104.5])
    assert (first.opened_at, first.fault_class, first.culprits[0].rank) == (101.5, "rank_lost", 1)
    assert first.said_at(["rank_lost"]) == 103.5
    assert second.opened_at == 102.5


def test_a_fault_is_found_within_its_time_and_the_delay_is_from_its_onset() -> None:
    matched = match([label()], [story(103.0)])
    assert [(o.found, o.culprit_right, o.delay_seconds) for o in matched.outcomes] == [(True, True, 3.0)]
    assert not matched.false


def test_of_a_fault_that_is_nobodys_true_words_may_name_any_node() -> None:
    disk = Right(frozenset(("checkpoint_failed",)), culprit="any", tolerated=frozenset(("warning",)))
    told = [story(103.0, "checkpoint_failed"), story(104.0, "warning", None, "node7")]
    assert not match([label(disk)], told).false
    assert len(match([label()], [story(103.0), story(104.0, "job_slow", None, "node7")]).false) == 1


@pytest.mark.parametrize("at", [99.0, 113.1])
def test_the_same_words_before_the_fault_or_long_after_it_are_false(at: float) -> None:
    matched = match([label()], [story(at)])
    assert not matched.outcomes[0].found
    assert len(matched.false) == 1


def test_without_an_end_a_fault_lasts_until_the_run_ends() -> None:
    assert match([label(ended=None)], [story(500.0)]).outcomes[0].found


def test_a_wrong_class_is_false_and_is_told_as_what_was_said() -> None:
    matched = match([label()], [story(103.0, "hang")])
    assert (matched.outcomes[0].found, matched.outcomes[0].said) == (False, "hang")
    assert len(matched.false) == 1


def test_somebody_else_beside_the_culprit_is_false_and_the_culprit_is_taken() -> None:
    matched = match([label()], [story(101.0, rank=3), story(104.0)])
    assert matched.outcomes[0].culprit_right
    assert [s.culprits[0].rank for s in matched.false] == [3]


def test_a_wrong_culprit_alone_is_found_with_the_wrong_culprit() -> None:
    matched = match([label()], [story(101.0, rank=3)])
    assert (matched.outcomes[0].found, matched.outcomes[0].culprit_right) == (True, False)
    assert not matched.false


def test_the_same_culprit_once_more_and_true_words_about_the_fault_are_not_false() -> None:
    assert not match([label()], [story(101.0), story(106.0), story(104.0, "job_slow", rank=None)]).false
    assert match([], [story(104.0, "job_slow", rank=None)]).false
    assert match([label()], [story(101.0), story(104.0, "job_slow", rank=3)]).false
    assert match([label()], [story(101.0), story(104.0, "job_slow", rank=None, node="node0")]).false


def test_a_node_is_a_node_and_a_rank_of_it_is_wrong() -> None:
    right = Right(frozenset(("contended_node",)), culprit="node")
    assert match([label(right)], [story(101.0, "contended_node", rank=None)]).outcomes[0].culprit_right
    assert not match([label(right)], [story(101.0, "contended_node", rank=2)]).outcomes[0].culprit_right
    assert match([label(right)], [story(101.0, None, rank=3)]).outcomes[0].culprit_right  # a baseline knows only ranks


def test_where_nobody_is_to_blame_naming_somebody_is_wrong() -> None:
    right = Right(frozenset(("job_slow",)), culprit="nobody")
    assert match([label(right)], [Story(101.0, "job_slow", ())]).outcomes[0].culprit_right
    assert not match([label(right)], [story(101.0, "job_slow")]).outcomes[0].culprit_right


def test_silence_may_be_right_and_is_not_counted() -> None:
    gap = label_of(fault("drop_telemetry", seconds=3.0))
    assert gap is not None
    assert tally(match([gap], [])) == Tally()
    assert tally(match([gap], [story(101.0, "telemetry_gap")])) == Tally()
    assert tally(match([gap], [story(101.0, "rank_lost")])).false == 1


def fault(name: str, **parameters: float) -> FaultInjected:
    return FaultInjected(
        job="job", attempt=1, rank=2, node="node1", sequence=0, at=100.0, fault=name, parameters=parameters
    )


def test_a_label_lasts_as_long_as_its_fault_and_a_blow_until_the_end() -> None:
    slow, late, kill = (
        label_of(fault("slow", seconds=8.0, factor=3.0)),
        label_of(fault("delay_telemetry", seconds=6.0, delay_seconds=1.5)), label_of(fault("kill", step=3.0)),
    )  # fmt: skip
    assert slow is not None
    assert late is not None
    assert kill is not None
    assert (slow.ended_at, late.ended_at, kill.ended_at) == (108.0, 107.5, None)
    assert (slow.ranks, slow.node) == ((2,), "node1")
    assert label_of(fault("cont")) is None
    assert label_of(fault("nothing known")) is None
    assert RIGHT["cpu_hog"].culprit == "node"


def test_counts_add_up() -> None:
    found = tally(match([label()], [story(103.0), story(50.0)]), clean_steps=500)
    missed = tally(match([label()], []), clean_steps=1_500)
    both = found + missed
    assert (both.recall, both.culprit, both.false_per_1k, both.delay(0.5)) == (0.5, 1.0, 0.5, 3.0)
    assert both.f1 == pytest.approx(0.5)
    assert math.isnan(Tally().recall)
    assert Tally().f1 == 0.0


def test_half_of_all_faults_are_found_by_a_time_that_missing_the_hard_ones_does_not_improve() -> None:
    assert Tally(faults=4, found=3, delays=(1.0, 9.0, 2.0)).found_within(0.5) == 2.0
    assert Tally(faults=4, found=1, delays=(0.1,)).found_within(0.5) == math.inf
    assert math.isnan(Tally().found_within(0.5))
