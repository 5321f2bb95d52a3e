"""Trees of logs as a historic run: torchrun's `--log-dir`, Slurm's outputs, the plain log of a trainer.

Lines are what live detection hears of a rank's output; lines of progress become samples of its steps as well.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from detectors.diagnosis.places import Speaker, Stamp, listen
from detectors.logs.line_prefixes import strip_prefixes
from detectors.logs.progress_lines import Progress, parse_progress
from ingest.events import (
    AttemptStarted,
    ErrorRecord,
    LogLine,
    Logs,
    Message,
    Metrics,
    RankExited,
    RankPlace,
    split_non_finite,
)
from recovery.launcher.output import Line, RecordJoiner, error_in

from .log_clock import YEAR_UNKNOWN, LogClock, seconds_of
from .run import Told

READ_BYTES = 32 * 1024  # of a file at once: no file stays open, so that thousands can be merged
LINE_CHARACTERS_MAX = 64 * 1024
HEAD_LINES = 2_000  # in which a file's first time is looked for
NAMES_LINES = 200  # in which it is looked whether lines name their ranks
HELD_LINES_MAX = 200
TAIL_BYTES = 32 * 1024  # in which its last time is looked for
TICK_SECONDS = 0.25
SILENCE_SECONDS = 180.0  # logs are no heartbeats: a tenth of what has to pass before silence means anything
NODE = "node0"


@dataclass(frozen=True, slots=True)
class _Record:
    """One record of a file, or what a line of progress told."""

    at: float
    rank: int
    node: str
    attempt: int
    line: LogLine | None = None
    ended: ErrorRecord | None = None  # the exception with which the file ends
    step: int = -1
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Head:
    """What a file's first lines tell: the first time, the year, and whether lines name their ranks."""

    first: Stamp | None
    year: int
    named: bool


