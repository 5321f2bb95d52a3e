"""A recorded run: the messages of one job in the order of the bus, compressed, and what was injected."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import IO, Protocol, Self, TypeVar

import msgspec

from ingest.bus import Record, TopicPartition
from ingest.codec import MESSAGE_BYTES_MAX, TYPE_PREFIX, Undecodable, message_type
from ingest.events import TOPICS, FaultInjected
from pipelines.errors import StatedError

FORMAT = "transom-recording"
VERSION = 1
MEMBER_BYTES_MAX = 4 * 2**20  # before compression; a gzip member ends about here
LINE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
READ_BYTES = 256 * 1024
REORDERED_MAX = 50_000  # records held back to be put in order; some 100 MB of memory
RUN_FILE = "run.json"
MESSAGES_FILE = "messages.jsonl.gz"
_GZIP = 31  # zlib's wbits for a gzip member


class NotARecording(StatedError):
    """This folder holds no recorded run; the text is one sentence that says what to do."""


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: what was recorded, and the faults that were really there."""

    format: str
    version: int
    job: str
    created_at: float
    labels: tuple[FaultInjected, ...] = ()


class Placed(Protocol):
    """What lay on the bus, and when the bus took it."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def appended_at(self) -> float: ...


Recorded = TypeVar("Recorded", bound=Placed)


class _Place(msgspec.Struct, kw_only=True):
    """Where a record lay on the bus, and its type."""

    topic: str
    partition: int
    offset: int
    key: str
    type: str | None
    appended_at: float


class _JsonLine(_Place, kw_only=True):
    """A record whose value is JSON: it stands here as it was on the bus."""

    value: msgspec.Raw


class _BytesLine(_Place, kw_only=True):
    """A record whose value is something else."""

    value_base64: str


class _AnyLine(_Place, kw_only=True):
    """Either of them, for reading."""

    value: msgspec.Raw = msgspec.Raw()
    value_base64: str | None = None


_encoder = msgspec.json.Encoder()
_line_decoder = msgspec.json.Decoder(_AnyLine)
_run_decoder = msgspec.json.Decoder(RunFile)
_label_decoder = msgspec.json.Decoder(FaultInjected)
_any_decoder = msgspec.json.Decoder()


class RecordingWriter:
    """Appends the records of one job; what was flushed survives a kill, and a record is never written twice.

    Opening a folder again goes on where it ended: a torn end is cut off first. One writer at a time.
    """

    def __init__(self, folder: Path, job: str, *, now: float) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._next: dict[TopicPartition, int] = {}
        if (self.folder / RUN_FILE).exists():
            self._run = read_run(self.folder)
            if self._run.job != job:
                raise NotARecording(
                    f"{self.folder} is the recording of job {self._run.job!r}, not {job!r}; give another folder"
                )
            self._repair()
        else:
            self._run = RunFile(format=FORMAT, version=VERSION, job=job, created_at=now)
            self._write_run()
        self._file: IO[bytes] = (self.folder / MESSAGES_FILE).open("ab")
        self._compressor = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._member_bytes = 0
        self._dirty = False

    def write(self, record: Record) -> None:
        """Take one record of this job; one that is in the recording already is left out."""
        if record.offset < self._next.get(record.place, 0):
            return
        line = _line_of(record)
        encoded = _encoder.encode(line) + b"\n"
        self._file.write(self._compressor.compress(encoded))
        self._next[record.place] = record.offset + 1
        self._member_bytes += len(encoded)
        self._dirty = True
        if line.type == "fault_injected.v1":
            self._label(record.value)
        if self._member_bytes >= MEMBER_BYTES_MAX:
            self._end_member()

    def flush(self) -> None:
        """Hand everything to the operating system, so that it is there after a kill."""
        if self._dirty:
            self._file.write(self._compressor.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()
            self._dirty = False

    def abandon(self) -> None:
        """Let go after a failed write; opening again mends the end."""
        with suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """End the file as gzip wants it. May be called twice."""
        if self._file.closed:
            return
        if self._member_bytes:
            self._end_member()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_member(self) -> None:
        self._file.write(self._compressor.flush(zlib.Z_FINISH))
        self._file.flush()
        self._compressor = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._member_bytes = 0
        self._dirty = False

    def _label(self, value: bytes) -> None:
        try:
            label = _label_decoder.decode(value)
        except msgspec.DecodeError:
            return  # whoever reads the record will say that it is none
        if label not in self._run.labels:
            self._run = msgspec.structs.replace(self._run, labels=(*self._run.labels, label))
            self._write_run()

    def _write_run(self) -> None:
        temporary = self.folder / (RUN_FILE + ".tmp")
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(_encoder.encode(self._run), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / RUN_FILE)

    def _repair(self) -> None:
        """Find where each partition ended; write the file anew where its end is torn: readers stop there."""
        path = self.folder / MESSAGES_FILE
        if not path.exists():
            return
        lines = _Lines(path)
        temporary = self.folder / (MESSAGES_FILE + ".tmp")
        compressor = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        with temporary.open("wb") as file:
            for raw in lines:
                record = record_of(raw, path)
                self._next[record.place] = record.offset + 1
                file.write(compressor.compress(raw + b"\n"))
            file.write(compressor.flush())
            file.flush()
            os.fsync(file.fileno())
        if lines.torn:
            temporary.replace(path)
        else:
            temporary.unlink()


def read_run(folder: Path) -> RunFile:
    """run.json of a recording. Raises NotARecording."""
    path = Path(folder) / RUN_FILE
    try:
        run = _run_decoder.decode(path.read_bytes())
    except OSError as error:
        raise NotARecording(
            f"{folder} is not a recorded run: {RUN_FILE} cannot be read ({error.strerror}); "
            "give a folder that `transom record` wrote, such as .transom/recordings/JOB"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotARecording(
            f"{path} is not the file of a recorded run: {error}; give a folder that `transom record` wrote"
        ) from error
    if run.format != FORMAT:
        raise NotARecording(
            f"{path} says format {run.format!r}, not {FORMAT!r}; give a folder that `transom record` wrote"
        )
    if run.version != VERSION:
        raise NotARecording(
            f"{path} has version {run.version}, this Transom reads {VERSION}; replay it with the Transom that wrote it"
        )
    return run


def read_recording(folder: Path) -> Iterator[Record]:
    """The records as they were recorded; a torn last line (a killed recorder) is left out. Raises NotARecording.

    A folder that is no recording is refused at the call, not at the first record.
    """
    lines, path = recorded_lines(folder), Path(folder) / MESSAGES_FILE
    return (record_of(raw, path) for raw in lines)


def recorded_lines(folder: Path) -> Iterable[bytes]:
    """The same as lines of JSON, for `record_of`."""
    read_run(folder)
    path = Path(folder) / MESSAGES_FILE
    if not path.is_file():
        raise NotARecording(
            f"{folder} is not a recorded run: there is no {MESSAGES_FILE}; give a folder that `transom record` wrote"
        )
    return _Lines(path)


def in_bus_order(records: Iterable[Recorded], held_max: int = REORDERED_MAX) -> Iterator[Recorded]:
    """Partitions interleaved by when the bus took each record, each partition in its own order.

    A recorder that was behind took its topics one after another; live detection heard them side by side. About
    `held_max` records are held back: what is further out of place stays so.
    """
    newest: dict[tuple[str, int], float] = {}
    held: list[tuple[float, int, Recorded]] = []
    block = max(1, held_max // 4)  # released at once: a list nearly in order is sorted quicker than a heap is kept
    for count, record in enumerate(records):
        place, at = (record.topic, record.partition), record.appended_at
        at = newest[place] = max(at, newest.get(place, at))
        held.append((at, count, record))
        if len(held) >= held_max + block:
            held.sort()
            yield from map(itemgetter(2), held[:block])
            del held[:block]
    held.sort()
    yield from map(itemgetter(2), held)


def recording_folder_of(recordings: Path, job: str) -> Path:
    """Where the recording of `job` lies below `recordings`; any job name makes one plain folder name."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", job)
    if plain:
        return recordings / job
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:80]
    return recordings / f"_{safe}-{zlib.crc32(job.encode('utf-8', 'surrogatepass')):08x}"


