"""One growing file: whole lines from where we were, over rotation by renaming and by truncating."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

READ_BYTES_MAX = 256 * 1024
LINE_BYTES_MAX = 16 * 1024
HEAD_BYTES = 64  # by which a file is known again whose number the file system has given to another
PARTIAL_SECONDS = 2.0  # a last line without its end is taken after so long


class TailPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where we were in a file: which file (number, checksum of its first bytes), and how far."""

    inode: int = 0
    offset: int = 0
    head: int = 0
    head_bytes: int = 0


class TailLine(NamedTuple):
    """One line, and where in which file it begins."""

    text: str
    start: int
    inode: int


class Tail:
    """`read` gives lines; `position` is the place after them. One that is gone is awaited, not complained of."""

    def __init__(self, path: Path, position: TailPosition | None, *, from_end: bool = False) -> None:
        """`position`: where an earlier life was; None: at the beginning, or with `from_end` at the end."""
        self._path = path
        self._file = -1
        self._position = position or TailPosition()
        self._resume = position is not None
        self._from_end = from_end
        self._partial_size = 0
        self._partial_at = 0.0
        self._rotated = self._truncated = self._lost = self._cut = 0
        self.missing = False

    @property
    def position(self) -> TailPosition:
        return self._position

    def counters(self) -> Mapping[str, int]:
        counted = {"rotated": self._rotated, "truncated": self._truncated, "lost_files": self._lost, "cut": self._cut}
        return {name: number for name, number in counted.items() if number}

    def read(self, now: float, lines_max: int) -> list[TailLine]:
        """The next whole lines, at most `lines_max`; empty where there is nothing new."""
        lines: list[TailLine] = []
        for _ in range(3):  # the rest of a renamed file, then the new one
            if self._file < 0 and not self._open():
                break
            self._see_truncation()
            lines += self._lines(now, lines_max - len(lines))
            if len(lines) >= lines_max or not self._replaced():
                break
            lines += self._lines(now, lines_max - len(lines), final=True)  # what came between reading and looking
            if os.fstat(self._file).st_size > self._position.offset:
                break  # there is more in the old one
            self._rotated += 1
            self.close()
            self._position, self._resume, self._from_end = TailPosition(), False, False
        return lines

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.missing = True
            return False
        self.missing = False
        stat = os.fstat(self._file)
        if self._resume:
            self._resume = False
            if not self._is_known(self._file):
                self._open_rotated()
            return True
        self._position = TailPosition(inode=stat.st_ino, offset=stat.st_size if self._from_end else 0)
        self._note_head()
        return True

    def _open_rotated(self) -> None:
        """The file was rotated while nobody read: its rest lies beside it under another name."""
        for beside in sorted(self._path.parent.glob(f"{self._path.name}*")):
            try:
                other = os.open(beside, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            if beside != self._path and self._is_known(other):
                os.close(self._file)
                self._file = other
                return
            os.close(other)
        self._lost += 1
        self._position = TailPosition(inode=os.fstat(self._file).st_ino)
        self._note_head()

    def _is_known(self, file: int) -> bool:
        known = self._position
        stat = os.fstat(file)
        return stat.st_ino == known.inode and stat.st_size >= known.offset and self._head(file) == known.head

    def _head(self, file: int) -> int:
        return zlib.crc32(os.pread(file, self._position.head_bytes, 0))

    def _note_head(self) -> None:
        """Remember how the file begins, as soon and as long as that is known."""
        if self._position.head_bytes < HEAD_BYTES:
            head = os.pread(self._file, min(HEAD_BYTES, self._position.offset), 0)
            self._position = msgspec.structs.replace(self._position, head=zlib.crc32(head), head_bytes=len(head))

    def _see_truncation(self) -> None:
        if self._is_known(self._file):
            return
        self._truncated += 1  # copied and cut to nothing, by a rotation that keeps the file
        self._position = TailPosition(inode=os.fstat(self._file).st_ino)

    def _replaced(self) -> bool:
        try:
            return os.stat(self._path).st_ino != self._position.inode  # noqa: PTH116  (every half second for each file)
        except OSError:
            return False  # renamed, and the new one is not there yet

    def _lines(self, now: float, lines_max: int, *, final: bool = False) -> list[TailLine]:
        raw = os.pread(self._file, READ_BYTES_MAX, self._position.offset)
        end = raw.rfind(b"\n") + 1
        if end < len(raw) and self._takes_partial(now, len(raw) - end, final or len(raw) - end > LINE_BYTES_MAX):
            end = len(raw)
        pieces = raw[:end].split(b"\n")
        if pieces and not pieces[-1]:
            pieces.pop()
        pieces = pieces[:lines_max]
        taken = min(end, sum(len(piece) + 1 for piece in pieces))
        if not taken:
            return []
        start, inode = self._position.offset, self._position.inode
        self._position = msgspec.structs.replace(self._position, offset=start + taken)
        self._note_head()
        lines = []
        for piece in pieces:
            self._cut += len(piece) > LINE_BYTES_MAX
            lines.append(TailLine(_text(piece[:LINE_BYTES_MAX]), start, inode))
            start += len(piece) + 1
        return lines

    def _takes_partial(self, now: float, size: int, at_once: bool) -> bool:
        if at_once:
            return True
        if size != self._partial_size:
            self._partial_size, self._partial_at = size, now
            return False
        return now - self._partial_at >= PARTIAL_SECONDS


def _text(raw: bytes) -> str:
    shown = raw.rstrip(b"\r")
    return shown[shown.rfind(b"\r") + 1 :].decode("utf-8", "replace")
