"""The demo is a strict judge: each answer that is not the one in the table is wrong, and it says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from detectors.verdict import Culprit, Verdict
from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.events import AttemptStarted, CheckpointEvent, Metrics, RankPlace
from ingest.memory_bus import MemoryBus
from pipelines.demo.faults import FAULTS, Outcome, chosen_faults, judge
from pipelines.demo.story import Story
from pipelines.errors import StatedError
from recovery.action import RECOVERY_TYPES, Action

KILL = next(fault for fault in FAULTS if fault.name == "kill")
NAN = next(fault for fault in FAULTS if fault.name == "nan")
XID = next(fault for fault in FAULTS if fault.name == "xid")
PLACES = tuple(RankPlace(rank=rank, local_rank=rank % 2, node=f"node{rank // 2}") for rank in range(4))


class Stage:
    """A story told by hand: attempt 1 saved steps 5 and 10 in memory, and step 5 is on disk."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        bus = MemoryBus(clock=self.clock)
        bus.create_topics(1)
        self.producer = bus.producer()
        self.story = Story(bus.consumer("stage", ("metrics", "events", "verdicts", "actions")), "demo", self.clock)
        self.sequence = 0
        self.begin(1)
        for step in (5, 10):
            for rank in range(4):
                self.checkpoint(1, rank, "sealed", step)
        self.checkpoint(1, -1, "complete", 5)

    def tell(self, *messages: Any) -> None:
        codec = Codec(RECOVERY_TYPES)
        for message in messages:
            self.producer.send(*codec.encode(message))
        self.producer.flush(1.0)
        while self.story.poll():
            pass

    def stamp(self, attempt: int, rank: int, node: str) -> dict[str, Any]:
        self.sequence += 1
        at = self.clock.now()
        return {"job": "demo", "attempt": attempt, "rank": rank, "node": node, "sequence": self.sequence, "at": at}

    def begin(self, attempt: int, resume_step: int | None = None) -> None:
        self.tell(
            AttemptStarted(**self.stamp(attempt, -1, "node0"), world_size=4, places=PLACES, resume_step=resume_step)
        )

    def steps(self, attempt: int, step: int) -> None:
        for place in PLACES:
            stamp = self.stamp(attempt, place.rank, place.node)
            self.tell(Metrics(**stamp, phase="train", step=step + 1, steps=(step,), ended_at=(self.clock.now(),)))

    def checkpoint(self, attempt: int, rank: int, state: str, step: int, tier: str = "memory") -> None:
        self.tell(CheckpointEvent(**self.stamp(attempt, rank, "node0"), state=state, step=step, tier=tier))

    def verdict(self, fault_class: str, *culprits: Culprit, first_bad_step: int | None = None, name: str = "v") -> None:
        self.tell(
            Verdict(
                verdict_id=name, revision=0, job="demo", attempt=1, fault_class=fault_class, severity="critical",
                settled=True, culprits=culprits, onset_at=self.clock.now(), at=self.clock.now(),
                first_bad_step=first_bad_step, advice="restart_in_place", summary=f"{fault_class}.",
            )
        )  # fmt: skip

    def action(self, verb: str, *, excluded: Sequence[str] = (), mode: str = "auto") -> None:
        self.tell(
            Action(
                action_id=f"demo/1/{verb}", job="demo", attempt=1, at=self.clock.now(), verb=verb, mode=mode,
                verdict_id="v", verdict_revision=0, fault_class="", rule="row", excluded_nodes=tuple(excluded),
            )
        )  # fmt: skip

    def resume(self, step: int, tiers: Sequence[str] = ("memory",) * 4) -> None:
        self.begin(2, resume_step=step)
        for rank, tier in enumerate(tiers):
            self.checkpoint(2, rank, "loaded", step, tier)
        self.steps(2, step + 1)

    def judged(self, fault: Any, *, node: str, bad_step: int | None = None) -> Outcome:
        outcome = Outcome(fault, self.clock.now(), 12, node=node, bad_step=bad_step)
        judge(outcome, self.story, self.story.attempts[1], set())
        return outcome


