"""Messages of a made-up job, and a bus that is just a list, for the tests of the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from detectors.verdict import Culprit, Verdict
from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointEvent,
    LogLine,
    Logs,
    Metrics,
    NodeHeartbeat,
    RankPlace,
    split_non_finite,
)
from recovery.action import RECOVERY_TYPES, Action, Command, Incident, Receipt

JOB = "gpt"
CODEC = Codec(RECOVERY_TYPES)


class Tape:
    """Gives messages their place on a bus of one partition, in the order in which they are told."""

    def __init__(self, partition: int = 0) -> None:
        self.partition = partition
        self.records: list[Record] = []
        self._offsets: dict[str, int] = {}

    def tell(self, *messages: Any) -> list[Record]:
        """The records of `messages`, which the tape remembers."""
        told = []
        for message in messages:
            encoded = CODEC.encode(message)
            told.append(self.raw(encoded.topic, encoded.value, encoded.headers, at=message.at, key=message.job))
        return told

    def raw(
        self,
        topic: Any,
        value: bytes,
        headers: Iterable[tuple[str, bytes]] = (),
        *,
        at: float = 0.0,
        key: str = JOB,
    ) -> Record:
        """Any bytes as a record."""
        offset = self._offsets.get(topic, 0)
        self._offsets[topic] = offset + 1
        record = Record(topic, self.partition, offset, key, tuple(headers), value, at + 0.01)
        self.records.append(record)
        return record


def metrics(
    step: int, *, rank: int = 0, at: float | None = None, attempt: int = 1, job: str = JOB, **columns: Any
) -> Metrics:
    """One step of one rank; `step_` columns: `train_loss=…` becomes train.loss."""
    at = 1000.0 + step if at is None else at
    named = {name.replace("_", "."): [value] for name, value in columns.items()}
    named.setdefault("train.step.duration", [0.5])
    finite, non_finite = split_non_finite(named)
    return Metrics(
        job=job, attempt=attempt, rank=rank, node=f"node-{rank // 2}", sequence=step, at=at, phase="train",
        step=step + 1, steps=(step,), ended_at=(at,), columns=finite, non_finite=non_finite,
    )  # fmt: skip


def heartbeat(at: float, node: str = "node-0", sequence: int = 0) -> NodeHeartbeat:
    return NodeHeartbeat(job=JOB, attempt=1, rank=-1, node=node, sequence=sequence, at=at, ranks_alive=(0, 1))


def logs(*texts: str, rank: int = 0, at: float = 1000.0, job: str = JOB, sequence: int = 0) -> Logs:
    lines = tuple(LogLine(at=at + index * 0.001, stream="stdout", text=text) for index, text in enumerate(texts))
    return Logs(job=job, attempt=1, rank=rank, node="node-0", sequence=sequence, at=at, lines=lines)


def attempt_started(attempt: int = 1, at: float = 1000.0, resume_step: int | None = None) -> AttemptStarted:
    places = tuple(RankPlace(rank=rank, local_rank=rank % 2, node=f"node-{rank // 2}") for rank in range(4))
    return AttemptStarted(
        job=JOB, attempt=attempt, rank=-1, node="node-0", sequence=0, at=at, world_size=4, places=places,
        resume_step=resume_step,
    )  # fmt: skip


def attempt_ended(outcome: Any, node: str, at: float = 1100.0, attempt: int = 1) -> AttemptEnded:
    return AttemptEnded(job=JOB, attempt=attempt, rank=-1, node=node, sequence=1, at=at, outcome=outcome)


def checkpoint(step: int, state: Any = "complete", tier: Any = "memory", rank: int = -1) -> CheckpointEvent:
    return CheckpointEvent(
        job=JOB, attempt=1, rank=rank, node="node-0", sequence=step, at=1000.0 + step, state=state, step=step,
        tier=tier,
    )  # fmt: skip


def verdict(number: int = 1, revision: int = 0, *, at: float = 1010.0, job: str = JOB, **fields: Any) -> Verdict:
    given: dict[str, Any] = {
        "verdict_id": f"{job}/1/2/logs/{number}",
        "revision": revision,
        "job": job,
        "attempt": 1,
        "fault_class": "rank_lost",
        "severity": "error",
        "settled": True,
        "culprits": (Culprit(rank=2, node="node-1"),),
        "onset_at": at - 1.0,
        "at": at,
        "advice": "restart_in_place",
        "summary": "Rank 2 was killed.",
    }
    return Verdict(**given | fields)


def action(number: int = 1, *, at: float = 1011.0, **fields: Any) -> Action:
    given: dict[str, Any] = {
        "action_id": f"{JOB}/{number}/restart", "job": JOB, "attempt": 1, "at": at, "verb": "restart",
        "mode": "auto",
        "verdict_id": f"{JOB}/1/2/logs/{number}", "verdict_revision": 0, "fault_class": "rank_lost",
        "rule": "rank_lost: restart in place", "next_attempt": 2, "resume_step": 10, "resume_tier": "memory",
        "plan_hash": "9f2c",
    }  # fmt: skip
    return Action(**given | fields)


def receipt(number: int = 1, outcome: Any = "done", *, at: float = 1013.0) -> Receipt:
    return Receipt(
        action_id=f"{JOB}/{number}/restart",
        job=JOB,
        attempt=1,
        at=at,
        outcome=outcome,
        text="Attempt 2 runs.",
    )


def transition(number: int = 1, sequence: int = 0, state: str = "open", *, at: float = 1012.0) -> Incident:
    return Incident(
        incident_id=f"{JOB}/1/2/logs/{number}", job=JOB, attempt=1, at=at, state=state, cause="verdict",
        sequence=sequence,
    )  # fmt: skip


def command(number: int = 1, verb: Any = "acknowledge", *, at: float = 1014.0, **fields: Any) -> Command:
    given: dict[str, Any] = {
        "command_id": f"c{number}-{verb}", "job": JOB, "at": at, "verb": verb,
        "incident_id": f"{JOB}/1/2/logs/{number}", "author": "ada",
    }  # fmt: skip
    return Command(**given | fields)
