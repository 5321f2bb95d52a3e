"""Checkpoints that fail: why, on which node, until the next one is whole again."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from detectors.channel import Arrays, Ended, Told
from detectors.clues import Condition, Place, Source, source_of
from detectors.roster import Roster
from detectors.steps import StepMatrix
from detectors.verdict import Culprit, Evidence
from ingest.events import CheckpointEvent, Message

NO_SPACE = re.compile(r"no space left|disk quota exceeded|\[errno (?:28|122)\]", re.IGNORECASE)
TEXT_CHARACTERS_MAX = 300
TIERS = ("memory", "peer", "disk", "object")
WHOLE = ("durable", "complete", "backed_up")


class _Failure(msgspec.Struct):
    """The newest failure of one node (or, with rank -1, of a whole step) in one tier."""

    at: float
    step: int
    rank: int
    node: str
    tier: str
    reason: str
    source: Source
    told: bool = False
    count: int = 1


class CheckpointChannel:
    """Says `checkpoint_failed` once for each node and tier, and that it is over with the next whole shard there."""

    wants: ClassVar[tuple[type[Message], ...]] = (CheckpointEvent,)

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._over: list[str] = []

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        if not isinstance(message, CheckpointEvent):
            return
        key = f"checkpoint_failed/{message.tier}/{message.node}"
        if message.state == "failed":
            known = self._failures.get(key)
            if known is None:
                self._failures[key] = _Failure(
                    message.at, message.step, message.rank, message.node, message.tier,
                    message.reason[:TEXT_CHARACTERS_MAX], source_of(message, place),
                )  # fmt: skip
            else:
                known.count += 1
        elif message.state in WHOLE:
            whole = message.state == "complete"  # of a whole step: every node has written its part
            for name, failure in list(self._failures.items()):
                mine = name == key or (whole and failure.tier == message.tier)
                if mine and message.step >= failure.step and message.at >= failure.at:
                    del self._failures[name]
                    self._over.append(name)

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        """Steps are nothing to it."""

    def look(self, now: float, roster: Roster) -> list[Told]:
        told: list[Told] = [Ended(key) for key in self._over]
        self._over = []
        for key, failure in sorted(self._failures.items()):
            if not failure.told:
                failure.told = True
                told.append(_condition(key, failure))
        return told

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        return {"failures": msgspec.to_builtins(self._failures), "over": list(self._over)}, {}

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._failures = msgspec.convert(state["failures"], dict[str, _Failure])
        self._over = list(state["over"])


def _condition(key: str, failure: _Failure) -> Condition:
    full = bool(NO_SPACE.search(failure.reason))
    whose = f"of rank {failure.rank} " if failure.rank >= 0 else ""
    why = f"there is no space left on {failure.node}" if full else failure.reason or "no reason was given"
    summary = f"The checkpoint of step {failure.step} {whose}was not written ({failure.tier}): {why}."
    advice = " Free space there, or the newest checkpoint stays the one before it." if full else ""
    return Condition(
        key=key, fault_class="checkpoint_failed",
        culprits=(Culprit(node=failure.node, confidence=0.9 if full else 0.7),), victims=0, onset_at=failure.at,
        onset_step=failure.step, summary=summary + advice,
        evidence=(
            Evidence(
                kind="event", text=failure.reason or summary, at=failure.at, node=failure.node, step=failure.step,
                rank=failure.rank if failure.rank >= 0 else None, topic=failure.source.topic,
                partition=failure.source.partition, offset=failure.source.offset,
            ),
        ),
        source=failure.source, detector="checkpoint_clues",
    )  # fmt: skip
