"""From bytes that a rank prints to lines, from lines to records: a traceback is one record."""

from __future__ import annotations

import re
from typing import NamedTuple

from ingest.events import ErrorRecord, LogLine, Stream

LINE_BYTES_MAX = 4096
RECORD_CHARS_MAX = 16_384
RECORD_LINES_MAX = 200
PARTIAL_SECONDS = 0.2  # a line without its end is taken as one after this; progress bars live on such lines
OPEN_SECONDS = 0.15  # a record takes further lines for this long

_OWN_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch's excepthook
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")
_FATAL = re.compile(r"^Fatal Python error: |^Current thread 0x|^Thread 0x")
_CHAIN = re.compile(
    r"^(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):"
)
_NATIVE_FRAMES = re.compile(r"^(Exception raised from |frame #\d+: |C\+\+ CapturedTraceback:|#\d+ )")
# A C++ exception, or torch's watchdog telling of one: advice and stack frames follow, not indented.
_NATIVE = re.compile(r"^terminate called (?:after throwing|without)|thread terminated with exception: ")
_ADVICE = re.compile(
    r"^(?:CUDA kernel errors might be asynchronously |HIP kernel errors might be asynchronously "
    r"|For debugging consider passing |Compile with `TORCH_USE_|Search for `cuda|nccl[A-Z]\w+: |Last error:$)"
)
_LAST_ERROR = "Last error:"  # of NCCL: the line behind it is the error
_SIGNAL = re.compile(r"^(\[[\w.-]+:\d+\] )\*{3} Process received signal \*{3}")  # Open MPI
# The NVIDIA driver tells of a lost GPU in three lines, and names the GPU of an Xid in one or two lines before it.
_DRIVER = re.compile(r"\bNVRM: (?:The NVIDIA GPU |GPU at |Xid \()")
_DRIVER_HEAD = re.compile(r"\bNVRM: GPU (?:at |Board )")
_DRIVER_MORE = re.compile(
    r"\bNVRM: (?:\(PCI ID|installed in this system|fallen off the bus and|GPU Board "
    r"|GPU [0-9a-f.:]+: GPU (?:has fallen|serial))"
)
_DRIVER_XID = re.compile(r"\bNVRM: Xid \(")
DRIVER_LINES_MAX = 6
_EXCEPTION = re.compile(r"^[\s|+]*([A-Za-z_][\w.]*)(?:: ?(.*))?$")
_ERROR_NAME = re.compile(r"(Error|Exception|Interrupt|Exit|Warning|Failure|Group|StopIteration)$")


class Line(NamedTuple):
    """One physical line and when we read its first byte."""

    at: float
    text: str


class LineSplitter:
    """Bytes of one stream to lines of at most `LINE_BYTES_MAX`; what is longer is cut, and says so."""

    def __init__(self) -> None:
        self._partial = b""
        self._partial_at = 0.0
        self._cut_bytes = 0

    def feed(self, chunk: bytes, at: float) -> list[Line]:
        """The lines that `chunk` completes."""
        lines: list[Line] = []
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            self._extend(piece, at)
            lines.append(self._finish())
        self._extend(pieces[-1], at)
        return lines

    def flush(self, before: float = float("inf")) -> list[Line]:
        """The line that has no end yet, if its first byte came before `before`."""
        if self._partial and self._partial_at < before:
            return [self._finish()]
        return []

    def _extend(self, piece: bytes, at: float) -> None:
        if not self._partial and not self._cut_bytes:
            self._partial_at = at
        room = LINE_BYTES_MAX - len(self._partial)
        self._partial += piece[:room]
        self._cut_bytes += max(0, len(piece) - room)

    def _finish(self) -> Line:
        shown = self._partial.rstrip(b"\r")
        text = shown[shown.rfind(b"\r") + 1 :].decode("utf-8", "replace")  # what a terminal would still show
        if self._cut_bytes:
            text += f" … ({self._cut_bytes} more bytes)"
        line = Line(self._partial_at, text)
        self._partial, self._cut_bytes = b"", 0
        return line