def handle_kill(stage: Stage, **changed: Any) -> Outcome:
    stage.verdict(changed.get("fault_class", "rank_lost"), *changed.get("culprits", (Culprit(rank=1, node="node0"),)))
    stage.action(changed.get("verb", "restart"), mode=changed.get("mode", "auto"))
    stage.resume(changed.get("step", 10), changed.get("tiers", ("memory",) * 4))
    return stage.judged(KILL, node="node0")


def test_the_right_answer_is_right() -> None:
    outcome = handle_kill(Stage())
    assert outcome.right, outcome.why
    assert (outcome.resume_step, outcome.tier, outcome.why) == (10, "memory", [])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fault_class": "hang"}, "no verdict rank_lost"),
        ({"culprits": (Culprit(rank=2, node="node1"),)}, "culprit"),
        ({"culprits": ()}, "culprit"),
        ({"culprits": (Culprit(rank=1, node="node0"), Culprit(rank=0, node="node0"))}, "culprit"),
        ({"verb": "exclude_and_restart"}, "actions"),
        ({"mode": "observe"}, "actions"),
        ({"step": 5}, "resumed from 5, not 10"),
        ({"tiers": ("memory", "memory", "disk", "memory")}, "not memory"),
    ],
)
def test_every_other_answer_is_wrong_and_says_why(changed: dict[str, Any], said: str) -> None:
    outcome = handle_kill(Stage(), **changed)
    assert not outcome.right
    assert any(said in reason for reason in outcome.why)


def test_a_second_verdict_about_one_fault_is_wrong() -> None:
    stage = Stage()
    stage.verdict("straggler", Culprit(rank=2, node="node1"), name="other")
    assert not handle_kill(stage).right


@pytest.mark.parametrize(("first_bad", "rejected", "right"), [(10, True, True), (9, True, False), (10, False, False)])
def test_a_nan_is_right_with_its_first_bad_step_rejected(first_bad: int, rejected: bool, right: bool) -> None:
    stage = Stage()
    stage.verdict("nan", Culprit(rank=0, node="node0"), first_bad_step=first_bad)
    if rejected:
        stage.checkpoint(1, -1, "rejected", 10)
    stage.action("restart")
    stage.resume(5)
    assert stage.judged(NAN, node="node0", bad_step=10).right is right


@pytest.mark.parametrize(
    ("step", "excluded", "right"), [(5, ("node1",), True), (10, ("node1",), False), (5, (), False)]
)
def test_after_the_loss_of_a_node_only_the_disk_counts(step: int, excluded: tuple[str, ...], right: bool) -> None:
    stage = Stage()
    stage.verdict("gpu_lost", Culprit(node="node1"))
    stage.action("exclude_and_restart", excluded=excluded)
    stage.resume(step, ("memory", "memory", "disk", "disk"))
    assert stage.judged(XID, node="node1").right is right


def test_what_an_earlier_nan_spoilt_is_no_step_to_resume_from() -> None:
    stage = Stage()
    stage.checkpoint(1, -1, "complete", 20, "disk")
    stage.checkpoint(1, -1, "rejected", 20, "disk")
    stage.verdict("gpu_lost", Culprit(node="node1"))
    stage.action("exclude_and_restart", excluded=("node1",))
    stage.resume(5, ("memory", "memory", "disk", "disk"))
    outcome = stage.judged(XID, node="node1")
    assert outcome.right, outcome.why


def test_faults_are_chosen_by_name_and_an_unknown_one_is_said() -> None:
    assert [fault.name for fault in chosen_faults("nan, kill")] == ["kill", "nan"]
    assert chosen_faults("none") == ()
    with pytest.raises(StatedError, match="no fault 'nope'; known: slow, kill"):
        chosen_faults("nope")
