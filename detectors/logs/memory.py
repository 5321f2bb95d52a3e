"""What a job's logs have shown in all its attempts: shapes of lines, and GPUs that were named before."""

from __future__ import annotations

from typing import Any

import msgspec

from detectors.clues import Place
from detectors.logs.templates import Templates
from detectors.verdict import Evidence, Verdict
from ingest.events import Logs

NOVEL_SECONDS = 60.0  # before an incident: what a rank said then and never before
NOVEL_MAX = 3
NOVEL_LINES_MIN = 50  # a job that has said less has no habits yet
NOVEL_AFTER_SECONDS = 60.0
RANK_LINES_MAX = 8
RANKS_MAX = 1_024
SAME_EVENT_SECONDS = 60.0  # lines of one device this close together tell of one event
AGAIN_SECONDS = 86_400.0
DEVICES_MAX = 256
EVENTS_MAX = 8
TEXT_CHARACTERS_MAX = 400
SUPPORTED_MAX = 16


class _State(msgspec.Struct):
    digests: list[str] = []
    lines: int = 0
    first_at: float | None = None
    recent: dict[int, list[Evidence]] = {}
    devices: dict[str, list[float]] = {}
    support: dict[str, list[Evidence]] = {}


class LogMemory:
    """Handed from one attempt's log book to the next."""

    def __init__(self) -> None:
        self._state = _State()
        self._templates = Templates()

    def remember(self, text: str, at: float, message: Logs, place: Place | None) -> None:
        """Note the shape of one record (its last line: the first of a traceback says nothing)."""
        state = self._state
        state.lines += 1
        state.first_at = at if state.first_at is None else min(state.first_at, at)
        last = text if "\n" not in text else text[text.rstrip().rfind("\n") + 1 :]
        if not self._templates.is_new(last) or message.rank < 0:
            return
        if state.lines < NOVEL_LINES_MIN or at < state.first_at + NOVEL_AFTER_SECONDS:
            return
        lines = state.recent.pop(message.rank, [])
        if not lines and len(state.recent) >= RANKS_MAX:
            del state.recent[next(iter(state.recent))]
        evidence = Evidence(
            kind="log", text=last.strip()[:TEXT_CHARACTERS_MAX], at=at, rank=message.rank, node=message.node,
            rule="novel", topic="logs", partition=None if place is None else place.partition,
            offset=None if place is None else place.offset,
        )  # fmt: skip
        state.recent[message.rank] = [*lines[-(RANK_LINES_MAX - 1) :], evidence]

    def support(self, verdict: Verdict) -> Verdict:
        """`verdict` with what its culprits said for the first time in the minute before: never a reason, only beside.

        What was added when an incident was first told stays with its later revisions.
        """
        state = self._state
        if verdict.severity not in ("error", "critical"):
            return verdict
        if verdict.verdict_id not in state.support:
            found = [
                line
                for culprit in verdict.culprits
                if culprit.rank is not None
                for line in state.recent.get(culprit.rank, [])
                if verdict.at - NOVEL_SECONDS <= line.at <= verdict.at
            ]
            told = {item.text for item in verdict.evidence}
            found = sorted((line for line in found if line.text not in told), key=lambda line: line.at)
            if not found and verdict.revision == 0:
                return verdict
            if len(state.support) >= SUPPORTED_MAX:
                del state.support[next(iter(state.support))]
            state.support[verdict.verdict_id] = found[:NOVEL_MAX]
        more = [line for line in state.support[verdict.verdict_id] if line not in verdict.evidence]
        return msgspec.structs.replace(verdict, evidence=(*verdict.evidence, *more)) if more else verdict

    def again(self, node: str, device: str, at: float) -> tuple[int, bool]:
        """Note an event of one device: how many it had within a day, and whether other devices had one too."""
        key, devices = f"{node}/{device}", self._state.devices
        times = devices.pop(key, [])
        if not times and len(devices) >= DEVICES_MAX:
            del devices[next(iter(devices))]
        if not times or at > times[-1] + SAME_EVENT_SECONDS:
            times = [*times[-(EVENTS_MAX - 1) :], at]
        times = [known for known in times if known >= at - AGAIN_SECONDS]
        devices[key] = times
        others = any(known[-1] >= at - AGAIN_SECONDS for name, known in devices.items() if name != key and known)
        return len(times), others

    def to_state(self) -> dict[str, Any]:
        self._state.digests = self._templates.digests()
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return built

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LogMemory:
        memory = cls()
        memory._state = msgspec.convert(state, _State, strict=False)
        memory._templates = Templates(memory._state.digests)
        return memory