class RecordJoiner:
    """Lines of one stream to records. At most one record is open, bounded in lines, characters and time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._chars = 0
        self._at = 0.0
        self._newest_at = 0.0
        self._blank = False  # a blank line came: only a chained exception goes on after it
        self._in_frames = False  # between "Traceback" and its last line
        self._is_trace = False
        self._signal = ""  # the prefix that all lines of a signal's report have

    def feed(self, line: Line) -> list[LogLine]:
        """The records that end because of this line."""
        text = _OWN_PREFIX.sub("", line.text, count=1)
        if not text.strip():
            if self._lines:
                self._blank = True
            return []
        full = len(self._lines) >= RECORD_LINES_MAX or self._chars + len(text) > RECORD_CHARS_MAX
        done: list[LogLine] = []
        if self._lines and (full or not self._continues(text)):
            done = self.flush()
        self._append(line.at, text)
        return done

    def flush(self, before: float = float("inf")) -> list[LogLine]:
        """The open record, if its last line came before `before`."""
        if not self._lines or self._newest_at >= before:
            return []
        record = LogLine(at=self._at, stream=self._stream, text="\n".join(self._lines))
        self._lines, self._chars = [], 0
        self._blank = self._in_frames = self._is_trace = False
        self._signal = ""
        return [record]

    def _continues(self, text: str) -> bool:
        if self._is_trace:
            if _CHAIN.match(text) or (self._in_frames and not self._blank):
                return True
            if _TRACEBACK.search(text) and _CHAIN.match(self._lines[-1]):
                return True
            if _NATIVE_FRAMES.match(text) or (_FATAL.match(text) and _FATAL.match(self._lines[0])):
                return True
            if not self._blank and (_ADVICE.match(text) or self._lines[-1] == _LAST_ERROR):
                return True
        if self._signal and text.startswith(self._signal):
            return True
        if "NVRM: " in text and _DRIVER.search(self._lines[0]) and len(self._lines) < DRIVER_LINES_MAX:
            headed = _DRIVER_HEAD.search(self._lines[-1]) is not None and _DRIVER_XID.search(text) is not None
            return headed or _DRIVER_MORE.search(text) is not None
        return text[0] in " \t" and not self._blank and not _TRACEBACK.search(text)

    def _append(self, at: float, text: str) -> None:
        if not self._lines:
            self._at = at
            self._is_trace = _NATIVE.search(text) is not None
            signal = _SIGNAL.match(text)
            self._signal = signal[1] if signal is not None else ""
        if _TRACEBACK.search(text):
            self._is_trace = self._in_frames = True
        elif _FATAL.match(text) or _CHAIN.match(text):
            self._is_trace = True
        elif self._in_frames and text[0] not in " \t":
            self._in_frames = False  # the exception itself
        if self._blank and self._lines:
            self._lines.append("")
        self._blank = False
        self._lines.append(text)
        self._chars += len(text) + 1
        self._newest_at = at


class LinePrefixer:
    """Bytes of one stream as a person sees them: whole lines with the rank before each."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._partial = b""
        self._partial_at = 0.0

    def feed(self, chunk: bytes, at: float) -> bytes:
        """What can be shown now."""
        if not self._partial:
            self._partial_at = at
        whole = self._partial + chunk
        cut = whole.rfind(b"\n") + 1
        self._partial = whole[cut:]
        if cut:
            self._partial_at = at
        if len(self._partial) > LINE_BYTES_MAX:
            return self._prefixed(whole[:cut]) + self.flush()
        return self._prefixed(whole[:cut])

    def flush(self, before: float = float("inf")) -> bytes:
        """The line that has no end yet, with one."""
        if not self._partial or self._partial_at >= before:
            return b""
        shown, self._partial = self._partial + b"\n", b""
        return self._prefixed(shown)

    def _prefixed(self, lines: bytes) -> bytes:
        return self._prefix + lines[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n" if lines else b""


def error_in(text: str) -> ErrorRecord | None:
    """The exception that a record tells of: the last one, where several are chained."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.search(line)]
    if not starts:
        found = _EXCEPTION.match(lines[-1]) if lines else None
        if found is None or not _ERROR_NAME.search(found[1]):
            return None
        return ErrorRecord(type=found[1], text=found[2] or "", traceback=text if len(lines) > 1 else "")
    indent = len(lines[starts[-1]]) - len(lines[starts[-1]].lstrip(" |+"))
    for number in range(starts[-1] + 1, len(lines)):
        line = lines[number]
        if len(line) - len(line.lstrip(" |+")) > indent:
            continue
        found = _EXCEPTION.match(line)
        if found is not None:
            rest = "\n".join(lines[number + 1 :])
            message = f"{found[2] or ''}\n{rest}" if rest and not indent else found[2] or ""
            return ErrorRecord(type=found[1], text=message.strip(), traceback=text)
    return None