class LogRun:
    """See `HistoricRun`. `speakers`: what each file's path tells of who wrote it, in the order of the files."""

    def __init__(self, files: Sequence[Path], job: str, speakers: Mapping[Path, Speaker], kind: str) -> None:
        self.job = job
        self.kind = kind
        self.notes: tuple[str, ...] = ()
        self.interval_seconds = SILENCE_SECONDS
        self._files = list(files)
        self._lone = all(speaker.rank is None and speaker.local is None for speaker in speakers.values())
        self._speakers = {file: _placed(speakers, file) for file in files}

    def told(self) -> Iterator[Told]:
        heads = {file: _head_of(file) for file in self._files}
        year = next((head.year for head in heads.values() if head.year), YEAR_UNKNOWN)
        firsts = {file: None if head.first is None else seconds_of(head.first, year) for file, head in heads.items()}
        begins = min((at for at in firsts.values() if at is not None), default=0.0)
        known = [file for file, at in firsts.items() if at is not None]
        unknown = [file for file, at in firsts.items() if at is None]
        if len(self._files) == 1 and heads[self._files[0]].named:  # what names no rank is nobody's, or the scheduler's
            only = self._speakers[self._files[0]]
            self._speakers = {self._files[0]: replace(only, rank=-1 if self._lone else only.rank)}
        self.notes = ()
        if len(unknown) == len(self._files):
            self.notes = ("No line says when it was written: the clock begins at 0 and goes by the steps.",)
        elif unknown:
            self.notes = (
                f"{len(unknown)} of {len(self._files)} files say no times: they are put behind the files beside them.",
            )
        if year == YEAR_UNKNOWN and known:
            self.notes += (f"No line says which year it was: {YEAR_UNKNOWN} is assumed.",)
        streams = []
        for file in self._files:
            own = firsts[file]
            if own is None and known:  # most often the errors of a rank whose other file has times: its last words
                clock = LogClock(self._last_time(file, year) or begins, year, stamped=True)
            else:
                clock = LogClock(begins if own is None else own, year, stamped=own is not None)
            streams.append(self._records(file, clock))
        yield from self._messages(heapq.merge(*streams, key=_order))

    def _last_time(self, file: Path, year: int) -> float | None:
        """The last time in the files beside this one, else in all."""
        beside = [other for other in self._files if other.parent == file.parent and other != file]
        for among in (beside, self._files):
            told = [at for other in among if (at := _last_stamp(other, year)) is not None]
            if told:
                return max(told)
        return None

    def _messages(self, records: Iterator[_Record]) -> Iterator[Message]:
        """Records of one producer that fall between two ticks together; samples at once."""
        sequences: dict[tuple[str, int, int, str], int] = {}
        held: dict[tuple[int, int, str], list[LogLine]] = {}
        started: set[int] = set()
        tick, count, said_at = -1, 0, 0.0
        for record in records:
            now = int(record.at / TICK_SECONDS)
            if held and (now > tick or count >= HELD_LINES_MAX):
                yield from self._logs(held, sequences, said_at)
                held, count = {}, 0
            tick = now
            if record.attempt not in started:
                started.add(record.attempt)
                yield self._start(record)
            who = (record.attempt, record.rank, record.node)
            if record.line is not None:
                held.setdefault(who, []).append(record.line)
                said_at = record.at  # a record is known to be whole when the next line comes
                count += 1
                continue
            if held:  # what was said before it comes before it
                yield from self._logs(held, sequences, said_at)
                held, count = {}, 0
            if record.ended is not None:
                yield RankExited(
                    job=self.job, attempt=record.attempt, rank=record.rank, node=record.node,
                    sequence=_next(sequences, ("exit", *who)), at=record.at, exit_code=1, error=record.ended,
                )  # fmt: skip
                continue
            columns, non_finite = split_non_finite({name: [value] for name, value in record.values.items()})
            yield Metrics(
                job=self.job, attempt=record.attempt, rank=record.rank, node=record.node,
                sequence=_next(sequences, ("metrics", *who)), at=record.at, phase="train", step=record.step,
                steps=(record.step,), ended_at=(record.at,), columns=columns, non_finite=non_finite,
            )  # fmt: skip
        yield from self._logs(held, sequences, said_at)

    def _logs(
        self,
        held: Mapping[tuple[int, int, str], list[LogLine]],
        sequences: dict[tuple[str, int, int, str], int],
        said_at: float,
    ) -> Iterator[Message]:
        for who, lines in sorted(held.items(), key=lambda item: (item[1][-1].at, item[0])):
            attempt, rank, node = who
            yield Logs(
                job=self.job, attempt=attempt, rank=rank, node=node, sequence=_next(sequences, ("logs", *who)),
                at=said_at, lines=tuple(lines),
            )  # fmt: skip

    def _start(self, first: _Record) -> AttemptStarted:
        """The ranks that the files' names tell of, else whoever speaks first."""
        told = {
            speaker.rank: speaker.node
            for speaker in self._speakers.values()
            if speaker.rank is not None and speaker.rank >= 0 and speaker.attempt == first.attempt
        }
        ranks: dict[int, str] = told or ({first.rank: first.node} if first.rank >= 0 else {})
        places = tuple(RankPlace(rank=rank, local_rank=rank, node=node) for rank, node in sorted(ranks.items()))
        return AttemptStarted(
            job=self.job, attempt=first.attempt, rank=-1, node=first.node, sequence=0, at=first.at,
            world_size=len(places), places=places,
        )  # fmt: skip

    def _records(self, file: Path, clock: LogClock) -> Iterator[_Record]:
        speaker = self._speakers[file]
        stream = "stderr" if "stderr" in file.name or file.suffix == ".err" else "stdout"
        joiners: dict[tuple[int, str], RecordJoiner] = {}
        steps: dict[int, tuple[int, float]] = {}
        last: dict[tuple[int, str], LogLine] = {}
        for text in _lines(file):
            said = listen(text)
            at = clock.line(said.stamp)
            rank, node = _who(said.speaker, speaker)
            progress = parse_progress(strip_prefixes(said.text))
            if progress is not None and progress.step is not None and progress.phase == "train":
                at = clock.step(progress.step, progress.step_seconds)
            joiner = joiners.get((rank, node))
            if joiner is None:
                joiner = joiners[rank, node] = RecordJoiner("stderr" if stream == "stderr" else "stdout")
            for line in joiner.feed(Line(at, said.text)):
                last[rank, node] = line
                yield _Record(at, rank, node, speaker.attempt, line=line)
            if progress is None or progress.step is None or rank < 0:
                continue
            values = _sample(progress, at, steps, rank)
            if values is not None:
                yield _Record(at, rank, node, speaker.attempt, step=progress.step, values=values)
        for (rank, node), joiner in joiners.items():
            for line in joiner.flush():
                last[rank, node] = line
                yield _Record(clock.at, rank, node, speaker.attempt, line=line)
        # a rank whose last words are an exception has ended by it; of a file of several, only who spoke last
        own = (speaker.rank, speaker.node) if speaker.rank is not None else None
        if own in last and own is not None and own[0] >= 0:
            error = error_in(last[own].text)
            if error is not None:
                yield _Record(clock.at, *own, speaker.attempt, ended=error)


