"""Logs in, cause out: reads files, folders and streams once, and hands their bytes to the diagnosis."""

from __future__ import annotations

import codecs
import gzip
import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISFIFO, S_ISREG
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
        if not _asked(path, Path.exists):
            raise CannotDiagnose(f"there is no {name}; give log files, a folder of them, or - for standard input")
        for file in _files_of(path, path, reading):
            _add(file, reading, known, pipes=file is path)
    return reading


def _asked(path: Path, question: Callable[[Path], bool]) -> bool:
    """What the file system answers; no, where it is not allowed to answer."""
    try:
        return question(path)
    except OSError:
        return False


def _files_of(path: Path, root: Path, reading: Reading) -> Iterator[Path]:
    if not _asked(path, Path.is_dir):
        yield path
        return
    try:
        entries = sorted(path.iterdir(), key=_natural)
    except OSError as error:
        reading.note(str(path), f"the folder cannot be read: {error.strerror}")
        return
    for entry in entries:
        if _asked(entry, Path.is_symlink) and _asked(entry, Path.is_dir):
            # it may lead in a circle; what it holds is met where it is, if that is below the root
            if not entry.resolve().is_relative_to(root.resolve()):
                reading.note(str(entry), "a link to a folder elsewhere; give that folder too")
            continue
        yield from _files_of(entry, root, reading)


def _natural(path: Path) -> list[tuple[int, str]]:
    """rank_2.log before rank_10.log."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in NUMBERS.split(path.name)]


def _add(file: Path, reading: Reading, known: set[tuple[int, int]], *, pipes: bool) -> None:
    """`pipes`: a pipe is read as a file is; in a folder it would wait for a writer for ever."""
    try:
        facts = file.stat()
    except OSError as error:
        reading.note(str(file), error.strerror or "cannot be read")
        return
    if not S_ISREG(facts.st_mode) and not (pipes and S_ISFIFO(facts.st_mode)):
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


def diagnose(reading: Reading, rules: RuleBook, stream: IO[bytes] | None, told: Told) -> Diagnosis:
    """Read everything once. `told` is called as reading goes on; what cannot be read is noted in `reading`.

    `stream` is standard input; None where it is closed.
    """
    diagnoser = Diagnoser(rules)
    if reading.stream and stream is None:
        reading.note(STREAM_NAME, "closed")
    elif reading.stream and stream is not None:
        _take(stream, STREAM_NAME, diagnoser, reading, lambda: told(STREAM_NAME, 0))
    for file in reading.files:
        _take_file(file, diagnoser, reading, told)
    return diagnoser.conclude()


def _take_file(file: Path, diagnoser: Diagnoser, reading: Reading, told: Told) -> None:
    source = str(file)
    try:
        with file.open("rb") as raw:
            _take(raw, source, diagnoser, reading, lambda: told(source, raw.tell() if raw.seekable() else 0))
    except OSError as error:
        reading.note(source, f"cannot be read to its end: {error.strerror or error}")


def _take(raw: IO[bytes], source: str, diagnoser: Diagnoser, reading: Reading, told: Callable[[], None]) -> None:
    """Read one file or stream, packed or not, to its end."""
    try:
        begun = _Begun(raw)
        opened = _unpacked(begun)
        if opened is None:
            reading.note(source, "packed with zstd, which this Python cannot read; unpack it")
            return
        wide = opened.head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if _binary(opened.head.decode("utf-16", "replace").encode() if wide else opened.head):
            reading.note(source, "binary")
            return
        _feed(opened, source, diagnoser, told, codecs.getincrementaldecoder("utf-16")("replace") if wide else None)
    except (OSError, EOFError, zlib.error) as error:
        reading.note(source, f"cannot be read to its end: {getattr(error, 'strerror', None) or error}")
    finally:
        diagnoser.end(source)


def _feed(
    opened: _Begun, source: str, diagnoser: Diagnoser, told: Callable[[], None], wide: codecs.IncrementalDecoder | None
) -> None:
    """`wide`: what makes characters of its bytes, where it is not UTF-8."""
    diagnoser.feed(source, b"")  # an empty one was looked at too
    while octets := opened.read(READ_BYTES):
        diagnoser.feed(source, octets if wide is None else wide.decode(octets).encode("utf-8", "replace"))
        told()


class _Begun:
    """A stream whose first bytes are known, though it cannot go back."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.head = self._ahead = stream.read(SAMPLE_BYTES)

    def read(self, size: int = -1) -> bytes:
        """As a file does."""
        if not self._ahead:
            return self._stream.read(size)
        taken = self._ahead if size < 0 else self._ahead[:size]
        self._ahead = self._ahead[len(taken) :]
        return taken + self._stream.read() if size < 0 else taken


def _unpacked(begun: _Begun) -> _Begun | None:
    """What is packed in it, itself where nothing is; None where it cannot be unpacked here."""
    packed = cast(IO[bytes], begun)  # of a file only `read` is asked
    if begun.head.startswith(b"\x1f\x8b"):
        return _Begun(cast(IO[bytes], gzip.GzipFile(fileobj=packed)))
    if begun.head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            zstd: Any = importlib.import_module("compression.zstd")  # the standard library's, from Python 3.14 on
        except ImportError:
            return None
        return _Begun(zstd.open(packed))
    return begun


def _binary(sample: bytes) -> bool:
    """Text has few control characters. NUL does not count: a log that was cut under its writer begins with them."""
    text = sample.replace(b"\0", b"")
    if not text:
        return bool(sample) and len(sample) < SAMPLE_BYTES
    return len(text.translate(None, PRINTABLE)) > CONTROL_SHARE_MAX * len(text) or _undecodable(text)


def _undecodable(text: bytes) -> bool:
    """A third of it is no UTF-8: packed or encrypted, not a log with a broken letter."""
    return text.decode("utf-8", "replace").count("�") * 3 > len(text)
