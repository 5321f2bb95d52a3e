"""Logs in, cause out: reads files, folders and streams once, and hands their bytes to the diagnosis."""

from __future__ import annotations

import gzip
import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, cast

from detectors.diagnosis.diagnosis import Diagnoser, Diagnosis
from detectors.logs.rule_book import RuleBook, RuleError
from pipelines.errors import StatedError

READ_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 13
CONTROL_SHARE_MAX = 0.1  # of a sample; text has fewer
NOTES_MAX = 200
FILES_MAX = 200_000
STANDARD_INPUT = "-"
STREAM_NAME = "standard input"
NUMBERS = re.compile(r"(\d+)")
PRINTABLE = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x100)))
NEVER_LOGS = frozenset((
    ".pt", ".pth", ".bin", ".safetensors", ".npy", ".npz", ".so", ".pyc", ".png", ".jpg", ".parquet", ".arrow",
    ".sqlite", ".duckdb", ".db", ".zip", ".tar", ".whl", ".distcp",
))  # fmt: skip

Told = Callable[[str, int], None]  # of a source: so many bytes of the file have been read


class CannotDiagnose(StatedError):
    """What was given cannot be read at all; the text says what to give instead."""


@dataclass(frozen=True, slots=True)
class Note:
    """A file that was not read, or not to its end, and why."""

    source: str
    why: str


@dataclass(slots=True)
class Reading:
    """What is to be read, and what could not be."""

    files: list[Path] = field(default_factory=list)
    stream: bool = False
    total_bytes: int = 0
    notes: list[Note] = field(default_factory=list)
    skipped: int = 0

    def note(self, source: str, why: str) -> None:
        self.skipped += 1
        if len(self.notes) < NOTES_MAX:
            self.notes.append(Note(source, why))


def gather(paths: Iterable[str]) -> Reading:
    """The files under `paths` in the order of their names, each once. Raises CannotDiagnose where there is no path."""
    reading = Reading()
    known: set[tuple[int, int]] = set()
    for name in paths:
        if name == STANDARD_INPUT:
            reading.stream = True
            continue
        path = Path(name)
        if not path.exists():
            raise CannotDiagnose(f"there is no {name}; give log files, a folder of them, or - for standard input")
        for file in _files_of(path, reading):
            _add(file, reading, known)
    return reading


def _files_of(path: Path, reading: Reading) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    try:
        entries = sorted(path.iterdir(), key=_natural)
    except OSError as error:
        reading.note(str(path), f"the folder cannot be read: {error.strerror}")
        return
    for entry in entries:
        if entry.is_symlink() and entry.is_dir():
            continue  # a link to a folder may lead in a circle; what it holds is met where it is
        yield from _files_of(entry, reading)


def _natural(path: Path) -> list[tuple[int, str]]:
    """rank_2.log before rank_10.log."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in NUMBERS.split(path.name)]


def _add(file: Path, reading: Reading, known: set[tuple[int, int]]) -> None:
    try:
        facts = file.stat()
    except OSError as error:
        reading.note(str(file), error.strerror or "cannot be read")
        return
    if not S_ISREG(facts.st_mode):
        reading.note(str(file), "not a file")
    elif file.suffix.lower() in NEVER_LOGS:
        reading.note(str(file), "not a log, by its name")
    elif len(reading.files) >= FILES_MAX:
        reading.note(str(file), f"more than {FILES_MAX:,} files")
    elif (facts.st_dev, facts.st_ino) not in known:
        known.add((facts.st_dev, facts.st_ino))
        reading.files.append(file)
        reading.total_bytes += facts.st_size


def rules_of(folder: Path | None) -> RuleBook:
    """The shipped rules, and those of a folder of the user's own before them. Raises CannotDiagnose."""
    try:
        return RuleBook.load_with(folder)
    except RuleError as error:
        raise CannotDiagnose(f"the log rules cannot be used: {error}") from error


def diagnose(reading: Reading, rules: RuleBook, stream: IO[bytes], told: Told) -> Diagnosis:
    """Read everything once. `told` is called as reading goes on; what cannot be read is noted in `reading`."""
    diagnoser = Diagnoser(rules)
    if reading.stream:
        _read(stream, STREAM_NAME, diagnoser, lambda: told(STREAM_NAME, 0))
        diagnoser.end(STREAM_NAME)
    for file in reading.files:
        _read_file(file, diagnoser, reading, told)
        diagnoser.end(str(file))
    return diagnoser.conclude()


def _read_file(file: Path, diagnoser: Diagnoser, reading: Reading, told: Told) -> None:
    source = str(file)
    try:
        with file.open("rb") as raw:
            head = raw.read(SAMPLE_BYTES)
            raw.seek(0)
            opened = _unpacked(raw, head)
            if opened is None:
                reading.note(source, "packed with zstd, which this Python cannot read; unpack it")
                return
            if opened is not raw:
                head = opened.read(SAMPLE_BYTES)
                opened.seek(0)
            if _binary(head):
                reading.note(source, "binary")
                return
            _read(opened, source, diagnoser, lambda: told(source, raw.tell()))
    except (OSError, EOFError, zlib.error) as error:
        reading.note(source, f"cannot be read to its end: {getattr(error, 'strerror', None) or error}")


def _read(stream: IO[bytes], source: str, diagnoser: Diagnoser, told: Callable[[], None]) -> None:
    diagnoser.feed(source, b"")  # an empty one was looked at too
    while octets := stream.read(READ_BYTES):
        diagnoser.feed(source, octets)
        told()


def _unpacked(raw: IO[bytes], head: bytes) -> IO[bytes] | None:
    if head.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.open(raw))  # opened for reading: bytes come out
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            zstd: Any = importlib.import_module("compression.zstd")  # the standard library's, from Python 3.14 on
        except ImportError:
            return None
        opened: IO[bytes] = zstd.open(raw)
        return opened
    return raw


def _binary(sample: bytes) -> bool:
    """Text has few control characters. NUL does not count: a log that was cut under its writer begins with them."""
    text = sample.replace(b"\0", b"")
    if not text:
        return bool(sample) and len(sample) < SAMPLE_BYTES
    return len(text.translate(None, PRINTABLE)) > CONTROL_SHARE_MAX * len(text) or _undecodable(text)


def _undecodable(text: bytes) -> bool:
    """A third of it is no UTF-8: packed or encrypted, not a log with a broken letter."""
    return text.decode("utf-8", "replace").count("�") * 3 > len(text)