def _sample(progress: Progress, at: float, steps: dict[int, tuple[int, float]], rank: int) -> dict[str, float] | None:
    """What a line of progress measured; None for one that tells of the same step again, or of no training."""
    step = progress.step
    if step is None or progress.phase != "train":
        return None
    before = steps.get(rank)
    if before is not None and before[0] == step:
        return None
    steps[rank] = (step, at)
    seconds = progress.step_seconds
    if seconds is None and before is not None and step > before[0] and at > before[1]:
        seconds = (at - before[1]) / (step - before[0])
    told = {"train.loss": progress.loss, "train.gradient.norm": progress.grad_norm, "train.step.duration": seconds}
    values = {name: value for name, value in told.items() if value is not None}
    if progress.nan_iterations and "train.loss" not in values:
        values["train.loss"] = float("nan")
    return values


def _placed(speakers: Mapping[Path, Speaker], file: Path) -> Speaker:
    """Whose a file is: rank −1 where it is nobody's. torchrun's local ranks count on from node to node."""
    speaker = speakers[file]
    node, attempt, rank = speaker.node or NODE, speaker.attempt or 1, speaker.rank
    if rank is None and speaker.local is not None:
        nodes = sorted({other.node or NODE for other in speakers.values() if other.local is not None})
        size = 1 + max(other.local for other in speakers.values() if other.local is not None)
        rank = nodes.index(node) * size + speaker.local
    if rank is None:
        ranked = any(other.rank is not None or other.local is not None for other in speakers.values())
        rank = -1 if ranked or len(speakers) > 1 else 0
    return Speaker(rank, node, None, attempt)


def _who(said: Speaker, file: Speaker) -> tuple[int, str]:
    rank = said.rank if said.rank is not None else file.rank
    return -1 if rank is None else rank, said.node or file.node


def _order(record: _Record) -> tuple[float, bool, int]:
    """By time; the end of a rank after its last words in whichever file."""
    return record.at, record.ended is not None, record.rank


def _next(sequences: dict[tuple[str, int, int, str], int], producer: tuple[str, int, int, str]) -> int:
    sequences[producer] = number = sequences.get(producer, -1) + 1
    return number


def _head_of(file: Path) -> _Head:
    first, year, named = None, 0, False
    for number, text in enumerate(_lines(file)):
        said = listen(text)
        named = named or said.speaker.rank is not None
        if said.stamp is not None and not said.stamp.uptime:
            first, year = first or said.stamp, year or said.stamp.year
        if number >= HEAD_LINES or (year and number >= NAMES_LINES):
            break
    return _Head(first, year, named)


def _last_stamp(file: Path, year: int) -> float | None:
    """The last time in a file's last bytes; None for a packed one."""
    with file.open("rb") as stream:
        if stream.read(2) == b"\x1f\x8b":
            return None
        stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
        tail = stream.read().decode("utf-8", "replace").splitlines()
    for text in reversed(tail):
        stamp = listen(text).stamp
        at = None if stamp is None else seconds_of(stamp, year)
        if at is not None:
            return at
    return None


def _lines(file: Path) -> Iterator[str]:
    """Lines without their ends; a carriage return ends one too."""
    rest = b""
    for chunk in _chunks(file):
        *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line[:LINE_CHARACTERS_MAX].decode("utf-8", "replace")
        if len(rest) > LINE_CHARACTERS_MAX:
            rest = rest[:LINE_CHARACTERS_MAX]
    if rest:
        yield rest.decode("utf-8", "replace")


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    if packed:
        with gzip.open(file) as unpacked:
            while chunk := unpacked.read(READ_BYTES):
                yield chunk
        return
    at = 0
    while True:
        with file.open("rb") as stream:
            stream.seek(at)
            chunk = stream.read(READ_BYTES)
        if not chunk:
            return
        at += len(chunk)
        yield chunk
