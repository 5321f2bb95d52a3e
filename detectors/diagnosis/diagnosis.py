"""A diagnosis of logs in one pass: the first cause, who it was, what to do, and what was only a consequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from detectors.diagnosis.first_cause import (
    TIMED_OUT,
    Behind,
    explains,
    first_cause,
    put_in_order,
    who_is_behind,
    who_is_missing,
)  # fmt: skip
from detectors.diagnosis.places import Speaker, Stamp
from detectors.diagnosis.scan import LineGate
from detectors.diagnosis.sightings import REMARKS, Sighting, Source, Survived
from detectors.diagnosis.symptoms import Action
from detectors.diagnosis.words import confidence_of, sentence
from detectors.logs.rule_book import RuleBook
from detectors.verdict import FaultClass

SIGHTINGS_MAX = 20_000  # of all sources together
LINES_SHOWN_MAX = 4
CONSEQUENCES_MAX = 12
RANKS_SHOWN_MAX = 16
TEXT_CHARACTERS_MAX = 400
STEPS_AFTER = 3  # another source that is so many steps further on has not noticed the failure


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line and where it stands; `line` counts from 1."""

    source: str
    line: int
    text: str
    rank: int | None = None
    node: str = ""


class Consequence(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one symptom that explain nothing, or after which the job went on. `ranks`: at most 16 of them."""

    symptom: str
    count: int
    ranks: tuple[int, ...]
    first: LogLine


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    sources: int
    lines: int
    octets: int
    last_step: int | None = None
    last_loss: float | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `symptom` is '' where nothing was found, and then `action` is none.

    `rank` is None where no rank, or no single one, is to blame; `workload`: all ranks did it. `suspects` are peers
    that a line names and that did not speak themselves; `device` is a PCI address; `victims` counts the ranks that only
    suffered from it.
    """

    symptom: str = ""
    fault_class: FaultClass = "unknown"
    action: Action = "none"
    summary: str
    mend: str = ""
    rank: int | None = None
    local_rank: int | None = None
    node: str = ""
    device: str = ""
    workload: bool = False
    victims: int = 0
    suspects: tuple[str, ...] = ()
    confidence: float = 0.0
    at: str = ""
    last_step: int | None = None
    last_loss: float | None = None
    lines: tuple[LogLine, ...] = ()
    consequences: tuple[Consequence, ...] = ()
    beside: tuple[Consequence, ...] = ()  # warnings, which stop nothing and tell of no consequence
    recovered: tuple[Consequence, ...] = ()
    looked: Looked

    @property
    def found(self) -> bool:
        return bool(self.symptom)


class Diagnoser:
    """Reads sources one after the other or in turns; memory is bounded by what they show, not by their size."""

    def __init__(self, rules: RuleBook | None = None) -> None:
        self._rules = rules or RuleBook.shipped()
        self._gate = LineGate(self._rules.rules, REMARKS)
        self._sources: dict[str, Source] = {}
        self._read: list[Source] = []
        self._looked = [0, 0, 0]  # sources, lines, bytes of what has ended
        self._kept = 0

    def feed(self, source: str, octets: bytes) -> None:
        """The next bytes of a source, in pieces of any size; its name tells rank and node where it can."""
        reader = self._sources.get(source)
        if reader is None:
            order = len(self._sources) + self._looked[0]
            reader = self._sources[source] = Source(source, order, self._rules, self._gate)
        reader.feed(octets)

    def feed_lines(self, source: str, lines: Iterable[str]) -> None:
        """Whole lines of a source."""
        for line in lines:
            self.feed(source, line.encode() + b"\n")

    def end(self, source: str) -> None:
        """No more of this source comes; what it showed is kept, what it was read with is let go."""
        reader = self._sources.pop(source, None)
        if reader is None:
            return
        reader.end()
        self._looked = [self._looked[0] + 1, self._looked[1] + reader.lines, self._looked[2] + reader.octets]
        telling = reader.pending or reader.survived or reader.completed or reader.progress is not None
        named = reader.speaker.rank is not None or reader.speaker.attempt
        if telling or named:
            room = max(0, SIGHTINGS_MAX - self._kept)
            for key in sorted(reader.pending, key=lambda key: reader.pending[key].symptom.group == "sufferer")[room:]:
                del reader.pending[key]
            self._kept += len(reader.pending)
            self._read.append(reader)

    def conclude(self) -> Diagnosis:
        """End what is still open and weigh it all."""
        for name in list(self._sources):
            self.end(name)
        return _conclude(self._read, self._looked)


def _conclude(sources: Sequence[Source], looked: Sequence[int]) -> Diagnosis:
    survived = [one for source in sources for one in source.survived.values()]
    pending: list[Sighting] = []
    onward = _onward(sources)
    attempt = max((source.speaker.attempt for source in sources if source.progress is not None), default=0)
    for source in sources:
        for one in source.pending.values():
            if source.speaker.attempt in range(1, attempt) or _survived_elsewhere(one, source, onward):
                survived.append(Survived(one, one.count))
            else:
                pending.append(one)
    ordered = put_in_order(pending)
    furthest = max(
        (source.progress for source in sources if source.progress is not None),
        key=lambda progress: (progress.step or -1, progress.place), default=None,
    )  # fmt: skip
    read = Looked(
        sources=looked[0], lines=looked[1], octets=looked[2],
        last_step=None if furthest is None else furthest.step,
        last_loss=None if furthest is None else _finite(furthest.loss),
    )  # fmt: skip
    recovered = _folded([(one.sighting, one.count) for one in survived])
    cause = first_cause(ordered)
    if cause is None:
        only = _folded([(one, one.count) for one in ordered])
        bare = Diagnosis(summary="", consequences=only, recovered=recovered, looked=read)
        return msgspec.structs.replace(bare, summary=sentence(bare, None, None))
    return _blame(cause, ordered, sources, recovered, read)


def _blame(
    cause: Sighting,
    ordered: Sequence[Sighting],
    sources: Sequence[Source],
    recovered: tuple[Consequence, ...],
    read: Looked,
) -> Diagnosis:
    same = [one for one in ordered if one.symptom.name == cause.symptom.name and not one.weak]
    ranks = sorted({one.speaker.rank for one in same if one.speaker.rank is not None})
    known = _ranks_of(sources)
    rank, node, local, workload, behind = cause.speaker.rank, cause.speaker.node, cause.speaker.local, False, None
    suspects: tuple[str, ...] = ()
    if rank is None:
        speakers = _same_speaker(cause, same) or _explained(cause, ordered)
        if len({speaker.rank for speaker in speakers}) == 1:
            rank, node = speakers[0].rank, node or speakers[0].node
    if cause.symptom.group == "user" and len(ranks) > 1 and len(ranks) * 2 >= len(known):
        rank, node, local, workload = None, "", None, True
    elif cause.symptom.group == "sufferer":
        rank, node, local = None, "", None
        behind = _behind(sources) if cause.symptom.name in TIMED_OUT else None
        if behind is not None and len(behind.ranks) == 1:
            rank = behind.ranks[0]
        elif cause.symptom.name in TIMED_OUT and behind is None:
            rank = who_is_missing(ranks, known)
        suspects = tuple(dict.fromkeys(one.peer for one in same if one.peer))[:CONSEQUENCES_MAX]
    elif cause.peer:
        suspects = (cause.peer,)
    if rank is not None and not node:
        node = _node_of(rank, sources)
    after = cause.after or next((one.after for one in ordered if one.after is not None), None)
    step, loss = (None, None) if after is None else (after.step, _finite(after.loss))
    shown = (
        [cause, *(one for one in same if one is not cause)]
        if cause.symptom.group == "sufferer"
        else _shown(cause, ordered)
    )
    others = [one for one in ordered if one.weak or one.symptom.name != cause.symptom.name]
    beside = [(one, one.count) for one in others if one.symptom.group == "warning"]
    after_it = [(one, one.count) for one in others if one.symptom.group != "warning"]
    suffered = {one.speaker.rank for one, _ in after_it} - {rank, None}
    diagnosis = Diagnosis(
        symptom=cause.symptom.name, fault_class=cause.rule.fault_class, action=cause.symptom.action, summary="",
        mend=cause.symptom.mend, rank=rank, local_rank=local if rank is None else None, node=node, device=cause.pci,
        workload=workload, victims=len(suffered), suspects=suspects, at="" if cause.stamp is None else cause.stamp.text,
        last_step=step if step is not None else read.last_step, last_loss=loss if step is not None else read.last_loss,
        lines=tuple(_line(one) for one in shown[:LINES_SHOWN_MAX]), consequences=_folded(after_it),
        beside=_folded(beside), recovered=recovered, looked=read,
    )  # fmt: skip
    sure = confidence_of(diagnosis, cause, ordered, behind)
    diagnosis = msgspec.structs.replace(diagnosis, confidence=sure)
    return msgspec.structs.replace(diagnosis, summary=sentence(diagnosis, cause, behind, len(ranks)))


def _same_speaker(cause: Sighting, same: Sequence[Sighting]) -> list[Speaker]:
    """Who says the same and tells a rank, where the first line did not: a kernel's assertion, torchrun's first word."""
    speaker = cause.speaker
    return [
        one.speaker for one in same
        if one.speaker.rank is not None and one.source == cause.source
        and speaker.local in (None, one.speaker.local) and speaker.node in ("", one.speaker.node)
    ]  # fmt: skip


def _explained(cause: Sighting, ordered: Sequence[Sighting]) -> list[Speaker]:
    """Who says what the cause explains: the kernel kills a process, its rank only says that it is gone."""
    return [one.speaker for one in ordered if one.speaker.rank is not None and explains(cause, one)]


def _shown(cause: Sighting, ordered: Sequence[Sighting]) -> list[Sighting]:
    """The cause's line, then other lines of its symptom from the same speaker."""
    speaker = cause.speaker
    return [cause] + [
        one for one in ordered
        if one is not cause and one.symptom.name == cause.symptom.name and one.speaker.over(speaker) == speaker
    ]  # fmt: skip


def _onward(sources: Sequence[Source]) -> list[Source]:
    """Sources with progress at known times, the one that went on longest first."""
    timed = {source.order: stamp for source in sources if (stamp := _last_mark(source)) is not None}
    year = max((stamp.year for stamp in timed.values()), default=0)
    told = (source for source in sources if source.order in timed)
    return sorted(told, key=lambda source: timed[source.order].in_year(year), reverse=True)


def _last_mark(source: Source) -> Stamp | None:
    """When a source that tells of steps at several times told so last."""
    stamp = source.marks[-1].stamp if len(source.marks) > 1 else None
    return None if stamp is None or stamp.uptime else stamp


def _survived_elsewhere(one: Sighting, source: Source, onward: Sequence[Source]) -> bool:
    """Another source tells that the job went on: steps at later times. (Nearly always the first one is asked.)"""
    if one.stamp is None or not one.own_stamp or one.stamp.uptime or source.speaker.attempt:
        return False
    for other in onward:
        last = other.marks[-1]
        if _earlier(last.stamp, one.stamp):
            return False
        if other is source:
            continue
        before = [mark for mark in other.marks if _earlier(mark.stamp, one.stamp)]
        reached = before[-1].place if before else other.marks[0].place
        if last.place >= reached + STEPS_AFTER:
            return True
    return False


def _earlier(one: Stamp | None, other: Stamp) -> bool:
    if one is None:
        return False
    year = max(one.year, other.year)
    return not one.uptime and one.in_year(year) <= other.in_year(year)


def _behind(sources: Sequence[Source]) -> Behind | None:
    completed: dict[tuple[str, int], int] = {}
    for source in sources:
        completed.update(source.completed)
    return who_is_behind(completed)


def _ranks_of(sources: Sequence[Source]) -> set[int]:
    ranks = {speaker.rank for source in sources for speaker in (*source.speakers, source.speaker)}
    ranks |= {rank for source in sources for _, rank in source.completed}
    return {rank for rank in ranks if rank is not None}


def _node_of(rank: int, sources: Sequence[Source]) -> str:
    for source in sources:
        for speaker in (*source.speakers, source.speaker):
            if speaker.rank == rank and speaker.node:
                return speaker.node
    return ""


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and abs(loss) < float("inf") else None


def _line(one: Sighting) -> LogLine:
    who = one.speaker
    return LogLine(
        source=one.source, line=one.line, text=one.text[:TEXT_CHARACTERS_MAX], rank=who.rank, node=who.node
    )  # fmt: skip


def _ranks_in(speakers: Iterable[Speaker]) -> tuple[int, ...]:
    return tuple(sorted({speaker.rank for speaker in speakers if speaker.rank is not None}))


def _folded(sightings: Iterable[tuple[Sighting, int]]) -> tuple[Consequence, ...]:
    """One row for each symptom, in the order in which they were first seen."""
    rows: dict[str, list[tuple[Sighting, int]]] = {}
    for one, count in sightings:
        rows.setdefault(one.symptom.name, []).append((one, count))
    return tuple(
        Consequence(
            symptom=name, count=sum(count for _, count in group), first=_line(group[0][0]),
            ranks=_ranks_in(one.speaker for one, _ in group)[:RANKS_SHOWN_MAX],
        )
        for name, group in list(rows.items())[:CONSEQUENCES_MAX]
    )  # fmt: skip
