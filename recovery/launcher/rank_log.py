"""What one rank says, by its two pipes and its logging handler, as batches of records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ingest.events import ErrorRecord, LogLine, Stream

from .output import OPEN_SECONDS, PARTIAL_SECONDS, LineSplitter, RecordJoiner, error_in

RAW_BYTES_MAX = 128 * 1024  # of one stream; to parse more, ten times a second, costs a processor
PENDING_CHARS_MAX = 512 * 1024
BATCH_CHARS_MAX = 120_000  # JSON may need six bytes for a character: a batch always fits a message
BATCH_LINES_MAX = 500
LAST_LINES_MAX = 20
LAST_LINE_CHARS_MAX = 500


class StreamLog:
    """One pipe: raw bytes wait, bounded, until they are parsed; a flood drops its oldest, and counts."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._raw: deque[tuple[float, bytes]] = deque()
        self._raw_bytes = 0
        self._splitter = LineSplitter()
        self._joiner = RecordJoiner(stream)
        self._lost_lines = 0

    def feed(self, chunk: bytes, at: float) -> int:
        """Keep `chunk`; how many lines were dropped for it."""
        self._raw.append((at, chunk))
        self._raw_bytes += len(chunk)
        lost = 0
        while self._raw_bytes > RAW_BYTES_MAX and len(self._raw) > 1:
            _, oldest = self._raw.popleft()
            self._raw_bytes -= len(oldest)
            lost += oldest.count(b"\n")
        self._lost_lines += lost
        return lost

    def parse(self, now: float, *, final: bool, last_lines: deque[str]) -> list[LogLine]:
        """The records that are complete now; all of them where `final`."""
        records: list[LogLine] = []
        if self._lost_lines:
            text = f"transom: {self._lost_lines} lines of this rank were dropped here: too many at once"
            records.append(LogLine(at=self._raw[0][0] if self._raw else now, stream=self.stream, text=text))
            self._lost_lines = 0
        lines = []
        while self._raw:
            at, chunk = self._raw.popleft()
            lines += self._splitter.feed(chunk, at)
        self._raw_bytes = 0
        lines += self._splitter.flush() if final else self._splitter.flush(now - PARTIAL_SECONDS)
        for line in lines:
            if line.text.strip():
                last_lines.append(line.text[:LAST_LINE_CHARS_MAX])
            records += self._joiner.feed(line)
        return records + (self._joiner.flush() if final else self._joiner.flush(now - OPEN_SECONDS))


class RankLog:
    """The one log stream of a rank."""

    def __init__(self) -> None:
        self._streams: dict[str, StreamLog] = {"stdout": StreamLog("stdout"), "stderr": StreamLog("stderr")}
        self._pending: deque[LogLine] = deque()
        self._pending_chars = 0
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES_MAX)
        self.error: ErrorRecord | None = None  # of the last traceback on stderr
        self.dropped = 0  # lines

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._last_lines)

    def feed(self, stream: str, chunk: bytes, at: float) -> None:
        """Bytes that the rank printed."""
        self.dropped += self._streams[stream].feed(chunk, at)

    def add(self, lines: Iterable[LogLine]) -> None:
        """Records that the rank's logging handler sent."""
        for line in lines:
            self._pending.append(line)
            self._pending_chars += len(line.text)
        while self._pending_chars > PENDING_CHARS_MAX and len(self._pending) > 1:
            self._pending_chars -= len(self._pending.popleft().text)
            self.dropped += 1

    def take(self, now: float, *, final: bool = False) -> list[tuple[LogLine, ...]]:
        """Batches that each fit a message, oldest first."""
        for stream in self._streams.values():
            records = stream.parse(now, final=final, last_lines=self._last_lines)
            if stream.stream == "stderr":
                for record in records:
                    self.error = error_in(record.text) or self.error
            self.add(records)
        if not self._pending:
            return []
        lines = sorted(self._pending, key=lambda line: line.at)  # stable: order within a stream stays
        self._pending.clear()
        self._pending_chars = 0
        return list(_batches(lines))


def _batches(lines: list[LogLine]) -> Iterable[tuple[LogLine, ...]]:
    batch: list[LogLine] = []
    chars = 0
    for line in lines:
        if batch and (len(batch) >= BATCH_LINES_MAX or chars + len(line.text) > BATCH_CHARS_MAX):
            yield tuple(batch)
            batch, chars = [], 0
        batch.append(line)
        chars += len(line.text)
    if batch:
        yield tuple(batch)
