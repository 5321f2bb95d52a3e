"""Log records into clues: teardown noise passed over, floods thinned, devices and processes mapped to ranks."""

from __future__ import annotations

from typing import Any

import msgspec

from detectors.clues import Clue, Condition, Place, Role, source_of
from detectors.log_rules import Hit, RuleBook
from detectors.roster import Roster
from detectors.verdict import Culprit, Evidence
from ingest.events import Logs

REPEAT_SECONDS = 5.0  # the same rule of the same producer counts once in this time
TEARDOWN_RECORDS = 10  # how far behind its announcement the error of a teardown may stand
TEXT_CHARACTERS_MAX = 400


class _State(msgspec.Struct):
    teardown: dict[str, int] = {}
    last: dict[str, float] = {}
    records: int = 0
    hits: dict[str, int] = {}


class LogBook:
    """Reads one attempt's log messages."""

    def __init__(self, rules: RuleBook) -> None:
        self.rules = rules
        self._state = _State()

    @property
    def hits(self) -> dict[str, int]:
        """How often each rule has matched."""
        return dict(self._state.hits)

    def read(self, message: Logs, place: Place | None, roster: Roster) -> tuple[list[Clue], list[Condition]]:
        """Clues for the judge, and warnings to open, of one batch."""
        clues: list[Clue] = []
        warnings: list[Condition] = []
        producer = f"{message.rank}/{message.node}"
        for line in message.lines:
            self._state.records += 1
            for hit in self._hits(line.text, f"{producer}/{line.stream}"):
                key = f"{hit.rule.id}/{producer}/{hit.pci}"
                last = self._state.last.get(key)
                if last is not None and line.at < last + REPEAT_SECONDS:
                    continue
                self._state.last[key] = line.at
                if hit.rule.fault_class == "warning":
                    if hit.rule.role == "root":
                        warnings.append(_warning(hit, message, place, line.at))
                else:
                    clues.append(_clue(hit, message, place, line.at, roster))
        return clues, warnings

    def to_state(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self._state)
        return built

    @classmethod
    def from_state(cls, state: dict[str, Any], rules: RuleBook) -> LogBook:
        book = cls(rules)
        book._state = msgspec.convert(state, _State)
        return book

    def _hits(self, text: str, stream: str) -> list[Hit]:
        state = self._state
        if self.rules.begins_teardown(text):
            state.teardown[stream] = TEARDOWN_RECORDS
            return []
        hits = self.rules.match_record(text)
        left = state.teardown.get(stream, 0)
        if left:
            state.teardown[stream] = 0 if hits else left - 1
            if hits:
                return []
        for hit in hits:
            state.hits[hit.rule.id] = state.hits.get(hit.rule.id, 0) + 1
        return hits


def _clue(hit: Hit, message: Logs, place: Place | None, at: float, roster: Roster) -> Clue:
    rule, rank = hit.rule, message.rank if message.rank >= 0 else _rank_of(hit, message.node, roster)
    where = f"Rank {message.rank} on {message.node}" if message.rank >= 0 else f"Node {message.node}"
    source = source_of(message, place)
    state = roster.ranks.get(rank) if rank is not None else None
    role: Role = "root" if rule.role == "root" else "confirm" if rule.role == "confirm" else "cascade"
    # a kernel line is about its node unless it names the process of a rank
    about = message.rank if message.rank >= 0 else rank if hit.pid is not None and not hit.pci else None
    return Clue(
        kind="log", role=role, fault_class=rule.fault_class, at=at, rank=about, node=message.node, source=source,
        evidence=(_evidence(hit, message, place, at, rank),),
        summary=f"{where} said: {hit.line.strip()[:TEXT_CHARACTERS_MAX]}", rule=rule.id, severity=rule.severity,
        advice=rule.advice, alone=rule.alone and role == "root",
        step=state.step if state is not None and state.step >= 0 else None,
    )  # fmt: skip


def _warning(hit: Hit, message: Logs, place: Place | None, at: float) -> Condition:
    rank = message.rank if message.rank >= 0 else None
    return Condition(
        key=f"warning/{hit.rule.id}/{message.node}", fault_class="warning",
        culprits=(Culprit(rank=rank, node=message.node, confidence=0.5),), victims=0, onset_at=at, onset_step=None,
        summary=f"Node {message.node} said: {hit.line.strip()[:TEXT_CHARACTERS_MAX]}",
        evidence=(_evidence(hit, message, place, at, rank),), source=source_of(message, place),
        detector=f"rules/{hit.rule.id}", severity=hit.rule.severity, advice=hit.rule.advice,
    )  # fmt: skip


def _evidence(hit: Hit, message: Logs, place: Place | None, at: float, rank: int | None) -> Evidence:
    return Evidence(
        kind="log", text=hit.line.strip()[:TEXT_CHARACTERS_MAX], at=at, rank=rank, node=message.node,
        rule=hit.rule.id, topic="logs", partition=None if place is None else place.partition,
        offset=None if place is None else place.offset,
    )  # fmt: skip


def _rank_of(hit: Hit, node: str, roster: Roster) -> int | None:
    """The rank on `node` whose device or process the line names."""
    for rank in roster.ranks_of(node):
        if hit.pci and rank.pci_address and hit.pci[-5:] in rank.pci_address.lower():
            return rank.rank
        if hit.pid is not None and rank.pid == hit.pid:
            return rank.rank
    return None
