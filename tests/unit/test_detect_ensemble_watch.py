"""The ensemble over an attempt: it speaks where no rule has, of whom and what is odd, once, and falls silent again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from detectors.channel import Ended
from detectors.clues import Condition
from detectors.ensemble.committee import Committee
from detectors.ensemble.config import EnsembleConfig
from detectors.ensemble.ensemble import Ensemble, EnsembleRefused
from detectors.ensemble.feedback import LEAST_MAX, Judged, eased, least
from detectors.ensemble.start import Start, start_from
from detectors.ensemble.stored import ModelRefused, StoredModel, StoredPart
from detectors.ensemble.watch import Watch
from detectors.ranks.finding import Finding
from tests.ensemble_rows import DATA, QUEUE, FakeJob, windows

LIGHT = EnsembleConfig(members=("top1", "top2", "PCA"), votes=())
RANKS = 16


@pytest.fixture(scope="module")
def committee() -> Committee:
    return Committee(windows(1, 600) / np.float32(2.5), LIGHT)  # running means are so much quieter


def model_of(committee: Committee, peers: str = "many", **more: object) -> StoredModel:
    part = StoredPart(windows=len(committee.windows), checks=committee.checks, level_decades=3.0)
    fields: dict[str, object] = {
        "features": LIGHT.features, "persistence": LIGHT.persistence, "members": LIGHT.members, "votes": LIGHT.votes,
        "seed": 0, "versions": {"numpy": np.__version__}, "parts": {peers: part},
        "windows": {peers: committee.windows},
    }  # fmt: skip
    return StoredModel(**(fields | more))  # type: ignore[arg-type]


def job_of(committee: Committee, ranks: int = RANKS, **more: object) -> FakeJob:
    peers = "many" if ranks > 7 else "few"
    start = Start(model_of(committee, peers, **more), {peers: committee})
    ensemble = Ensemble(replace(LIGHT, start=start))
    return FakeJob(Watch(ensemble, range(ranks), [f"n{rank // 8}" for rank in range(ranks)]), ranks)


def conditions(told: list[object]) -> list[Condition]:
    return [thing for thing in told if isinstance(thing, Condition)]


def test_a_slow_rank_that_no_rule_has_found_is_named_with_what_made_it_odd_and_ends(committee: Committee) -> None:
    job = job_of(committee)
    assert job.train(40) == []
    job.slow(5)
    (said,) = job.train(14, quiet=False)
    assert isinstance(said, Condition)
    assert (said.key, said.fault_class, said.detector) == ("straggler/5", "straggler", "ensemble")
    assert (said.culprits[0].rank, said.culprits[0].node) == (5, "n0")
    metrics = [evidence.metric for evidence in said.evidence]
    assert metrics[0] == "train.compute.own"
    at = metrics.index("detect.ensemble")
    assert "PCA" in said.evidence[at].text
    behind = said.evidence[at + 1 :]
    assert 1 <= len(behind) <= 3
    assert all(evidence.value == pytest.approx(0.6) and evidence.peers_median == 0.5 for evidence in behind)
    job.channel.added.clear()
    assert job.train(60, quiet=False) == [Ended("straggler/5")]


def test_late_data_is_a_data_stall(committee: Committee) -> None:
    job = job_of(committee)
    job.train(40)
    job.channel.added[3, DATA] = 10.0
    job.matrix.late[3] = 0.1
    (said,) = conditions(job.train(14, quiet=False))
    assert (said.key, said.fault_class) == ("data_stall/3", "data_stall")


def test_a_run_queue_is_no_ranks_fault_and_what_is_too_small_to_matter_is_not_said(committee: Committee) -> None:
    job = job_of(committee)
    job.train(40)
    job.channel.added[3, QUEUE] = 15.0
    job.slow(7)
    job.matrix.factor[7] = 1.01
    assert job.train(20, quiet=False) == []


@pytest.mark.parametrize("crowded", [[5], list(range(8))], ids=["the rank waits", "its node waits"])
def test_a_rank_that_looks_slow_where_processors_are_crowded_is_not_blamed(
    committee: Committee, crowded: list[int]
) -> None:
    job = job_of(committee)
    job.train(40)
    job.slow(5)
    job.matrix.queue[crowded] = 0.06
    assert job.train(14, quiet=False) == []


def test_what_all_ranks_share_and_two_of_a_node_is_not_told_of_a_rank(committee: Committee) -> None:
    job = job_of(committee)
    job.train(40)
    for rank in range(RANKS):
        job.slow(rank)
    assert job.train(14, quiet=False) == []
    job = job_of(committee)
    job.train(40)
    job.slow(1)
    job.slow(2)
    assert job.train(14, quiet=False) == []


@pytest.mark.parametrize("busy", ["straggler/5", "straggler/node/n0", "contended_node/n0"])
def test_while_a_rule_speaks_of_the_rank_or_its_node_the_ensemble_only_supports(
    committee: Committee, busy: str
) -> None:
    job = job_of(committee)
    job.train(40)
    job.slow(5)
    assert job.train(20, busy=[busy]) == []


def test_a_rule_that_comes_later_takes_over_and_no_end_is_said_twice(committee: Committee) -> None:
    job = job_of(committee)
    job.train(40)
    job.slow(5)
    assert len(job.train(14, quiet=False)) == 1
    finding = Finding(kind="straggler", subject="5", open=True, rank=5, node="n0", steps=(job.step - 1,))
    support = job.watch.support(finding, job.matrix, job.channel)  # type: ignore[arg-type]
    assert support is not None
    assert support.decades >= 3.0
    assert job.watch.begins(finding, support)
    job.channel.added.clear()
    assert job.train(60, busy=["straggler/5"]) == []


def test_a_rule_that_finds_the_whole_node_ends_what_was_said_of_its_rank(committee: Committee) -> None:
    job = job_of(committee)
    job.train(40)
    job.slow(5)
    assert len(job.train(14, quiet=False)) == 1
    whole = Finding(kind="straggler", subject="node/n0", open=True, node="n0", steps=(job.step - 1,))
    assert job.watch.begins(whole, None)
    assert job.watch.take() == [Ended("straggler/5")]


def test_after_a_start_nothing_is_said_at_once(committee: Committee) -> None:
    job = job_of(committee)
    job.slow(5)
    assert job.train(LIGHT.restart_steps, quiet=False) == []


def test_in_a_small_job_one_alarm_of_its_own_silences_it_until_it_has_been_quiet_for_long(
    committee: Committee,
) -> None:
    job = job_of(committee, ranks=4)
    job.watch.ensemble.alarmed_alone()
    assert not job.watch.ensemble.decides
    for _ in range(LIGHT.few_shadow_steps):
        job.watch.ensemble.learn(windows(1, 0), 1.0)
    assert job.watch.ensemble.decides


def test_in_a_small_job_a_rank_must_be_beyond_the_largest_of_the_others(committee: Committee) -> None:
    """Who shares a core shares its bursts."""
    said = []
    for others in (1.0, 1.18):
        job = job_of(committee, ranks=4)
        job.watch.ensemble.learn(windows(1, 0), 1.0)
        job.matrix.factor[:] = 1.0 + 0.01 * job.channel.dice.standard_normal(4)
        for _ in range(130):
            job.matrix.factor[:] = 1.0 + 0.01 * job.channel.dice.standard_normal(4)
            assert job.train(1) == []
        assert job.watch.ensemble.decides
        for _ in range(16):
            job.matrix.factor[:] = 1.0 + 0.01 * job.channel.dice.standard_normal(4)
            job.matrix.factor[[1, 2]] *= (1.2, others)
            said += [(others, told.key) for told in conditions(job.train(1, quiet=False))]
    assert said == [(1.0, "straggler/1")]


def test_verdicts_called_wrong_ask_for_more_decades_and_a_rules_finding_waits_until_it_has_them(
    committee: Committee,
) -> None:
    job = job_of(committee, least={"straggler": 5.0})
    job.train(40)
    assert job.watch.ensemble.threshold(RANKS, "straggler") >= 5.0
    job.slow(5, z=0.5)
    job.train(8, quiet=False)
    finding = Finding(
        kind="straggler", subject="5", open=True, rank=5, node="n0", steps=(job.step - 1,), metric="train.compute.own",
        value=0.6, peers_median=0.5,
    )  # fmt: skip
    weak = job.watch.support(finding, job.matrix, job.channel)  # type: ignore[arg-type]
    assert weak is not None
    assert not job.watch.begins(finding, weak)
    assert conditions(job.train(10, quiet=False)) == []
    job.slow(5, z=15.0)
    told: list[Condition] = []
    for _ in range(12):
        told += conditions(job.train(1, busy=[said.key for said in told], quiet=False))
    assert [(said.key, said.detector) for said in told] == [("straggler/5", "rank_channel")]


def test_feedback_raises_a_class_within_bounds_and_never_above_what_was_right() -> None:
    wrong = [Judged("straggler", "false_positive", 3.2), Judged("straggler", "false_positive", 2.0)]
    assert least(wrong)[0] == {"straggler": 3.3}
    assert least([*wrong, Judged("straggler", "true_positive", 2.9)])[0] == {"straggler": 2.8}
    assert least([Judged("straggler", "false_positive", 11.0)])[0] == {"straggler": LEAST_MAX}
    assert least([Judged("straggler", "unknown", 3.0)]) == ({}, [])
    assert "1 of them would still open" in least([Judged("data_stall", "false_positive", 11.0)])[1][0]


def test_faults_that_were_missed_by_little_lower_a_class_and_others_do_not() -> None:
    assert eased([("straggler", 2.5, 3.0), ("data_stall", 1.0, 3.0), ("straggler", 4.0, 3.0)])[0] == {"straggler": 0.6}


def test_a_stored_model_comes_back_and_scores_the_same(committee: Committee) -> None:
    back = StoredModel.from_bytes(model_of(committee).to_bytes())
    start = start_from(back, LIGHT)
    fresh = windows(9, 20)
    assert np.array_equal(start.committees["many"].level_of(fresh), committee.level_of(fresh))
    ensemble = Ensemble(replace(LIGHT, start=start))
    ensemble.begin("many")
    assert ensemble.decides


def test_a_model_of_other_features_members_or_scores_is_refused_in_a_sentence(committee: Committee) -> None:
    model = model_of(committee)
    with pytest.raises(ModelRefused, match="other features"):
        start_from(model, replace(LIGHT, features=LIGHT.features[:5]))
    with pytest.raises(ModelRefused, match=r"other members .*fit it anew"):
        start_from(model, EnsembleConfig())
    moved = StoredPart(windows=len(committee.windows), checks=(9.0, *committee.checks[1:]), level_decades=3.0)
    with pytest.raises(ModelRefused, match="does not reproduce its scores"):
        start_from(model_of(committee, parts={"many": moved}), LIGHT)


def test_what_is_no_model_is_refused_and_never_unpickled(committee: Committee) -> None:
    with pytest.raises(ModelRefused, match="no model"):
        StoredModel.from_bytes(b"\x80\x04nothing")
    stored = model_of(committee, version=99).to_bytes()
    with pytest.raises(ModelRefused, match="version 99"):
        StoredModel.from_bytes(stored)


def test_an_ensembles_state_comes_back_and_another_one_is_refused(committee: Committee) -> None:
    config = replace(LIGHT, fit_steps=40, hold_steps=2)
    ensemble = Ensemble(config)
    ensemble.begin("many")
    for step in range(45):
        ensemble.learn(windows(step, 8), 0.7)
    state, arrays = ensemble.to_state()
    state = json.loads(json.dumps(state))
    again = Ensemble.from_state(state, arrays, config)
    assert again.committee is not None
    assert again.threshold(64) == ensemble.threshold(64)
    assert again.to_state()[0] == state
    with pytest.raises(EnsembleRefused, match="does not reproduce"):
        Ensemble.from_state({**state, "checks": [score + 1.0 for score in state["checks"]]}, arrays, config)
    with pytest.raises(EnsembleRefused, match="other members"):
        Ensemble.from_state(state, arrays, EnsembleConfig())
