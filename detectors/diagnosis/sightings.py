"""What one source of log lines showed: sightings of rules by speaker, last progress, and what it went on after.

Bytes come in pieces of any size; they are cut into blocks of a fixed size here, so that the cuts change nothing. Only
lines that the gate lets through are decoded; all others are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from detectors.diagnosis.places import Said, Speaker, Stamp, listen, speaker_of_file, stamp_of
from detectors.diagnosis.scan import BLOCK_BYTES, LineGate, line_around
from detectors.diagnosis.symptoms import Symptom, symptom_of
from detectors.logs.progress_lines import parse_progress, read_bar
from detectors.logs.rule_book import Hit, Rule, RuleBook

LINE_BYTES_MAX = 4096
# by symptom and speaker, of one source and episode, for sufferers and for others each; more are counted
SIGHTINGS_MAX = 4_096
STORM_LINES = 200  # so many lines that differ in numbers alone, and the next are only counted
SHAPES_MAX = 2_000
MARKS_MAX = 512
LOOK_BACK_LINES = 30
PROGRESS_TRIES = 12
TEARDOWN_LINES = 60
CHAIN_LINES = 120
WENT_ON_STEPS = 2

REMARKS = ("last completed ", "xid (")  # in no rule's gate, but read all the same


@dataclass(frozen=True, slots=True)
class Reached:
    """A line that says how far the training is. `place` grows with it: a step, or epochs where no step is told."""

    place: float
    step: int | None
    loss: float | None
    stamp: Stamp | None = None


@dataclass(slots=True)
class Sighting:
    """One kind of line by one speaker since the job last went on: the first of them, and how many."""

    rule: Rule
    symptom: Symptom
    source: str
    line: int
    text: str
    speaker: Speaker
    stamp: Stamp | None
    own_stamp: bool
    pci: str = ""
    peer: str = ""
    weak: bool = False  # said at a level, or with words, of somebody who goes on
    after: Reached | None = None
    count: int = 1
    source_order: int = 0
    at: float | None = None  # on the axis of the whole diagnosis, once that is known


@dataclass(slots=True)
class Survived:
    """Lines of one symptom after which the job went on."""

    sighting: Sighting
    count: int


PROGRESS_WORDS = re.compile(rb"loss|it/s|s/it")
SEQUENCE = re.compile(r"\bSeqNum=(\d{1,15})")
COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d{1,15})")
DIGITS = b"0123456789"
NUMBERS_TELL = re.compile(rb"xid|errno|exitcode|signal|status|code|seqnum|last completed|nan|inf(?!o)", re.IGNORECASE)
GROUP = re.compile(r"\[(PG [^\]]*?)\s*Rank \d+\]")
ADDRESS = r"((?:\d{1,3}\.){3}\d{1,3}|[\w-]+(?:\.[\w-]+)+)"
PEER = re.compile(r"(?:\b(?:to|from|peer|address)|[Cc]onnect(?:ion)? (?:to|with)) \[?" + ADDRESS + r"\]?[<:]\d+")
EXCEPTION = re.compile(r"^\s*(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b")
RANK_ABOVE = re.compile(r"^\s*rank\s+:\s(\d{1,6}) \(local_rank: (\d{1,4})\)")
HOST_ABOVE = re.compile(r"^\s*host\s+:\s(\S+)")


def reached_by(line: str) -> Reached | None:
    """What a line of progress says, None for any other line and for those that tell neither step nor epoch."""
    said = listen(line)
    told = parse_progress(said.text)
    if told is None or told.phase != "train":
        return None
    place = float(told.step) if told.step is not None else told.epoch
    return None if place is None else Reached(place, told.step, told.loss, said.stamp)


@dataclass(slots=True)
class Source:
    """One file or stream, read once. `end` must be called after the last bytes."""

    name: str
    order: int
    rules: RuleBook
    gate: LineGate
    lines: int = 0
    octets: int = 0
    pending: dict[tuple[object, ...], Sighting] = field(default_factory=dict)
    survived: dict[str, Survived] = field(default_factory=dict)
    completed: dict[tuple[str, int], int] = field(default_factory=dict)  # by process group and rank
    progress: Reached | None = None
    marks: list[Reached] = field(default_factory=list)  # one for each block that had any
    speakers: set[Speaker] = field(default_factory=set)
    folded: int = 0
    _buffer: bytearray = field(default_factory=bytearray)
    _of_file: Speaker = field(default_factory=Speaker)
    _stamp: Stamp | None = None
    _teardown: dict[int | None, int] = field(default_factory=dict)
    _room: dict[bool, int] = field(default_factory=dict)  # sightings of sufferers and of others in this episode
    _shapes: dict[bytes, int] = field(default_factory=dict)
    _since: Reached | None = None  # the first progress after the newest pending sighting
    _counted: int = 0

    def __post_init__(self) -> None:
        self._of_file = speaker_of_file(self.name)

    @property
    def speaker(self) -> Speaker:
        """What the name of the file tells."""
        return self._of_file

    def feed(self, octets: bytes) -> None:
        """The next bytes, in pieces of any size."""
        self.octets += len(octets)
        buffer = self._buffer
        buffer += octets
        while len(buffer) >= 2 * BLOCK_BYTES:
            self._take_block()

    def end(self) -> None:
        """No more bytes come."""
        while len(self._buffer) > BLOCK_BYTES:
            self._take_block()
        if self._buffer:
            self._read(bytes(self._buffer))
            self.lines += not self._buffer.endswith(b"\n")
        self._buffer, self._shapes = bytearray(), {}

    def _take_block(self) -> None:
        """Cut at the first line's end behind a block's size; a line that has none by then is cut as it is."""
        buffer = self._buffer
        cut = buffer.find(b"\n", BLOCK_BYTES - 1, 2 * BLOCK_BYTES) + 1 or 2 * BLOCK_BYTES
        block = bytes(buffer[:cut])
        del buffer[:cut]
        self._read(block)

    def _read(self, block: bytes) -> None:
        lower = block.lower()
        at = self._counted = 0
        for begin, end in self.gate.lines(block, lower):
            if self.pending:
                self._went_on(block, lower, at, begin)
            self.lines += block.count(b"\n", self._counted, begin)
            self._counted = begin
            self._line(block, lower, begin, end)
            at = end
        if self.pending:
            self._went_on(block, lower, at, len(block))
        last = self._progress_before(block, lower, len(block))
        if last is not None:
            self.progress = last
            if last.stamp is not None and len(self.marks) < MARKS_MAX:
                self.marks.append(last)
        self.lines += block.count(b"\n", self._counted, len(block))

    def _line(self, block: bytes, lower: bytes, begin: int, end: int) -> None:
        octets = block[begin:end].lstrip(b"\0")[:LINE_BYTES_MAX].replace(b"\0", b"")  # cut under its writer: a hole
        if self._storms(octets):
            self.folded += 1
            return
        raw = octets.decode("utf-8", "replace")
        said = self._heard(raw)
        self._remark(said)
        if self.rules.begins_teardown(said.text):
            self._teardown[said.speaker.rank] = self.lines
            return
        hit = self.rules.match_line(said.text)
        if hit is None or hit.rule.role in ("noise", "advice") or self._torn_down(said):
            return
        symptom = symptom_of(hit.rule)
        weak = not hit.rule.firm and _goes_on(said, symptom)
        if weak and symptom.group != "sufferer":
            return
        sighting = self._sighting(hit, symptom, said, block, begin)
        sighting.weak = weak
        self._since = None
        key = (symptom.name, sighting.speaker, hit.pci, sighting.peer)
        known = self.pending.get(key)
        if known is not None:
            known.count += 1
        elif self._room.get(symptom.group == "sufferer", 0) < SIGHTINGS_MAX:
            self._room[symptom.group == "sufferer"] = self._room.get(symptom.group == "sufferer", 0) + 1
            sighting.after = self._progress_before(block, lower, begin) or self.progress
            self.pending[key] = sighting
            self.speakers.add(sighting.speaker)
        else:
            self.folded += 1

    def _storms(self, octets: bytes) -> bool:
        """One more of a flood of lines that are alike but for numbers that tell nothing."""
        if NUMBERS_TELL.search(octets) is not None:
            return False
        shape = octets.translate(None, DIGITS)
        seen = self._shapes.get(shape, 0)
        if seen == 0 and len(self._shapes) >= SHAPES_MAX:
            return False
        self._shapes[shape] = seen + 1
        return seen >= STORM_LINES

    def _heard(self, raw: str) -> Said:
        """The line, or what was printed behind a progress bar that had not ended its own."""
        said = listen(raw)
        bar = read_bar(said.text)
        return said if bar is None or bar.rest_at < 0 else listen(said.text[bar.rest_at :])

    def _sighting(self, hit: Hit, symptom: Symptom, said: Said, block: bytes, begin: int) -> Sighting:
        speaker, stamp = said.speaker, said.stamp
        if symptom.group == "exit" or stamp is None:
            for line in _lines_before(block, begin):
                if stamp is None:
                    stamp = stamp_of(line)
                if symptom.group == "exit" and speaker.rank is None and (found := RANK_ABOVE.match(line)):
                    speaker = replace(speaker, rank=int(found.group(1)), local=int(found.group(2)))
                if symptom.group == "exit" and not speaker.node and (found := HOST_ABOVE.match(line)):
                    speaker = replace(speaker, node=found.group(1))
        self._stamp = stamp or self._stamp
        peer = PEER.search(said.text) if symptom.group in ("sufferer", "program", "kernel") else None
        return Sighting(
            hit.rule, symptom, self.name, self.lines + 1, said.text.strip(), speaker.over(self._of_file), self._stamp,
            said.stamp is not None, hit.pci, "" if peer is None else peer.group(1), source_order=self.order,
        )  # fmt: skip

    def _remark(self, said: Said) -> None:
        """Collective sequence numbers: what a rank has completed says who is behind."""
        rank = said.speaker.rank if said.speaker.rank is not None else self._of_file.rank
        if rank is None:
            return
        named = GROUP.search(said.text)
        group = "" if named is None else named.group(1)
        if "last completed" in said.text and (found := COMPLETED.search(said.text)):
            self.completed[(group, rank)] = int(found.group(1))
        elif "SeqNum=" in said.text and (found := SEQUENCE.search(said.text)):
            self.completed.setdefault((group, rank), int(found.group(1)) - 1)

    def _torn_down(self, said: Said) -> bool:
        """The error that Python prints of an object it tears down ends nothing."""
        since = self._teardown.get(said.speaker.rank)
        if since is None or EXCEPTION.match(said.text) is None:
            return False
        del self._teardown[said.speaker.rank]
        return self.lines - since <= TEARDOWN_LINES

    def _went_on(self, block: bytes, lower: bytes, begin: int, end: int) -> None:
        """Two steps after the newest failure end its episode."""
        at = begin
        while (found := PROGRESS_WORDS.search(lower, at, end)) is not None:
            first, at = line_around(block, found.start())
            at = max(at, found.end())
            progress = _progress_at(block, first, at)
            if progress is None or not self._after_pending(progress):
                continue
            if self._since is None or progress.place < self._since.place:
                self._since = progress
            elif progress.place >= self._since.place + (WENT_ON_STEPS - 1 if progress.step is not None else 0.0) and (
                progress.place > self._since.place
            ):
                self._survive(progress)
                return

    def _after_pending(self, progress: Reached) -> bool:
        """A process that dies may flush what it printed before: its own times tell."""
        if progress.stamp is None:
            return True
        stamps = [one.stamp for one in self.pending.values() if one.stamp is not None and one.own_stamp]
        return all(
            one.uptime != progress.stamp.uptime or bool(one.year) != bool(progress.stamp.year)
            or one.in_year(0) <= progress.stamp.in_year(0)
            for one in stamps
        )  # fmt: skip

    def _survive(self, progress: Reached) -> None:
        finite = progress.loss is None or abs(progress.loss) < float("inf")
        for key, sighting in list(self.pending.items()):
            if sighting.symptom.name == "loss_nan" and not finite:
                continue
            del self.pending[key]
            known = self.survived.get(sighting.symptom.name)
            if known is None:
                self.survived[sighting.symptom.name] = Survived(sighting, sighting.count)
            else:
                known.count += sighting.count
        self._room = {}
        for sighting in self.pending.values():
            suffers = sighting.symptom.group == "sufferer"
            self._room[suffers] = self._room.get(suffers, 0) + 1
        self._shapes = {}
        self._since = None

    def _progress_before(self, block: bytes, lower: bytes, end: int) -> Reached | None:
        """The last progress of a block before a position, None where the last lines that look like it are none."""
        for _ in range(PROGRESS_TRIES):
            at = max(lower.rfind(b"loss", 0, end), lower.rfind(b"it/s", 0, end), lower.rfind(b"s/it", 0, end))
            if at < 0:
                return None
            begin, line_end = line_around(block, at)
            progress = _progress_at(block, begin, line_end)
            if progress is not None:
                return progress
            end = begin
        return None


def _progress_at(block: bytes, begin: int, end: int) -> Reached | None:
    return reached_by(block[begin : min(end, begin + LINE_BYTES_MAX)].decode("utf-8", "replace"))


def _lines_before(block: bytes, begin: int) -> Iterator[str]:
    """The lines above a position, nearest first."""
    end = begin - 1
    for _ in range(LOOK_BACK_LINES):
        if end <= 0:
            return
        begin = block.rfind(b"\n", 0, end) + 1
        yield block[begin : min(end, begin + LINE_BYTES_MAX)].decode("utf-8", "replace")
        end = begin - 1


def _goes_on(said: Said, symptom: Symptom) -> bool:
    """The line is of somebody who noticed and goes on: its level says so."""
    if symptom.group in ("kernel", "scheduler", "warning"):
        return False
    return said.level in ("debug", "info") or (said.level == "warning" and symptom.group == "user")