class _Lines:
    """The complete lines of a file of gzip members; `torn` says afterwards whether its end was damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn = False

    def __iter__(self) -> Iterator[bytes]:
        self.torn = False
        rest = b""
        with self._path.open("rb") as file:
            for chunk in self._chunks(file):
                *complete, rest = (rest + chunk).split(b"\n")
                yield from complete
                if len(rest) > LINE_BYTES_MAX:
                    raise NotARecording(f"{self._path} has a line of more than {LINE_BYTES_MAX} bytes; it is damaged")
        if rest:
            self.torn = True

    def _chunks(self, file: io.BufferedReader) -> Iterator[bytes]:
        decompressor = zlib.decompressobj(_GZIP)
        begun = False
        pending = b""
        while True:
            raw = pending or file.read(READ_BYTES)
            pending = b""
            if not raw:
                break
            begun = True
            try:
                chunk = decompressor.decompress(raw, READ_BYTES)
            except zlib.error:
                self.torn = True
                return
            if chunk:
                yield chunk
            if decompressor.eof:
                pending = decompressor.unused_data
                decompressor = zlib.decompressobj(_GZIP)
                begun = False
            else:
                pending = decompressor.unconsumed_tail
        if begun:
            self.torn = True  # the last member has no end: the writer was killed, or it still writes
            yield decompressor.flush()


def _line_of(record: Record) -> _JsonLine | _BytesLine:
    try:
        kind: str | None = message_type(record.headers)
    except Undecodable:
        kind = None
    key = record.key.encode("utf-8", "replace").decode()
    if _is_one_line_of_json(record.value):
        return _JsonLine(
            topic=record.topic, partition=record.partition, offset=record.offset, key=key, type=kind,
            appended_at=record.appended_at, value=msgspec.Raw(record.value),
        )  # fmt: skip
    return _BytesLine(
        topic=record.topic, partition=record.partition, offset=record.offset, key=key, type=kind,
        appended_at=record.appended_at, value_base64=base64.b64encode(record.value).decode(),
    )  # fmt: skip


def _is_one_line_of_json(value: bytes) -> bool:
    if b"\n" in value:
        return False
    try:
        value.decode("utf-8")
        _any_decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return value.strip() == value  # or reading would give other bytes


def record_of(raw: bytes, path: Path) -> Record:
    """The record in one line of this file. Raises NotARecording."""
    try:
        line = _line_decoder.decode(raw)
        if line.value_base64 is not None:
            value = base64.b64decode(line.value_base64, validate=True)
        else:
            value = bytes(line.value)
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error) as error:
        raise NotARecording(f"{path} has a line that is no record ({error}); it is damaged") from error
    topic = next((known for known in TOPICS if known == line.topic), None)
    if topic is None:
        raise NotARecording(f"{path} has a record of the topic {line.topic!r}, which is none; it is damaged")
    headers: tuple[tuple[str, bytes], ...] = ()
    if line.type is not None:
        headers = (
            ("ce_specversion", b"1.0"),
            ("ce_type", (TYPE_PREFIX + line.type).encode()),
            ("content-type", b"application/json"),
        )
    return Record(topic, line.partition, line.offset, line.key, headers, value, line.appended_at)
