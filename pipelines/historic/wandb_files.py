"""W&B's offline runs: the history in each `run-ID.wandb`.

A file is LevelDB's log behind seven bytes of its own (`:W&B`, a magic number, a version): blocks of 32 KiB, in them
pieces of checksum (4 bytes), length (2) and kind (whole, first, middle, last); each record is a message of protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from .json_lines import flat, loose_json
from .prefixes import split_by_rank
from .protobuf_shapes import DecodeError, WandbRecord
from .run import NotARun
from .tables import FILE, Cell, Row

MAGIC = b":W&B"
HEAD_BYTES = 7
BLOCK_BYTES = 32 * 1024
RECORD_BYTES_MAX = 2**28
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
NAME = "run_"


def is_wandb_file(head: bytes) -> bool:
    """Whether a file begins as W&B's do."""
    return head.startswith(MAGIC)


def wandb_rows(files: Sequence[Path]) -> Iterator[Row]:
    """A row for each step that was logged: its keys, with `_step` and `_timestamp`. Raises NotARun."""
    for file in files:
        for record in _records(file):
            if not record.HasField("history"):
                continue
            cells: dict[str, Cell] = {FILE: str(file)}
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                cells |= flat(key, _value(item))
            if "_step" not in cells and record.history.HasField("step"):
                cells["_step"] = float(record.history.step.num)
            yield from split_by_rank(cells)


def run_name(file: Path) -> str:
    """The name that its user gave the run, else its id, else the file's."""
    for record in _records(file):
        if record.HasField("run"):
            return record.run.display_name or record.run.run_id or file.stem
    return file.stem


def host_of(file: Path) -> str:
    """The host that the run ran on, '' where it is not told."""
    return next((record.run.host for record in _records(file) if record.HasField("run")), "")


def _value(item: WandbRecord) -> object:
    if item.HasField("number"):
        return item.number
    if item.HasField("integer"):
        return item.integer
    try:
        return loose_json(item.value_json.encode())
    except msgspec.DecodeError:
        return None


def _records(file: Path) -> Iterator[WandbRecord]:
    with file.open("rb") as stream:
        if not stream.read(HEAD_BYTES).startswith(MAGIC):
            raise NotARun(f"{file} is no file of an offline W&B run; give a run-ID.wandb or a folder of them")
        for body in _bodies(stream, file):
            try:
                yield WandbRecord.FromString(body)
            except DecodeError as error:
                raise NotARun(f"{file} is damaged before byte {stream.tell()}: {error}") from error


def _bodies(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    parts: list[bytes] = []
    while True:
        left = BLOCK_BYTES - stream.tell() % BLOCK_BYTES
        if left < _PIECE.size:
            stream.read(left)  # too small for a piece: filled with zeros
            continue
        head = stream.read(_PIECE.size)
        if len(head) < _PIECE.size:
            return
        _, size, kind = _PIECE.unpack(head)
        body = stream.read(size)
        if len(body) < size or kind == 0:
            return  # its writer was stopped, or writes on
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or sum(map(len, parts)) > RECORD_BYTES_MAX:
            raise NotARun(f"{file} is damaged at byte {stream.tell() - size - _PIECE.size}; its log has no such piece")
        parts = [body] if kind in (_WHOLE, _FIRST) else [*parts, body]
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts = []
