"""Collects where ranks stand and how far their collectives got while a job stands still, and says whom it points at."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from detectors.channel import Arrays, Told
from detectors.clues import Clue, Place, Source, source_of
from detectors.culprits import whom
from detectors.roster import Roster
from detectors.silence.sequence_numbers import GATE, parse_watchdog
from detectors.silence.stack_groups import Group, Pointing, Stand, behind_of, groups_of, odd_of, ranks_words, stand_of
from detectors.steps import StepMatrix
from detectors.verdict import Evidence
from ingest.events import Logs, Message, RankStacks

QUIET_SECONDS = 1.0  # after the last answer, what is there is looked at
GROUPS_SHOWN_MAX = 4
FRAMES_SHOWN_MAX = 12
LINE_CHARACTERS_MAX = 300
PROCESS_GROUPS_MAX = 64
FLIGHT = "flight recorder"  # the process group of numbers that are no watchdog's


class _Answer(msgspec.Struct):
    """One rank's stacks, as they came."""

    message: RankStacks
    source: Source


class _Number(msgspec.Struct):
    """The newest collective of one rank in one process group; `text` is the line that told it."""

    at: float
    source: Source
    node: str
    text: str
    number: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    collective: str = ""


class _State(msgspec.Struct):
    answers: dict[int, _Answer] = {}
    numbers: dict[str, dict[int, _Number]] = {}  # by process group and rank
    heard_at: float | None = None
    numbers_at: float | None = None
    told: str = ""  # what was said last of the stacks, and of the numbers
    told_numbers: str = ""


class StackChannel:
    """Evidence from a standstill; when the job moves on it is worth nothing any more."""

    wants: ClassVar[tuple[type[Message], ...]] = (RankStacks, Logs)

    def __init__(self) -> None:
        self._state = _State()

    def observe(self, message: Message, place: Place | None, roster: Roster) -> None:
        state = self._state
        if isinstance(message, Logs):
            self._read(message, place)
        elif isinstance(message, RankStacks) and message.rank >= 0:
            source = source_of(message, place)
            state.answers[message.rank] = _Answer(message, source)
            state.heard_at = message.at
            if message.enqueued is not None or message.completed is not None:
                text = (
                    f"rank {message.rank}: last enqueued {message.collective or 'collective'} {message.enqueued},"
                    f" last completed {message.completed}"
                )
                number = _Number(
                    message.at, source, message.node, text, None, message.enqueued, message.completed,
                    message.collective,
                )  # fmt: skip
                self._note(FLIGHT, message.rank, number)

    def closed(self, step: int, matrix: StepMatrix, roster: Roster) -> None:
        """Steps are nothing to it."""

    def look(self, now: float, roster: Roster) -> list[Told]:
        state = self._state
        if state.heard_at is None and state.numbers_at is None:
            return []
        if roster.moved_at is not None:
            self._forget(roster.moved_at)
        told: list[Told] = []
        if state.answers and state.heard_at is not None:
            everyone = all(rank.rank in state.answers for rank in roster.live())
            if everyone or now >= state.heard_at + QUIET_SECONDS:
                clue = self._stacks(roster)
                told += [clue] if clue is not None else []
        if state.numbers_at is not None and now >= state.numbers_at + QUIET_SECONDS:
            clue = self._numbers(roster)
            told += [clue] if clue is not None else []
        return told

    def to_state(self) -> tuple[dict[str, Any], Arrays]:
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return built, {}

    def load_state(self, state: dict[str, Any], arrays: Arrays) -> None:
        self._state = msgspec.convert(state, _State, strict=False)

    def _read(self, message: Logs, place: Place | None) -> None:
        for line in message.lines:
            if GATE[0] not in line.text and GATE[1] not in line.text:
                continue
            for text in line.text.split("\n"):
                told = parse_watchdog(text)
                if told is None:
                    continue
                rank = message.rank if message.rank >= 0 else told.rank
                if rank is None:
                    continue
                known = self._state.numbers.get(told.group, {}).get(rank)
                number = _Number(
                    line.at, source_of(message, place), message.node, text.strip()[:LINE_CHARACTERS_MAX],
                    told.number if told.number is not None else known.number if known else None,
                    told.enqueued if told.enqueued is not None else known.enqueued if known else None,
                    told.completed if told.completed is not None else known.completed if known else None,
                    told.collective or (known.collective if known else ""),
                )  # fmt: skip
                self._note(told.group, rank, number)

    def _note(self, group: str, rank: int, number: _Number) -> None:
        state = self._state
        if group not in state.numbers and len(state.numbers) >= PROCESS_GROUPS_MAX:
            return
        state.numbers.setdefault(group, {})[rank] = number
        state.numbers_at = max(state.numbers_at or number.at, number.at)

    def _forget(self, moved_at: float) -> None:
        state = self._state
        if state.heard_at is not None and moved_at > state.heard_at:
            state.answers, state.heard_at, state.told = {}, None, ""
        if state.numbers_at is not None and moved_at > state.numbers_at:
            state.numbers, state.numbers_at, state.told_numbers = {}, None, ""

    def _stacks(self, roster: Roster) -> Clue | None:
        """What the stacks say; None where that has been said."""
        state = self._state
        stands = [_stand(rank, answer, roster) for rank, answer in sorted(state.answers.items())]
        groups = groups_of(stands)
        pointing = odd_of(groups)
        sentence = _sentence(pointing) or _spread(groups)
        if sentence == state.told:
            return None
        state.told = sentence
        first = min(state.answers, key=lambda rank: (state.answers[rank].message.at, rank))
        at = state.answers[first].message.at
        lead = pointing.ranks[0] if pointing.ranks else None
        evidence = [self._evidence(sentence, at, lead, roster, len(pointing.ranks))]
        for group in groups[:GROUPS_SHOWN_MAX]:
            where = f"{ranks_words(group.ranks)} in {group.place}"
            if group.kind == "silent":
                where = f"{ranks_words(group.ranks)} without an answer: {group.place}"
            text = "\n".join((where, *group.frames[:FRAMES_SHOWN_MAX]))
            evidence.append(self._evidence(text, at, group.ranks[0], roster, len(group.ranks)))
        return Clue(
            kind="stack", role="confirm", fault_class="hang", at=at, rank=lead,
            node=roster.node_of(lead) if lead is not None else None, source=state.answers[first].source,
            evidence=tuple(evidence), summary=sentence, key="stack",
            culprits=whom(pointing.ranks, roster, pointing.confidence),
        )  # fmt: skip

    def _evidence(self, text: str, at: float, rank: int | None, roster: Roster, count: int) -> Evidence:
        source = self._state.answers[rank].source if rank is not None and rank in self._state.answers else None
        return Evidence(
            kind="stack", text=text, at=at, rank=rank if count == 1 else None,
            node=roster.node_of(rank) if rank is not None and count == 1 else None, value=float(count), unit="ranks",
            topic=source.topic if source else None, partition=source.partition if source else None,
            offset=source.offset if source else None,
        )  # fmt: skip

    def _numbers(self, roster: Roster) -> Clue | None:
        """What the sequence numbers say; None where that has been said, or where they say nothing."""
        state = self._state
        best, of = Pointing(), ""
        for group in sorted(state.numbers):
            pointing = _behind(state.numbers[group])
            if pointing.confidence > best.confidence or (pointing.reason and not best.reason):
                best, of = pointing, group
        sentence = _sentence(best) or best.reason
        if not sentence or sentence == state.told_numbers:
            return None
        state.told_numbers = sentence
        known = state.numbers[of]
        lead = best.ranks[0] if best.ranks else min(known)
        ahead = max(known, key=lambda rank: (known[rank].enqueued or known[rank].number or -1, -rank))
        shown = list(dict.fromkeys((lead, ahead)))
        flight = of == FLIGHT
        evidence = [
            Evidence(
                kind="stack" if flight else "log", text=known[rank].text, at=known[rank].at, rank=rank,
                node=known[rank].node, topic="events" if flight else "logs",
                partition=known[rank].source.partition, offset=known[rank].source.offset,
            )
            for rank in shown
        ]  # fmt: skip
        first = known[lead]
        return Clue(
            kind="sequence", role="confirm", fault_class="collective_timeout", at=first.at,
            rank=best.ranks[0] if best.ranks else None, node=first.node if best.ranks else None, source=first.source,
            evidence=tuple(evidence), summary=sentence, key="sequence",
            culprits=whom(best.ranks, roster, best.confidence),
        )  # fmt: skip


def _stand(rank: int, answer: _Answer, roster: Roster) -> Stand:
    message = answer.message
    known = roster.ranks.get(rank)
    waits = known is not None and known.phase == "collective"
    return stand_of(
        rank, message.node, message.stacks, in_collective=waits, state=message.state, wchan=message.wchan
    )  # fmt: skip


def _sentence(pointing: Pointing) -> str:
    return f"{ranks_words(pointing.ranks)} {pointing.reason}" if pointing.ranks else ""


def _spread(groups: list[Group]) -> str:
    """Where everybody stands, where nobody is odd."""
    if len(groups) == 1:
        return f"all {len(groups[0].ranks)} ranks stand in {groups[0].place}"
    shown = ", ".join(f"{len(group.ranks)} in {group.place}" for group in groups[:GROUPS_SHOWN_MAX])
    return f"the ranks stand in {len(groups)} places ({shown}): nobody stands out"


def _behind(known: dict[int, _Number]) -> Pointing:
    """Compare what all ranks of a process group have told: the newest enqueued, the one that timed out, the newest
    completed."""
    best = Pointing()
    for name in ("enqueued", "number", "completed"):
        numbers = {rank: getattr(entry, name) for rank, entry in known.items() if getattr(entry, name) is not None}
        if 2 * len(numbers) < len(known):
            continue
        pointing = behind_of(numbers)
        if pointing.ranks:
            return pointing
        best = best if best.reason else pointing
    return best
