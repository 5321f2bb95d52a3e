"""The kernel's log as a source: /dev/kmsg, else the journal, else a forwarded syslog file; from its end on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ingest.clock import Clock
from ingest.events import LogLine
from ingest.sources.kernel_log import KernelLine, from_journal, from_kmsg, from_syslog
from pipelines.collect.source import SEEN_MAX, Seen, SeenLine, SourceFailed, Whose
from pipelines.collect.tail import Tail, TailPosition
from recovery.launcher.output import Line, RecordJoiner

KMSG = Path("/dev/kmsg")
RECORD_BYTES_MAX = 8_192
JOURNAL_BYTES_MAX = 256 * 1024  # of one read
JOURNAL_COMMAND = ("journalctl", "-k", "-o", "json", "-f", "-n", "0", "--no-pager")
OPEN_SECONDS = 0.3  # the NVIDIA driver tells of one fault in several lines


class _Joined:
    """Lines that belong together as one record, for each host."""

    def __init__(self) -> None:
        self._joiners: dict[str, RecordJoiner] = {}

    def feed(self, lines: Sequence[KernelLine], now: float) -> list[Seen]:
        """Records that are complete now."""
        seen: list[Seen] = []
        for line in lines:
            joiner = self._joiners.setdefault(line.host, RecordJoiner("kernel"))
            seen += self._of(line.host, joiner.feed(Line(line.at, line.text)))
        for host, joiner in self._joiners.items():
            seen += self._of(host, joiner.flush(now - OPEN_SECONDS))
        return seen

    @staticmethod
    def _of(host: str, records: Sequence[LogLine]) -> list[Seen]:
        return [SeenLine(record, Whose(node=host)) for record in records]


class Kmsg:
    """This host's kernel by /dev/kmsg. What the kernel overwrote before we read it is counted and told."""

    name = "kernel"
    every_seconds = 0.2

    def __init__(self, clock: Clock, path: Path = KMSG, monotonic: Callable[[], float] | None = None) -> None:
        """`monotonic`: seconds since the kernel's zero; the clock's own by default. Raises SourceFailed."""
        self._clock = clock
        self._monotonic = monotonic or clock.monotonic
        self._joined = _Joined()
        self._next: int | None = None
        self._overwritten = self._unreadable = 0
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise SourceFailed(
                f"{path} cannot be read ({error.strerror}); run as root or with CAP_SYSLOG, or set collect.kernel"
            ) from error

    def read(self, now: float) -> Sequence[Seen]:
        booted_at = self._clock.now() - self._monotonic()
        lines: list[KernelLine] = []
        lost = 0
        while len(lines) < SEEN_MAX:
            try:
                record = os.read(self._file, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the ring went round: the next read gives the oldest that is left
                lost = max(lost, 1)
                continue
            except OSError as error:
                raise SourceFailed(f"the kernel log cannot be read ({error.strerror}); it is tried again") from error
            line = from_kmsg(record, booted_at)
            if line is None:
                self._unreadable += 1
                continue
            assert line.number is not None
            if lost:
                lost = max(1, line.number - (self._next if self._next is not None else line.number))
                self._overwritten += lost
                lines.append(KernelLine(line.at, f"transom: {lost} records of the kernel were overwritten before this"))
                lost = 0
            self._next = line.number + 1
            lines.append(line)
        return self._joined.feed(lines, now)

    def stored(self) -> None:
        """The kernel keeps no place for us: who starts, starts at the end."""

    def counters(self) -> Mapping[str, int]:
        return {"overwritten": self._overwritten, "unreadable": self._unreadable}

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Journal:
    """This host's kernel by `journalctl -k -f`, where /dev/kmsg may not be read."""

    name = "kernel"
    every_seconds = 0.2

    def __init__(self, command: Sequence[str] = JOURNAL_COMMAND) -> None:
        """Raises SourceFailed."""
        if shutil.which(command[0]) is None:
            raise SourceFailed(f"{command[0]} is not installed; set collect.kernel to a syslog file, or to off")
        self._joined = _Joined()
        self._rest = b""
        self._unreadable = 0
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self._output: IO[bytes] = self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def read(self, now: float) -> Sequence[Seen]:
        with suppress(BlockingIOError):
            self._rest += os.read(self._output.fileno(), JOURNAL_BYTES_MAX)
        *whole, self._rest = self._rest.split(b"\n")
        self._rest = self._rest[:JOURNAL_BYTES_MAX]
        lines = []
        for raw in whole[:SEEN_MAX]:
            line = from_journal(raw)
            self._unreadable += line is None
            lines += [line] if line is not None else []
        if not lines and self._process.poll() is not None:
            raise SourceFailed(f"journalctl ended with code {self._process.returncode}; it is started again")
        return self._joined.feed(lines, now)

    def stored(self) -> None:
        """The journal is followed from its end."""

    def counters(self) -> Mapping[str, int]:
        return {"unreadable": self._unreadable}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


class Syslog:
    """Kernels of one or many hosts by a file that a syslog daemon writes."""

    name = "kernel"
    every_seconds = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = Tail(path, None, from_end=True)
        self._joined = _Joined()

    def read(self, now: float) -> Sequence[Seen]:
        found = [from_syslog(line.text, now) for line in self._tail.read(now, SEEN_MAX)]
        if self._tail.missing:
            raise SourceFailed(f"there is no syslog file {self._path}; set collect.kernel to one that there is")
        return self._joined.feed([line for line in found if line is not None], now)

    def stored(self) -> None:
        """It is followed from its end."""

    @property
    def position(self) -> TailPosition:
        return self._tail.position

    def counters(self) -> Mapping[str, int]:
        return self._tail.counters()

    def close(self) -> None:
        self._tail.close()


def kernel_source(chosen: str, clock: Clock) -> Kmsg | Journal | Syslog:
    """`auto`: /dev/kmsg, else the journal; `kmsg`, `journal`, or the path of a syslog file. Raises SourceFailed."""
    if chosen == "kmsg":
        return Kmsg(clock)
    if chosen == "journal":
        return Journal()
    if chosen != "auto":
        return Syslog(Path(chosen))
    try:
        return Kmsg(clock)
    except SourceFailed:
        return Journal()
