"""The rank channel on arrays: who is named, how soon, whose doing it is, and who is never named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from detectors.ranks.channel import RankChannel
from detectors.ranks.finding import Finding
from detectors.steps import TIMINGS, Floats

OWN, WALL, STEP, DATA = TIMINGS[0], TIMINGS[1], TIMINGS[2], TIMINGS[3]
OPTIMIZER, WAIT, DELAY = "train.optimizer.duration", "train.collective.wait", "train.run_queue.delay"
Fault = Callable[[dict[str, Floats]], None]


@dataclass
class Steps:
    """What the channel asks of a step matrix, from an array: step × rank × TIMINGS."""

    values_: Floats
    apart: frozenset[int] = frozenset()
    first_step: int = 0

    def values(self, step: int, name: str) -> Floats:
        return self.values_[step, :, TIMINGS.index(name)].copy()

    def rows(self, step: int) -> Floats:
        return self.values_[step]

    def is_apart(self, step: int) -> bool:
        return step in self.apart


def trained(
    ranks: int, steps: int, fault: Fault | None = None, *, seed: int = 0, per_node: int = 8, work: Sequence[float] = ()
) -> Steps:
    """A synchronous job of 1-second steps: noise of nodes (4 %, in blocks), of ranks (1.5 %), 1 % missing."""
    dice = np.random.default_rng(seed)
    node = np.repeat(dice.normal(0.0, 0.04, (-(-steps // 12), -(-ranks // per_node))), 12, axis=0)[:steps]
    own = 0.6 * np.exp(np.repeat(node, per_node, axis=1)[:, :ranks] + dice.normal(0.0, 0.015, (steps, ranks)))
    own *= np.asarray(work) if len(work) else 1.0 + dice.normal(0.0, 0.02, ranks)
    parts = {
        OWN: own, DATA: np.abs(dice.normal(0.002, 0.001, (steps, ranks))), OPTIMIZER: np.full((steps, ranks), 0.05),
        DELAY: np.abs(dice.normal(0.02, 0.004, (steps, ranks))), WAIT: np.zeros((steps, ranks)),
    }  # fmt: skip
    parts[OPTIMIZER] = parts[OPTIMIZER] * (1.0 + dice.normal(0.0, 0.03, (steps, ranks)))
    if fault is not None:
        fault(parts)
    wall = parts[OWN] + parts[DELAY]
    arrived = wall + parts[DATA]
    parts[WAIT] = parts[WAIT] + arrived.max(axis=1, keepdims=True) - arrived + 0.05
    length = (arrived + parts[WAIT]).max(axis=1, keepdims=True) + 0.05
    parts |= {WALL: wall, STEP: np.broadcast_to(length, own.shape)}
    values = np.full((steps, ranks, len(TIMINGS)), np.nan)
    for name, column in parts.items():
        values[:, :, TIMINGS.index(name)] = column
    values[dice.random((steps, ranks)) < 0.01] = np.nan
    return Steps(values)


def more(name: str, where: object, begin: int, end: int, *, by: float = 0.0, factor: float = 1.0) -> Fault:
    def bend(parts: dict[str, Floats]) -> None:
        parts[name][begin:end, where] = parts[name][begin:end, where] * factor + by

    return bend


def channel_of(ranks: int, per_node: int = 8, roles: Sequence[str] = ()) -> RankChannel:
    return RankChannel(list(range(ranks)), [f"node{rank // per_node}" for rank in range(ranks)], None, roles)


def told(channel: RankChannel, steps: Steps, begin: int = 0, end: int | None = None) -> list[tuple[int, Finding]]:
    last = len(steps.values_) if end is None else end
    return [(step, finding) for step in range(begin, last) for finding in channel.score(steps, step)]


def opened(found: list[tuple[int, Finding]]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.subject) for _, finding in found if finding.open]


@pytest.mark.parametrize("seed", range(2))
def test_a_clean_job_of_64_ranks_is_quiet(seed: int) -> None:
    assert told(channel_of(64), trained(64, 300, seed=seed)) == []


@pytest.mark.parametrize(("factor", "soon"), [(1.5, 5), (1.2, 8), (1.1, 40)])
def test_a_slow_rank_is_named_the_sooner_the_slower_and_its_victims_never(factor: float, soon: int) -> None:
    found = told(channel_of(64), trained(64, 280, more(OWN, 21, 150, 220, factor=factor)))
    assert [(finding.subject, finding.open) for _, finding in found] == [("21", True), ("21", False)]
    step, first = found[0]
    assert 150 <= first.steps[0] <= step <= 150 + soon
    assert first.value / first.peers_median == pytest.approx(factor, rel=0.06)
    assert first.wait is not None
    assert first.wait_peers is not None
    assert first.wait_peers - first.wait > 0.3 * (first.value - first.peers_median)
    assert found[1][0] <= 250  # over, and not opened again by what the longer scales remember


def test_a_whole_slow_node_is_one_finding_and_names_no_rank() -> None:
    found = told(channel_of(64), trained(64, 260, more(OWN, slice(16, 24), 150, 220, factor=1.35)))
    assert [(f.kind, f.subject, f.rank, f.node) for _, f in found if f.open] == [
        ("straggler", "node/node2", None, "node2")
    ]
    assert not found[-1][1].open


def test_a_rank_that_only_loses_a_lead_delays_nobody() -> None:
    def quick_at_first(parts: dict[str, Floats]) -> None:
        parts[OWN][:40, 9] *= 0.80
        parts[OWN][40:, 9] *= 0.90

    assert opened(told(channel_of(64), trained(64, 200, quick_at_first))) == []


def test_a_stage_that_slows_as_a_whole_is_nobodys_fault() -> None:
    roles = [f"stage{rank // 32}" for rank in range(64)]
    found = told(channel_of(64, roles=roles), trained(64, 260, more(OWN, slice(0, 32), 150, 260, factor=1.3)))
    assert [finding for _, finding in found if finding.rank is not None] == []


@pytest.mark.parametrize(
    ("fault", "kind", "subject"),
    [
        (more(DATA, 9, 150, 210, by=0.1), "data_stall", "9"),
        (more(OPTIMIZER, 9, 150, 210, factor=4.0), "straggler", "9"),
        (more(DELAY, slice(8, 16), 150, 210, by=0.3), "contended_node", "node1"),
        (more(WAIT, 9, 150, 210, by=0.3), "link_degraded", "9"),
        (more(WAIT, slice(8, 16), 150, 210, by=0.4), "link_degraded", "node/node1"),
    ],
    ids=["data", "optimizer", "contended", "link of a rank", "link of a node"],
)
def test_every_timing_is_scored_and_named_for_what_it_is(fault: Fault, kind: str, subject: str) -> None:
    assert opened(told(channel_of(64), trained(64, 240, fault))) == [(kind, subject)]


def test_a_link_that_is_slow_for_everybody_names_nobody() -> None:
    assert told(channel_of(64), trained(64, 240, more(WAIT, slice(None), 150, 210, by=0.3))) == []


def test_a_rank_that_is_slow_from_its_first_step_is_found_by_the_slow_test_and_said_so() -> None:
    work = np.ones(64)
    work[37] = 1.12
    found = told(channel_of(64), trained(64, 200, work=work.tolist()))
    assert opened(found) == [("straggler", "37")]
    assert found[0][1].from_start


def test_roles_given_are_peers_and_a_role_of_one_is_not_compared() -> None:
    roles = ["first", *["rest"] * 15]
    work = [2.0, *[1.0] * 15]
    channel = channel_of(16, roles=roles)
    assert opened(told(channel, trained(16, 150, work=work))) == []
    assert channel.peerless == [0]


def test_roles_are_learned_from_the_ranks_own_times_once_and_stay() -> None:
    work = np.repeat([0.7, 1.0, 1.3], 32)
    channel, steps = channel_of(96), trained(96, 260, work=work.tolist())
    assert told(channel, steps, end=40) == []
    early = channel.roles.tolist()
    assert told(channel, steps, begin=40) == []
    assert channel.roles.tolist() == np.repeat([0, 1, 2], 32).tolist()
    assert early in (channel.roles.tolist(), [0] * 96)


def test_steps_apart_and_steps_of_another_length_are_not_learned_from() -> None:
    def long_steps(parts: dict[str, Floats]) -> None:
        parts[OWN][100:110] *= 3.0
        parts[OWN][100:110, 5] *= 1.2

    steps = trained(64, 140, long_steps)
    channel = channel_of(64)
    told(channel, steps, end=100)
    before = channel.learned
    told(channel, steps, begin=100, end=110)
    assert channel.learned == before
    steps.apart = frozenset(range(110, 120))
    told(channel, steps, begin=110, end=120)
    assert channel.learned == before


def test_deviations_are_masked_where_nothing_was_told_and_large_for_the_odd_rank_only() -> None:
    steps = trained(64, 170, more(OWN, 21, 150, 170, factor=1.5))
    channel = channel_of(64)
    told(channel, steps)
    step = next(step for step in range(169, 160, -1) if np.isfinite(steps.values_[step, 21, 0]))
    among_peers, among_mates = channel.deviations(step), channel.deviations(step, from_mates=True)
    assert among_peers is not None
    assert among_mates is not None
    assert among_peers.shape == (64, len(TIMINGS))
    missing = np.isnan(steps.values_[step, :, 0])
    assert np.isnan(among_peers[missing]).all()
    assert np.nanargmax(among_peers[:, 0]) == np.nanargmax(among_mates[:, 0]) == 21
    assert among_mates[21, 0] > 10.0
    assert channel.deviations(10) is None


def test_sixteen_ranks_in_four_small_stages_are_compared_within_them() -> None:
    work = np.repeat([0.8, 0.95, 1.1, 1.25], 4)
    steps = trained(16, 400, more(OWN, 5, 250, 330, factor=1.5), work=work, seed=3)
    channel = channel_of(16)
    found = told(channel, steps)
    assert len(set(channel.roles.tolist())) == 4
    assert [(finding.kind, finding.subject) for _, finding in found if finding.open] == [("straggler", "5")]


def test_each_kept_step_has_its_own_deviations_though_steps_between_are_not_compared() -> None:
    steps = Steps(trained(64, 140).values_, apart=frozenset(range(3, 140, 4)))
    channel, shown = channel_of(64), {}
    for step in range(140):
        channel.score(steps, step)
        if not steps.is_apart(step) and channel.deviations(step) is not None:
            shown[step] = channel.deviations(step)
    kept = [step for step in range(110, 140) if channel.deviations(step) is not None]
    assert len(kept) == 16
    assert all(np.array_equal(channel.deviations(step), shown[step], equal_nan=True) for step in kept)


def test_a_late_rank_changes_the_evidence_of_its_steps_and_opens_nothing_twice() -> None:
    steps = trained(64, 200, more(OWN, 21, 150, 200, factor=1.5))
    whole = steps.values_.copy()
    steps.values_[150:160, 21] = np.nan
    channel = channel_of(64)
    assert told(channel, steps, end=160) == []
    steps.values_[:] = whole
    found = [finding for step in range(150, 160) for finding in channel.rescore(steps, step)]
    found += [finding for step in range(150, 160) for finding in channel.rescore(steps, step)]
    assert [(finding.subject, finding.open) for finding in found] == [("21", True)]
    assert opened(told(channel, steps, begin=160)) == []


def test_a_channel_saved_and_loaded_goes_on_the_same() -> None:
    steps = trained(64, 240, more(OWN, slice(16, 24), 150, 200, factor=1.35))
    nodes = [f"node{rank // 8}" for rank in range(64)]
    one, other = channel_of(64), channel_of(64)
    expected = told(one, steps)
    found = []
    for step in range(240):
        if step % 37 == 0:
            state, arrays = other.to_state()
            other = RankChannel.from_state(list(range(64)), nodes, json.loads(json.dumps(state)), arrays)
        found += [(step, finding) for finding in other.score(steps, step)]
    assert found == expected
    assert opened(found) == [("straggler", "node/node2")]


@pytest.mark.parametrize("seed", range(2))
def test_few_peers_name_a_slowdown_of_a_tenth_after_a_long_window(seed: int) -> None:
    channel = channel_of(4, per_node=2)
    found = told(channel, trained(4, 280, more(OWN, 2, 120, 200, factor=1.13), seed=seed, per_node=2))
    assert set(opened(found)) == {("straggler", "2")}


@pytest.mark.parametrize("seed", range(2))
def test_few_peers_are_quiet_in_clean_runs_whatever_their_number(seed: int) -> None:
    for ranks, per_node in ((2, 1), (3, 1), (4, 2), (7, 4)):
        assert told(channel_of(ranks, per_node), trained(ranks, 300, seed=seed, per_node=per_node)) == []


def test_a_slow_node_of_two_in_a_job_of_four_ranks_is_the_node() -> None:
    found = told(channel_of(4, 2), trained(4, 300, more(OWN, slice(2, 4), 120, 200, factor=1.4), per_node=2))
    assert [(f.kind, f.subject) for _, f in found if f.open] == [("straggler", "node/node1")]


def test_a_rank_alone_on_its_node_needs_more_than_a_burst() -> None:
    found = told(channel_of(2, 1), trained(2, 300, more(OWN, 1, 120, 135, factor=1.2), per_node=1))
    assert opened(found) == []
    found = told(channel_of(2, 1), trained(2, 300, more(OWN, 1, 120, 160, factor=1.6), per_node=1))
    assert opened(found) == [("straggler", "1")]


def test_one_rank_is_compared_with_nobody() -> None:
    assert told(channel_of(1), trained(1, 100, more(OWN, 0, 50, 100, factor=3.0))) == []


def test_a_rank_that_never_tells_does_not_keep_a_small_job_from_learning_the_others() -> None:
    steps = trained(4, 280, more(OWN, 2, 120, 200, factor=1.2), per_node=2)
    steps.values_[:, 3] = np.nan
    assert ("straggler", "2") in opened(told(channel_of(4, 2), steps))


def test_a_rank_that_tells_at_last_is_compared_with_the_others_too() -> None:
    steps = trained(4, 480, more(OWN, 3, 380, 440, factor=1.5), per_node=2)
    steps.values_[:150, 3] = np.nan
    channel = channel_of(4, 2)
    assert told(channel, steps, end=380) == []
    assert opened(told(channel, steps, begin=380)) == [("straggler", "3")]


def test_a_rank_that_only_ever_waited_for_a_core_is_not_slow_when_it_gets_one() -> None:
    steps = trained(4, 200, per_node=2)
    steps.values_[:120, 3, TIMINGS.index(OWN)] = 0.0
    steps.values_[120:, 3, TIMINGS.index(OWN)] = 0.005
    assert told(channel_of(4, 2), steps) == []


@pytest.mark.parametrize("seed", range(2))
def test_few_ranks_whose_batches_differ_in_length_from_step_to_step_blame_nobody(seed: int) -> None:
    steps = trained(4, 1000, seed=seed, per_node=2)
    lengths = np.exp(np.random.default_rng(seed).normal(0.0, 0.2, (1000, 4)))
    steps.values_[:, :, TIMINGS.index(OWN)] *= lengths
    assert told(channel_of(4, 2), steps) == []


@pytest.mark.parametrize("seed", range(2))
def test_few_ranks_that_all_wait_for_their_data_now_and_then_have_no_stall(seed: int) -> None:
    steps = trained(4, 1000, seed=seed, per_node=2)
    steps.values_[:, :, TIMINGS.index(DATA)] = np.random.default_rng(seed).exponential(0.05, (1000, 4))
    assert told(channel_of(4, 2), steps) == []


def test_of_two_ranks_with_different_hardware_neither_is_the_odd_one() -> None:
    assert told(channel_of(2, 1), trained(2, 200, work=[1.0, 1.5], per_node=1)) == []


def test_eight_ranks_in_nodes_of_four_whose_batches_differ_blame_nobody() -> None:
    def vary(parts: dict[str, Floats]) -> None:
        parts[OWN] *= np.exp(np.random.default_rng(8).normal(0.0, 0.1, parts[OWN].shape))

    assert told(channel_of(8, 4), trained(8, 500, vary, per_node=4)) == []
