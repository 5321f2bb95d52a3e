"""Telemetry that stops is told of the rank, or the node, that has stopped telling; late and lost messages are not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detectors.channel import Ended
from detectors.clues import Condition, source_of
from detectors.ranks.telemetry import TelemetryChannel
from detectors.roster import Roster
from detectors.steps import StepMatrix
from ingest.events import AttemptStarted, Message, Metrics, NodeHeartbeat, RankExited, RankPlace

RANKS = 16
COLUMNS = ("train.compute.own", "train.step.duration", "train.loss")


class Job:
    """Steps of one second, told by those who tell; `told` is what the channel said, with its step."""

    def __init__(self) -> None:
        self.roster, self.matrix = Roster(attempt=1, started_at=0.0), StepMatrix(list(range(RANKS)))
        self.channel = TelemetryChannel()
        places = tuple(RankPlace(rank=rank, local_rank=rank % 4, node=f"n{rank // 4}") for rank in range(RANKS))
        self.roster.observe(
            AttemptStarted(**self.stamp(-1, 0.0), world_size=RANKS, places=places, resume_step=None), None
        )
        self.step = 0
        self.told: list[tuple[int, Condition | Ended]] = []

    def stamp(self, rank: int, at: float) -> dict[str, object]:
        node = "n0" if rank < 0 else f"n{rank // 4}"
        return {"job": "j", "attempt": 1, "rank": rank, "node": node, "sequence": int(at), "at": at}

    def say(self, rank: int, step: int, lost: tuple[str, ...] = ()) -> None:
        at = float(step + 1)
        message = Metrics(
            **self.stamp(rank, at), phase="train", step=step + 1, steps=(step,), ended_at=(at,),
            columns={name: (1.0,) for name in COLUMNS if name not in lost},
        )  # fmt: skip
        self.roster.observe(message, None)
        self.matrix.add(message, None)

    def beat(self, node: int, dead: tuple[int, ...] = ()) -> None:
        alive = tuple(rank for rank in range(4 * node, 4 * node + 4) if rank not in dead)
        stamp = {**self.stamp(-1, float(self.step)), "node": f"n{node}"}
        message: Message = NodeHeartbeat(**stamp, ranks_alive=alive)
        self.roster.observe(message, None)
        self.channel.observe(message, None, self.roster)

    def train(
        self, steps: int, *, silent: tuple[int, ...] = (), lost: dict[int, tuple[str, ...]] | None = None,
        dead: tuple[int, ...] = (),
    ) -> Job:  # fmt: skip
        for _ in range(steps):
            for rank in range(RANKS):
                if rank not in silent:
                    self.say(rank, self.step, (lost or {}).get(rank, ()))
            for node in range(4):
                self.beat(node, dead)
            for step in self.matrix.close(self.step + 5.0, set(range(RANKS))):
                self.channel.closed(step, self.matrix, self.roster)
                self.told += [(step, told) for told in self.channel.look(step + 5.0, self.roster)]
            self.step += 1
        return self


def conditions(job: Job) -> list[Condition]:
    return [told for _, told in job.told if isinstance(told, Condition)]


def test_a_rank_that_stops_telling_while_its_process_lives_is_named_after_half_a_minute_and_closed_when_back() -> None:
    job = Job().train(30).train(50, silent=(5,)).train(10)
    (begun, said), (ended, end) = job.told
    assert isinstance(said, Condition)
    assert (said.fault_class, said.key, said.culprits[0].rank, said.culprits[0].node) == (
        "telemetry_gap", "telemetry_gap/5", 5, "n1",
    )  # fmt: skip
    assert 50 <= begun <= 60
    assert said.onset_at == 31.0
    assert said.source.silence
    assert "no word of its steps" in said.summary
    assert end == Ended("telemetry_gap/5")
    assert 80 <= ended <= 84


def test_a_metric_that_one_rank_loses_is_named_by_name() -> None:
    job = Job().train(30).train(40, lost={7: ("train.loss",)})
    (said,) = conditions(job)
    assert (said.culprits[0].rank, said.evidence[0].metric) == (7, "train.loss")
    assert "train.loss" in said.summary


def test_a_whole_node_that_stops_telling_is_one_finding() -> None:
    job = Job().train(30).train(40, silent=(8, 9, 10, 11))
    (said,) = conditions(job)
    assert (said.key, said.culprits[0].rank, said.culprits[0].node) == ("telemetry_gap/node/n2", None, "n2")


def test_a_metric_that_everybody_ceases_to_report_is_the_jobs_own_doing() -> None:
    lost = dict.fromkeys(range(RANKS), ("train.loss",))
    assert Job().train(30).train(60, lost=lost).told == []


@pytest.mark.parametrize("seed", range(3))
def test_one_message_in_a_hundred_lost_and_late_ones_are_no_gap(seed: int) -> None:
    dice, job = np.random.default_rng(seed), Job()
    late: list[tuple[int, int, int]] = []
    for step in range(150):
        missing = tuple(np.flatnonzero(dice.random(RANKS) < 0.06).tolist())
        late += [(step + int(dice.integers(3, 20)), rank, step) for rank in missing if dice.random() < 0.8]
        job.train(1, silent=missing)
        for _, rank, of in [entry for entry in late if entry[0] == step]:
            job.say(rank, of)
    assert job.told == []


def test_a_rank_whose_every_message_is_twenty_seconds_late_is_slow_to_arrive_and_not_gone() -> None:
    job = Job().train(30)
    for step in range(30, 100):
        job.train(1, silent=(5,))
        if step >= 50:
            job.say(5, step - 20)
    assert job.told == []


def test_a_rank_whose_process_is_gone_is_nobodys_gap() -> None:
    assert Job().train(30).train(50, silent=(5,), dead=(5,)).told == []
    job = Job().train(30)
    job.roster.observe(RankExited(**job.stamp(5, 30.5), exit_code=1), None)
    assert job.train(50, silent=(5,)).told == []


def test_a_gap_saved_and_loaded_in_the_middle_ends_the_same() -> None:
    job = Job().train(30).train(35, silent=(5,))
    state, arrays = job.channel.to_state()
    again = TelemetryChannel()
    again.load_state(json.loads(json.dumps(state)), {name: array.copy() for name, array in arrays.items()})
    job.channel = again
    job.train(10)
    assert job.told[-1][1] == Ended("telemetry_gap/5")
    assert len(job.told) == 2


def test_the_identity_of_a_gap_is_the_last_word_before_it() -> None:
    job = Job().train(30).train(50, silent=(5,))
    (said,) = conditions(job)
    last = Metrics(**job.stamp(5, 30.0), phase="train", step=30)
    assert said.source == source_of(last, None, silence=True)
